"""Hostile files given as a checkpoint or as weights, with a right checksum: no code in them runs, and each is refused
in a sentence."""

import io
import os
import pickle
from unittest import mock

import pytest
import torch

from config import TrainingConfig, UserError
from ddp_utils import cleanup_distributed, load_checkpoint, setup_distributed
from forged import Call, archive, disguised, pickled, small_state, train_to
from utils.checkpoint import format as checkpoint


@pytest.fixture(scope="module")
def ctx():
    yield setup_distributed(TrainingConfig(backend="gloo"))
    cleanup_distributed()


def as_legacy(bomb):
    """The format of torch before 1.6."""
    file = io.BytesIO()
    torch.save({"model": bomb}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


CODE = {
    "os.system": lambda marker: Call(os.system, f"touch {marker}"),
    "eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"),
}
FORMATS = {
    "a pickle": lambda bomb, payload, records: pickle.dumps({"model": bomb}, protocol=2),
    "an archive": lambda bomb, payload, records: archive(pickled(payload | {"model": bomb}), records),
    "the former format": lambda bomb, payload, records: as_legacy(bomb),
}


def opened(folder, data, honest, ctx):
    """{way to open the file: why it was refused, None where it was loaded}, of the bytes as a checkpoint and as a file
    of weights."""
    path, weights, found = checkpoint.step_path(folder, 10), folder / "weights.pt", {}
    with mock.patch("torch.save", lambda _payload, file, **_options: file.write(data)):
        checkpoint.write(path, honest)  # its checksum is right, whatever the bytes are
    weights.write_bytes(data)
    ways = {
        "read": lambda: checkpoint.read(path),
        "resume": lambda: small_state(seed=5).load_state_dict(load_checkpoint(path, ctx), 0, 1),
        "weights of the checkpoint": lambda: checkpoint.load_weights(path),
        "weights": lambda: checkpoint.load_weights(weights),
    }
    for way, action in ways.items():
        found[way] = None
        try:
            action()
        except UserError as refused:
            found[way] = str(refused)
    return found


def test_no_hostile_file_runs_code_or_is_loaded(tmp_path, ctx):
    honest, records = train_to(small_state(), 10), {}
    payload, marker = disguised(honest, records), tmp_path / "marker"
    found = opened(tmp_path, archive(pickled(payload), records), honest, ctx)
    # else the others would be refused for how they are made
    assert [way for way, why in found.items() if why] == ["weights"]
    for code, bomb_for in CODE.items():
        pickle.loads(pickle.dumps(bomb_for(marker)))
        assert marker.exists(), f"{code} runs nothing"
        marker.unlink()
        for form, make in FORMATS.items():
            for way, why in opened(tmp_path, make(bomb_for(marker), payload, records), honest, ctx).items():
                assert not marker.exists(), f"{code} in {form}: its code ran"
                assert why and "; give " in why and "weights_only" not in why and "safe_globals" not in why, (
                    code,
                    form,
                    way,
                    why,
                )


@pytest.mark.parametrize(
    ("key", "value"),
    [("progress", {"epoch": "10"}), ("model", {"0.weight": "x"}), ("optimizer", {"names": 5}), ("config", "text")],
)
def test_a_checkpoint_with_a_value_of_another_type_is_refused(tmp_path, ctx, key, value):
    payload, path = train_to(small_state(), 10), checkpoint.step_path(tmp_path, 10)
    payload[key] = payload[key] | value if isinstance(value, dict) else value
    checkpoint.write(path, payload)
    with pytest.raises(UserError, match="; give "):
        small_state(seed=5).load_state_dict(load_checkpoint(path, ctx), 0, 1)

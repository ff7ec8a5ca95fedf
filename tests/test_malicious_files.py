"""Files that a stranger hands over as a checkpoint or as weights, their checksum right: none runs code, eats memory or is loaded."""

import functools
import io
import json
import math
import os
import pickle
import resource
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import forged
from config import Refused, TrainingConfig
from ddp_utils import cleanup_distributed, load_checkpoint, setup_distributed
from forged import Call, Storage, archive, disguised, limit_memory, pickled, seal, small_state, tensor, train_to
from ranks import CONTEXT
from utils import checkpoint

MIB = 2**20
BOMB = 256 * MIB  # what it becomes in memory, unless it is refused before
STEP = 10


@pytest.fixture(scope="module")
def honest():
    """A checkpoint's content."""
    setup_distributed(TrainingConfig(backend="gloo"))
    yield train_to(small_state(), STEP)
    cleanup_distributed()


# ---- what runs code where it is unpickled ----


def partial_of_eval(marker):
    return Call(functools.partial(eval, f"open({str(marker)!r}, 'w')"))


def load_of_another(marker):
    inner = marker.with_name("inner.pkl")
    torch.save(Call(os.system, f"touch {marker}"), inner)
    return Call(functools.partial(torch.load, str(inner), weights_only=False))


CODE = {
    "os.system": lambda marker: Call(os.system, f"touch {marker}"),
    "eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"),
    "a partial of eval": partial_of_eval,
    "torch.load of another file": load_of_another,
    "__setstate__": lambda marker: forged.Gadget(str(marker)),
}


def as_tar(bomb):
    """The format of torch before 0.1.10; its members would also be unpacked."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("sys_info", "storages", "tensors", "pickle", "../../marker"):
            data = pickle.dumps(bomb, protocol=2)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def as_legacy(bomb):
    """The format of torch before 1.6."""
    file = io.BytesIO()
    torch.save({"model": bomb}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


FORMATS = {  # of a checkpoint with a bomb in it
    "a pickle": lambda bomb, payload, records: pickle.dumps({"model": bomb}, protocol=2),
    "an archive": lambda bomb, payload, records: archive(pickled(payload | {"model": bomb}), records),
    "a tensor's hooks": lambda bomb, payload, records: archive(
        pickled(payload | {"model": {"w": Call(torch._utils._rebuild_parameter, tensor("0", 4, (4,)), True, OrderedDict(a=bomb))}}), records
    ),
    "the former format": lambda bomb, payload, records: as_legacy(bomb),
    "tar": lambda bomb, payload, records: as_tar(bomb),
}


# ---- archives that are not what they say ----


def with_tensor(call):
    """The model's first tensor is another; its record has 48 * 9 bytes."""

    def forge(payload, records):
        name = next(iter(payload["model"]))
        return archive(pickled(payload | {"model": payload["model"] | {name: call}}), records)

    return forge


def jit(payload, records):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    return file.getvalue()


def zip_bomb(payload, records):
    model = {"weight": tensor("9999", BOMB // 4, (BOMB // 4,))}
    return archive(pickled(payload | {"model": model}), records | {"9999": bytes(BOMB)}, compression=zipfile.ZIP_DEFLATED)


def twice(payload, records):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile notes the second of a name
        return archive(pickled(payload), records, {"archive/data/0": bytes(len(records["0"]))})


def outside(payload, records):
    key = "../../../../../../tmp/marker"
    with_key = {"weight": tensor(key, 4, (4,))}
    return archive(pickled(payload | {"model": with_key}), records | {key: bytes(16)}, {"/etc/marker": b"", "../../marker": b""})


def deep(payload, records):
    """100,000 lists, one in the other."""
    data = pickled(payload | {"provenance": payload["provenance"] | {"ledger": "DEEP"}})
    return archive(data.replace(b"X\4\0\0\0DEEP", b"]" * 100_000 + b"a" * 99_999), records)


def endless(payload, records):
    loop = []
    loop.append(loop)
    return archive(pickled(payload | {"ema": {"loop": loop}}), records)


def laughs(payload, records):
    """A list of ten times the same list of ten times the same ...: few bytes, 10^30 values."""
    value = [0.0]
    for _ in range(30):
        value = [value] * 10
    return archive(pickled(payload | {"provenance": payload["provenance"] | {"ledger": value}}), records)


FALSE = {
    "TorchScript": jit,
    "a zip bomb": zip_bomb,
    "a call that allocates": with_tensor(Call(bytearray, BOMB)),
    "a storage of 10^12 elements": with_tensor(tensor("0", 10**12, (10**12,))),
    "a storage larger than its record": with_tensor(tensor("0", 4 * 3 * 9 * 2, (4 * 3 * 9 * 2,))),
    "a storage of -1 elements": with_tensor(tensor("0", -1, (4,))),
    "a shape beyond the storage": with_tensor(tensor("0", 4 * 3 * 9, (4, 3, 3, 3), (27, 9, 3, 10**6))),
    "an offset beyond the storage": with_tensor(tensor("0", 4 * 3 * 9, (4, 3, 3, 3), (27, 9, 3, 1), offset=10**9)),
    "a negative offset": with_tensor(tensor("0", 4 * 3 * 9, (4, 3, 3, 3), (27, 9, 3, 1), offset=-8)),
    "10^12 elements in 4 bytes": with_tensor(tensor("0", 4 * 3 * 9, (10**12,), (0,))),
    "a tensor without values": with_tensor(Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (10**12,), (1,), False)),
    "a storage and no tensor": with_tensor(Storage("0", 4 * 3 * 9)),
    "a dict with other methods": with_tensor(Call(OrderedDict, state={"items": "x", "keys": "x", "_metadata": "x"})),
    "a record twice": twice,
    "names outside of the archive": outside,
    "100,000 lists in each other": deep,
    "a list in itself": endless,
    "10^30 values": laughs,
}


# ---- checkpoints whose values are none of ours ----


def with_value(key, name, value):
    def forge(payload, records):
        return archive(pickled(payload | {key: payload[key] | {name: value} if name else value}), records)

    return forge


VALUES = {
    f"{key} {name} {str(value)[:30]}": with_value(key, name, value)
    for key, name, value in [
        *[("progress", "step", each) for each in ("10", -1, 1e300, math.nan, True, 2**70, None, 11, 10.0)],
        *[("progress", "epoch", each) for each in ("three", -2, 0.5, [1])],
        *[("progress", "samples_in_epoch", each) for each in (math.inf, 2**63)],
        *[("progress", "best_value", each) for each in ("high", [1.0])],
        *[("progress", "intervals", each) for each in ("x", [1], None)],
        *[(key, "", each) for key in ("progress", "config", "provenance", "model", "optimizer") for each in ("text", [1])],
        *[("optimizer", "state", each) for each in ("x", {0: "x"}, {0: {"momentum_buffer": "x"}})],
        *[("optimizer", "names", each) for each in (5, "x", [["a"]])],
        ("model", "0.weight", "x"),
        ("ema", "0.weight", "x"),
    ]
}


# ---- opening them ----


def open_all(sealed: Path, unsealed: Path, out: Path) -> None:
    """In a process of its own, with a limit to its memory: what each way to open the file comes to."""
    ctx = setup_distributed(TrainingConfig(backend="gloo"))
    state = small_state(seed=5)
    limit_memory(2**31)
    ways = {
        "newest_whole": lambda: checkpoint.newest_whole(sealed.parent),
        "best_or_newest": lambda: checkpoint.best_or_newest(sealed.parent, prefers_best=False),
        "read": lambda: checkpoint.read(sealed),
        "resume": lambda: state.load_state_dict(load_checkpoint(sealed, ctx), 0, 1),
        "its weights": lambda: checkpoint.load_weights(sealed),
        "weights": lambda: checkpoint.load_weights(unsealed),
    }
    found = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way, action in ways.items():
        try:
            action()
            found[way] = ["loaded", ""]
        except Refused as refused:
            found[way] = ["refused", str(refused)]
        except Exception as error:
            found[way] = ["raised", repr(error)[:300]]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # MiB
    out.write_text(json.dumps({"ways": found, "grown": grown}))
    os._exit(0)


def open_apart(sealed: Path, unsealed: Path, out: Path) -> dict:
    process = CONTEXT.Process(target=open_all, args=(sealed, unsealed, out))
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0, f"exit code {code} (None: took more than 60 s; below 0: died of a signal)"
    return json.loads(out.read_text())


def opened(folder: Path, data: bytes, honest) -> dict:
    """What came of the file, given with a checksum and without."""
    sealed, unsealed = checkpoint.step_path(folder / "run", STEP), folder / "weights.pt"
    sealed.parent.mkdir(exist_ok=True)
    seal(sealed, data, honest)
    unsealed.write_bytes(data)
    return open_apart(sealed, unsealed, folder / "out.json")


def check(found: dict, ways: tuple[str, ...], marker: Path) -> None:
    assert not marker.exists(), "its code ran"
    assert found["grown"] < BOMB / MIB / 2, "it took memory"
    for way, (outcome, text) in found["ways"].items():
        assert outcome != "raised" and "weights_only" not in text and "safe_globals" not in text, (way, text)
        if way in ways:
            assert outcome == "refused" and "; give " in text, (way, outcome, text)


CONTENT = ("read", "resume", "its weights", "weights")  # the ways that give what is in the file


def test_the_forger_can_make_a_file_that_is_taken(tmp_path, honest):
    """Else the others would be refused for how they are made."""
    records = {}
    found = opened(tmp_path, archive(pickled(disguised(honest, records)), records), honest)
    assert {way: outcome for way, (outcome, _) in found["ways"].items()} == dict.fromkeys(found["ways"], "loaded") | {"weights": "refused"}


@pytest.mark.parametrize("kind", CODE)
def test_no_code_runs(kind, tmp_path, honest):
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(CODE[kind](marker)))
    assert marker.exists(), "the bomb is a dud"
    marker.unlink()
    for form in FORMATS.values():
        records = {}
        payload = disguised(honest, records)
        check(opened(tmp_path, form(CODE[kind](marker), payload, records), honest), CONTENT, marker)


@pytest.mark.parametrize("kind", FALSE)
def test_an_archive_that_is_not_what_it_says_is_refused(kind, tmp_path, honest):
    records = {}
    payload = disguised(honest, records)
    check(opened(tmp_path, FALSE[kind](payload, records), honest), CONTENT, tmp_path / "marker")


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_are_none_of_ours_are_refused(kind, tmp_path, honest):
    records = {}
    payload = disguised(honest, records)
    check(opened(tmp_path, VALUES[kind](payload, records), honest), ("resume",), tmp_path / "marker")


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "/dev/null", "/proc/self/mem", "."])
def test_a_link_to_something_else_is_refused(target, tmp_path):
    path = checkpoint.step_path(tmp_path, STEP)
    path.symlink_to(target)
    check(open_apart(path, path, tmp_path / "out.json"), CONTENT, tmp_path / "marker")

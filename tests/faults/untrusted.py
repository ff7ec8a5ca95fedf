"""Files that somebody else hands over, or leaves in the run's folder: none runs code, none is loaded."""

import os
import pickle
import shutil
from pathlib import Path
from unittest import mock

from drill import SAME_BITS, Drill, fault, says
from forged import Call, archive, disguised, pickled
from utils import checkpoint

RUN = "--dataset_size 200 --epochs 1 --save_every_steps 5 --num_workers 1".split()  # 25 steps of two ranks

TAKES_WEIGHTS = """
from utils.checkpoint import load_weights
plain_model = train.create_model
def create_model(config, device):
    net = plain_model(config, device)
    if config.init_from:
        net.load_state_dict(load_weights(Path(config.init_from)))
    return net
train.create_model = create_model
"""  # as model.py does


def malicious(drill: Drill, honest: Path, target: Path, step: int, claim: int = 0) -> Path:
    """A checkpoint of this step whose checksum is right, and which makes who unpickles it touch the marker that is returned."""
    marker = drill.folder / "marker"
    bomb = Call(os.system, f"touch {marker}")
    pickle.loads(pickle.dumps(bomb))
    assert marker.exists(), "the bomb is a dud"
    marker.unlink()
    payload, records = checkpoint.read(honest)[0], {}
    payload["progress"]["step"] = step
    data = archive(pickled(disguised(payload, records) | {"model": bomb}), records)
    with mock.patch("torch.save", lambda _payload, file: file.write(data)):
        checkpoint.write(target, payload, claim)
    return marker


@fault(
    "malicious file to resume from",
    "--resume_from a checkpoint, its checksum right, that runs a command when it is unpickled",
    "refused, names the file and what it calls; no code runs",
    "commands run",
    "--resume_from",
    r"{}: is no checkpoint \(it names posix system\); give another",
)
@fault(
    "malicious file to start from",
    "--init_from the same",
    "refused, names the file; no code runs",
    "commands run",
    "--init_from",
    "init_from={}: is no file of tensors alone; give a checkpoint or a saved state dict",
)
def refused(drill: Drill, flag: str, sentence: str) -> float:
    """A new run to start from the file."""
    drill.fork(2, *RUN, "--max_steps", 5, name="other")
    evil = drill.folder / "evil.pt"
    marker = malicious(drill, drill.runs.checkpoints("other")[-1], evil, 5)
    drill.fails(drill.start(2, *RUN, flag, evil, code=TAKES_WEIGHTS), sentence.format(evil))
    assert not marker.exists(), "its code ran"
    assert not drill.runs.checkpoints("run")
    return len(list(drill.folder.glob("marker")))


def passes_over(drill: Drill, dropped: Path, sentence: str) -> float:
    """The run goes on from its own newest checkpoint, says why, and ends in the same bits."""
    step = drill.json("status.json")["step"]
    says(drill.completes(2, *RUN, "--resume_from", "auto").text, rf"{dropped}: {sentence}")
    drill.is_whole(2, *RUN)
    return drill.steps_lost(step)


@fault(
    "malicious file in the folder",
    "the same as the newest step of a run, under the number of its claim",
    f"passed over with a line, no code runs; {SAME_BITS}",
    "steps redone",
    is_default=True,
)
def dropped_into_the_folder(drill: Drill) -> float:
    drill.stopped(12, *RUN)
    newest = drill.runs.checkpoints("run")[-1]
    dropped = checkpoint.step_path(newest.parent, 24)
    marker = malicious(drill, newest, dropped, 24, claim=checkpoint.seal_of(newest).claim)
    lost = passes_over(drill, dropped, r"is no checkpoint \(it names posix system\)")
    assert not marker.exists()
    return lost


@fault("checkpoint of another run in the folder", "under the name of a newer step", f"passed over with a line; {SAME_BITS}", "steps redone")
def of_another_run(drill: Drill) -> float:
    drill.stopped(12, *RUN)
    drill.fork(2, *RUN, "--seed", 7, name="other")
    dropped = checkpoint.step_path(drill.folder / "run/checkpoints", 24)
    shutil.copy(drill.runs.checkpoints("other")[0], dropped)
    return passes_over(drill, dropped, r"is the checkpoint of step \d+ under another's name")

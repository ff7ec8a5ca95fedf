"""Files that a stranger hands over, or leaves in the run's folder: none runs code, none is loaded."""

import os
import pickle
import shutil
import signal
from pathlib import Path
from unittest import mock

from drill import Drill, Fault, says
from forged import Call, archive, disguised, pickled
from utils import checkpoint

RUN = ("--dataset_size", 200, "--epochs", 1, "--save_every_steps", 5, "--num_workers", 1)  # 25 steps of two ranks


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


def refused(drill: Drill, flag: str, sentence: str) -> float:
    """A new run to start from the file."""
    drill.fork(2, *RUN, "--max_steps", 5, name="other")
    evil = drill.folder / "evil.pt"
    marker = malicious(drill, drill.runs.checkpoints("other")[-1], evil, 5)
    ended = drill.run(2, *RUN, flag, evil)
    assert not marker.exists(), "its code ran"
    assert (ended.code, ended.left) == (1, 0), ended.text
    says(ended.text, sentence.format(evil))
    says(drill.json("status.json")["error"], sentence.format(evil))
    assert not drill.runs.checkpoints("run")
    return len(list(drill.folder.glob("marker")))


def to_resume_from(drill: Drill) -> float:
    return refused(drill, "--resume_from", r"{}: is no checkpoint \(it names posix system\); give another")


def to_start_from(drill: Drill) -> float:
    return refused(drill, "--init_from", "init_from={}: is no file of tensors alone; give a checkpoint or a saved state dict")


def stop_midway(drill: Drill) -> list[Path]:
    """The run, asked to stop after some steps; its checkpoints."""
    job = drill.start(2, *RUN)
    job.wait_for_step(12)
    job.signal_launcher(signal.SIGTERM)
    job.end()
    assert drill.json("status.json")["state"] == "preempted"
    return drill.runs.checkpoints("run")


def passes_over(drill: Drill, dropped: Path, sentence: str) -> float:
    """The run goes on from its own newest checkpoint, says why, and ends in the undisturbed bits."""
    step = drill.json("status.json")["step"]
    ended = drill.run(2, *RUN, "--resume_from", "auto")
    assert (ended.code, ended.left) == (0, 0), ended.text
    says(ended.text, rf"{dropped}: {sentence}")
    drill.is_whole(2, *RUN)
    return drill.steps_lost(step)


def dropped_into_the_folder(drill: Drill) -> float:
    newest = stop_midway(drill)[-1]
    dropped = checkpoint.step_path(newest.parent, 24)
    marker = malicious(drill, newest, dropped, 24, claim=checkpoint.seal_of(newest).claim)
    lost = passes_over(drill, dropped, r"is no checkpoint \(it names posix system\)")
    assert not marker.exists()
    return lost


def of_another_run(drill: Drill) -> float:
    newest = stop_midway(drill)[-1]
    drill.fork(2, *RUN, "--seed", 7, name="other")
    dropped = checkpoint.step_path(newest.parent, 24)
    shutil.copy(drill.runs.checkpoints("other")[0], dropped)
    return passes_over(drill, dropped, r"is the checkpoint of step \d+ under another's name")


FAULTS = [
    Fault(
        "malicious file to resume from",
        "strangers",
        "--resume_from a checkpoint, its checksum right, that runs a command when it is unpickled",
        "refused, names the file and what it calls; no code runs",
        "commands run",
        to_resume_from,
    ),
    Fault(
        "malicious file to start from",
        "strangers",
        "--init_from the same",
        "refused, names the file; no code runs",
        "commands run",
        to_start_from,
    ),
    Fault(
        "malicious file in the folder",
        "strangers",
        "the same as the newest step of a run, under the number of its claim",
        "passed over with a line; goes on from its own newest to the same bits",
        "steps made again",
        dropped_into_the_folder,
    ),
    Fault(
        "checkpoint of another run in the folder",
        "strangers",
        "another run's checkpoint under the name of a newer step",
        "passed over with a line; goes on from its own newest to the same bits",
        "steps made again",
        of_another_run,
    ),
]

"""A fault drill: one row of a table, and the tools to do to a real run what the row says.

A row's `drill` injects the fault, asserts the end that the row promises, and returns the row's figure. A kind is a distinct
(what fails, where, what must happen): sizes, ranks and moments of one kind are one row.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranks import ROOT, Ended, finish, start, stop
from training import STATE, Runs, difference
from utils.checkpoint import step_path
from utils.watchdog import Place, read_place

GROUPS = ("processes", "start-up", "storage", "data", "numbers", "time", "strangers")
FLAGS = ["--image_size", "8", "--batch_size", "4", "--log_interval", "5", "--backend", "gloo", "--no-use_amp", "--record_samples"]
SLOW = 0.02  # seconds that a step of a drill takes at least, so that a fault finds it on its way
AT_STEP = """
from pathlib import Path
from utils.watchdog import Watch
RUN, STEP = Path(sys.argv[sys.argv.index('--run_dir') + 1]), [0]
plain_begin = Watch.begin_step
def begin_step(self, step):
    STEP[0] = step
    plain_begin(self, step)
Watch.begin_step = begin_step
"""  # for `code`: the run's folder, and in STEP[0] the optimizer step under way (0: before the first)


@dataclass(frozen=True)
class Fault:
    """One row."""

    kind: str
    group: str
    injection: str
    end: str
    figure: str  # what the number is
    drill: Callable[["Drill"], float]


@dataclass
class Job:
    """A launch that goes on."""

    program: object
    folder: Path
    former: set[int] = field(default_factory=set)  # pids of ranks that came before

    def place(self, rank: int) -> Place | None:
        """Where a rank is, once it is there."""
        place = read_place(self.folder / "watch" / f"rank{rank}")
        return place if place and place.pid and place.pid not in self.former else None

    def places(self, ranks: int) -> list[Place | None]:
        return [self.place(rank) for rank in range(ranks)]

    def wait_for(self, what: Callable[[], object], seconds: float = 60.0) -> object:
        """Until it is true, or the launch has ended; fails after so many seconds."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if found := what():
                return found
            if self.program.poll() is not None:
                break
            time.sleep(0.005)
        raise AssertionError(f"waited in vain; the launch {'goes on' if self.program.poll() is None else 'has ended'}\n{self.end(1).text}")

    def wait_for_step(self, step: int, rank: int = 0) -> Place:
        """Until the rank has begun this optimizer step."""
        return self.wait_for(lambda: (place := self.place(rank)) and place.step >= step and place.phase != "start" and place)

    def wait_for_phase(self, phase: str, rank: int = 0) -> Place:
        return self.wait_for(lambda: (place := self.place(rank)) and place.phase == phase and place)

    def wait_for_partial_file(self) -> None:
        """Until a checkpoint is being written."""
        self.wait_for(lambda: list(self.folder.glob("checkpoints/*.tmp")))

    def pid(self, rank: int) -> int:
        return self.wait_for(lambda: self.place(rank)).pid

    def signal(self, rank: int, number: int) -> None:
        """To a rank's main process alone."""
        os.kill(self.pid(rank), number)

    def signal_launcher(self, number: int) -> None:
        os.kill(self.program.pid, number)

    def children(self, pid: int) -> list[int]:
        """Of a process: DataLoader workers, the writer."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
        return found

    def writer(self) -> int:
        """The process that writes checkpoints: the child of rank 0 that leads a session of its own."""

        def leads(child: int) -> bool:
            with contextlib.suppress(ProcessLookupError):
                return os.getsid(child) == child
            return False

        return self.wait_for(lambda: next(filter(leads, self.children(self.pid(0))), None))

    def members(self) -> list[int]:
        """All processes of the launch that live, in whatever session."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.program.mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def checkpoint(self, step: int) -> Path:
        return step_path(self.folder / "checkpoints", step)

    def text(self) -> str:
        """What it has printed so far."""
        return "".join(os.pread(file.fileno(), 2**24, 0).decode(errors="replace") for file in self.program.files)

    def end(self, seconds: float = 60.0) -> Ended:
        """Wait for the end of the launch."""
        return finish(self.program, seconds)


class Drill:
    """The ground for one drill: a folder of its own, seeded randomness, launches that are ended whatever happens."""

    def __init__(self, folder: Path, seed: object) -> None:
        self.folder, self.random, self.runs = folder, random.Random(f"{seed}"), Runs(folder)
        self._jobs: list[Job] = []

    def program(self, code: str, name: str = "program.py") -> Path:
        """train.py with some lines before it runs, that patch what the fault needs; a step takes at least 20 ms."""
        path = self.folder / name
        path.write_text(
            f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.argv[0] = 'train.py'\n"
            "from utils.signals import hold\nhold()\nimport os, time, torch, train\n"
            "RANK = int(os.environ.get('RANK', 0))\n"
            f"plain_loss = train.compute_loss\ndef slow_loss(net, batch):\n    time.sleep({SLOW} if net.training else 0)\n    return plain_loss(net, batch)\n"
            f"train.compute_loss = slow_loss\n{code}\ntrain.run_as_script()\n"
        )
        return path

    def start(
        self,
        ranks: int,
        *flags: object,
        code: str = "",
        name: str = "run",
        env: dict[str, str] | None = None,
        before: tuple = (),
        how: tuple = ("--standalone",),
    ) -> Job:
        """Launch by torchrun, which `how` gives further words; 0 ranks: by python alone. `before` comes first: strace, unshare."""
        folder = self.folder / name
        launcher = [sys.executable, *(["-m", "torch.distributed.run", *how, f"--nproc-per-node={ranks}"] if ranks else [])]
        words = [*before, *launcher, self.program(code), *FLAGS, "--run_dir", folder, *flags]
        return self.launch(words, name, env)

    def launch(self, words: Sequence[object], name: str = "run", env: dict[str, str] | None = None) -> Job:
        """Any command line that runs in this folder."""
        job = Job(start(words, env=env), self.folder / name, self.former(name))
        self._jobs.append(job)
        return job

    def former(self, name: str = "run") -> set[int]:
        """The pids of the ranks that were there last."""
        return {place.pid for file in (self.folder / name).glob("watch/rank*") if (place := read_place(file))}

    def run(self, ranks: int, *flags: object, seconds: float = 90.0, **options: object) -> Ended:
        """Launch and wait for the end."""
        return self.start(ranks, *flags, **options).end(seconds)

    def fork(self, ranks: int, *flags: object, name: str = "run") -> None:
        """A run, or one gone on with, that nothing befalls and that is not what the row is about: quick, in ranks that are forked."""
        self.runs.train(max(1, ranks), name, *FLAGS, *flags)

    def beside(self, *words: object) -> subprocess.Popen:
        """Start a tool that goes on beside the launches, as long as the drill."""
        self._jobs.append(Job(start(words), self.folder))
        return self._jobs[-1].program

    def close(self) -> None:
        for job in self._jobs:
            stop(job.program)

    # ---- what is asserted ----

    def json(self, file: str, name: str = "run") -> dict:
        return json.loads((self.folder / name / file).read_text())

    def events(self, event: str, name: str = "run") -> list[dict]:
        return [record for record in self.runs.records(name, "event") if record["event"] == event]

    def is_whole(self, ranks: int, *flags: object, name: str = "run", code: str = "") -> None:
        """The run, gone on with and completed, is to the bit the one that nothing befell, and each sample was taken once."""
        if code:
            ended = self.run(ranks, *flags, name="undisturbed", code=code)
            assert ended.code == 0, ended.text
        elif not (self.folder / "undisturbed").exists():
            self.fork(ranks, *flags, name="undisturbed")
        self.is_like("undisturbed", name)

    def is_like(self, other: str | Path, name: str = "run") -> None:
        """The two runs ended in the same state, to the bit, and took the same samples."""
        got, want = self.runs.last(name), self.runs.last(other)
        assert {key: difference(want[key], got[key]) for key in STATE} == {key: [] for key in STATE}
        assert self.runs.samples(name) == self.runs.samples(other)

    def steps_lost(self, step: int, name: str = "run") -> int:
        """How many optimizer steps were made again after an attempt that had come to this step."""
        return step - self.events("resumed", name)[-1]["step"]

    def is_stopped_in_time(self, name: str = "run") -> int:
        """The run was asked to stop and has saved; the committed steps that its newest checkpoint lacks."""
        status, last = self.json("status.json", name), max(self.runs.samples(name), default=0)
        assert (status["state"], status["step"]) == ("preempted", last), status
        self.no_partial_files(name)
        return last - (self.runs.last(name)["progress"]["step"] if last else 0)

    def no_partial_files(self, name: str = "run") -> None:
        assert not list((self.folder / name).rglob("*.tmp"))


def slow_writer(seconds: float) -> str:
    """Lines that make each checkpoint stand as a partial file for so long."""
    return (
        "from utils import checkpoint\nplain_replace = checkpoint.replace_file\n"
        "def slow_replace(path, write, *rest, **options):\n"
        f"    plain_replace(path, lambda file: (write(file), file.flush(), time.sleep({seconds})), *rest, **options)\n"
        "checkpoint.replace_file = slow_replace\n"
    )


def until(what: Callable[[], object], seconds: float = 60.0) -> object:
    """Wait for it, whatever the launch does meanwhile."""
    ends = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < ends, f"waited {seconds} s in vain"
        time.sleep(0.005)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def says(text: str, pattern: str) -> None:
    """The pattern is in the text."""
    assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


def kill(job: Job, rank: int) -> None:
    job.signal(rank, signal.SIGKILL)

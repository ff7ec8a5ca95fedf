# extra: template
"""Faults, each with an entry in tests/faults/README.md, and tools to inject them into a real run.

A fault is a function with the decorator `fault`, which injects the fault and asserts what must happen. Its group is its
module. A kind is a combination of what fails, where, and what must happen; its sizes, ranks and times share an entry.
"""

import contextlib
import hashlib
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from ranks import ROOT, Ended, WarmLaunch, finish, marked, start, stop
from tasks import BUCKETS
from training import Runs, assert_same_state, says
from utils.checkpoint.format import step_checkpoint_path
from utils.files import replace_file

FLAGS = "--batch_size 4 --log_interval 5 --backend gloo --no-use_amp --record_samples".split() + BUCKETS
HOST = re.escape(socket.gethostname())
# otherwise a restart by torchrun finds the keys of the previous attempt
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LOOKED = ("lock.json", ".lock")  # a rejected launch may change these in a run's folder
# train.py on the task "images". Code of a fault can use: RUN, the run's folder; STEP, the current optimizer step (0:
# before the first); before_loss(net), called at each forward pass. A step takes at least 20 ms, so that a fault hits
# it; 0.2 s if the drill's folder has a file "slow". Step HELD_AT waits for a file "go".
PROGRAM = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.argv[0] = 'train.py'
from utils.signals import catch_stop_signals
catch_stop_signals()
import os, time, torch, train
from pathlib import Path
from tasks import Images, using
from utils import assembly
from utils.clock import PhaseClock
TASK = using('images')
TASK.__enter__()
RANK, STEP = int(os.environ.get('RANK', 0)), 0
RUN = Path(sys.argv[sys.argv.index('--run_dir') + 1])
STATUS_FILE = Path(FOLDER, f'status-{{RUN.name}}-{{RANK}}')
plain_begin, enter_phase, plain_loss = PhaseClock.begin_step, PhaseClock.enter_phase, train.your_model.compute_loss

def show(clock):
    new = f'{{STATUS_FILE}}.{{os.getpid()}}.new'  # two jobs may have this folder
    Path(new).write_text(f'0 {{clock.progress_count}} {{clock.step}} {{clock.phase}} {{os.getpid()}}')
    os.replace(new, STATUS_FILE)

def begin_step(self, step):
    global STEP
    STEP = step
    plain_begin(self, step)
    show(self)

def enter(self, phase):
    enter_phase(self, phase)
    show(self)

def before_loss(net):
    pass

def compute_loss(net, batch):
    while net.training and STEP == HELD_AT and not os.path.exists(f'{{FOLDER}}/go'):
        time.sleep(0.005)
    time.sleep((0.2 if os.path.exists(f'{{FOLDER}}/slow') else 0.02) if net.training else 0)
    before_loss(net)
    return plain_loss(net, batch)

PhaseClock.begin_step, PhaseClock.enter_phase, train.your_model.compute_loss = begin_step, enter, compute_loss
"""


@dataclass(frozen=True)
class Fault:
    """One entry of tests/faults/README.md."""

    kind: str
    group: str
    drill: Callable[["Drill"], None]
    is_default: bool  # the others run with --all only
    guarantees: str  # keys of docs/guarantees.md, with spaces between them


FAULTS: list[Fault] = []


def fault(kind: str, *args: object, is_default: bool = False, guarantees: str = "") -> Callable:
    """Register the decorated function, called with these args, as a fault. tests/faults/README.md describes it."""

    def register(function: Callable) -> Callable:
        group = function.__module__.replace("_", "-")
        FAULTS.append(Fault(kind, group, lambda drill: function(drill, *args), is_default, guarantees))
        return function

    return register


class RankStatus(NamedTuple):
    """Where a rank is."""

    heartbeat: int
    progress_count: int
    step: int
    phase: str
    pid: int


def read_status(file: Path) -> RankStatus | None:
    """The status that a rank of `PROGRAM` has written."""
    if not file.exists():
        return None
    heartbeat, progress_count, step, phase, pid = file.read_text().split()
    return RankStatus(int(heartbeat), int(progress_count), int(step), phase, int(pid))


@dataclass
class Job:
    """A launch in progress."""

    program: object
    folder: Path
    former: set[int] = field(default_factory=set)  # pids of earlier ranks

    def status(self, rank: int) -> RankStatus | None:
        """The status of a rank, None before it has started."""
        status = read_status(self.folder.parent / f"status-{self.folder.name}-{rank}")
        return status if status and status.pid not in self.former else None

    def statuses(self, ranks: int) -> list[RankStatus | None]:
        return [self.status(rank) for rank in range(ranks)]

    def wait_for(self, what: Callable[[], object], seconds: float = 60.0) -> object:
        """Wait until what() is true; fails if the launch ends or after `seconds`."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if result := what():
                return result
            if self.program.poll() is not None:
                break
            time.sleep(0.005)
        raise AssertionError(f"condition not met; the launch's exit code: {self.program.poll()}\n{self.end(1).text}")

    def wait_for_step(self, step: int, rank: int = 0) -> RankStatus:
        """Wait until the rank has begun this optimizer step."""
        return self.wait_for(
            lambda: (status := self.status(rank)) and status.phase != "start" and status.step >= step and status
        )

    def wait_for_phase(self, phase: str, rank: int = 0) -> RankStatus:
        return self.wait_for(lambda: (status := self.status(rank)) and status.phase == phase and status)

    def wait_for_partial_file(self) -> None:
        """Wait until a checkpoint is being written."""
        self.wait_for(lambda: list(self.folder.glob("checkpoints/*.tmp")))

    def pid(self, rank: int) -> int:
        return self.wait_for(lambda: self.status(rank)).pid

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's main process only."""
        os.kill(self.pid(rank), number)

    def signal_launcher(self, number: int) -> None:
        os.kill(self.program.pid, number)

    def children(self, pid: int) -> list[int]:
        """The children of a process: DataLoader workers."""
        pids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                    pids.append(int(stat.parent.name))
        return pids

    def writer(self) -> int:
        """The thread of rank 0 that writes checkpoints, from the first one on: it alone has a niceness."""

        def is_nice(stat: Path) -> bool:
            return int(stat.read_text().rpartition(")")[2].split()[16]) > os.nice(0)

        tasks = Path(f"/proc/{self.pid(0)}/task")
        return int(self.wait_for(lambda: next(filter(is_nice, tasks.glob("*/stat")), None)).parent.name)

    def members(self) -> list[int]:
        """All live processes of the launch, in any session."""
        return marked(self.program)

    def checkpoint(self, step: int) -> Path:
        return step_checkpoint_path(self.folder / "checkpoints", step)

    def text(self) -> str:
        """The output so far."""
        return "".join(os.pread(file.fileno(), 2**24, 0).decode(errors="replace") for file in self.program.files)

    def end(self, seconds: float = 60.0) -> Ended:
        """Wait for the end of the launch."""
        return finish(self.program, seconds)


class Drill:
    """The tools of one drill: a folder, seeded randomness, launches that are always ended."""

    def __init__(self, folder: Path, seed: object) -> None:
        self.folder, self.random, self.runs = folder, random.Random(f"{seed}"), Runs(folder)
        self.ends = contextlib.ExitStack()  # closed at the end of the drill

    def program(self, code: str, held_at: int) -> Path:
        """Write a program that runs a fault's code and then train.py."""
        for name in ("go", "slow"):
            (self.folder / name).unlink(missing_ok=True)
        path, values = self.folder / "program.py", f"HELD_AT, FOLDER = {held_at}, {str(self.folder)!r}"
        replace_file(path, lambda file: file.write(f"{values}\n{PROGRAM}\n{code}\ntrain.run_as_script()\n".encode()))
        return path  # replaced, since another rank may be reading it

    def start(
        self,
        ranks: int,
        *flags: object,
        code: str = "",
        held_at: int = -1,
        name: str | Path = "run",
        env: dict[str, str] | None = None,
        before: tuple = (),
        how: tuple = ("--standalone",),
        is_real: bool = False,
    ) -> Job:
        """Launch `ranks` ranks; 0: python without a launcher. Forked, without torchrun itself (ranks.WarmLaunch); with
        `is_real`, arguments of torchrun (`how`) or a command `before` it, a real torchrun."""
        words = [self.program(code, held_at), *FLAGS, "--run_dir", self.folder / name, *flags]
        folder, launcher = self.folder / name, [sys.executable]
        former = {read_status(file).pid for file in self.folder.glob(f"status-{folder.name}-*[0-9]")}
        if is_real or before or how != ("--standalone",):
            launcher += ["-m", "torch.distributed.run", *how, f"--nproc-per-node={ranks}"] if ranks else []
            program = start([*before, *launcher, *words], env=env)
        else:
            program = WarmLaunch(ranks, words[0], words[1:], env)
        self.ends.callback(stop, program)
        return Job(program, folder, former)

    def fork(self, ranks: int, *flags: object, name: str | Path = "run") -> None:
        """Start or resume a run without a fault, quickly, in forked ranks."""
        self.runs.train(max(1, ranks), name, *FLAGS, *flags)

    def held(self, ranks: int, step: int, *flags: object, checkpoint_of: int = 0, **options: object) -> Job:
        """A launch whose ranks all wait in this step until `let_go`; with `checkpoint_of`, the checkpoint of that step
        is on disk."""
        job = self.start(ranks, *flags, held_at=step, **options)
        statuses = [(step, "forward")] * max(1, ranks)
        job.wait_for(
            lambda: [status and (status.step, status.phase) for status in job.statuses(max(1, ranks))] == statuses
        )
        if checkpoint_of:
            job.wait_for(job.checkpoint(checkpoint_of).exists)
            job.wait_for(lambda: not any(job.checkpoint(0).parent.glob("*.tmp")))
        return job

    def let_go(self, is_slow: bool = False) -> None:
        """Let the waiting ranks continue; slowly until `run_on`, if `is_slow`."""
        if is_slow:
            (self.folder / "slow").touch()
        (self.folder / "go").touch()

    def run_on(self) -> None:
        (self.folder / "slow").unlink()

    def stopped(
        self, step: int, *flags: object, ranks: int = 2, number: int = signal.SIGTERM, **options: object
    ) -> None:
        """A run that was asked to stop at this step and has saved every step."""
        job = self.held(ranks, step, *flags, **options)
        job.signal_launcher(number)
        self.let_go(is_slow=True)
        self.has_stopped(job, code=1 if ranks else 75)

    def beside(self, *words: object) -> Popen:
        """Start a tool that runs in parallel until the drill ends."""
        program = start(words)
        self.ends.callback(stop, program)
        return program

    # ---- assertions ----

    def completes(self, ranks: int, *flags: object, seconds: float = 90.0, **options: object) -> Ended:
        """The launch succeeds and leaves no process."""
        return self.has_completed(self.start(ranks, *flags, **options), seconds)

    def has_completed(self, job: Job, seconds: float = 60.0) -> Ended:
        ended = job.end(seconds)
        assert (ended.code, ended.left) == (0, 0), ended.text
        return ended

    def fails(
        self, job: Job, *sentences: str, rank: int | None = None, has_status: bool = True, seconds: float = 60.0
    ) -> str:
        """The launch fails with these messages, on the terminal and (the first one) in status.json, and leaves no
        process. Returns its output."""
        ended = job.end(seconds)
        assert (ended.code, ended.left) == (1, 0), ended.text
        for sentence in sentences:
            says(ended.text, sentence)
        if has_status:
            status = self.json("status.json")
            assert (status["state"], status["host"]) == ("failed", HOST) and rank in (None, status["rank"]), status
            says(status["error"], sentences[0] if sentences else "")
        return ended.text

    def json(self, file: str, name: str = "run") -> dict:
        return self.runs.json(name, file)

    def events(self, event: str, name: str = "run") -> list[dict]:
        return self.runs.events(name, event)

    def resumes(self, ranks: int, *flags: object) -> None:
        """Started again, the run completes and equals the one without a fault."""
        self.fork(ranks, *flags, "--resume_from", "auto")
        self.no_partial_files()
        self.is_whole(ranks, *flags)

    def is_whole(self, ranks: int, *flags: object, name: str = "run", code: str = "") -> None:
        """The completed run is bitwise equal to the one without a fault, and used each sample once per epoch."""
        other = self.uninterrupted(ranks, *flags, code=code)
        assert_same_state(self.runs.last(name), self.runs.last(other))
        assert self.runs.samples(name) == self.runs.samples(other)

    def uninterrupted(self, ranks: int, *flags: object, code: str = "") -> Path:
        """The folder of the same run without a fault, shared by all drills with these flags."""
        key = hashlib.sha256(repr((ranks, flags, code)).encode()).hexdigest()[:12]
        folder = self.folder.parent / f"uninterrupted-{key}"
        if not (folder / "summary.json").exists():
            self.completes(ranks, *flags, name=folder, code=code) if code else self.fork(ranks, *flags, name=folder)
        return folder

    def steps_lost(self, step: int) -> int:
        """The number of optimizer steps repeated after an attempt that had reached this step."""
        return step - self.events("resumed")[-1]["step"]

    def has_stopped(self, job: Job, name: str = "run", code: int = 1) -> None:
        """The launch stopped on request and has saved: its latest checkpoint includes every committed step."""
        ended = job.end()
        assert (ended.code, ended.left) == (code, 0), ended.text
        status, last = self.json("status.json", name), max(self.runs.samples(name), default=0)
        assert (status["state"], status["step"]) == ("preempted", last), status
        self.no_partial_files(name)
        assert last == (self.runs.last(name)["progress"]["step"] if last else 0)

    @contextlib.contextmanager
    def unchanged(self, *but: str) -> Iterator[None]:
        """The run's folder does not change, except for the logs and these files."""
        folder = self.folder / "run"

        def files() -> dict[str, bytes]:
            paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
            return {name: path.read_bytes() for name, path in paths.items() if not name.startswith(("logs/", *but))}

        before = files()
        yield
        after = files()
        assert [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)] == []

    def no_partial_files(self, name: str = "run") -> None:
        assert list((self.folder / name).rglob("*.tmp")) == []


def slow_writer(seconds: float | str) -> str:
    """Lines that keep each checkpoint a partial file for so long."""
    return (
        "from utils.checkpoint import archive\nplain_replace = archive.replace_file\n"
        "def slow_replace(path, write, *rest, **options):\n"
        f"    plain_replace(path, lambda file: (write(file), file.flush(), time.sleep({seconds})), *rest, **options)\n"
        "archive.replace_file = slow_replace\n"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

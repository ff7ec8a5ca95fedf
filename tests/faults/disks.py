"""Storage that fills up, fails or goes away under a run: a mount namespace of the drill's own, and strace on one process."""

import contextlib
import os
import time
from pathlib import Path

from drill import Drill, Job
from ranks import ROOT, lack, launch, need
from utils import checkpoint

MEGABYTE = 2**20


class Disk:
    """A tmpfs in a mount namespace that a process holds; launches enter it, the drill looks into it through /proc.

    The drill's folder "run" leads to the run's folder on the disk, in this and in that namespace.
    """

    def __init__(self, drill: Drill, megabytes: int = 128, is_run_folder: bool = False) -> None:
        need("unshare")
        need("nsenter")
        self._drill, self.place = drill, drill.folder / "disk"
        self.place.mkdir()
        is_root = os.geteuid() == 0
        holder = drill.beside("unshare", *([] if is_root else ["--map-root-user"]), "-m", "sleep", 600)
        ends = time.monotonic() + 10
        with contextlib.suppress(OSError):
            while os.readlink(f"/proc/{holder.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt") and time.monotonic() < ends:
                time.sleep(0.005)
        self._enter = ["nsenter", *([] if is_root else ["-U", "--preserve-credentials"]), "-m", "-t", holder.pid]
        self.before = (*self._enter, "sh", "-c", f'cd {ROOT} && exec "$@"', "sh")
        if self.inside("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", self.place).code:
            lack("this machine allows no mount namespaces")
        self.run = self.place if is_run_folder else self.place / "run"
        self.seen = Path(f"/proc/{holder.pid}/root{self.place}")
        (drill.folder / "run").symlink_to(f"/proc/{holder.pid}/root{self.run}")

    def inside(self, *words: object):
        """Run a command in the namespace."""
        return launch([*self._enter, *words], deadline=20)

    def start(self, ranks: int, *flags: object, **options) -> Job:
        return self._drill.start(ranks, *flags, "--run_dir", self.run, before=self.before, **options)

    def run_to_end(self, ranks: int, *flags: object, **options):
        return self.start(ranks, *flags, **options).end(90)

    def fill(self, leave: float) -> None:
        """Take all room but so many MB."""
        room = os.statvfs(self.seen)
        with (self.seen / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - int(leave * MEGABYTE)))
            while not leave:
                file.write(bytes(4096))

    def make_room(self) -> None:
        (self.seen / "filler").unlink()

    def turn_read_only(self) -> None:
        """From now on. Files that are open stay writable, as on a server that fences a client off."""
        for words in (("mount", "--bind", self.run, self.run), ("mount", "-o", "remount,bind,ro", self.run)):
            assert self.inside(*words).code == 0

    def unmount(self, place: Path) -> None:
        assert self.inside("umount", "-l", place).code == 0


# ---- holding the run still while something is done to it ----


def held_at(drill: Drill, step: int) -> str:
    """Lines for a program: the forward pass of this optimizer step waits for `let_go`, on all ranks; where they then crawl, until `run_on`."""
    return f"""
held_loss, passes = train.compute_loss, []
def held(net, batch):
    passes.append(net.training)
    while sum(passes) == 2 + {step} and not os.path.exists({str(drill.folder / "go")!r}):  # 2: to warm up
        time.sleep(0.005)
    time.sleep(0.2 if net.training and os.path.exists({str(drill.folder / "slow")!r}) else 0.0)
    return held_loss(net, batch)
train.compute_loss = held
"""


def wait_until_held(drill: Drill, job: Job, step: int, checkpoint_of: int = 0) -> None:
    """The run waits at this step, and the checkpoint of that one is on the disk."""
    job.wait_for(lambda: all(place and (place.step, place.phase) == (step, "forward") for place in job.places(2)))
    if checkpoint_of:
        job.wait_for(lambda: job.checkpoint(checkpoint_of).exists() and not any(job.checkpoint(0).parent.glob("*.tmp")))


def let_go(drill: Drill, crawling: bool = False) -> None:
    if crawling:
        (drill.folder / "slow").touch()
    (drill.folder / "go").touch()


def run_on(drill: Drill) -> None:
    (drill.folder / "slow").unlink()


# ---- system calls that fail ----


def tracing(drill: Drill, pid: int, *words: object) -> Path:
    """Attach strace to a process; returns its log."""
    need("strace")
    log = drill.folder / f"strace-{pid}"
    drill.beside("strace", "-y", "-o", log, *words, "-p", pid)
    ends = time.monotonic() + 10
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < ends, "strace cannot attach"
        time.sleep(0.005)
    return log


def are_whole(job: Job) -> list[int]:
    """The steps of all files under a checkpoint's name, each of which is whole."""
    return [checkpoint.verify(path).step for path in checkpoint.step_checkpoints(job.checkpoint(0).parent)]

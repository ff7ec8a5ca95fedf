"""Storage that fills up, fails or goes away under a run: mount namespaces, and strace on one process."""

import contextlib
import os
from pathlib import Path

from drill import Drill, Job, until
from ranks import ROOT, lack, launch, need
from utils import checkpoint

MEGABYTE = 2**20
IS_ROOT = os.geteuid() == 0


def mounting(*words: object, only_rank: int | None = None) -> str:
    """Lines after which a rank, or only this one, has a mount of its own that no other process sees."""
    need("unshare")
    mine = ["unshare", *([] if IS_ROOT else ["--map-root-user"]), "-m"]
    if launch([*mine, "true"]).code:
        lack("this machine allows no mount namespaces")
    unshared = 0x20000 if IS_ROOT else 0x10020000  # CLONE_NEWNS, CLONE_NEWUSER
    return (
        f"import ctypes, subprocess\nif {only_rank} in (None, RANK):\n"
        f"    assert ctypes.CDLL(None).unshare({unshared}) == 0\n"
        "    subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"    subprocess.run({['mount', *map(str, words)]}, check=True)\n"
    )


class Disk:
    """A tmpfs in a mount namespace that a process holds; launches enter it, the drill looks into it through /proc.

    The drill's folder "run" leads to the run's folder on the disk, in this and in that namespace.
    """

    def __init__(self, drill: Drill, megabytes: int = 64, is_run_folder: bool = False) -> None:
        need("unshare")
        need("nsenter")
        self._drill, self.place = drill, drill.folder / "disk"
        self.place.mkdir()
        holder = drill.beside("unshare", *([] if IS_ROOT else ["--map-root-user"]), "-m", "sleep", 600)
        mounts = Path(f"/proc/{holder.pid}/ns/mnt")
        with contextlib.suppress(OSError):  # it could not, and has ended
            until(lambda: mounts.readlink() != Path("/proc/self/ns/mnt").readlink(), 30)
        self._inside = ["nsenter", *([] if IS_ROOT else ["-U", "--preserve-credentials"]), "-m", "-t", holder.pid]
        if self.inside("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", self.place).code:
            lack("this machine allows no mount namespaces")
        self.run = self.place if is_run_folder else self.place / "run"
        self.seen = Path(f"/proc/{holder.pid}/root{self.place}")
        (drill.folder / "run").symlink_to(f"/proc/{holder.pid}/root{self.run}")
        self._enter = f"import ctypes\nfor kind in {('mnt',) if IS_ROOT else ('user', 'mnt')}:\n"
        self._enter += f"    assert ctypes.CDLL(None).setns(os.open(f'/proc/{holder.pid}/ns/{{kind}}', os.O_RDONLY), 0) == 0\n"
        self._enter += f"os.chdir({str(ROOT)!r})\n"

    def inside(self, *words: object):
        """Run a command in the namespace."""
        return launch([*self._inside, *words], deadline=20)

    def held(self, ranks: int, step: int, *flags: object, code: str = "", **options: object) -> Job:
        return self._drill.held(ranks, step, *flags, "--run_dir", self.run, code=self._enter + code, **options)

    def completes(self, ranks: int, *flags: object, code: str = "") -> None:
        self._drill.completes(ranks, *flags, "--run_dir", self.run, code=self._enter + code)

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


def tracing(drill: Drill, pid: int, *words: object) -> Path:
    """Attach strace to a process; returns its log."""
    need("strace")
    log = drill.folder / f"strace-{pid}"
    drill.beside("strace", "-y", "-o", log, *words, "-p", pid)
    until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text())
    return log


def are_whole(job: Job) -> list[int]:
    """The steps of all files under a checkpoint's name, each of which is whole."""
    return [checkpoint.verify(path).step for path in checkpoint.step_checkpoints(job.checkpoint(0).parent)]

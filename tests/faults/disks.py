# extra: template
"""Storage that fills up, fails or goes away under a run: mount namespaces, and strace on one process."""

import contextlib
import os
from pathlib import Path

from drill import Drill, Job
from nodes import Place
from ranks import ROOT, lack, launch, need
from training import wait_until
from utils.checkpoint import format as checkpoint

MEGABYTE = 2**20
IS_ROOT = os.geteuid() == 0


def mounting(*words: object) -> str:
    """Lines that give each rank its own mount, which no other process sees."""
    need("unshare")
    prefix = ["unshare", *([] if IS_ROOT else ["--map-root-user"]), "-m"]
    if launch([*prefix, "true"]).code:
        lack("this machine allows no mount namespaces")
    unshared = 0x20000 if IS_ROOT else 0x10020000  # CLONE_NEWNS, CLONE_NEWUSER
    return (
        f"import ctypes, subprocess\nassert ctypes.CDLL(None).unshare({unshared}) == 0\n"
        "subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"subprocess.run({['mount', *map(str, words)]}, check=True)\n"
    )


class Disk:
    """A tmpfs in a mount namespace. Launches enter it; the drill accesses it through /proc.

    The drill's folder "run" is a link to the run's folder on the disk, valid in both namespaces.
    """

    def __init__(self, drill: Drill, megabytes: int = 64, inodes: int = 9999, is_run_folder: bool = False) -> None:
        need("unshare")
        need("nsenter")
        self._drill, self.place = drill, drill.folder / "disk"
        self.place.mkdir()
        self._node = Place(["-m", "-n", "-u", *([] if IS_ROOT else ["--map-root-user"])])
        drill.ends.callback(self._node.close)
        self._node.mount_tmpfs(self.place, f"{megabytes}m,nr_inodes={inodes}")
        self.run = self.place if is_run_folder else self.place / "run"
        self.seen = self._node.seen(self.place)
        (drill.folder / "run").symlink_to(self._node.seen(self.run))
        self._enter = f"import ctypes\nfor kind in {('mnt',) if IS_ROOT else ('user', 'mnt')}:\n"
        self._enter += (
            f"    assert ctypes.CDLL(None).setns(os.open(f'/proc/{self._node.pid}/ns/{{kind}}', os.O_RDONLY), 0) == 0\n"
        )
        self._enter += f"os.chdir({str(ROOT)!r})\n"

    def held(self, ranks: int, step: int, *flags: object, code: str = "", **options: object) -> Job:
        return self._drill.held(ranks, step, *flags, "--run_dir", self.run, code=self._enter + code, **options)

    def completes(self, ranks: int, *flags: object, code: str = "") -> None:
        self._drill.completes(ranks, *flags, "--run_dir", self.run, code=self._enter + code)

    def fill(self, leave: float) -> None:
        """Fill the disk, except for `leave` MB."""
        room = os.statvfs(self.seen)
        with (self.seen / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - int(leave * MEGABYTE)))
            while not leave:
                file.write(bytes(4096))

    def take_inodes(self) -> None:
        """Create empty files until the file system can hold no more."""
        with contextlib.suppress(OSError):
            for number in range(9999):
                (self.seen / f"filler{number}").touch()

    def make_room(self) -> None:
        for filler in self.seen.glob("filler*"):
            filler.unlink()

    def turn_read_only(self) -> None:
        """Open files stay writable, as on a server that fences off a client."""
        self._node.bind(self.run, self.run, is_read_only=True)

    def unmount(self, place: Path) -> None:
        self._node.do("umount", "-l", place)


def tracing(drill: Drill, pid: int, *words: object) -> Path:
    """Attach strace to a process; returns its log."""
    need("strace")
    log = drill.folder / f"strace-{pid}"
    drill.beside("strace", "-y", "-o", log, *words, "-p", pid)
    wait_until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text())
    return log


def are_whole(job: Job) -> list[int]:
    """The steps of all files with a checkpoint's name, after verifying each."""
    return [
        checkpoint.verify_checkpoint(path).step for path in checkpoint.list_step_checkpoints(job.checkpoint(0).parent)
    ]

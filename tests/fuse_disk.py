# extra: template
"""A file system that passes everything on to a folder, and hangs or is slow: fuse_disk.py FOLDER MOUNT BYTES_PER_SECOND

While a file "hang-CALL" (write, fsync, rename) exists next to FOLDER, that call does not return for step 20's files;
while a file "stall" exists, no call returns.
"""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path


def python() -> str:
    """A Python that has fusepy, in this environment or in FUSE_PYTHON; "" if there is none or no FUSE here."""
    for interpreter in [sys.executable, os.environ.get("FUSE_PYTHON")] if os.path.exists("/dev/fuse") else []:
        if interpreter and not subprocess.run([interpreter, "-c", "import fuse"], capture_output=True).returncode:
            return interpreter
    return ""


def serve(folder: Path, mount: str, bytes_per_second: float) -> None:
    from fuse import FUSE, FuseOSError, Operations

    class Disk(Operations):
        def __call__(self, name, path, *args):
            if not hasattr(self, name):
                raise FuseOSError(errno.EFAULT)
            hangs = folder.parent / f"hang-{name}", folder.parent / "stall"
            while hangs[1].exists() or ("step_00000020" in path and hangs[0].exists()):
                time.sleep(0.05)
            return getattr(self, name)(str(folder) + path, *args)

        def getattr(self, path, handle=None):
            stats = os.lstat(path)
            names = "st_atime st_ctime st_gid st_mode st_mtime st_nlink st_size st_uid".split()
            return {name: getattr(stats, name) for name in names}

        def readdir(self, path, handle):
            return [".", "..", *os.listdir(path)]

        def create(self, path, mode, info=None):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def open(self, path, flags):
            return os.open(path, flags)

        def read(self, path, size, offset, handle):
            return os.pread(handle, size, offset)

        def write(self, path, data, offset, handle):
            time.sleep(len(data) / bytes_per_second)
            return os.pwrite(handle, data, offset)

        def fsync(self, path, datasync, handle):
            os.fsync(handle)

        def release(self, path, handle):
            os.close(handle)

        def rename(self, path, new):
            os.rename(path, str(folder) + new)

        def symlink(self, path, target):
            os.symlink(target, path)

        def statfs(self, path):
            stats = os.statvfs(path)
            return {name: getattr(stats, name) for name in dir(stats) if name.startswith("f_") and name != "f_fsid"}

        truncate = staticmethod(lambda path, length, handle=None: os.truncate(path, length))
        mkdir, rmdir, unlink, readlink, chmod = map(
            staticmethod, (os.mkdir, os.rmdir, os.unlink, os.readlink, os.chmod)
        )

    # a big write arrives as one request; the kernel keeps nothing back
    FUSE(Disk(), mount, foreground=True, nothreads=False, direct_io=True, big_writes=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve(), sys.argv[2], float(sys.argv[3]))

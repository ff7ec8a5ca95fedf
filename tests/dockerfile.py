# extra: kubernetes
"""scripts/Dockerfile as a list of instructions, and its copied files: an image as far as possible without docker."""

import shutil
import subprocess
from pathlib import Path

from ranks import PATH, ROOT, lack, launch, need

FILE = ROOT / "scripts" / "Dockerfile"
# prefix that runs a command as in a pod: process 1, a user without a passwd entry and without capabilities
POD = "unshare --user --map-user=10001 --map-group=10001 --pid --fork --mount-proc --kill-child".split()


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest of the line), in order, without comments; lines that end with a backslash are joined."""
    lines = [line for line in FILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined]


def copies() -> list[tuple[list[Path], str]]:
    """The sources and the target of each COPY. Raises AssertionError for a source that does not exist."""
    pairs = []
    for _, words in (instruction for instruction in instructions() if instruction[0] == "COPY"):
        *sources, target = words.split()
        paths = [path for source in sources for path in sorted(ROOT.glob(source.rstrip("/")))]
        assert len(paths) >= len(sources), words
        pairs.append((paths, target))
    return pairs


def copy_into(folder: Path) -> None:
    """Copy the content of the image's WORKDIR, which its user can read but not write."""
    for paths, target in copies():
        for path in paths:
            if path.is_dir():
                shutil.copytree(path, folder / target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / target)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o277)  # as with the strictest umask
    for step in (rest for name, rest in instructions() if name == "RUN" and "pip install" not in rest):
        subprocess.run(["sh", "-c", step], cwd=folder, check=True)


def make_image(folder: Path) -> dict[str, str]:
    """Create the image's WORKDIR in a folder; returns variables for programs: its ENV, this environment's Python."""
    need("unshare")
    if (ended := launch([*POD, "true"])).code:
        lack(f"this machine allows no namespaces: {ended.err}")
    copy_into(folder)
    variables = dict(word.split("=", 1) for name, rest in instructions() if name == "ENV" for word in rest.split())
    return variables | {"GIT_COMMIT": "c0ffee", "PATH": PATH, "PYTHONPATH": ""}


def process_1(program: subprocess.Popen) -> int:
    """The pid of the pod's first process, as the kubelet sees it."""
    (pid,) = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    return int(pid)


def make_removable(folder: Path) -> None:
    """Make the folder removable for pytest."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)

"""scripts/Dockerfile as a list of instructions, and what it copies: as far as an image can be made without docker."""

import shutil
import subprocess
from pathlib import Path

from ranks import ROOT

FILE = ROOT / "scripts" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest), in order; comments left out, lines that end with a backslash joined."""
    lines = [line for line in FILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined]


def copies() -> list[tuple[list[Path], str]]:
    """Of each COPY the files and folders, and where they go. Raises AssertionError for one that is not there."""
    found = []
    for _, words in (each for each in instructions() if each[0] == "COPY"):
        *sources, target = words.split()
        paths = [path for source in sources for path in sorted(ROOT.glob(source.rstrip("/")))]
        assert len(paths) >= len(sources), words
        found.append((paths, target))
    return found


def copy_into(folder: Path) -> None:
    """What the image has in its WORKDIR, and its user may read and not write."""
    for paths, target in copies():
        for path in paths:
            if path.is_dir():
                shutil.copytree(path, folder / target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / target)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o277)  # as under the strictest umask
    for step in (rest for name, rest in instructions() if name == "RUN" and "pip install" not in rest):
        subprocess.run(["sh", "-c", step], cwd=folder, check=True)

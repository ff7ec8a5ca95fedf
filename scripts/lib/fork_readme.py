"""Write the README of a fork that has deleted extras.

scripts/remove_extras.sh replaces a README that nobody has edited. The last line shows this, since it has a checksum of
the others. After a change of the template's README, `python scripts/lib/fork_readme.py` writes this line again. This
module needs only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

README = "README.md"
README_PATH = Path(__file__).resolve().parents[2] / README
CHECKSUM_LINE = "<!-- scripts/remove_extras.sh replaces this file unless it was edited: {} -->\n"
TEXT = """# {name}

This repository trains models with PyTorch DDP. It is a fork of a DDP training template.
{parts}
Your code is in `model.py`, `dataset.py` and the block "yours" of `config.py`.
[Wrap your script](docs/wrap-your-script.md) shows how to write it, and [the reference](docs/reference.md) lists every
function. Please replace this README by one about your model and data.

## Commands

```bash
scripts/quickstart.sh            # makes the environment in .venv, unless one is active, and trains on two ranks
source .venv/bin/activate        # if the first command has made it
python train.py --help           # lists the flags
torchrun --standalone --nproc-per-node=2 train.py --run_dir runs/first --resume_from auto
scripts/test.sh                  # runs the tests
```

The `torchrun` command trains on two ranks, on generated images until `dataset.py` reads your own data. The same command
continues the run after an interruption. [Commands](docs/commands.md) has more, for example to evaluate and to export.

## Documentation

{pages}
- [Changes of the template](CHANGELOG.md)
- [For coding agents](AGENTS.md)

`git show {commit}:./README.md` prints the README of the template. It describes the deleted parts, too, and says what
has not been tested yet.
"""


def add_checksum(text: str) -> str:
    """Return the text with a last line that tells whether somebody has edited the other lines."""
    return text + CHECKSUM_LINE.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def is_edited(text: str) -> bool:
    """Return whether the text is neither the template's README nor one that `build_readme` has made."""
    lines = text.splitlines(keepends=True)
    return not lines or text != add_checksum("".join(lines[:-1]))


def list_pictures(files: dict[str, str]) -> set[str]:
    """Return the pictures in .github, where those of the template are, that pages show."""
    pictures = set()
    for name, text in files.items():
        if name.endswith(".md"):
            for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
                path = os.path.normpath(Path(name).parent / link)
                if path.startswith(".github/"):
                    pictures.add(path)
    return pictures


def build_readme(name: str, files: dict[str, str], kept_extras: dict[str, str], replaced: str, commit: str) -> str:
    """Build the README of a fork.

    Args:
        name: the name of the fork.
        files: the files that are left of the template, as text by path.
        kept_extras: what each remaining extra buys, by its name.
        replaced: the README that is replaced. If it is one of a fork, it says which commit has the template's.
        commit: a commit that has the README that is replaced.
    """
    parts = "All its [optional parts](docs/extras.md) were deleted.\n"
    if kept_extras:
        parts = "It has kept these [optional parts](docs/extras.md):\n\n"
        parts += "".join(f"- `{extra}`: {sentence}\n" for extra, sentence in kept_extras.items())
    pages = []
    for path, text in sorted(files.items()):
        title = re.match(r"(?:<!--.*-->\s+)?# (.*)", text)
        if re.fullmatch(r"docs/[^/]+\.md|docs/recipes/README\.md", path) and title:
            pages.append(f"- [{title[1]}]({path})")
    earlier = re.search(r"`git show (\w+):\./README\.md`", replaced)
    return add_checksum(
        TEXT.format(name=name, parts=parts, pages="\n".join(pages), commit=earlier[1] if earlier else commit)
    )


def main() -> None:
    lines = README_PATH.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines[-1].startswith(CHECKSUM_LINE.partition("{}")[0]):
        lines.pop()
    README_PATH.write_text(add_checksum("".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()

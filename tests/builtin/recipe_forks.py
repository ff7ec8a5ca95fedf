# extra: template
"""A copy of this repository with a recipe of docs/recipes applied."""

import json
import re
import subprocess
from dataclasses import dataclass

import forks
from ranks import ROOT, copy_repository

RECIPES = ROOT / "docs" / "recipes"
# recipes that change the fork of other ones
ON = {
    "muon": ["gpt"],
    "sweeps": ["tabular"],
    "lora": ["causal_lm"],
    "memory_mapped_tokens": ["gpt"],
    "several_validation_sets": ["gpt"],
    "tensor_parallel": ["gpt"],
    "pipeline": ["gpt", "tensor_parallel"],
}
TARGET = re.compile(
    r"^Target: `(?P<metric>[\w/]+)` (?P<side>above|below) (?P<bound>[\d.]+) within (?P<steps>\d+) steps on two ranks"
    r"(?: with `(?P<flags>[^`]+)`)? \(measured (?P<measured>[\d.]+)\)\.$"
)
FAST = "--log_interval 5 --num_workers 1 --backend gloo".split()


def blocks_of(name, language):
    text = (RECIPES / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """What the last line of a recipe says that a run on the test's data reaches."""

    metric: str
    side: str
    bound: float
    steps: int
    flags: list[str]
    measured: float

    @classmethod
    def of(cls, name: str) -> "Target":
        last = (RECIPES / f"{name}.md").read_text().splitlines()[-1]
        match = TARGET.match(last)
        assert match, f"{name}.md ends with {last!r}, not with a target as {TARGET.pattern}"
        kinds = {"bound": float, "steps": int, "flags": lambda text: (text or "").split(), "measured": float}
        return cls(**{key: kinds.get(key, str)(value) for key, value in match.groupdict().items()})

    def is_met(self, value: float) -> bool:
        return value > self.bound if self.side == "above" else value < self.bound


class Fork:
    """A copy of the repository with a recipe applied, or several in turn."""

    def __init__(self, folder, *names):
        if len(names) == 1:
            names = (*ON.get(names[0], ()), *names)
        self.folder = copy_repository(folder)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # so that `git apply` works
        text = "".join((RECIPES / f"{name}.md").read_text() for name in names)
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for language, text in blocks:
            if language == "diff":
                subprocess.run(["git", "apply", "--recount"], cwd=folder, input=text, text=True, check=True)
            elif named := re.match(r"# (\w+\.py)", text):  # a complete file, named in its first line
                (folder / named[1]).write_text(text)
        self.code = [text for language, text in blocks if language == "python"]
        command = blocks_of(names[-1], "bash")[0]
        self.words = re.search(r"\.py((?: |\\\n).*)", command, re.DOTALL)[1].replace("\\\n", " ").split()
        (folder / "FOLDER").mkdir()

    def train(self, *flags):
        """Run the recipe's command with flags that make it quick; returns the output and the summary."""
        ended = forks.run(self.folder, 2, "train.py", *self.words, *FAST, *flags, "--run_dir", "runs/fork")
        assert ended.code == 0, ended.text
        return ended.out, json.loads((self.folder / "runs" / "fork" / "summary.json").read_text())

    def verify(self, ranks=2):
        ended = forks.run(self.folder, ranks, "scripts/verify.py", *self.words, "--backend", "gloo", "--num_workers", 0)
        assert ended.code == 0 and "11 of 11 invariants hold" in ended.out, ended.text
        assert "Use --no-use_amp or a float32" not in ended.out and "no answer" not in ended.out, ended.out

    @property
    def changed(self):
        files = sorted(path.name for path in self.folder.glob("*.py"))
        return [name for name in files if (self.folder / name).read_bytes() != (ROOT / name).read_bytes()]

# extra: template
"""AGENTS.md: its commands and exit codes are real. test_readme.py checks its names and links."""

import json
import re
import shlex

import pytest

from config import TrainingConfig
from ranks import PATH, ROOT, copy_repository, launch

PAGE = (ROOT / "AGENTS.md").read_text()
ROWS = re.findall(r"^\| `((?:python|torchrun) [^`]+)` \| [^|]+ \| ([^|]+) \|(?:<!-- .* -->)?$", PAGE, re.MULTILINE)
TINY = "--image_size 8 --batch_size 8 --dataset_size 32 --backend gloo"


# reading it, but not setting it
ASKS_MODE = re.compile(r"\b(?:model|net|network|module)\.training\b(?!\s*&?=[^=])")
ADVICE_AGAINST = re.compile(r"\bnot\s+(ask\s+)?`model\.training`")


def asks_mode(text):
    return ASKS_MODE.search(ADVICE_AGAINST.sub("", text))


def test_other_tools_find_the_page_and_each_of_its_commands_is_parsed():
    assert (ROOT / "CLAUDE.md").read_text() == "@AGENTS.md\n"
    assert len(ROWS) == 5


@pytest.mark.parametrize(
    ("text", "is_advice"),
    [
        ("belong to training only (`model.training`)", True),
        ("smoothing = 0.1 if unwrap(model).training or net.training else 0", True),
        ("if model.training == True:", True),
        ("if self.model.training:", True),
        ("x = F.dropout(x, 0.5, self.training)", False),
        ("module.training = True", False),
        ("ours.training.model", False),
        ("Do not ask\n  `model.training` in it.", False),
        ("asks `torch.is_grad_enabled()`, not `model.training`", False),
    ],
)
def test_advice_to_ask_the_model_for_its_mode_is_recognized(text, is_advice):
    assert bool(asks_mode(text)) == is_advice


def test_no_page_and_no_code_asks_the_model_for_its_mode():
    """torch.is_grad_enabled() says whether compute_loss trains. A model may keep itself in another mode."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.py")]
    paths += [path for folder in ("scripts", "utils") for path in (ROOT / folder).rglob("*.py")]
    asking = [str(path.relative_to(ROOT)) for path in paths if asks_mode(path.read_text())]
    assert not asking


@pytest.mark.parametrize("command", [command for command, _ in ROWS])
def test_flags_of_its_commands_exist(command):
    words = shlex.split(command.split(".py", 1)[1])
    script = re.search(r"\S+\.py", command)[0]
    text = "".join(path.read_text() for path in (ROOT / script, *(ROOT / "scripts/lib").glob("*/result.py")))
    fields = {f"--{name}" for name in TrainingConfig.__dataclass_fields__}
    assert not [word for word in words if word.startswith("--") and word not in fields and word not in text]


@pytest.mark.parametrize(
    ("command", "code", "result"),
    [
        (f"python train.py --max_steps 2 --run_dir runs/try {TINY}", 0, None),
        ("python train.py --max_step 2", 2, None),
        ("python scripts/runs.py --json runs/none", 2, None),
        ("python scripts/verify.py --json verify.json --max_step 2", 2, "could not run"),
        pytest.param(f"python scripts/verify.py --json verify.json {TINY}", 0, "ok", marks=pytest.mark.slow),
        pytest.param(f"python scripts/verify.py --json verify.json {TINY} x", 1, "broken", marks=pytest.mark.slow),
    ],
)
def test_exit_codes_are_those_of_the_page(tmp_path, command, code, result):
    folder = copy_repository(tmp_path)
    if command.endswith(" x"):
        command, file = command.removesuffix(" x"), folder / "model.py"
        text = file.read_text()
        name = "def compute_loss("
        assert text.count(name) == 1
        mean = '    return found | {"loss": (found["loss"][0] / found["loss"][1], 1)}\n'
        file.write_text(
            text.replace(name, "def sums(")
            + f"\n\ndef compute_loss(model, batch):\n    found = sums(model, batch)\n{mean}"
        )
    ended = launch(shlex.split(command), cwd=folder, env={"PATH": PATH}, deadline=280)
    assert ended.code == code, ended.text
    if result:
        assert json.loads((folder / "verify.json").read_text())["result"] == result

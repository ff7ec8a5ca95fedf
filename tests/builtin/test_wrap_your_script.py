# extra: template
"""docs/wrap-your-script.md: its script runs as it stands, and the fork that its edits make learns as well."""

import ast
import math
import re

import pytest
import torch

import forks
from ranks import ROOT, copy_repository
from training import Runs

PAGE = (ROOT / "docs/wrap-your-script.md").read_text()
SCRIPT = re.search(r"^```python\n(# gestures\.py.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
CLASSES = {
    node.name: ast.get_source_segment(SCRIPT, node) for node in ast.parse(SCRIPT).body if isinstance(node, ast.ClassDef)
}
EDITS = re.findall(r"^```diff\n\+\+\+ (\w+\.py)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
AS_IT_IS = re.compile(r"^class (\w+)\(.*\): \.\.\.  # as it is$", re.MULTILINE)
BLOCK = "    # ---- yours: "  # the line of config.py after which a fork adds its fields
COMMANDS = re.search(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1].replace("\\\n", " ").splitlines()
HELD_OUT = 192  # whole batches of 32, so that the script's mean of means is the mean


def lines_of(edit, sign):
    return [line[1:] for line in edit.splitlines() if line.startswith(sign)]


def write_data(folder):
    """A tone for each of six classes on three channels, with random phases and much noise."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for split, count in (("train", 600), ("val", HELD_OUT)):
        labels = torch.randint(6, (count,), generator=generator)
        phases = 2 * math.pi * torch.rand(count, 3, 1, generator=generator)
        waves = torch.sin(2 * math.pi * (2 + labels[:, None, None]) * torch.arange(32) / 32 + phases)
        torch.save((waves + 0.8 * torch.randn(count, 3, 32, generator=generator), labels), folder / f"{split}.pt")


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the repository with the page's edits, its script and data."""
    folder = copy_repository(tmp_path_factory.mktemp("fork"))
    texts = {}
    for name, edit in EDITS:
        added = AS_IT_IS.sub(lambda match: CLASSES[match[1]], "\n".join(lines_of(edit, "+")))
        texts[name] = f"{texts.get(name, '')}{added}\n"
    config = (folder / "config.py").read_text()
    mark = next(line for line in config.splitlines(keepends=True) if line.startswith(BLOCK))
    texts["config.py"] = config.replace(mark, mark + texts["config.py"])
    for name, text in {**texts, "gestures.py": SCRIPT}.items():
        (folder / name).write_text(text)
    write_data(folder / "FOLDER")
    words = COMMANDS[0][COMMANDS[0].index("train.py") :].split(" > ")[0].split()
    (folder / "gestures.toml").write_text(run(folder, 0, *words))
    return folder


def run(fork, ranks, *words, deadline=120.0):
    ended = forks.run(fork, ranks, *words, deadline=deadline)
    assert ended.code == 0, ended.text
    return ended.out


def run_script(fork, name, *flags):
    """The loss and accuracy that the script prints at last."""
    out = run(fork, 0, name, "--data", "FOLDER", *flags)
    return map(float, re.findall(r"loss (\S+), accuracy (\S+)", out)[-1])


def run_command(fork, script, **options):
    """Run the page's commands of a script in turn, each with as many ranks as it says."""
    for command in (line for line in COMMANDS if f"{script} --config" in line):
        ranks = int((re.search("--nproc-per-node=(.)", command) or "00")[1])
        yield run(fork, ranks, *command[command.index(script) :].split(), **options)


def test_each_edit_replaces_lines_of_the_script_and_nothing_of_it_is_left_out():
    names = [name for name, _ in EDITS]
    assert names == ["model.py", "model.py", "dataset.py", "config.py"]
    for _, edit in EDITS:
        assert not set(lines_of(edit, "-")) - set(SCRIPT.splitlines())
    after = PAGE.split("## Five edits")[1]
    for flag in re.findall(r"(\w+)=", re.search(r"defaults = dict\((.*)\)", SCRIPT)[1]):
        assert f"`--{flag}`" in after or f"+    {flag}: " in after, flag
    loop = SCRIPT.split("args = parser.parse_args()")[1]
    called = {*re.findall(r"\b(?:torch|nn|F)\.(?:\w+\.)*(\w+)\(|\b(DataLoader)\(", loop)}
    called = {name for pair in called for name in pair if name} - {"manual_seed", "is_available"}  # --seed
    assert len(called) >= 8 and not [name for name in called if not re.search(rf"\b{name}\b", after)]


def test_the_fork_learns_as_well_as_the_script_on_one_and_on_two_ranks(fork):
    """Equally good models of accuracy p differ on n windows by some standard errors of p: sqrt(p * (1 - p) / n)."""
    _, accuracy = run_script(fork, "gestures.py")
    least = accuracy - 3 * math.sqrt(accuracy * (1 - accuracy) / HELD_OUT)
    assert accuracy > 0.8
    assert len([*run_command(fork, "train.py")]) == 2
    for name, ranks in (("default", 1), ("two", 2)):
        summary, started = (Runs(fork / "runs").json(name, file) for file in ("summary.json", "provenance.json"))
        assert started["world_size"] == ranks and summary["final"]["accuracy"] >= least


def test_in_the_same_order_the_fork_has_the_weights_of_the_script(fork):
    """One process, one epoch without jitter; the script gets the batches that the fork has recorded."""
    words = "--data_dir FOLDER --epochs 1 --optimizer adamw --lr 3e-3 --batch_size 32 --warmup_steps 5".split()
    words += "--clip_grad_norm 1 --seed 0 --jitter 0 --num_workers 0 --record_samples --run_dir runs/same".split()
    run(fork, 0, "train.py", *words)
    runs = Runs(fork / "runs")
    batches = [indices for _, indices in sorted(runs.samples("same").items())]
    loader = "DataLoader(train_set, args.batch_size, shuffle=True)"
    assert SCRIPT.count(loader) == 1 and [len(batch) for batch in batches] == [32] * 18 + [24]
    (fork / "same.py").write_text(SCRIPT.replace(loader, f"DataLoader(train_set, batch_sampler={batches})"))
    loss, accuracy = run_script(fork, "same.py", *"--epochs 1 --warmup 5 --jitter 0".split())
    weights, expected = runs.last("same")["model"], torch.load(fork / "model.pt")
    assert weights.keys() == expected.keys()
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    [record] = runs.records("same", "eval")
    assert record["loss"] == pytest.approx(loss, rel=1e-4) and record["accuracy"] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow  # extra: verify
def test_verify_finds_nothing_broken_in_the_fork(fork):
    [out] = run_command(fork, "scripts/verify.py", deadline=400)
    assert "11 of 11 invariants hold" in out, out

"""The README's three recipes, as a forker applies them: to a copy of the repository, trained on two ranks."""

import json
import random
import re
import subprocess

import pytest
import torch

from images import save_images
from ranks import ROOT, Ended, copy_repository, torchrun

README = (ROOT / "README.md").read_text()
FAST = ["--log_interval", "5", "--num_workers", "1", "--backend", "gloo"]


def recipe(title: str) -> dict[str, list[str]]:
    """The code blocks below a heading of the README, by language."""
    section = re.search(rf"^#+ {title}.*?(?=^#+ [A-Z]|\Z)", README, re.DOTALL | re.MULTILINE)[0]
    blocks: dict[str, list[str]] = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(text)
    return blocks


@pytest.fixture
def fork(tmp_path):
    """A copy of the repository, in which `git apply` works."""
    copy_repository(tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def apply(fork, blocks):
    """Patches are applied; a whole file, which its first line names, is put in place."""
    for text in blocks.get("diff", []):
        subprocess.run(["git", "apply", "--recount"], cwd=fork, input=text, text=True, check=True)
    for text in blocks.get("python", []):
        (fork / re.match(r"# (\w+\.py)", text)[1]).write_text(text)


def train(fork, blocks, *flags) -> tuple[Ended, dict]:
    """The recipe's own command, and what makes it quick."""
    words = re.search(r"train\.py((?: |\\\n).*)", blocks["bash"][0], re.DOTALL)[1].replace("\\\n", " ").split()
    ended = torchrun(2, *words, *FAST, *flags, "--run_dir", "runs/fork", cwd=fork)
    assert ended.code == 0, ended.text
    return ended, json.loads((fork / "runs" / "fork" / "summary.json").read_text())


def changed(fork, run="fork"):
    names = json.loads((fork / "runs" / run / "provenance.json").read_text())["changed_template_files"]
    differing = [path.name for path in fork.glob("*.py") if path.read_bytes() != (ROOT / path.name).read_bytes()]
    return names, sorted(differing)


def test_a_small_vision_transformer_on_the_image_folder(fork):
    blocks = recipe("A vision transformer")
    apply(fork, blocks)
    for split, count in (("train", 40), ("test", 10)):
        save_images(fork / "FOLDER" / split, {"red": count, "green": count, "blue": count}, size=16, seed=len(split))
    ended, summary = train(fork, blocks, "--epochs", "6", "--batch_size", "10")
    assert "SmallViT" in ended.out and changed(fork) == ([], ["model.py"])
    assert summary["best_top1"] > 0.9


def test_text_of_unequal_lengths_with_perplexity(fork):
    blocks = recipe("Text of unequal lengths")
    apply(fork, blocks)
    rng = random.Random(0)
    words = "rank batch ring until gradients are summed on every node".split()
    (fork / "FOLDER").mkdir()
    for split, lines in (("train", 300), ("val", 40)):
        text = "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(lines))
        (fork / "FOLDER" / f"{split}.txt").write_text(text)
    _, summary = train(fork, blocks, "--epochs", "4")
    assert changed(fork) == ([], ["dataset.py", "model.py"])
    assert summary["best_metric"] == "perplexity" and summary["best_value"] < 8 and summary["best_top1"] is None
    records = [json.loads(line) for line in (fork / "runs/fork/metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if record["kind"] == "eval"][-1]
    assert evaluated["count"] == 40
    assert evaluated["perplexity"] == pytest.approx(2.718281828459045 ** evaluated["loss"])  # per token, not per line
    words = re.search(r"train\.py((?: |\\\n).*)", blocks["bash"][0], re.DOTALL)[1].replace("\\\n", " ").split()
    ended = torchrun(2, *words, "--backend", "gloo", script="scripts/verify.py", cwd=fork)  # it knows nothing of images
    assert ended.code == 0 and "10 of 10 invariants hold" in ended.out, ended.text


def test_fine_tuning_with_a_new_head_and_a_frozen_trunk(fork):
    blocks = recipe("Fine-tuning")
    first = torchrun(2, *FAST, "--image_size", "8", "--dataset_size", "64", "--epochs", "1", "--run_dir", "runs/first", cwd=fork)
    assert first.code == 0, first.text
    apply(fork, blocks)
    for split, count in (("train", 40), ("val", 10)):
        save_images(fork / "FOLDER" / split, {"red": count, "green": count, "blue": count}, size=8, seed=len(split))
    source = fork / "runs/first/checkpoints/best.pt"
    (fork / "CHECKPOINT").write_bytes(source.read_bytes())
    ended, summary = train(fork, blocks, "--epochs", "3", "--batch_size", "10")
    assert "left at their new values: head.weight, head.bias" in ended.out and changed(fork) == ([], ["model.py"])
    assert "771 of them trained" in ended.out  # 3 x 256 weights and 3 biases
    before = torch.load(source, weights_only=True)["model"]
    after = torch.load(sorted((fork / "runs/fork/checkpoints").glob("step_*.pt"))[-1], weights_only=True)["model"]
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head"))  # statistics too
    assert summary["best_top1"] > 0.8

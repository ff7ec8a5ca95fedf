"""The README's three recipes, as a forker applies them: to a copy of the repository, trained on two ranks."""

import json
import random
import re
import subprocess

import pytest
import torch

import forks
from images import save_images
from ranks import ROOT, copy_repository

README = (ROOT / "README.md").read_text()
FAST = "--log_interval 5 --num_workers 1 --backend gloo".split()


class Fork:
    """A copy of the repository with a recipe of the README applied."""

    def __init__(self, folder, title):
        self.folder = copy_repository(folder)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # so that `git apply` works
        section = re.search(rf"^#+ {title}.*?(?=^#+ [A-Z]|\Z)", README, re.DOTALL | re.MULTILINE)[0]
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        for language, text in blocks:
            if language == "diff":
                subprocess.run(["git", "apply", "--recount"], cwd=folder, input=text, text=True, check=True)
            elif language == "python":  # a whole file, which its first line names
                (folder / re.match(r"# (\w+\.py)", text)[1]).write_text(text)
        command = next(text for language, text in blocks if language == "bash")
        self.words = re.search(r"train\.py((?: |\\\n).*)", command, re.DOTALL)[1].replace("\\\n", " ").split()

    def images(self, size, **counts):
        """The image folder that the recipe's command reads."""
        for split, count in counts.items():
            classes = dict.fromkeys(("red", "green", "blue"), count)
            save_images(self.folder / "FOLDER" / split, classes, size=size, seed=len(split))

    def train(self, *flags):
        """The recipe's own command, and what makes it quick; what was printed, and the summary."""
        ended = forks.run(self.folder, 2, "train.py", *self.words, *FAST, *flags, "--run_dir", "runs/fork")
        assert ended.code == 0, ended.text
        return ended.out, json.loads((self.folder / "runs" / "fork" / "summary.json").read_text())

    @property
    def changed(self):
        files = sorted(path.name for path in self.folder.glob("*.py"))
        return [name for name in files if (self.folder / name).read_bytes() != (ROOT / name).read_bytes()]


@pytest.mark.slow
def test_a_small_vision_transformer_learns_an_image_folder(tmp_path):
    fork = Fork(tmp_path, "A vision transformer")
    fork.images(16, train=40, test=10)
    out, summary = fork.train("--epochs", "6", "--batch_size", "10")
    assert "SmallViT" in out and fork.changed == ["model.py"]
    assert summary["best_top1"] > 0.9


@pytest.fixture
def text_fork(tmp_path):
    fork, rng = Fork(tmp_path, "Text of unequal lengths"), random.Random(0)
    words = "rank batch ring until gradients are summed on every node".split()
    (tmp_path / "FOLDER").mkdir()
    for split, lines in (("train", 300), ("val", 40)):
        text = "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(lines))
        (tmp_path / "FOLDER" / f"{split}.txt").write_text(text)
    return fork


def test_text_of_unequal_lengths_is_learnt_with_a_loss_and_perplexity_per_token(text_fork):
    _, summary = text_fork.train("--epochs", "4")
    assert text_fork.changed == ["dataset.py", "model.py"]
    origin = json.loads((text_fork.folder / "runs/fork/provenance.json").read_text())
    assert not {"dataset.py", "model.py"} & set(origin["changed_template_files"])  # they are the forker's own
    assert summary["best_metric"] == "perplexity" and summary["best_value"] < 8 and summary["best_top1"] is None
    records = [json.loads(line) for line in (text_fork.folder / "runs/fork/metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if record["kind"] == "eval"][-1]
    assert evaluated["count"] == 40
    assert evaluated["perplexity"] == pytest.approx(2.718281828459045 ** evaluated["loss"])  # per token, not per line


@pytest.mark.slow
def test_verify_passes_on_text_since_it_knows_nothing_of_images(text_fork):
    ended = forks.run(text_fork.folder, 2, "scripts/verify.py", *text_fork.words, "--backend", "gloo")
    assert ended.code == 0 and "10 of 10 invariants hold" in ended.out, ended.text


@pytest.mark.slow
def test_fine_tuning_trains_a_new_head_and_leaves_the_frozen_trunk_as_it_was(tmp_path, runs):
    runs.train(2, "first", *"--dataset_size 64 --batch_size 64 --epochs 1".split(), task="")
    fork = Fork(tmp_path / "fork", "Fine-tuning")
    fork.images(8, train=40, val=10)
    source = runs.folder("first") / "checkpoints" / "best.pt"
    (fork.folder / "CHECKPOINT").write_bytes(source.read_bytes())
    out, summary = fork.train("--epochs", "3", "--batch_size", "10")
    assert "newly initialised: head.weight, head.bias" in out and fork.changed == ["model.py"]
    assert "771 of them trained" in out  # 3 x 256 weights and 3 biases
    before = torch.load(source, weights_only=True)["model"]
    after = torch.load(max((fork.folder / "runs/fork/checkpoints").glob("step_*.pt")), weights_only=True)["model"]
    # statistics too
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head"))
    assert summary["best_top1"] > 0.8

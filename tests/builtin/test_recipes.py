# extra: template
"""The forks of docs/recipes: each applied to a copy of the repository, trained on two ranks, and verified."""

import csv
import json
from unittest import mock

import pytest
import torch

import forks
from recipe_data import (
    graphs_of_two_classes,
    hub_images,
    image_folder,
    labelled_texts,
    lines_of_words,
    pairs_of_image_and_text,
    preferences,
    ratings,
    running_text,
    running_text_for_adapters,
    shapes_with_boxes,
    shapes_with_masks,
    smooth_images,
    spoken_words,
    table,
    tar_shards,
    texts_of_two_kinds,
    timm_images,
    token_files,
)
from recipe_forks import FAST, RECIPES, Fork, Target, blocks_of
from training import Runs

# recipe: its data, and the files that it changes
BOTH, ALL = ["dataset.py", "model.py"], ["config.py", "dataset.py", "model.py"]
CASES = {
    "vision_transformer": (image_folder, ["model.py"]),
    "self_distillation": (image_folder, ["model.py"]),
    "text": (lines_of_words, BOTH),
    "segmentation": (shapes_with_masks, ALL),
    "detection": (shapes_with_boxes, BOTH),
    "diffusion": (smooth_images, ALL),
    "speech": (spoken_words, BOTH),
    "packed_documents": (lines_of_words, BOTH),  # extra: lengths
    "gpt": (lines_of_words, ALL),
    "memory_mapped_tokens": (token_files, ALL),
    "contrastive": (pairs_of_image_and_text, ALL),
    "several_validation_sets": (texts_of_two_kinds, ALL),
    "tabular": (table, ALL),
    "recommender": (ratings, BOTH),
    "graph": (graphs_of_two_classes, ALL),
    "tar_shards": (tar_shards, ["dataset.py"]),
    "hugging_face": (hub_images, ["dataset.py"]),
    "text_classification": (labelled_texts, BOTH),
    "causal_lm": (running_text, ALL),
    "lora": (running_text_for_adapters, ALL),
    "dpo": (preferences, ALL),
    "muon": (lines_of_words, ALL),
    "timm": (timm_images, BOTH),  # extra: images
}
WITHOUT_TARGET = {  # and why
    "README": "the list of the recipes",
    "fine_tuning": "no fork: commands that download weights",
    "trackers": "no fork: shows flags",
    "sweeps": "no run of its own: test_recipe_details.py has a bound for the best trial of a sweep",
    "tensor_parallel": "not train.py: test_model_parallel.py compares its weights with those of one process",
    "pipeline": "not train.py: test_model_parallel.py compares its weights with those of one process",
}


@pytest.mark.guarantee("recipes")
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.md") if "```diff" in path.read_text()))
def test_the_diffs_of_a_recipe_apply(tmp_path, name):
    Fork(tmp_path, name)


@pytest.mark.guarantee("recipes")
@pytest.mark.parametrize("name", sorted({path.stem for path in RECIPES.glob("*.md")} - WITHOUT_TARGET.keys()))
def test_a_recipe_ends_with_a_target_that_is_weaker_than_what_was_measured(name):
    target = Target.of(name)
    assert name in CASES and (RECIPES / f"{name}.md").read_text().count("\nTarget: ") == 1
    assert target.is_met(0.87 * target.measured if target.side == "above" else 1.14 * target.measured)


@pytest.mark.guarantee("recipes")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_reaches_its_target_on_two_ranks(tmp_path, name):
    """A model that is not yet trained does not."""
    (make_data, changed), target = CASES[name], Target.of(name)
    fork = Fork(tmp_path, name)
    make_data(fork.folder / "FOLDER")
    _, summary = fork.train(*target.flags, "--log_interval", "1")
    assert fork.changed == changed
    assert summary["best_metric"] == target.metric and summary["best"][target.metric] == summary["best_value"]
    runs = Runs(fork.folder / "runs")
    records = [*runs.records("fork", "train"), *runs.records("fork", "eval")]  # not each metric is in both
    first = next(record for record in records if target.metric in record)
    assert max(record["step"] for record in records) == target.steps
    assert target.is_met(summary["best_value"]) and not target.is_met(first[target.metric]), (summary, first)


@pytest.mark.guarantee("recipes")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_verify_raises_no_false_alarm_on_a_recipe(tmp_path, name, ranks):
    fork = Fork(tmp_path, name)
    CASES[name][0](fork.folder / "FOLDER")
    fork.verify(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("vision_transformer", "--epochs 15 --batch_size 10 --global_batch_size 80 --amp_dtype bf16"),
        ("text", "--epochs 10 --batch_size 16 --global_batch_size 128 --no-use_amp"),
        ("contrastive", "--epochs 15 --global_batch_size 256 --no-use_amp"),
    ],
)
def test_with_exact_sums_a_recipe_has_the_same_bits_on_any_number_of_ranks(tmp_path, name, flags):
    """30 steps with AdamW, of which every second or third has a short global batch."""
    fork, runs = Fork(tmp_path, name), Runs(tmp_path / "runs")
    CASES[name][0](fork.folder / "FOLDER")
    for ranks in (1, 2, 3, 5, 8):
        words = [*fork.words, *FAST, *flags.split(), "--reduction", "exact", "--run_dir", f"runs/on-{ranks}"]
        ended = forks.run(fork.folder, ranks, "train.py", *words, deadline=300)
        assert ended.code == 0, ended.text
    for ranks in (2, 3, 5, 8):
        runs.assert_same("on-1", f"on-{ranks}")
    assert runs.last("on-1")["progress"]["step"] == 30


@pytest.mark.slow
def test_a_sharded_language_model_of_transformers_trains_as_under_ddp(tmp_path):
    """from_pretrained on rank 0, from_config on the meta device on rank 1; blocks are recomputed and sharded."""
    fork = Fork(tmp_path, "causal_lm")
    running_text(fork.folder / "FOLDER")
    flags = "--lr 3e-3 --context 16 --max_steps 20 --no-use_amp".split()
    losses = []
    sharded = ["--sharding", "zero3"]
    sharded += ["--activation_checkpointing"]  # extra: compile
    for sharding in ([], sharded):
        losses.append(fork.train(*flags, *sharding, "--overwrite")[1]["final"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.guarantee("recipes")
def test_a_metric_of_text_is_per_token_not_per_line(tmp_path):
    fork = Fork(tmp_path, "text")
    lines_of_words(fork.folder / "FOLDER")
    fork.train("--epochs", "1")
    records = [json.loads(line) for line in (fork.folder / "runs/fork/metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if record["kind"] == "eval"][-1]
    assert evaluated["count"] == 40
    assert evaluated["perplexity"] == pytest.approx(2.718281828459045 ** evaluated["loss"])
    ended = forks.run(fork.folder, 2, "scripts/predict.py", "runs/fork/checkpoints/best.pt")
    assert ended.code == 0 and "nll of 40 samples" in ended.out, ended.text


@pytest.mark.parametrize(("name", "make_data"), [("tar_shards", tar_shards), ("segmentation", shapes_with_masks)])
def test_the_fingerprint_of_many_files_is_short_and_follows_their_listing(tmp_path, name, make_data):
    """It is in each checkpoint."""
    make_data(tmp_path)
    code = next(text for text in blocks_of(name, "python") if text.startswith("# dataset.py"))
    exec(compile(code, name, "exec"), fork := {})
    config = mock.Mock(data_dir=str(tmp_path), num_classes=4, crop_size=8)
    fingerprints = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: max((tmp_path / "train").glob("*.tar"), default=tmp_path / "train/images/000.png").unlink(),
    ):
        change()
        fork.get("prepare_data", lambda config: None)(config)
        fingerprints.append(fork["create_dataset"](config, "train").fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] and {*map(len, fingerprints)} == {64}


@pytest.mark.slow
def test_auc_and_f1_of_the_tabular_recipe_are_those_of_scikit_learns_formulas(tmp_path):
    """On two ranks, with the page's schedule on a plateau. The AUC is that of the scores in bins of 1/1000."""
    fork = Fork(tmp_path, "tabular")
    table(fork.folder / "FOLDER")
    schedule = next(code for code in fork.code if "def lr_factor" in code)
    with (fork.folder / "model.py").open("a") as file:
        file.write(f"\n\n{schedule}")
    fork.train("--epochs", "12")
    records = [json.loads(line) for line in (fork.folder / "runs/fork/metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    assert rates[0] == 0.01 and rates[-1] <= 0.0011
    evaluated = max((record for record in records if record["kind"] == "eval"), key=lambda record: record["auc"])
    ended = forks.run(fork.folder, 2, "scripts/predict.py", "runs/fork/checkpoints/best.pt")
    assert ended.code == 0, ended.text
    scores = torch.load(next((fork.folder / "runs/fork").glob("**/pred*.pt")), weights_only=True)["score"].double()
    with (fork.folder / "FOLDER/table.csv").open() as file:
        labels = torch.tensor([int(row["label"]) for row in csv.DictReader(file)][::5])

    def auc(scores):
        """sklearn.metrics.roc_auc_score: the part of pairs in order; ties count half."""
        pairs = scores[labels == 1][:, None] - scores[labels == 0][None, :]
        return ((pairs > 0).double() + (pairs == 0) / 2).mean().item()

    predicted = scores >= 0.5
    hits = (predicted & (labels == 1)).sum().item()
    assert evaluated["f1"] == 2 * hits / (predicted.sum().item() + labels.sum().item())  # sklearn.metrics.f1_score
    assert evaluated["auc"] == pytest.approx(auc((scores * 1000).floor()), abs=1e-4)  # a score may be at a bin's edge
    assert evaluated["auc"] == pytest.approx(auc(scores), abs=2e-3) and evaluated["auc"] > 0.9

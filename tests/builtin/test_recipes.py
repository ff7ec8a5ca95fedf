"""The forks of docs/recipes: each applied to a copy of the repository, trained on two ranks, and verified."""

import csv
import io
import json
import math
import random
import re
import subprocess
import sys
import tarfile
from unittest import mock

import pytest
import torch

import forks
from images import save_images
from ranks import ROOT, copy_repository, finish, start
from training import Runs, wait_until

RECIPES = ROOT / "docs" / "recipes"
FAST = "--log_interval 5 --num_workers 1 --backend gloo".split()
WORDS = "rank batch ring until gradients are summed on every node".split()


def blocks_of(name, language):
    text = (RECIPES / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


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
        assert "please check, or use" not in ended.out, ended.out

    @property
    def changed(self):
        files = sorted(path.name for path in self.folder.glob("*.py"))
        return [name for name in files if (self.folder / name).read_bytes() != (ROOT / name).read_bytes()]


def image_folder(folder, size=16):
    for split, count in (("train", 40), ("val", 10)):
        save_images(folder / split, dict.fromkeys(("red", "green", "blue"), count), size=size, seed=len(split))


def lines_of_words(folder):
    rng = random.Random(0)
    for split, lines in (("train", 300), ("val", 40)):
        text = "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)


def texts_of_two_kinds(folder):
    """Words as in training, and shuffled characters, which cannot be predicted."""
    lines_of_words(folder)
    text = list((folder / "val.txt").read_text())
    random.Random(0).shuffle(text)
    (folder / "val-shuffled.txt").write_text("".join(text[:700]))


def shapes_with_masks(folder):
    """Squares of three colors on gray; the border of each is ignored."""
    from torchvision.io import write_png

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 64), ("val", 20)):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            image, mask = torch.full((3, 40, 40), 128.0), torch.zeros(1, 40, 40)
            for color in range(3):
                top, left = torch.randint(2, 24, (2,), generator=generator).tolist()
                mask[:, top - 1 : top + 13, left - 1 : left + 13] = 255
                mask[:, top : top + 12, left : left + 12] = color + 1
                image[:, top : top + 12, left : left + 12] = 30
                image[color, top : top + 12, left : left + 12] = 220
            image += 10 * torch.randn(image.shape, generator=generator)
            write_png(image.clamp(0, 255).byte(), str(folder / split / "images" / f"{number:03d}.png"))
            write_png(mask.byte(), str(folder / split / "masks" / f"{number:03d}.png"))


def shapes_with_boxes(folder):
    """Up to three squares on gray, whose classes are their colors; a third of the images has none."""
    from torchvision.io import write_png

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for split, count in (("train", 96), ("val", 24)):
        (folder / split / "images").mkdir(parents=True)
        lines = ["image,class,left,top,right,bottom"]
        for number in range(count):
            image = torch.full((3, 64, 64), 128.0)
            for quarter in rng.sample(range(4), rng.choice([0, 1, 3])):  # they do not overlap
                color, size = rng.randrange(3), rng.randrange(12, 24)
                top, left = (32 * place + rng.randrange(32 - size) for place in divmod(quarter, 2))
                image[:, top : top + size, left : left + size] = 30
                image[color, top : top + size, left : left + size] = 220
                lines.append(f"{number:03d}.png,{color + 1},{left},{top},{left + size},{top + size}")
            image += 10 * torch.randn(image.shape, generator=generator)
            write_png(image.clamp(0, 255).byte(), str(folder / split / "images" / f"{number:03d}.png"))
        (folder / split / "boxes.csv").write_text("\n".join(lines))


def token_files(folder):
    """Documents of ascending numbers from 1 to 19, and then from 1 again; 0 ends each."""
    rng = random.Random(0)
    for split, documents in (("train", 800), ("val", 80)):
        tokens = []
        for _ in range(documents):
            first = rng.randrange(19)
            tokens += [1 + (first + place) % 19 for place in range(rng.randrange(4, 24))] + [0]
        torch.tensor(tokens).to(torch.uint16).numpy().tofile(folder / f"{split}.bin")


def pairs_of_image_and_text(folder):
    """Four quarters of five colors each; a token of the text names a quarter and its color, in any order."""
    generator = torch.Generator().manual_seed(0)
    palette = torch.tensor([[220, 30, 30], [30, 220, 30], [30, 30, 220], [220, 220, 30], [128, 128, 128]])
    numbers = torch.randperm(5**4, generator=generator)
    for split, chosen in (("train", numbers[:500]), ("val", numbers[500:600])):
        colors = torch.stack([chosen // 5**place % 5 for place in range(4)], 1)
        texts = colors + 1 + 5 * torch.arange(4)
        order = torch.rand(texts.shape, generator=generator).argsort(1)
        images = palette[colors].view(-1, 2, 2, 3).permute(0, 3, 1, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)
        images = (images + 20 * torch.randn(images.shape, generator=generator)).clamp(0, 255).byte()
        torch.save({"image": images, "text": texts.gather(1, order)}, folder / f"{split}.pt")


def ratings(folder):
    rng = random.Random(0)
    taste = [[rng.gauss(0, 1) for _ in range(2)] for _ in range(60)]
    for split, count in (("train", 2000), ("val", 300)):
        with (folder / f"{split}.csv").open("w") as file:
            for _ in range(count):
                user, item = rng.randrange(30), 30 + min(rng.randrange(30), rng.randrange(30))
                rating = sum(a * b for a, b in zip(taste[user], taste[item], strict=True))
                csv.writer(file).writerow([user, item, round(rating, 3), rng.choice([0.5, 1.0, 2.0])])


def table(folder):
    """One row in eight is positive; the label depends on all columns."""
    pytest.importorskip("pandas")
    rng = random.Random(0)
    with (folder / "table.csv").open("w") as file:
        print("city,product,age,income,label", file=file)
        for _ in range(1500):
            city, product, age, income = rng.randrange(6), rng.randrange(9), rng.uniform(18, 80), rng.gauss(3, 1)
            score = city - product / 2 + age / 20 + income + rng.gauss(0, 1)
            print(f"c{city},p{product},{age:.2f},{income:.4f},{int(score > 9)}", file=file)


def tar_shards(folder):
    image_folder(folder / "images")
    for split in ("train", "val"):
        (folder / split).mkdir()
        files = sorted((folder / "images" / split).glob("*/*.png"))
        random.Random(0).shuffle(files)
        for shard in range(2):
            with tarfile.open(folder / split / f"{shard}.tar", "w") as tar:
                for number, file in enumerate(files[shard::2]):
                    label = ["blue", "green", "red"].index(file.parent.name)
                    for suffix, data in (("png", file.read_bytes()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))


def hub_images(folder):
    datasets = pytest.importorskip("datasets")
    image_folder(folder / "images")
    for split in ("train", "val"):
        found = datasets.load_dataset("imagefolder", data_dir=str(folder / "images" / split), split="train")
        found.save_to_disk(str(folder / split))


def timm_images(folder):
    pytest.importorskip("timm")
    image_folder(folder, size=32)


def save_language_model(folder, kind, **options):
    """A small random model of transformers and a tokenizer that knows WORDS. kind: Bert or Llama."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    settings = getattr(transformers, f"{kind}Config")(vocab_size=len(vocabulary), pad_token_id=0, **sizes, **options)
    torch.manual_seed(0)
    names = {"Bert": "BertForSequenceClassification", "Llama": "LlamaForCausalLM"}
    getattr(transformers, names[kind])(settings).save_pretrained(folder)


def labelled_texts(folder):
    save_language_model(folder / "model", "Bert")
    rng = random.Random(0)
    for split, count in (("train", 300), ("val", 60)):
        with (folder / f"{split}.csv").open("w") as file:
            print("text,label", file=file)
            for _ in range(count):
                text = rng.choices(WORDS, k=rng.randint(2, 12))
                print(f"{' '.join(text)},{'yes' if 'gradients' in text else 'no'}", file=file)


def running_text_for_adapters(folder):
    pytest.importorskip("peft")
    running_text(folder, initializer_range=0.3)  # the head is frozen: with 0.02 its logits would all be near 0


def running_text(folder, **options):
    save_language_model(folder / "model", "Llama", **options)
    for split, count in (("train", 400), ("val", 40)):
        (folder / f"{split}.txt").write_text(" ".join(WORDS * count))


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
# recipe: its data, the files that it changes, the metric, the bound of its value (lower; upper for a loss)
CASES = {
    "vision_transformer": (image_folder, ["model.py"], "top1", 0.9, "--epochs 6 --batch_size 10"),
    "self_distillation": (image_folder, ["model.py"], "top1", 0.9, "--epochs 6 --batch_size 10"),
    "text": (lines_of_words, ["dataset.py", "model.py"], "perplexity", 8, "--epochs 4"),
    "segmentation": (shapes_with_masks, ["config.py", "dataset.py", "model.py"], "miou", 0.6, ""),
    "detection": (shapes_with_boxes, ["dataset.py", "model.py"], "f1", 0.7, ""),
    "gpt": (lines_of_words, ["config.py", "dataset.py", "model.py"], "perplexity", 7, "--epochs 8"),
    "memory_mapped_tokens": (
        token_files,
        ["config.py", "dataset.py", "model.py"],
        "perplexity",
        1.5,
        "",
    ),
    "contrastive": (pairs_of_image_and_text, ["config.py", "dataset.py", "model.py"], "recall", 0.9, ""),
    "several_validation_sets": (
        texts_of_two_kinds,
        ["config.py", "dataset.py", "model.py"],
        "perplexity/val",
        7,
        "--epochs 8",
    ),
    "tabular": (table, ["config.py", "dataset.py", "model.py"], "auc", 0.9, ""),
    "recommender": (ratings, ["dataset.py", "model.py"], "rmse", 0.9, ""),
    "tar_shards": (tar_shards, ["dataset.py"], "top1", 0.9, ""),
    "hugging_face": (hub_images, ["dataset.py"], "top1", 0.9, ""),
    "text_classification": (labelled_texts, ["dataset.py", "model.py"], "f1", 0.9, "--lr 3e-3 --epochs 6"),
    "causal_lm": (running_text, ["config.py", "dataset.py", "model.py"], "perplexity", 2, "--lr 3e-3 --context 16"),
    "lora": (
        running_text_for_adapters,
        ["config.py", "dataset.py", "model.py"],
        "perplexity",
        2,
        "--lr 1e-2 --context 16 --epochs 6",
    ),
    "muon": (lines_of_words, ["config.py", "dataset.py", "model.py"], "perplexity", 5, "--epochs 8"),
    "timm": (timm_images, ["model.py"], "top1", 0.8, ""),
}
DEFAULT = ("segmentation",)  # text and tabular have default tests of their own


def case(name):
    return pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.md") if "```diff" in path.read_text()))
def test_the_diffs_of_a_recipe_apply(tmp_path, name):
    Fork(tmp_path, name)


@pytest.mark.parametrize("name", map(case, CASES))
def test_a_recipe_trains_on_two_ranks(tmp_path, name):
    make_data, changed, metric, limit, flags = CASES[name]
    fork = Fork(tmp_path, name)
    make_data(fork.folder / "FOLDER")
    _, summary = fork.train(*flags.split())
    assert fork.changed == changed
    origin = json.loads((fork.folder / "runs/fork/provenance.json").read_text())
    assert not set(changed) & set(origin["changed_template_files"])  # they belong to the fork
    is_lower_better = metric in ("perplexity", "perplexity/val", "rmse")
    assert summary["best_metric"] == metric and summary["best"][metric] == summary["best_value"]
    assert (summary["best_value"] < limit) if is_lower_better else (summary["best_value"] > limit)


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
    for sharding in ([], ["--sharding", "zero3", "--activation_checkpointing"]):
        losses.append(fork.train(*flags, *sharding, "--overwrite")[1]["final"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


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


@pytest.mark.slow
def test_the_metric_of_each_validation_set_is_that_of_the_set_alone(tmp_path):
    """The loss is that of all characters; an evaluation of the second set as the only one gives the same number."""
    fork = Fork(tmp_path, "several_validation_sets")
    folder = fork.folder / "FOLDER"
    texts_of_two_kinds(folder)
    _, summary = fork.train("--epochs", "3")
    both = summary["best"]
    windows = [(len((folder / name).read_text()) - 1) // 64 for name in ("val.txt", "val-shuffled.txt")]
    losses = [math.log(both[f"perplexity/{name}"]) for name in ("val", "shuffled")]
    assert both["loss"] == pytest.approx(
        sum(map(math.prod, zip(windows, losses, strict=True))) / sum(windows), rel=1e-5
    )
    assert both["perplexity/shuffled"] > 1.5 * both["perplexity/val"]
    (folder / "val-shuffled.txt").rename(folder / "val.txt")
    words = [*fork.words[:-1], "loss", *FAST, "--eval_only", "--run_dir", "runs/fork"]
    ended = forks.run(fork.folder, 2, "train.py", *words)
    assert ended.code == 0, ended.text
    alone = json.loads((fork.folder / "runs/fork/eval-best.json").read_text())["records"][0]
    assert alone["perplexity/val"] == pytest.approx(both["perplexity/shuffled"], rel=1e-6)


@pytest.mark.slow
def test_a_sweep_prunes_by_sigterm_and_continues_an_interrupted_trial(tmp_path):
    """Four trials of two folds, of which the last learns nothing; the sweep is stopped in the second trial."""
    optuna = pytest.importorskip("optuna")
    fork = Fork(tmp_path, "sweeps")
    table(fork.folder / "FOLDER")
    study_folder = fork.folder / "runs/study"
    study_folder.mkdir(parents=True)
    backend = optuna.storages.journal.JournalFileBackend(str(study_folder / "study.log"))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="study", direction="maximize")
    for lr in (0.01, 0.02, 0.03, 1e-6):
        study.enqueue_trial({"lr": lr, "weight_decay": 0.01})
    command = [sys.executable, "sweep.py", *fork.words, "--trials", "4", "--folds", "2", *FAST]
    program = start(command, cwd=fork.folder)
    stopped = study_folder / "trial-1" / "fold-1"
    records = stopped / "metrics.jsonl"
    wait_until(lambda: records.exists() and '"eval"' in records.read_text(), 200)
    program.terminate()
    program.wait(60)
    assert json.loads((stopped / "status.json").read_text())["state"] == "preempted"
    assert [trial.state.name for trial in study.trials[:2]] == ["COMPLETE", "RUNNING"]
    ended = finish(start(command, cwd=fork.folder), 400)
    assert ended.code == 0 and "best: auc 0.9" in ended.out, ended.text
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "PRUNED", "COMPLETE"]
    again = study.trials[4]
    assert again.user_attrs["run"] == "trial-1" and again.params == study.trials[1].params
    folds = [stopped.with_name("fold-0"), stopped]
    assert [len(json.loads((fold / "goodput.json").read_text())["attempts"]) for fold in folds] == [1, 2]
    values = [json.loads((fold / "summary.json").read_text())["best_value"] for fold in folds]
    assert again.value == sum(values) / 2
    pruned = json.loads((study_folder / "trial-3/fold-0/status.json").read_text())
    assert pruned["state"] == "preempted" and not (study_folder / "trial-3/fold-1").exists()


@pytest.mark.slow
def test_checkpoints_of_lora_hold_only_adapters_and_reject_another_base(tmp_path):
    fork = Fork(tmp_path, "lora")
    running_text_for_adapters(fork.folder / "FOLDER")
    fork.train(*"--context 16 --epochs 1".split())
    best = fork.folder / "runs/fork/checkpoints/best.pt"
    saved = torch.load(best, weights_only=True)["model"]
    assert len(saved) == 2 * 7 * 2 and all("lora_" in name for name in saved)  # 2 blocks of 7 layers
    ended = forks.run(fork.folder, 0, "scripts/export.py", best, "whole.pt")
    assert ended.code == 0, ended.text
    exported = torch.load(fork.folder / "whole.pt", weights_only=True)["model"]
    assert saved.keys() < exported.keys() and "base_model.model.lm_head.weight" in exported
    save_language_model(fork.folder / "FOLDER/model", "Llama", initializer_range=0.2)
    ended = forks.run(fork.folder, 0, "scripts/predict.py", best)
    assert ended.code == 2 and "create_model" in ended.text, ended.text


CHUNKS = """
import torch
from config import TrainingConfig
from dataset import create_dataset
from model import compute_loss, create_model

torch.set_default_dtype(torch.float64)
pairs, found = create_dataset(TrainingConfig(data_dir="FOLDER"), "train"), []
images, texts = torch.utils.data.default_collate([pairs[index] for index in range(64)])
batch = pairs.device_transform((images, texts), 0, 0, None)
for chunk in (64, 16):  # 64: the whole batch
    torch.manual_seed(0)
    config = TrainingConfig(vocabulary=pairs.vocabulary, image_size=pairs.image_size, chunk=chunk)
    model, kept = create_model(config, torch.device("cpu")), []
    model.dropout.p = 0.0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss, _ = compute_loss(model, batch)["loss"]
    loss.backward()
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    found.append(([p.grad for p in model.parameters()], loss.detach()))
    inputs = sum(x.untyped_storage().nbytes() for x in batch)
    assert sum(sizes.values()) < 1.5 * inputs, (sizes, inputs)  # the inputs and the embeddings, no activations
torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
"""


def test_the_chunks_of_a_contrastive_batch_give_its_gradient_without_keeping_activations(tmp_path):
    fork = Fork(tmp_path, "contrastive")
    pairs_of_image_and_text(fork.folder / "FOLDER")
    (fork.folder / "chunks.py").write_text(CHUNKS)
    ended = forks.run(fork.folder, 0, "chunks.py")
    assert ended.code == 0, ended.text


PACKED = """
import torch
from config import TrainingConfig
from model import compute_loss, create_model

torch.manual_seed(0)
model = create_model(TrainingConfig(vocabulary=20, context=16, dropout=0.0), torch.device("cpu"))
documents = [torch.randint(1, 20, (length,)) for length in (5, 3, 6)]
documents = [torch.cat([each, torch.zeros(1, dtype=torch.int64)]) for each in documents]
packed, alone = torch.cat(documents)[None], [each[None] for each in documents]
torch.testing.assert_close(model(packed), torch.cat([model(each) for each in alone], 1))
sums, counts = zip(*(compute_loss(model, each)["loss"] for each in alone))
loss, count = compute_loss(model, packed)["loss"]
assert count == sum(counts) == 14
torch.testing.assert_close(loss, sum(sums))
"""


def test_documents_in_a_window_do_not_see_each_other(tmp_path):
    fork = Fork(tmp_path, "memory_mapped_tokens")
    (fork.folder / "packed.py").write_text(PACKED)
    ended = forks.run(fork.folder, 0, "packed.py")
    assert ended.code == 0, ended.text


@pytest.mark.parametrize(("name", "make_data"), [("tar_shards", tar_shards), ("segmentation", shapes_with_masks)])
def test_the_fingerprint_of_many_files_is_short_and_follows_their_listing(tmp_path, name, make_data):
    """It is in each checkpoint."""
    make_data(tmp_path)
    code = next(text for text in blocks_of(name, "python") if text.startswith("# dataset.py"))
    exec(compile(code, name, "exec"), fork := {})
    config = mock.Mock(data_dir=str(tmp_path), num_classes=4, crop_size=8)
    found = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: max((tmp_path / "train").glob("*.tar"), default=tmp_path / "train/images/000.png").unlink(),
    ):
        change()
        fork.get("prepare_data", lambda config: None)(config)
        found.append(fork["create_dataset"](config, "train").fingerprint)
    assert found[0] == found[1] != found[2] and {*map(len, found)} == {64}


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

    found = scores >= 0.5
    hits = (found & (labels == 1)).sum().item()
    assert evaluated["f1"] == 2 * hits / (found.sum().item() + labels.sum().item())  # sklearn.metrics.f1_score
    assert evaluated["auc"] == pytest.approx(auc((scores * 1000).floor()), abs=1e-4)  # a score may be at a bin's edge
    assert evaluated["auc"] == pytest.approx(auc(scores), abs=2e-3) and evaluated["auc"] > 0.9


WANDB = (
    "import json, sys\ndef init(**options): json.dump(options, open(sys.argv[1] + '/init.json', 'w'))\nlog = print\n"
)


def test_a_resumed_run_keeps_its_id_in_weights_and_biases_and_a_new_one_in_its_folder_gets_another(tmp_path):
    (tmp_path / "follow.py").write_text(blocks_of("trackers", "python")[0])
    (tmp_path / "wandb.py").write_text(WANDB)
    run, found = tmp_path / "default", []
    run.mkdir()
    for started_at, attempts in ((1.5, 1), (1.5, 2), (2.5, 1)):
        for name, value in {
            "config.json": {},
            "status.json": {"state": "completed"},
            "goodput.json": {"started_at": started_at, "attempts": attempts * [{}]},
        }.items():
            (run / name).write_text(json.dumps(value))
        subprocess.run([sys.executable, "follow.py", run, "wandb"], cwd=tmp_path, check=True)
        found.append(json.loads((run / "init.json").read_text()))
    first, resumed, other = (each["id"] for each in found)
    assert first == resumed != other and found[0]["name"] == "default" and found[0]["resume"] == "allow"


@pytest.mark.slow
def test_a_tracker_follows_a_run_from_outside(tmp_path):
    fork = Fork(tmp_path, "trackers")
    ended = forks.run(
        fork.folder, 0, "train.py", *"--image_size 8 --dataset_size 40 --epochs 2 --log_interval 1".split()
    )
    assert ended.code == 0, ended.text
    ended = forks.run(fork.folder, 0, "follow.py", "runs/default")
    lines = [line for line in ended.out.splitlines() if "train/loss" in line]
    records = [json.loads(line) for line in (fork.folder / "runs/default/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == sum(record["kind"] == "train" for record in records) and "val/top1" in ended.out

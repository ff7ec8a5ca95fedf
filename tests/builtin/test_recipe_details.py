# extra: template
"""What single recipes promise beside the training: sweeps, adapters, packing, chunks, several validation sets."""

import json
import math
import sys

import pytest
import torch

import forks
from images import save_images
from ranks import finish, start
from recipe_data import (
    image_folder,
    labelled_texts,
    lines_of_words,
    pairs_of_image_and_text,
    preferences,
    running_text,
    running_text_for_adapters,
    save_language_model,
    smooth_images,
    spoken_words,
    table,
    texts_of_two_kinds,
)
from recipe_forks import FAST, Fork, blocks_of
from training import Runs, attempts_in, difference, wait_until


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
    assert [len(attempts_in(fold)) for fold in folds] == [1, 2]
    values = [json.loads((fold / "summary.json").read_text())["best_value"] for fold in folds]
    assert again.value == sum(values) / 2
    pruned = json.loads((study_folder / "trial-3/fold-0/status.json").read_text())
    assert pruned["state"] == "preempted" and not (study_folder / "trial-3/fold-1").exists()


@pytest.mark.slow
def test_muon_is_rejected_with_sharding_and_its_state_survives_a_resume(tmp_path):
    fork, runs = Fork(tmp_path, "muon"), Runs(tmp_path / "runs")
    lines_of_words(fork.folder / "FOLDER")
    ended = forks.run(fork.folder, 2, "train.py", *fork.words, *FAST, "--sharding", "zero2")
    assert ended.code and "MuonAndAdamW" in ended.text and "--sharding none" in ended.text, ended.text
    words = [*fork.words, *FAST, "--epochs", "2", "--max_steps", "12", "--schedule_steps", "12"]
    for name, more in (("whole", []), ("parts", ["--max_steps", "7"]), ("parts", ["--resume_from", "auto"])):
        ended = forks.run(fork.folder, 2, "train.py", *words, *more, "--run_dir", f"runs/{name}")
        assert ended.code == 0, ended.text
    whole, parts = (runs.last(name) for name in ("whole", "parts"))
    assert all(difference(whole[key], parts[key]) == [] for key in ("model", "optimizer"))
    kinds = {frozenset(state) for state in whole["optimizer"]["state"].values()}
    assert kinds == {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}


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
    (fork.folder / "adapter.py").write_text(ADAPTER)
    ended = forks.run(fork.folder, 0, "adapter.py")
    assert ended.code == 0, ended.text
    save_language_model(fork.folder / "FOLDER/model", "Llama", initializer_range=0.2)
    ended = forks.run(fork.folder, 0, "scripts/predict.py", best)
    assert ended.code == 2 and "create_model" in ended.text, ended.text


POLICY = """
import torch
from config import TrainingConfig
from model import create_model
from transformers import AutoModelForCausalLM

saved = torch.load("whole.pt")
model = create_model(TrainingConfig(**saved["config"]), torch.device("cpu")).train()
assert not any(module.training for module in model.modules())
base = AutoModelForCausalLM.from_pretrained("FOLDER/model").state_dict()
model.load_state_dict(saved["model"])
is_kept = [torch.equal(value, base[name]) for name, value in model.reference.state_dict().items()]
is_trained = [not torch.equal(value, base[name]) for name, value in model.policy.state_dict().items()]
assert all(is_kept) and all(is_trained)
model.policy.save_pretrained("policy")
ids = torch.arange(9)[None]
again = AutoModelForCausalLM.from_pretrained("policy")
assert torch.equal(again(input_ids=ids).logits, model.policy(input_ids=ids).logits)
"""


@pytest.mark.slow
def test_checkpoints_of_dpo_hold_the_policy_and_its_reference_stays_as_it_was(tmp_path):
    fork = Fork(tmp_path, "dpo")
    preferences(fork.folder / "FOLDER")
    fork.train(*"--lr 1e-2 --epochs 1".split())
    best = fork.folder / "runs/fork/checkpoints/best.pt"
    saved = torch.load(best, weights_only=True)["model"]
    assert saved and all(name.startswith("policy.") for name in saved)
    ended = forks.run(fork.folder, 0, "scripts/export.py", best, "whole.pt")
    assert ended.code == 0, ended.text
    (fork.folder / "policy.py").write_text(POLICY)
    ended = forks.run(fork.folder, 0, "policy.py")
    assert ended.code == 0, ended.text


SOME_END_BADLY = """
import json, pathlib, sys
flags = dict(flag.lstrip("-").split("=") for flag in sys.argv[1:] if "=" in flag)
run, lr = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1]), float(flags["lr"])
run.mkdir(parents=True)
value, state = (None if lr == 0.02 else lr), ("failed" if lr == 0.05 else "completed")
(run / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "split": "val", "auc": value}) + "\\n")
(run / "status.json").write_text(json.dumps({"state": state}))
(run / "summary.json").write_text(json.dumps({"best_value": value}))
sys.exit(state == "failed")
"""


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_trial_without_a_finite_metric_and_one_that_fails(tmp_path):
    optuna = pytest.importorskip("optuna")
    (tmp_path / "sweep.py").write_text(blocks_of("sweeps", "python")[0])
    (tmp_path / "train.py").write_text(SOME_END_BADLY)
    for rates, code, states in (
        ((0.01, 0.02, 0.05, 0.03), 0, "COMPLETE PRUNED FAIL COMPLETE"),
        ((0.05, 0.01), 1, "FAIL WAITING"),  # the first one fails
    ):
        folder = tmp_path / str(code)
        folder.mkdir()
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
        study = optuna.create_study(storage=storage, study_name="study", direction="maximize")
        for lr in rates:
            study.enqueue_trial({"lr": lr, "weight_decay": 0.01})
        ended = finish(start([sys.executable, "sweep.py", folder, "--trials", "3"], cwd=tmp_path))
        assert ended.code == code, ended.text
        assert " ".join(trial.state.name for trial in study.trials) == states


ADAPTER = """
import torch
from config import TrainingConfig
from model import create_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

saved, ids = torch.load("whole.pt"), torch.arange(12)[None]
model = create_model(TrainingConfig(**saved["config"]), torch.device("cpu")).eval()
model.load_state_dict(saved["model"])
expected = model(input_ids=ids).logits
model.save_pretrained("adapter")
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("FOLDER/model"), "adapter").eval()
assert torch.equal(again(input_ids=ids).logits, expected)
model.merge_and_unload().save_pretrained("merged")
torch.testing.assert_close(AutoModelForCausalLM.from_pretrained("merged")(input_ids=ids).logits, expected)
"""


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


ROWS = """
import torch
from config import TrainingConfig
from dataset import create_dataset
from model import create_model, edits, predict, summarize

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = create_dataset(TrainingConfig(data_dir="FOLDER"), "val")
samples = [data[k] for k in range(6)]
lengths = [len(features) for features, _ in samples]
assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
model = create_model(TrainingConfig(), torch.device("cpu")).eval()
batch = data.collate(samples)
together, best = model(batch[0], batch[2]), predict(model, batch)["best"]
for row, (sample, length) in enumerate(zip(samples, lengths)):
    alone = data.collate([sample])
    torch.testing.assert_close(together[row, :length], model(alone[0], alone[2])[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(best[row, :length], predict(model, alone)["best"][0]) and not best[row, length:].any()
for found, text, expected in (("a b", "a b", 0), ("", "a b", 2), ("a x c", "a b c", 1), ("b c d", "a b c", 2)):
    assert edits(found.split(), text.split()) == edits(text.split(), found.split()) == expected
spoken, text = torch.tensor([[3, 3, 0, 3, 1, 1, 4, 0, 0]]), torch.tensor([[3, 3, 1, 5]])  # "aa b" and "aa c"
assert summarize({"best": spoken, "text": text}) == {"wer": 0.5}
"""


@pytest.mark.slow
def test_packed_rows_of_the_speech_recipe_stay_in_order_and_words_are_compared_by_edits(tmp_path):
    fork = Fork(tmp_path, "speech")
    spoken_words(fork.folder / "FOLDER")
    (fork.folder / "rows.py").write_text(ROWS)
    ended = forks.run(fork.folder, 0, "rows.py")
    assert ended.code == 0, ended.text


@pytest.mark.slow
def test_the_diffusion_recipe_shows_samples(tmp_path):
    fork = Fork(tmp_path, "diffusion")
    smooth_images(fork.folder / "FOLDER")
    out, _ = fork.train(*"--epochs 1 --width 8 --diffusion_steps 20".split())
    assert "log_images" not in out
    [events] = (fork.folder / "runs/fork/tensorboard").glob("events*")
    assert b"val/samples" in events.read_bytes()


# ---- extra: images ----
TIMM_INPUT = """
import sys
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from config import TrainingConfig
from dataset import create_dataset
from utils.example.augment import normalize

name, size = sys.argv[1:]
config = TrainingConfig(data_dir="FOLDER", dataset="imagefolder", model=name, init_from="weights.pt", image_size=size)
data = create_dataset(config, "val")
published = timm.get_pretrained_cfg(name).to_dict()
settings = {} if size == "auto" else {"input_size": (3, int(size), int(size))}
transform = create_transform(**resolve_data_config(settings, pretrained_cfg=published))
for index in (0, -1):
    expected = transform(Image.open(data.path(index % len(data))).convert("RGB"))
    image = normalize(data[index % len(data)][0][None], data.mean, data.std)[0]
    assert image.shape == expected.shape, (image.shape, expected.shape)
    levels = (image - expected).abs().mean() * 255 * min(published["std"])  # PIL and torch round in other places
    assert levels < 0.5, levels
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["auto", "96"])
@pytest.mark.parametrize(
    "name",
    [
        "test_vit.r160_in1k",  # mean and deviation 0.5, bicubic, crop of 0.95
        "resnet50_clip.cc12m",  # those of CLIP
        "mobilevit_s.cvnets_in1k",  # mean 0, deviation 1
        "dpn68.mx_in1k",
        "dla34.in1k",  # bilinear, crop of 0.875
        "dm_nfnet_f0.dm_in1k",  # squash and crop
        "maxvit_base_tf_384.in1k",  # squash
    ],
)
def test_images_for_weights_of_timm_are_those_of_timms_own_transform(tmp_path, name, size):
    pytest.importorskip("timm")
    fork = Fork(tmp_path, "timm")
    for split in ("train", "val"):
        save_images(fork.folder / "FOLDER" / split, {"red": 1, "green": 1}, size=(150, 100))
    (fork.folder / "timm_input.py").write_text(TIMM_INPUT)
    ended = forks.run(fork.folder, 0, "timm_input.py", name, size)
    assert ended.code == 0, ended.text


TIMM_GROUPS = """
import sys
import torch
from timm.optim import create_optimizer_v2
from config import TrainingConfig
from model import compute_loss, create_model, param_groups

config = TrainingConfig(model=sys.argv[1], image_size=64, num_classes=3, in_channels=3, weight_decay=0.1)
model = create_model(config, torch.device("cpu"))
timms = create_optimizer_v2(model, opt="adamw", weight_decay=0.1).param_groups
decays = [{p: group["weight_decay"] for group in groups for p in group["params"]}
          for groups in (param_groups(model, config), timms)]
assert decays[0] == decays[1]
assert int(sys.argv[2]) == sum(p.ndim > 1 and decay == 0 for p, decay in decays[0].items())
loss, _ = compute_loss(model, (torch.randn(2, 3, 64, 64), torch.tensor([0, 2])))["loss"]
loss.backward()
assert all(p.grad is not None for p in model.parameters())
frozen = create_model(TrainingConfig(**{**vars(config), "freeze": "backbone"}), torch.device("cpu"))
heads = {name.rpartition(".")[0] for name, p in frozen.named_parameters() if p.requires_grad}
assert heads == set(sys.argv[3].split(",")), heads
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "undecayed", "heads"),
    [
        ("resnet10t", 0, "fc"),
        ("vit_tiny_patch16_224", 2, "head"),  # the position embedding and the class token
        ("deit_tiny_distilled_patch16_224", 3, "head,head_dist"),
        ("swin_tiny_patch4_window7_224", 12, "head.fc"),  # a table of relative positions in each block
        ("efficientformerv2_s0", 5, "head,head_dist"),
        ("levit_128s", 11, "head.bn,head.linear,head_dist.bn,head_dist.linear"),
    ],
)
def test_groups_and_heads_of_a_timm_model_are_those_of_timm(tmp_path, name, undecayed, heads):
    pytest.importorskip("timm")
    fork = Fork(tmp_path, "timm")
    (fork.folder / "timm_groups.py").write_text(TIMM_GROUPS)
    ended = forks.run(fork.folder, 0, "timm_groups.py", name, undecayed, heads)
    assert ended.code == 0, ended.text


@pytest.mark.slow
def test_a_run_starts_with_weights_of_timm_and_trains_both_heads(tmp_path):
    timm = pytest.importorskip("timm")
    fork = Fork(tmp_path, "timm")
    image_folder(fork.folder / "FOLDER", size=32)
    model = "deit_tiny_distilled_patch16_224"
    torch.save(timm.create_model(model, img_size=64).state_dict(), fork.folder / "weights.pt")
    flags = f"--model {model} --init_from weights.pt --freeze backbone --image_size 64 --epochs 1".split()
    out, _ = fork.train(*flags)
    assert "Kept from create_model: head" in out and "pos_embed" not in out
    settings = json.loads((fork.folder / "runs/fork/config.json").read_text())
    assert settings["resize_size"] == 71 and settings["interpolation"] == "bicubic"


# ---- end of images ----


DTYPES = """
import torch
from transformers import AutoConfig, AutoModel
from config import TrainingConfig
from model import create_model

folder = "FOLDER/model"
architecture = AutoConfig.from_pretrained(folder).architectures[0]
weights = getattr(__import__("transformers"), architecture).from_pretrained(folder, dtype=torch.bfloat16)
weights.save_pretrained(folder)
assert AutoModel.from_pretrained(folder, dtype="auto").dtype is torch.bfloat16
for dtype in (torch.float32, torch.float64):
    torch.set_default_dtype(dtype)
    for name in ("cpu", "meta"):
        model = create_model(TrainingConfig(model=folder, num_classes=2), torch.device(name))
        dtypes = {p.dtype for p in model.parameters()}
        assert dtypes == {dtype}, (name, dtype, dtypes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make_data"),
    [
        ("causal_lm", running_text),
        ("text_classification", labelled_texts),
        ("lora", running_text_for_adapters),
        ("dpo", preferences),
    ],
)
def test_a_model_of_transformers_has_the_default_dtype_and_not_that_of_its_file(tmp_path, name, make_data):
    """On the ranks that create it and, with sharding, on those that get the meta device."""
    fork = Fork(tmp_path, name)
    make_data(fork.folder / "FOLDER")
    (fork.folder / "dtypes.py").write_text(DTYPES)
    ended = forks.run(fork.folder, 0, "dtypes.py")
    assert ended.code == 0, ended.text

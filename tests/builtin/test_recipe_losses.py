# extra: template
"""The losses of two recipes, step by step, against those of the trainers that people would use instead."""

import json

import pytest

import forks
from recipe_data import graphs_of_two_classes, preferences
from recipe_forks import Fork
from training import Runs

PYG = """
import json
import torch
from torch.nn import functional as F
from torch_geometric.loader import DataLoader
import dataset
from config import TrainingConfig
from model import create_model
from utils.data.sets import load_data
from utils.distributed.context import DistributedContext

with open("runs/fork/config.json") as file:
    config = TrainingConfig(**json.load(file))
with open("steps.json") as file:
    steps = json.load(file)
cpu = torch.device("cpu")
groups = load_data(dataset, config, DistributedContext(0, 0, 1, cpu)).train.groups
torch.manual_seed(config.seed)
model = create_model(config, cpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0)
graphs, numbers = [], []
for step in steps:
    chosen = [graph for number in step for graph in groups[number]]
    numbers.append(range(len(graphs), len(graphs) + len(chosen)))
    graphs += chosen
losses = []
for data in DataLoader(graphs, batch_sampler=numbers):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), data.y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with open("losses.json", "w") as file:
    json.dump(losses, file)
"""

TRL = """
import json
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

with open("runs/fork/config.json") as file:
    config = json.load(file)
with open("steps.json") as file:
    steps = json.load(file)
with open("FOLDER/train.jsonl") as file:
    pairs = [json.loads(line) for line in file]
assert {len(step) for step in steps} == {16}
settings = DPOConfig(
    output_dir="trl",
    per_device_train_batch_size=16,
    num_train_epochs=1,
    train_sampling_strategy="sequential",
    learning_rate=config["lr"],
    lr_scheduler_type="constant",
    beta=config["beta"],
    weight_decay=0.0,
    max_grad_norm=0.0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
)
trainer = DPOTrainer(
    model="FOLDER/model",
    args=settings,
    train_dataset=Dataset.from_list([pairs[number] for step in steps for number in step]),
    processing_class=AutoTokenizer.from_pretrained("FOLDER/model"),
)
losses, compute_loss = [], trainer.compute_loss


def kept(*args, **options):
    loss = compute_loss(*args, **options)
    losses.append(loss.item())
    return loss


trainer.compute_loss = kept
trainer.train()
with open("losses.json", "w") as file:
    json.dump(losses, file)
names = ["rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"]
logged = [[record[name] for name in names] for record in trainer.state.log_history[:-1]]
with open("runs/fork/metrics.jsonl") as file:
    records = [record for record in map(json.loads, file) if record["kind"] == "train"]
for ours, theirs in zip(records, logged, strict=True):
    assert all(abs(ours[name] - value) < 1e-5 for name, value in zip(names, theirs, strict=True)), (ours, theirs)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make_data", "script", "flags"),
    [
        ("dpo", preferences, TRL, "--lr 1e-3 --beta 0.5"),
        ("graph", graphs_of_two_classes, PYG, ""),
    ],
)
def test_the_losses_of_a_recipe_are_those_of_the_original_trainer(tmp_path, name, make_data, script, flags):
    """On two ranks with gradient accumulation, which takes the same batches in the same order in one process."""
    if name == "dpo":
        pytest.importorskip("trl")
    fork, runs = Fork(tmp_path, name), Runs(tmp_path / "runs")
    make_data(fork.folder / "FOLDER")
    constant = "--epochs 2 --grad_accum_steps 2 --weight_decay 0 --schedule constant --warmup_epochs 0"
    fork.train(*constant.split(), *flags.split(), "--record_samples", "--log_interval", "1")
    losses = [record["loss"] for record in runs.records("fork", "train")]
    samples = runs.samples("fork")
    assert len(samples) == len(losses) >= 12 and losses[-1] < 0.9 * losses[0]
    (fork.folder / "steps.json").write_text(json.dumps([samples[step] for step in sorted(samples)]))
    (fork.folder / "original.py").write_text(script)
    ended = forks.run(fork.folder, 0, "original.py")
    assert ended.code == 0, ended.text
    assert losses == pytest.approx(json.loads((fork.folder / "losses.json").read_text()), abs=1e-5)

# extra: template
"""Functions of model.py that ask for `config` get the values that the data have resolved, wherever they are called."""

import pytest

import forks
from ranks import copy_repository, slow

FUNCTIONS = '''

def note(function, config):
    """Append to seen.txt which function was called, and the number of classes that it has got."""
    from pathlib import Path

    with Path(__file__).with_name("seen.txt").open("a") as file:
        file.write(f"{function} {config.num_classes!r}\\n")


show_images = log_images


def compute_loss(model, batch, config):
    note("compute_loss", config)
    images, labels = batch
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    return {"loss": {"classes": (loss, len(labels), 1.0)}}


def loss_counts(batch, config):
    note("loss_counts", config)
    return {"classes": len(batch[1])}


def predict(model, batch, config):
    note("predict", config)
    return {"logits": model(batch[0])}


def summarize(outputs, config):
    note("summarize", config)
    return {"largest": outputs["logits"].max().item()}


def log_images(model, batch, config):
    note("log_images", config)
    return show_images(model, batch)


def example_inputs(batch, config):
    note("example_inputs", config)
    return (batch[0],)
'''
FLAGS = "--num_classes auto --dataset_size 12 --image_size 8 --batch_size 4 --num_workers 0 --backend gloo".split()
RUN = [*FLAGS, *"--run_dir runs/a --max_steps 2 --log_interval 1".split()]
STEP = "compute_loss loss_counts"
EVALUATION = "compute_loss predict summarize"
CASES = [  # the functions that are called, and the command
    (EVALUATION, "train.py", RUN, "--eval_only"),
    ("predict", "scripts/predict.py runs/a"),
    ("example_inputs", "scripts/export.py runs/a exported.pt2 --format torch.export"),
    (STEP, "scripts/replay.py runs/a --step 2"),  # extra: replay
    ("compute_loss", "scripts/lib/judge/probe.py . probe.json outputs outputs.pt", FLAGS),  # extra: judge
    slow(("compute_loss loss_counts predict summarize", "scripts/verify.py", FLAGS)),  # extra: verify
    slow((STEP, "scripts/benchmark.py --find-batch --memory 4", FLAGS)),  # extra: benchmark
]


def called(fork, *command):
    """What the functions of the fork have got in this command: {(function, number of classes)}."""
    seen = fork / "seen.txt"
    seen.write_text("")
    words = []
    for part in command:
        words += part.split() if isinstance(part, str) else part
    ended = forks.run(fork, 0, *words)
    assert ended.code == 0, ended.text
    return {tuple(line.split()) for line in seen.read_text().splitlines()}


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A fork whose functions ask for the config, with a completed run."""
    folder = copy_repository(tmp_path_factory.mktemp("fork"))
    with (folder / "model.py").open("a") as file:
        file.write(FUNCTIONS)
    calls = called(folder, "train.py", RUN)
    assert calls == {(name, "10") for name in f"{STEP} {EVALUATION} log_images".split()}
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].split()[0])
def test_functions_that_ask_for_the_config_get_what_the_data_have_resolved(fork, case):
    """The command line says auto, and the training set has 10 classes."""
    names, *command = case
    calls = called(fork, *command)
    assert {name for name, _ in calls} >= {*names.split()}
    assert {number for _, number in calls} == {"10"}

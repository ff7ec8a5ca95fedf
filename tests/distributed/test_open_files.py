"""Batches of many tensors: loader workers send each of them by a descriptor."""

import re
import resource
from collections import namedtuple
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

import tasks
import train
from config import TrainingConfig
from ranks import run_ranks, slow
from tasks import Images
from training import TINY
from utils.distributed.context import DistributedContext
from utils.run.exit import find_cause
from utils.settings.errors import TrainingError, UserError

FLAGS = "--dataset_size 16 --num_workers 1 --epochs 1 --save_every 0".split()
FEW = 40  # tensors in a batch, which fit
MANY = 120  # tensors in a batch of the whole, which do not
LIMIT = 400
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Graph:
    nodes: torch.Tensor
    parts: list


def numbers(count):
    return [torch.tensor([float(k)]) for k in range(count)]


# what a batch has beside images and labels, as so many tensors
BATCHES = {
    "detection": lambda count: [{"boxes": box, "area": box.clone()} for box in numbers(count // 2)],
    "graphs": lambda count: [Graph(node, [node.clone()]) for node in numbers(count // 2)],
    "nested tuples": lambda count: tuple((first, (first.clone(),)) for first in numbers(count // 2)),
    "named tuples": lambda count: {"a": {"b": [Pair(first, first.clone()) for first in numbers(count // 2)]}},
    "list": numbers,
}


class Box:
    """An object whose tensors nobody counts."""

    def __init__(self, tensors):
        self.tensors = tensors


OTHERS = {
    "box": lambda count: Box([torch.ones(1) for _ in range(count)]),
    "views": lambda count: list(torch.ones(count, 1).split(1)),
}


def many_tensors(kind, counts):
    """Images whose batches have many tensors more: counts[0] of them, and counts[1] from sample 4 on."""

    class Many(Images):
        in_memory = False
        device_transform = None

        def __getitems__(self, indices):
            count = counts[max(indices) >= 4 and self.split == "train"]
            return self.images[indices], self.labels[indices], (BATCHES | OTHERS)[kind](count)

    return lambda config, split: None if split == "test" else Many(config.dataset_size, split)


HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
KINDS = [kind if kind in ("detection", "graphs") else slow(kind) for kind in BATCHES]


def loss(net, batch):
    return tasks.image_loss(net, (batch[0].float() / 255, batch[1]))


def train_under_limit(folder, kind, counts, limit, *flags):
    """The error, or how the run ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 256), limit))
    words = [*TINY, *FLAGS, "--run_dir", f"{folder}/run", *flags]
    data = mock.patch.object(train.your_data, "create_dataset", many_tensors(kind, counts))
    with tasks.using("plain"), data, mock.patch.object(train.your_model, "compute_loss", loss):
        try:
            return train.train(TrainingConfig.from_args(words))["state"]
        except (UserError, TrainingError) as error:
            return type(error).__name__, str(error)


@pytest.mark.guarantee("open-files")
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_that_is_too_low_for_the_tensors_is_refused_at_the_start(tmp_path, kind):
    [(name, text)] = run_ranks(1, train_under_limit, str(tmp_path), kind, (MANY, MANY), LIMIT)
    assert name == "UserError" and text.startswith(f"The limit on open files is {LIMIT}, but about "), text
    end = r"\. Use fewer --num_workers \(0 needs none\), or raise the limit \(ulimit -n (\d+), LimitNOFILE of .*\)\.$"
    need = int(re.search(end, text)[1])
    assert need > 2 * 4 * MANY
    # the limit that the message gives is enough
    assert run_ranks(1, train_under_limit, str(tmp_path), kind, (MANY, MANY), need) == ["completed"]


@pytest.mark.guarantee("open-files")
def test_the_number_of_an_error_is_enough_where_tensors_cannot_be_counted(tmp_path):
    [(_, text)] = run_ranks(1, train_under_limit, str(tmp_path), "box", (LIMIT, LIMIT), LIMIT)
    need = min(int(re.search(r"raise the limit \(ulimit -n (\d+), which", text)[1]), HARD_LIMIT)
    again = run_ranks(1, train_under_limit, str(tmp_path), "box", (LIMIT, LIMIT), need, "--overwrite")
    assert again == ["completed"]


def train_with_strategy(strategy, *arguments):
    torch.multiprocessing.set_sharing_strategy(strategy)
    return train_under_limit(*arguments)


@pytest.mark.guarantee("open-files")
def test_tensors_that_need_no_descriptor_are_not_counted(tmp_path):
    """Those that are sent through files, and views of one storage."""
    whole = ("file_system", str(tmp_path / "files"), "list", (MANY, MANY), LIMIT)
    assert run_ranks(1, train_with_strategy, *whole) == ["completed"]
    views = str(tmp_path / "views"), "views", (MANY, MANY), LIMIT
    assert run_ranks(1, train_under_limit, *views) == ["completed"]


@pytest.mark.parametrize("kind", KINDS)
def test_few_tensors_train_below_the_same_limit_on_two_ranks(tmp_path, kind):
    assert run_ranks(2, train_under_limit, str(tmp_path), kind, (4, 4), LIMIT) == ["completed"] * 2


def test_without_workers_no_tensor_needs_a_file(tmp_path):
    flags = "--num_workers", "0"
    assert run_ranks(1, train_under_limit, str(tmp_path), "list", (MANY, MANY), LIMIT, *flags) == ["completed"]


@pytest.mark.guarantee("open-files")
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_batch_with_more_tensors_names_the_limit(tmp_path, kind):
    [(name, text)] = run_ranks(1, train_under_limit, str(tmp_path), kind, (8, 2 * LIMIT), LIMIT)
    assert name == "TrainingError", text
    assert re.match(rf"Rank 0 failed: The limit on open files is {LIMIT}, ", text), text
    assert "--shm-size" not in text, text
    found = re.search(r"\. Use --num_workers 0, or raise the limit \(ulimit -n (\d+), which", text)
    need = min(int(found[1]), HARD_LIMIT)
    assert run_ranks(1, train_under_limit, str(tmp_path), kind, (8, 2 * LIMIT), need, "--overwrite") == ["completed"]


@pytest.mark.parametrize(
    ("error", "is_of_files"),
    [
        (OSError(24, "Too many open files"), True),
        (RuntimeError("unable to open shared memory object </t> in read-write mode: Too many open files (24)"), True),
        (RuntimeError("received 0 items of ancdata"), True),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), True),
        (OSError(28, "No space left on device"), False),
        (UserError("run_dir=a: cannot be written (Too many open files); give a writable folder"), False),
    ],
)
def test_an_error_of_a_process_without_descriptors_names_the_limit(error, is_of_files):
    cause = find_cause(error, None, TrainingConfig(), DistributedContext(0, 0, 1, torch.device("cpu")))
    assert (cause is not error) == is_of_files
    if is_of_files:
        pattern = r"^Rank 0 failed: The limit on open files is \d+, .* raise the limit \(ulimit -n \d+, which"
        assert re.search(pattern, str(cause))

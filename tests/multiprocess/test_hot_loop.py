"""Between two log points nothing is read from the device, and each optimizer step costs its buckets' all-reduces and one."""

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from config import TrainingConfig
from ranks import run_ranks
from training import TINY
from utils.report import Reporter

# four steps of two micro-batches on each of two ranks; the log point is the last of them
FLAGS = [*TINY, "--dataset_size", "64", "--epochs", "1", "--grad_accum_steps", "2", "--log_interval", "4", "--ema_decay", "0.9"]
FLAGS += ["--clip_grad_norm", "1", "--amp_dtype", "fp16", "--record_samples", "--num_workers", "1", "--save_every", "0"]
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::unique")


class Reads(TorchDispatchMode):
    """Notes where operations hand a tensor's value to the host."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.startswith(READS):
            frames = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_stack(limit=6)]
            if not any("dataloader.py" in frame for frame in frames):  # it draws a seed for its workers, on the host, once an epoch
                self.places.append(" < ".join(reversed(frames[:-1])))
        return function(*args, **(kwargs or {}))


def reads_by_step(folder, reads_in_step):
    """Train one epoch under the mode; the reads up to the end of each step. One `.item()` is put into a step where asked for."""
    mode, seen, is_read = Reads(), {}, []
    plain_epoch, plain_done, plain_loss = train.train_one_epoch, Reporter.step_done, train.compute_loss

    def epoch(*args):
        with mode:
            return plain_epoch(*args)

    def done(self, samples, step):
        seen[step] = list(mode.places)
        plain_done(self, samples, step)

    def loss(model, batch):
        loss_sum, metrics = plain_loss(model, batch)
        if model.training and len(seen) + 1 == reads_in_step and not is_read:
            is_read.append(loss_sum.item())
        return loss_sum, metrics

    train.train_one_epoch, Reporter.step_done, train.compute_loss = epoch, done, loss
    train.train(TrainingConfig.from_args([*FLAGS, "--run_dir", folder]))
    return seen, mode.places


@pytest.mark.parametrize(("reads_in_step", "expected"), [(0, 0), (2, 1)])
def test_three_windows_read_nothing_and_an_item_put_in_is_seen(tmp_path, reads_in_step, expected):
    """With accumulation, clipping, averaged weights, scaler, finite check, recorded samples and metrics on, on two ranks."""
    for seen, in_all in run_ranks(2, reads_by_step, str(tmp_path / "run"), reads_in_step):
        assert list(seen) == [1, 2, 3, 4]
        assert len(seen[3]) == expected, seen[3]
        assert len(in_all) > expected  # the log point reads


def collectives(folder, flags):
    """How many collectives of the default group each step took, and the buckets DDP has."""
    counts, steps = [0], []
    plain_reduce, plain_done, plain_wrap = dist.all_reduce, Reporter.step_done, train.wrap_ddp
    plain_broadcast, wrapped = dist._broadcast_coalesced, []

    def broadcast(*args, **kwargs):  # what DDP synchronises buffers with
        counts[0] += 1
        return plain_broadcast(*args, **kwargs)

    def reduce(tensor, *args, group=None, **kwargs):
        counts[0] += group is None
        return plain_reduce(tensor, *args, group=group, **kwargs)

    def hook(_, bucket):
        counts[0] += 1
        future = plain_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def wrap(*args):
        wrapped.append(plain_wrap(*args))
        wrapped[0].register_comm_hook(None, hook)
        return wrapped[0]

    def done(self, samples, step):
        steps.append(counts[0])
        counts[0] = 0
        plain_done(self, samples, step)

    def epoch(*args, plain_epoch=train.train_one_epoch):
        counts[0] = 0
        return plain_epoch(*args)

    dist._broadcast_coalesced = broadcast
    dist.all_reduce, Reporter.step_done, train.wrap_ddp, train.train_one_epoch = reduce, done, wrap, epoch
    train.train(TrainingConfig.from_args([*FLAGS, *flags, "--run_dir", folder]))
    sizes = wrapped[0]._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return steps, len(sizes.split(",")) if sizes else 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_collectives_of_a_step_are_the_buckets_and_one_for_batch_norm(tmp_path, ranks):
    for steps, buckets in run_ranks(ranks, collectives, str(tmp_path / "run"), ["--bucket_cap_mb", "3"]):
        assert buckets > 2
        assert steps == [buckets + 1] * (8 // ranks)


def test_one_rank_has_no_collective(tmp_path):
    assert run_ranks(1, collectives, str(tmp_path / "run"), []) == [([0] * 8, 0)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_without_batch_norm_has_no_further_collective(tmp_path, ranks):
    flags = ["--model", "squeezenet1_1", "--image_size", "32", "--lr", "1e-4"]
    for steps, buckets in run_ranks(ranks, collectives, str(tmp_path / "run"), flags):
        assert steps == [buckets] * (8 // ranks)


def test_the_default_buckets_are_several_so_that_they_overlap(tmp_path):
    assert run_ranks(2, collectives, str(tmp_path / "run"), [])[0][1] > 1


def test_the_modes_own_operations_are_seen():
    with Reads() as mode:
        value = torch.ones(3).sum()
        value.item(), float(value), bool(value > 0)
    assert len(mode.places) == 3

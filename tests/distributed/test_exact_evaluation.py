"""Exact: an evaluation gives the same counts and the same logits on any number of ranks, or it is an error."""

from unittest import mock

import pytest
import torch

import train
from config import TrainingConfig
from ddp_utils import setup_distributed
from ranks import run_ranks
from tasks import Images, Lines, SmallNet, TokenModel, image_loss, token_loss
from train import Precision
from utils.data.loader import create_evaluation_dataloader
from utils.data.sampler import GlobalBatch, GlobalBatchSampler

SIZES = (1, 2, 3, 4, 5, 11, 16, 23)


def evaluate(task, workers, bf16=False):
    """For each size of the set: the record, and the logits of each sample as bytes, of this rank."""
    config = TrainingConfig(backend="gloo", batch_size=4, num_workers=workers)
    ctx = setup_distributed(config)
    torch.manual_seed(0)
    net = SmallNet(True, 10) if task == "images" else TokenModel()
    logits, here, found = {}, [], []
    net.register_forward_hook(
        lambda *args: logits.update(
            (k, row.float().numpy().tobytes()) for k, row in zip(here[-1], args[2], strict=True)
        )
    )
    plain_iter = GlobalBatch.__iter__

    def iterate(self):
        for micro_batch in plain_iter(self):
            here.append(micro_batch.indices)
            yield micro_batch

    loss = image_loss if task == "images" else token_loss
    with mock.patch.object(GlobalBatch, "__iter__", iterate), mock.patch.object(train, "compute_loss", loss):
        for size in SIZES:
            data = Images(size, "val") if task == "images" else Lines(size, "val")
            logits.clear()
            precision = Precision("cpu", torch.bfloat16 if bf16 else None)
            record = train.evaluate(net, create_evaluation_dataloader(data, config, ctx), precision, ctx, None)
            found.append((record, dict(logits)))
    train.cleanup_distributed()
    return found


@pytest.mark.parametrize(
    ("task", "workers", "bf16", "worlds"),
    [
        ("images", 0, True, (2, 4)),
        ("lines", 1, False, (3,)),
        pytest.param("images", 2, False, (2, 3, 4), marks=pytest.mark.slow),
        pytest.param("lines", 2, False, (2, 3, 4), marks=pytest.mark.slow),
    ],
)
def test_counts_and_logits_are_the_same_on_one_to_four_ranks(task, workers, bf16, worlds):
    """Sets smaller than the number of ranks too. Means are of float64 sums, which another order may move by a
    rounding."""
    alone = run_ranks(1, evaluate, task, workers, bf16)[0]
    assert [record["count"] for record, _ in alone] == list(SIZES)
    assert [sorted(logits) for _, logits in alone] == [list(range(size)) for size in SIZES]
    for ranks in worlds:
        each = run_ranks(ranks, evaluate, task, workers, bf16)
        for k, (record, logits) in enumerate(alone):
            # one rank computed it
            assert [sum(index in rank[k][1] for rank in each) for index in logits] == [1] * SIZES[k]
            assert {index: row for rank in each for index, row in rank[k][1].items()} == logits
            for rank in each:
                assert rank[k][0] == pytest.approx(record, rel=1e-14)


def evaluate_what_a_sampler_gives():
    """One micro-batch too few, and one too many, as a padding sampler has it."""
    config = TrainingConfig(backend="gloo", batch_size=4, num_workers=0)
    ctx = setup_distributed(config)
    plain, said = GlobalBatchSampler.global_batches, []
    for change in ("fewer", "more"):

        def global_batches(self, epoch, start=0, change=change):
            given = list(plain(self, epoch, start))
            if ctx.rank == 1:
                given[-1].micro_batches[0].is_padding = change != "more"  # rank 1 stands in here with rank 0's
            elif change == "fewer":
                given[-1].micro_batches[0].is_padding = True
            return iter(given)

        loader = create_evaluation_dataloader(Images(11, "val"), config, ctx)
        with (
            mock.patch.object(GlobalBatchSampler, "windows", global_batches),
            mock.patch.object(train, "compute_loss", image_loss),
            pytest.raises(RuntimeError) as error,
        ):
            train.evaluate(SmallNet(True, 10), loader, Precision("cpu", None), ctx, None)
        said.append(str(error.value))
    return said


def test_a_count_that_is_not_the_sets_is_an_error():
    said = [f"evaluation counted {count} samples of 11; this is a bug of the loader" for count in (8, 14)]
    assert run_ranks(2, evaluate_what_a_sampler_gives) == [said] * 2

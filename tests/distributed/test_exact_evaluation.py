"""An evaluation gives the same counts and logits on any number of ranks, or raises an error."""

from unittest import mock

import pytest
import torch

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from line_tasks import Lines, TokenModel, token_loss
from ranks import run_ranks, slow
from tasks import Images, SmallNet, image_loss
from utils.data.loader import GlobalBatchLoader, create_evaluation_dataloader
from utils.data.sampler import GlobalBatchSampler
from utils.training.evaluation import Evaluation
from utils.training.precision import Precision
from utils.training.seams import Seams

SIZES = (1, 2, 3, 4, 5, 11, 16, 23)


def evaluations(task, workers, bf16=False, reduction="fast"):
    """For each size of the data set: the record, and this rank's logits of each sample as bytes."""
    config = TrainingConfig(backend="gloo", batch_size=4, num_workers=workers, reduction=reduction)
    ctx = setup_distributed(config)
    precision = Precision("cpu", torch.bfloat16 if bf16 else None)
    torch.manual_seed(0)
    net = SmallNet(True, 10) if task == "images" else TokenModel()
    found, here, plain_stream = [], {}, GlobalBatchLoader.micro_batches

    def stream(self, epoch):
        for micro_batch in plain_stream(self, epoch):
            here["indices"] = [] if micro_batch.is_padding else micro_batch.indices
            yield micro_batch

    def note(module, inputs, logits):
        rows = [row.float().numpy().tobytes() for row in logits]
        found[-1][1].update(zip(here["indices"], rows, strict=False))  # none of the padding

    net.register_forward_hook(note)
    with mock.patch.object(GlobalBatchLoader, "micro_batches", stream):
        for size in SIZES:
            data = Images(size, "val") if task == "images" else Lines(size, "val")
            found.append([None, {}])
            loader, loss = (
                create_evaluation_dataloader(data, config, ctx),
                image_loss if task == "images" else token_loss,
            )
            shown = []  # by the progress bar
            evaluation = Evaluation(net, Seams(None, None, loss), precision, ctx)
            found[-1][0] = evaluation.means(loader, lambda *now, to=shown: to.append(now))
            assert shown == [(step, len(shown)) for step in range(1, len(shown) + 1)] and shown
    cleanup_distributed()
    return found


@pytest.mark.guarantee("evaluation-counts", "evaluation-means")
@pytest.mark.parametrize(
    ("task", "workers", "bf16", "worlds"),
    [
        ("images", 0, True, (2, 4)),
        ("lines", 1, False, (3,)),
        slow("images", 2, False, (2, 3, 4)),
        slow("lines", 2, False, (2, 3, 4)),
    ],
)
def test_counts_and_logits_are_the_same_on_one_to_four_ranks(task, workers, bf16, worlds):
    """Also sets smaller than the number of ranks. The last bit of a mean depends on the order of float64 sums."""
    alone = run_ranks(1, evaluations, task, workers, bf16)[0]
    assert [record["count"] for record, _ in alone] == list(SIZES)
    assert [sorted(logits) for _, logits in alone] == [list(range(size)) for size in SIZES]
    for world in worlds:
        ranks = run_ranks(world, evaluations, task, workers, bf16)
        for (record, logits), *each in zip(alone, *ranks, strict=True):
            assert sum(len(own) for _, own in each) == len(logits)  # each by one rank
            assert {index: row for _, own in each for index, row in own.items()} == logits
            assert all(own == pytest.approx(record, rel=1e-14) for own, _ in each)


@pytest.mark.guarantee("exact-ranks")
@pytest.mark.parametrize(
    ("task", "worlds"), [("lines", (3, 5)), slow("images", (2, 3, 4, 5, 6)), slow("lines", (2, 4, 6))]
)
def test_exact_means_are_the_same_bits_on_any_number_of_ranks(task, worlds):
    """Each rank evaluates consecutive micro-batches, each of them once; the sets have 1 to 6 of them."""
    alone = run_ranks(1, evaluations, task, 1, False, "exact")[0]
    assert [record["count"] for record, _ in alone] == list(SIZES)
    for world in worlds:
        for (record, logits), *each in zip(alone, *run_ranks(world, evaluations, task, 1, False, "exact"), strict=True):
            assert sum(len(own) for _, own in each) == len(logits)
            assert {index: row for _, own in each for index, row in own.items()} == logits
            assert all(own == record for own, _ in each)


def evaluate_with_a_wrong_sampler():
    """One micro-batch too few and one too many, as with a padding sampler."""
    config = TrainingConfig(backend="gloo", batch_size=4, num_workers=0)
    ctx = setup_distributed(config)
    plain, errors = GlobalBatchSampler.micro_batches, []
    for change in ("fewer", "more"):

        def micro_batches(self, epoch, start=0, change=change):
            given = list(plain(self, epoch, start))
            if ctx.rank == 1:
                given[-1].is_padding = change != "more"  # rank 1 pads here with a copy of rank 0's
            elif change == "fewer":
                given[-1].is_padding = True
            return iter(given)

        loader = create_evaluation_dataloader(Images(11, "val"), config, ctx)
        with (
            mock.patch.object(GlobalBatchSampler, "micro_batches", micro_batches),
            pytest.raises(RuntimeError) as error,
        ):
            Evaluation(SmallNet(True, 10), Seams(None, None, image_loss), Precision("cpu", None), ctx).means(loader)
        errors.append(str(error.value))
    return errors


@pytest.mark.guarantee("evaluation-counts")
def test_a_wrong_sample_count_is_an_error():
    expected = [f"evaluation counted {count} samples of 11; this is a bug in the loader" for count in (8, 14)]
    assert run_ranks(2, evaluate_with_a_wrong_sampler) == [expected] * 2

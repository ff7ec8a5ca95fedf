"""An evaluation gives the same counts and logits on any number of ranks, or raises an error."""

from unittest import mock

import pytest

from config import TrainingConfig
from ddp_utils import setup_distributed
from ranks import run_ranks
from tasks import Images, SmallNet, image_loss
from utils.data.loader import create_evaluation_dataloader
from utils.data.sampler import GlobalBatchSampler
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks
from utils.training.precision import Precision


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
            Evaluation(SmallNet(True, 10), ModelHooks(None, None, image_loss), Precision("cpu", None), ctx).evaluate(
                loader
            )
        errors.append(str(error.value))
    return errors


@pytest.mark.guarantee("evaluation-counts")
def test_a_wrong_sample_count_is_an_error():
    expected = [f"The evaluation counted {count} samples of 11. This is a bug in the loader." for count in (8, 14)]
    assert run_ranks(2, evaluate_with_a_wrong_sampler) == [expected] * 2

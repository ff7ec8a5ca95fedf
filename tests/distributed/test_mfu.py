"""`mfu` of the train records: operations that are computed by hand, over a peak, in the seconds of the steps."""

import itertools
import math
from unittest import mock

import pytest
import torch
from torch import nn

import train
from config import TrainingConfig
from ranks import run_ranks
from tasks import using
from training import assert_same_state
from utils.data.sampler import MicroBatch
from utils.run import resume
from utils.training import first_passes
from utils.training.fingerprint import fingerprint_tensors
from utils.training.parts.create import create_parts
from utils.training.parts.mfu import FlopCounter, find_peak_flops

PEAK = 1e9
# SmallNet, a sample: both convolutions (4 x 4 x 8 outputs of 27 terms, 2 x 2 x 16 of 72) and the head (64 x 10), each
# twice for a product and a sum; again for the gradients of the weights, and but for the first one of the inputs
FORWARD = [2 * 128 * 27, 2 * 64 * 72, 2 * 640]
PER_SAMPLE = 3 * sum(FORWARD) - FORWARD[0]


@pytest.mark.parametrize(
    ("name", "dtype", "has_tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989),
        ("NVIDIA H100 PCIe", torch.float16, True, 756),
        ("NVIDIA H200", torch.bfloat16, True, 989),
        ("NVIDIA H200 NVL", torch.bfloat16, True, 835),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, True, 312),
        ("NVIDIA A100-SXM4-80GB", None, True, 156),
        ("NVIDIA A100-SXM4-80GB", None, False, 0),  # float32 proper
        ("NVIDIA A10G", torch.bfloat16, True, 70),
        ("NVIDIA L40S", torch.bfloat16, True, 362),
        ("NVIDIA GeForce RTX 4090", torch.float16, True, 165.2),
        ("NVIDIA RTX A4000", torch.bfloat16, True, 0),  # not an A40
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125),
        ("NVIDIA GH200 480GB", torch.bfloat16, True, 989),
        ("a device of tomorrow", torch.bfloat16, True, 0),
    ],
)
def test_peaks_are_found_by_the_words_of_a_name(name, dtype, has_tf32, peak):
    assert find_peak_flops(name, dtype, has_tf32) == pytest.approx(1e12 * peak)


def run_with_a_peak(flags, task, peak=PEAK):
    def with_a_counter(*args, **options):
        return [*create_parts(*args, **options), FlopCounter(peak)]

    with using(task), mock.patch.object(resume, "create_parts", with_a_counter):
        return train.train(TrainingConfig.from_args(flags))


FLAGS = "--dataset_size 58 --epochs 1 --log_interval 4 --save_every 0".split()  # the last micro-batch is short


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, []),
        (2, []),
        (2, ["--grad_accum_steps", "2"]),
        (3, ["--global_batch_size", "8"]),  # one rank computes padding, which does not count
        (2, ["--reduction", "exact"]),  # extra: exact
    ],
)
def test_records_have_the_operations_of_all_samples(runs, ranks, flags):
    """The tensors of a micro-batch are its images and labels, so operations are proportional to samples."""
    flags = [*FLAGS, *flags]
    run_ranks(ranks, run_with_a_peak, runs.words("counted", *flags), "plain")
    runs.train(ranks, "plain", *flags, task="plain")
    records, samples = runs.records("counted", "train"), 58
    seconds = [record["step_s"] * n * record["mfu"] for record, n in zip(records, steps_of(records), strict=True)]
    assert sum(seconds) * ranks == pytest.approx(PER_SAMPLE * samples / PEAK, rel=1e-6)  # of float64 sums and quotients
    assert_same_state(runs.last("counted"), runs.last("plain"))
    assert all("mfu" not in record for record in runs.records("plain", "train"))  # of a CPU


def steps_of(records):
    steps = [0, *(record["step"] for record in records)]
    return [b - a for a, b in itertools.pairwise(steps)]


def test_a_model_in_shards_is_counted_too(runs):  # extra: sharding
    counted = []
    for name, flags in {"whole": [], "shards": ["--sharding", "zero3"]}.items():
        run_ranks(2, run_with_a_peak, runs.words(name, *FLAGS, *flags), "blocks")
        records = runs.records(name, "train")
        counted.append(sum(r["mfu"] * r["step_s"] * n for r, n in zip(records, steps_of(records), strict=True)))
    assert counted[0] == pytest.approx(counted[1], rel=1e-6)


def run_that_cannot_be_counted(flags, task):
    """The gradients of two passes are there when it fails."""

    def fails_if_counted(*args):
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode(), "a formula that does not fit"
        return fingerprint_tensors(*args)

    with mock.patch.object(first_passes, "fingerprint_tensors", fails_if_counted):
        return run_with_a_peak(flags, task)


def test_a_failed_count_leaves_nothing_behind(runs):
    run_ranks(1, run_that_cannot_be_counted, runs.words("counted", *FLAGS), "images")
    runs.train(1, "plain", *FLAGS)
    assert "The operations cannot be counted (a formula that does not fit), so no MFU is shown." in runs.log("counted")
    runs.assert_same("counted", "plain")


def test_an_unknown_peak_gives_no_figure(runs):
    run_ranks(1, run_with_a_peak, runs.words("unknown", *FLAGS), "plain", 0.0)
    assert all("mfu" not in record for record in runs.records("unknown", "train"))


def test_an_operation_that_cannot_be_counted_costs_only_the_figure():
    counter = FlopCounter(PEAK)
    batch = torch.ones(4, 3)

    def passes():
        raise AssertionError("a formula that does not fit")

    def logged(*batches):
        stream = (
            MicroBatch(0, 0, [], is_padding=False, is_last=True, micro_batches_in_step=1, batch=batch)
            for batch in batches
        )
        assert len([*counter.micro_batches(stream)]) == len(batches)
        counter.begin_read(is_log_point=False)  # a save in between
        counter.begin_read(is_log_point=True)
        return counter.log_values(seconds=2.0)["mfu"]

    counter.first_passes(passes, batch)
    assert math.isnan(logged(batch))
    linear = nn.Linear(3, 5)
    counter.first_passes(lambda: [linear(batch).sum().backward() for _ in range(2)], batch)
    # forward, and the gradient of the weights; five samples
    assert logged(batch, batch[:1]) == 2 * 2 * 5 * 3 * 5 / PEAK / 2.0
    assert logged() == 0

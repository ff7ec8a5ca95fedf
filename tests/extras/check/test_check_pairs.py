"""Who checks whom, and who is wrong: the arithmetic of --check_every."""

import dataclasses
import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.extras.check import CrossCheck, Round, check_possible, compare, first_of, shifts_of
from utils.extras.exact import Runs  # extra: exact
from utils.training.fingerprint import digest_of, fingerprint_of

CPU = torch.device("cpu")


def check_of(ranks, every, hosts=None, first_step=0):
    """The check of a model of one parameter, in an attempt that begins after so many steps."""
    ctx = DistributedContext(0, 0, ranks, CPU, hosts=tuple(hosts or ["a"] * ranks), device_names=("cpu",) * ranks)
    state = SimpleNamespace(model=nn.Linear(1, 1), progress=SimpleNamespace(step=first_step))
    return CrossCheck(state, None, TrainingConfig(check_every=every), ctx, *[mock.Mock()] * 3)


def test_ranks_check_each_other_at_changing_distances_on_other_hosts_if_there_are_any():
    assert shifts_of(["a"]) == [] and shifts_of("aa") == [1] and shifts_of("aaaa") == [1, 2, 3]
    assert shifts_of("aabb") == [2] and shifts_of("aaabbbccc") == [3, 4, 5, 6] and shifts_of("aab") == [1, 2]
    shifts = [check_of(4, 3).shift_at(step) for step in range(15)]
    assert shifts == [1, 0, 2, 0, 0, 3, 0, 0, 1, 0, 0, 2, 0, 0, 3]  # the first step, and each third one


def test_the_first_step_of_an_attempt_is_checked():
    assert [check_of(2, 100).shift_at(step) for step in (0, 1, 99)] == [1, 0, 1]
    assert [check_of(2, 100, first_step=22).shift_at(step) for step in (0, 21, 22, 23, 99)] == [0, 0, 1, 0, 1]
    assert not any(check_of(1, 1).shift_at(step) for step in range(3))


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize(
    ("per_step", "kind"),
    [
        (4, Assignment),
        (8, Assignment),
        (3, Assignment),
        (8, Runs),  # extra: exact
        (6, Runs),  # extra: exact
    ],
)
def test_a_rank_is_checked_with_its_own_first_micro_batch(per_step, kind):
    """Also in a short last step, and with padding."""
    parts = [kind(rank, 4) for rank in range(4)]
    options = {"batch_size": 2, "micro_batches_per_step": per_step}
    samplers = [GlobalBatchSampler(range(43), assignment=part, **options) for part in parts]
    for start, rank in itertools.product(range(0, 43, 2 * per_step), range(4)):
        own = next(samplers[rank].micro_batches(1, start))
        checked = first_of(samplers[0], rank, 1, start)
        assert checked == dataclasses.replace(own, is_check=True, is_last=False)


NOISE = random.Random(1)


def noise(rank, number):
    return NOISE.randrange(1, 10**6)


def once(rank, number):
    return 7 * (number == 0)


def always(rank, number):
    return 7 + rank


def rounds_of(ranks, shifts, bad, added):
    """Two rounds in which added(rank, round) is added to a fingerprint of all that the bad ranks compute."""
    true, rounds = torch.arange(ranks * 3).reshape(ranks, 3), []
    for number, shift in enumerate(shifts):
        own, checked = true.clone(), true.roll(-shift, 0)
        for rank, rows in itertools.product(bad, (own, checked)):
            rows[rank, 1] += added(rank, number)
        rounds.append(Round(shift, own, checked))
    return rounds


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
@pytest.mark.parametrize("added", [noise, once, always])
def test_of_three_or_more_ranks_the_wrong_one_is_named_whatever_it_computes(ranks, added):
    for bad, shift in itertools.product(range(ranks), range(1, ranks)):
        found = compare(rounds_of(ranks, (shift, shift % (ranks - 1) + 1), [bad], added))
        assert found.wrong == [bad] and found.is_steady and found.parameter == 1


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_ranks_the_pair_is_named_unless_one_of_them_does_not_repeat_itself(bad):
    for added, named in ((once, [bad]), (noise, [bad]), (always, [0, 1])):
        found = compare(rounds_of(2, (1, 1), [bad], added))
        assert found.wrong == named and found.is_steady


@pytest.mark.parametrize(("ranks", "added"), [(2, noise), (3, noise), (8, noise), (3, always), (8, always)])
def test_ranks_that_all_differ_are_not_deterministic(ranks, added):
    assert not compare(rounds_of(ranks, (1, 1 % (ranks - 1) + 1), range(ranks), added)).is_steady


def test_two_wrong_ranks_of_one_host_are_both_named():
    found = compare(rounds_of(8, (4, 5), [6, 7], always))
    assert found.wrong == [6, 7] and found.is_steady


def test_the_digest_of_a_tensor_is_its_fingerprint_and_any_bit_changes_it():
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).t()
    found = digest_of("gradient", [tensor], CPU)
    assert found.shape == () and found.item() == fingerprint_of("gradient", [tensor])
    assert found == digest_of("gradient", [tensor.contiguous()], CPU) and digest_of("x", [torch.empty(0)], CPU) == 0
    other = tensor.clone()
    other[3, 2].view(torch.int32).bitwise_xor_(1)
    assert digest_of("gradient", [other], CPU) != found


@pytest.mark.parametrize(
    "flags",
    [
        {"sharding": "zero2"},
        {"find_unused_parameters": True},
        {"compile": "reduce-overhead"},  # extra: compile
    ],
)
def test_settings_with_which_gradients_cannot_be_compared_are_rejected(flags):
    ((name, value),) = flags.items()
    with pytest.raises(UserError, match=f"{name}={value}: does not work with check_every; give only one of the two"):
        TrainingConfig(check_every=10, **flags)


def test_models_and_devices_with_which_gradients_cannot_be_compared_are_rejected():
    config = TrainingConfig(check_every=10)
    ctx = DistributedContext(0, 0, 2, torch.device("cpu"), device_names=("A100", "A100"))
    check_possible(nn.BatchNorm1d(2), config, ctx)
    with pytest.raises(UserError, match="SyncBatchNorm"):
        check_possible(nn.SyncBatchNorm(2), config, ctx)
    with pytest.raises(UserError, match="A100 and H100 round differently"):
        check_possible(nn.Linear(2, 2), config, dataclasses.replace(ctx, device_names=("H100", "A100")))
    on_cuda = dataclasses.replace(ctx, device=torch.device("cuda", 0))
    with pytest.raises(UserError, match="add --deterministic"):
        check_possible(nn.Linear(2, 2), config, on_cuda)
    check_possible(nn.Linear(2, 2), dataclasses.replace(config, deterministic=True), on_cuda)

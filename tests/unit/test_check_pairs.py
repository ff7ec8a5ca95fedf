"""Who checks whom, and who is wrong: the arithmetic of --check_every."""

import dataclasses
import itertools
import random

import pytest
import torch
from torch import nn

from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from utils.data.sampler import Assignment, GlobalBatchSampler, shifts_of
from utils.training.cross_check import Round, check_possible, compare
from utils.training.fingerprint import digest_of, fingerprint_of

CPU = torch.device("cpu")


def samplers(ranks, n, per_step, every, hosts=None, **options):
    options |= {"batch_size": 2, "micro_batches_per_step": per_step}
    how = {"check_every": every, "hosts": hosts or ["a"] * ranks, "in_runs": options.pop("in_runs", False)}
    parts = [Assignment(rank, ranks, **how) for rank in range(ranks)]
    found = [GlobalBatchSampler(range(n), assignment=part, **options) for part in parts]
    for sampler in found:
        sampler.set_epoch(0, 0)
    return found


def test_ranks_check_each_other_at_changing_distances_on_other_hosts_if_there_are_any():
    assert shifts_of(["a"]) == [] and shifts_of("aa") == [1] and shifts_of("aaaa") == [1, 2, 3]
    assert shifts_of("aabb") == [2] and shifts_of("aaabbbccc") == [3, 4, 5, 6] and shifts_of("aab") == [1, 2]
    shifts = [samplers(4, 400, 4, 3)[0].shift_at(0, 8 * step) for step in range(15)]
    assert shifts == [1, 0, 2, 0, 0, 3, 0, 0, 1, 0, 0, 2, 0, 0, 3]  # the first step, and each third one


@pytest.mark.parametrize(("per_step", "in_runs"), [(4, False), (8, False), (8, True), (6, True), (3, False)])
def test_a_rank_is_checked_with_its_own_first_micro_batch_by_exactly_one_other(per_step, in_runs):
    """Also in a short last step, and with padding; without checks the micro-batches are the same."""
    checked, plain = (samplers(4, 43, per_step, every, in_runs=in_runs) for every in (2, 0))
    steps = 0
    for epoch in (0, 1):
        for number, batches in enumerate(
            zip(*(each.global_batches(epoch) for each in (*checked, *plain)), strict=True)
        ):
            usual, own = [each.micro_batches for each in batches[4:]], []
            shift = checked[0].shift_at(epoch, number * 2 * per_step)
            for each in batches[:4]:
                checks = [m for m in each.micro_batches if m.is_check]
                own.append([m for m in each.micro_batches if not m.is_check])
                assert len(checks) == bool(shift) and each.micro_batches[: len(checks)] == checks
            assert own == usual
            for rank, each in enumerate(batches[:4] if shift else ()):
                partner = own[(rank + shift) % 4][0]
                expected = dataclasses.replace(partner, is_check=True, is_last=False)
                assert each.micro_batches[0] == expected and each.micro_batches[0].is_extra
            steps += bool(shift)
    assert steps >= 4
    assert [*checked[1]] == [*plain[1]]  # iterating yields this rank's own samples


def test_the_first_step_of_an_attempt_is_checked():
    sampler = samplers(2, 40, 2, 100)[0]
    resumed = GlobalBatchSampler(
        range(41), batch_size=2, micro_batches_per_step=2, assignment=Assignment(1, 2, check_every=100, hosts="ab")
    )
    assert sampler.shift_at(0, 0) == 1 and sampler.shift_at(0, 4) == 0
    resumed.set_epoch(1, 41)  # at the end of an epoch, in which the short last step was made
    assert [resumed.shift_at(*at) for at in ((0, 0), (1, 0), (1, 40), (2, 0), (2, 4))] == [0, 0, 0, 1, 0]


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


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
@pytest.mark.parametrize("added", [noise, once, always])
def test_of_three_or_more_ranks_the_wrong_one_is_named_whatever_it_computes(ranks, added):
    for bad, shift in itertools.product(range(ranks), range(1, ranks)):
        found = compare(rounds_of(ranks, (shift, shift % (ranks - 1) + 1), [bad], added))
        assert found.wrong == [bad] and found.is_steady and found.parameter == 1


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
    [{"sharding": "zero2"}, {"find_unused_parameters": True}, {"compile": "reduce-overhead"}],
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

# extra: verify
"""Check that the schedule is a function of the step.

It has to be the same on all ranks, in repeated calls and in another process.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial

from config import TrainingConfig
from lib.values import format_plural, scramble_global_rngs
from lib.verify.fork import BrokenInvariant, Fork, default_dtype, pretend_rank
from lib.verify.new_process import CHANGED_ENVIRONMENT, NO_ANSWER
from lib.verify.result import NOT_CHECKED, join_parts
from utils.distributed.collectives import all_gather_json
from utils.training import optimizer
from utils.training.hooks import ModelHooks
from utils.training.optimizer import check_param_groups, list_group_lr_factors
from utils.training.schedule import Progress, Schedule

Factors = dict[str, float]  # the factor of each group by its name, or of all groups under ""
TOTAL_STEPS, WARMUP_STEPS = 1000, 100  # steps of the run whose factors are compared


def sample_factors(hooks: ModelHooks, config: TrainingConfig) -> list[Factors]:
    """Return the factors at five steps and their epochs, in a run of as many epochs as the config has."""
    epochs = min(config.limits[0], TOTAL_STEPS)
    steps = (0, WARMUP_STEPS // 2, WARMUP_STEPS, TOTAL_STEPS // 2, TOTAL_STEPS - 1)
    moments = [Progress(step=step, epoch=int(step * epochs / TOTAL_STEPS)) for step in steps]
    return [compute_factors(hooks, config, TOTAL_STEPS, WARMUP_STEPS, progress) for progress in moments]


@default_dtype()
def schedule(fork: Fork) -> str:
    """Check that the learning rate is a function of the step, the same on all ranks and in repeated calls."""
    ask = partial(sample_factors, fork.hooks, fork.config)

    def check() -> tuple[list[Factors], str]:
        scramble_global_rngs(fork.ctx.rank)
        factors, net = ask(), fork.create_model()
        by_step, length = list_run_factors(fork)
        checked = factors + list(by_step.values())
        if not all(math.isfinite(value) and value >= 0 for factor in checked for value in factor.values()):
            raise BrokenInvariant(
                f"lr_factor must be finite and not negative, but gives {format_factors(checked)}. Fix its formula."
            )
        groups = check_param_groups(
            fork.hooks.param_groups(net, fork.config), {p: name for name, p in net.named_parameters()}
        )
        for factor in checked:
            list_group_lr_factors(groups, factor.get("", factor))
        with pretend_rank(ranks := fork.ctx.world_size, ranks + 1):
            other_factors = ask()
        if factors != ask() or factors != other_factors:
            raise BrokenInvariant(
                f"lr_factor gives {format_factors(factors)}, but {format_factors(other_factors)} on {ranks + 1} ranks."
                " It depends on more than config, step and progress. Use only these."
            )
        first, second = simulate_factors(fork, is_resumed=False), simulate_factors(fork, is_resumed=True)
        if first != second:
            step = next(step for step, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
            raise BrokenInvariant(
                f"lr_factor gives {format_factors(first[step : step + 1])} in step {step} of a run whose metric stops"
                f" improving, but {format_factors(second[step : step + 1])} in a second run that is resumed halfway."
                " lr_factor keeps state of its own. Keep that state in progress.user."
            )
        steps = ", ".join(f"{format_factors([factor], 3)} at step {step:,}" for step, factor in by_step.items())
        return factors, f"{length} lr_factor is {steps}."

    factors, text = fork.run_on_all_ranks(check)
    note = ""
    if fork.hooks.lr_factor is not optimizer.lr_factor:
        note = fork.divide_among_ranks([partial(check_new_process_factors, fork, factors)])[0]
    if any(rank_factors != factors for rank_factors in all_gather_json(factors, fork.ctx)):
        raise BrokenInvariant("lr_factor differs between ranks. Make it a function of config, step and progress.")
    return join_parts(text, note)


def list_run_factors(fork: Fork) -> tuple[dict[int, Factors], str]:
    """Return the factors by step in a run with these flags, and the length of the run as text.

    The steps are at the start, in the warm-up, after the warm-up, in the middle and at the end.
    """
    planned = Schedule(fork.config, fork.hooks.lr_factor)
    sampler = fork.create_loader(fork.train_set, fork.config, fork.ctx).sampler
    planned.plan(sampler)
    warmup = planned.warmup_steps
    total = fork.config.schedule_steps or planned.total_steps
    factors = {}
    for step in sorted({0, min(warmup // 2, total - 1), min(warmup, total - 1), total // 2, total - 1}):
        progress = Progress(step=step, epoch=step // sampler.steps_per_epoch)
        factors[step] = compute_factors(fork.hooks, fork.config, total, warmup, progress)
    length = f"The run has {format_plural(total, 'step')} without warm-up."
    if warmup:
        length = f"The run has {format_plural(total, 'step')}, {warmup:,} of them warm-up."
    return factors, length


def compute_factors(hooks: ModelHooks, config: TrainingConfig, total: int, warmup: int, progress: Progress) -> Factors:
    factor = hooks.lr_factor(config, progress.step, total, warmup, progress)
    by_name = factor if isinstance(factor, dict) else {"": factor}
    return {name: float(value) for name, value in by_name.items()}


def format_factors(factors: list[Factors], digits: int = 6) -> str:
    return ", ".join(" ".join(f"{n} {f:.{digits}g}".strip() for n, f in factor.items()) for factor in factors)


def check_new_process_factors(fork: Fork, factors: list[Factors]) -> str:
    """Raise BrokenInvariant if lr_factor gives something else in a new process. No answer from there is a note."""
    new_factors, problem = fork.new_process.answer("factors")
    if problem.startswith(NO_ANSWER):
        return f"{NOT_CHECKED}lr_factor in a new process ({problem})."
    if new_factors != factors:
        there = f"fails ({problem})" if problem else f"gives {format_factors(new_factors)}"
        raise BrokenInvariant(
            f"lr_factor gives {format_factors(factors)}, but {there} in a new process with another working directory,"
            f" {CHANGED_ENVIRONMENT}. It depends on one of these. Let lr_factor use only config, step and progress."
        )
    return ""


def simulate_factors(fork: Fork, is_resumed: bool) -> list[Factors]:
    """Return the factors of a run of 400 steps with an evaluation every 10 steps, of which only the first improves."""
    total, every, progress, factors = 400, 10, Progress(), []
    for step in range(total):
        progress.step, progress.epoch = step, step // every
        if step and step % every == 0:
            progress.record_value(1.0, sign=1)
        if is_resumed and step == total // 2:  # a checkpoint would restore the progress here
            progress = Progress(**json.loads(json.dumps(asdict(progress))))
        factors.append(compute_factors(fork.hooks, fork.config, total, total // 20, progress))
    return factors

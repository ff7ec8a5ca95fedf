# extra: replay
"""Repeat one optimizer step of a run in one process, whatever number of ranks it had, and look at it closely:

    python scripts/replay.py RUN --step N [--dump FILE] [flags of train.py]

It continues in a temporary folder from the latest checkpoint before step N (--keep_every keeps some for this), or from
the start. It prints loss and gradient norm of the step, the samples with the largest losses, the parameters with the
largest gradients, and where values that are not finite arise. Then it trains to the next record of the run, and
compares all records from the checkpoint on. It also compares the state if the run has a checkpoint of step N. They
are bitwise equal if the run has exact sums, otherwise equal up to rounding. The run is not changed. The exit code is 1
if an exact run differs.

--dump FILE writes all of it. torch.load(FILE, weights_only=True) returns a dict with the samples' indices, losses and
batches, the weights before and after the step, the optimizer's state after the step, the gradients (those that the
optimizer got, and computed once more), and for each micro-batch its loss and a fingerprint of each module's output.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import torch
from torch import Tensor, nn

import model as fork
import train
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark.in_process_run import InProcessRun
from lib.values import TIMING_FIELDS, comparable_state, flatten_nested, hash_nested
from scripts.lib.mirrored_run import local_run  # extra: companions
from utils.batch import list_tensors, map_tensors
from utils.checkpoint import format as checkpoint
from utils.data.sampler import MicroBatch
from utils.distributed.consensus import Stopped
from utils.files import read_json, read_records, replace_file
from utils.rng import seed_device
from utils.run.command_line import repair_standard_streams
from utils.run.exit import exit_with_error
from utils.settings.errors import UserError
from utils.table import format_table
from utils.training.fingerprint import fingerprint_tensors
from utils.training.hooks import ModelHooks
from utils.training.parts.loss_terms import LossTerms
from utils.training.step_sums import StepSums

ROWS_SHOWN = 8
DISABLED_SETTINGS = """save_every save_every_steps save_every_minutes max_time max_skipped_steps hang_timeout
record_samples enable_profiling cpu_offload""".split()


@dataclass
class ReplayedStep:
    """The facts about a replayed step. Tensors are on the CPU."""

    number: int = 0  # the number of the step, from 1
    epoch: int = 0  # the number of the epoch, from 0
    host: str = field(default_factory=socket.gethostname)
    loss: float = math.nan
    norm: float = math.nan
    lrs: list[float] = field(default_factory=list)  # the learning rates of the parameter groups
    indices: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # the losses of the samples one by one, in evaluation mode
    micro_batches: list[list[int]] = field(default_factory=list)  # the samples of each micro-batch
    batches: list[Any] = field(default_factory=list)  # the micro-batches as compute_loss gets them
    micro_losses: list[float] = field(default_factory=list)
    outputs: list[list[tuple[str, int]]] = field(default_factory=list)  # module and fingerprint, as they were computed
    places: dict[str, str] = field(default_factory=dict)  # where values that are not finite arise
    gradients: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, Tensor] = field(default_factory=dict)  # the gradients that the optimizer got in the step
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)  # the optimizer's state after the step, by parameter


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", help="folder of a run, or URL of a mirrored run")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step, from 1, as in metrics.jsonl")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write everything to this file")
    options, flags = parser.parse_known_args()
    options.run = local_run(options.run, functools.partial(choose_checkpoints, options.step))  # extra: companions
    options.run = Path(options.run)
    with open_replay(options.run, options.step, flags) as (rerun, start):
        is_equal = replay(rerun, options, start)
    return 0 if is_equal or vars(rerun.config).get("reduction") != "exact" else 1


def choose_checkpoints(step: int, steps: list[int], best: int) -> list[int]:
    """Return the checkpoints that are needed, which are the latest before the step, and the step's own."""
    return [saved_step for saved_step in steps if saved_step < step][-1:] + [
        saved_step for saved_step in steps if saved_step == step
    ]


@contextlib.contextmanager
def open_replay(run: Path, step: int, flags: list[str]) -> Iterator[tuple[InProcessRun, Path | None]]:
    """Open the run in a temporary folder, at its latest checkpoint before the step. Yield it with that checkpoint."""
    start, payload = find_checkpoint_before(run, step)
    config = choose_config(run, payload, flags)
    if payload and payload["provenance"].get("cpu_threads"):
        os.environ["OMP_NUM_THREADS"] = str(payload["provenance"]["cpu_threads"])
        torch.set_num_threads(payload["provenance"]["cpu_threads"])
    ctx = setup_distributed(config)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        rerun = InProcessRun(config, ctx, Path(folder) / "run", 0, str(start or ""))
        try:
            yield rerun, start
        finally:
            rerun.close()
    cleanup_distributed()


def record_steps(run: Path, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Return records of the replayed steps up to `last`, by step, from the latest checkpoint before step `first` on."""
    with open_replay(run, first, ["--log_interval", "1"]) as (rerun, _):
        train_to_step(rerun, last)
        return {record["step"]: record for record in rerun.training.attempt.run.records.read("train")}


def dump_step(run: Path, step: int) -> dict[str, Any]:
    """Replay a step, and return what --dump writes."""
    with open_replay(run, step, []) as (rerun, _):
        return vars(replay_step(rerun, step))


def find_checkpoint_before(run: Path, step: int) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the latest valid checkpoint before the step, and its content. Raises UserError.

    Both are None for a start from scratch.
    """
    if not (status := read_json(run / "status.json")):
        raise UserError(f"{run} has no status.json. Give the folder of a run.")
    if not 1 <= step <= status.get("step", 0):
        raise UserError(f"--step must be a step of the run, from 1 to {status.get('step', 0)}, got {step}.")
    folder = run / "checkpoints"
    folder = folder if folder.is_dir() else Path(read_json(run / "config.json")["checkpoint_dir"])
    for path in reversed(checkpoint.list_step_checkpoints(folder)):
        if checkpoint.parse_step(path) < step:
            try:
                return path, checkpoint.read_checkpoint(path)[0]
            except UserError as error:
                print(f"A checkpoint was skipped: {error}")
    return None, None


def choose_config(run: Path, payload: dict[str, Any] | None, flags: list[str]) -> TrainingConfig:
    """Return the run's settings, for one process and without its saves."""
    origin = payload["provenance"] if payload else read_json(run / "provenance.json")
    # in a run that was made longer, the steps after the end of the former attempt have the latest settings
    is_inside = payload and payload["progress"]["step"] < origin.get("total_steps", math.inf)
    saved = payload["config"] if payload and is_inside else read_json(run / "config.json")
    plain: dict[str, Any] = {"init_method": "", "on_checkpoint": "", "track": "none", "sharding": "none"}
    plain |= dict.fromkeys(DISABLED_SETTINGS, 0) | ({"init_from": ""} if payload else {})
    if ModelHooks.from_module(fork).lr_factor is ModelHooks.lr_factor:  # else the schedule may depend on evaluations
        plain |= {"eval_every_steps": 0}
    sizes = {"global_batch_size": origin["global_batch_size"], "grad_accum_steps": 1}
    return TrainingConfig.from_args(flags, saved | plain | sizes)


def replay(rerun: InProcessRun, options: argparse.Namespace, start: Path | None) -> bool:
    """Train to the step, examine it, and go on to the next record. Return whether everything equals the run's."""
    state, first, target = rerun.state, rerun.state.progress.step, options.step
    records = read_records(options.run / "metrics.jsonl")
    run_records = [r for *_, r in records if r.get("kind") == "train" and r["step"] > first]
    end = min((r["step"] for r in run_records if r["step"] >= target), default=target)
    origin = start.name if start else "the start"
    print(f"Step {target} of {options.run} is replayed from {origin}.", flush=True)
    step = replay_step(rerun, target)
    print_step(step)
    different = None
    for path in checkpoint.list_step_checkpoints(options.run / "checkpoints"):
        if checkpoint.parse_step(path) != target:
            continue
        different = find_differing_state(path, state.state_dict())
        text = f"The state after the step and {path.name} are bitwise equal."
        if different:
            text = f"{len(different)} tensors of the state after the step differ from {path.name}, such as"
            text += f" {', '.join(different[:3])}."
        print(text)
    train_to_step(rerun, end)
    replay_records = {r["step"]: r for r in rerun.training.attempt.run.records.read("train")}
    is_equal = compare_records([(r, replay_records[r["step"]]) for r in run_records if r["step"] <= end])
    if options.dump:
        replace_file(options.dump, lambda file: torch.save(vars(step), file))
        print(f"{options.dump} was written.")
    return is_equal and not different


def replay_step(rerun: InProcessRun, target: int) -> ReplayedStep:
    """Train to the step, and return what an examination of it shows."""
    state, progress = rerun.state, rerun.state.progress
    train_to_step(rerun, target - 1)
    begin_epoch(rerun)
    step = ReplayedStep(number=target, epoch=progress.epoch, before=copy_tensors(state.model.state_dict()))
    planned = rerun.loader.sampler.micro_batches(step.epoch, progress.samples_in_epoch)
    first = next(planned)
    plan = [first, *itertools.islice(planned, first.micro_batches_in_step - 1)]
    plain_commit = StepSums.commit

    def commit(sums: StepSums, *args: Any, **options: Any) -> None:
        step.loss, step.norm = (sums.loss / sums.loss_count).item(), state.gradient_norm.item()
        plain_commit(sums, *args, **options)

    def copy_gradients(*_: Any) -> None:
        step.used = copy_tensors({name: p.grad for name, p in state.model.named_parameters()})

    hook = state.optimizer.register_step_pre_hook(copy_gradients)
    with mock.patch.object(StepSums, "commit", commit):
        train_to_step(rerun, target)
    hook.remove()
    step.after, step.lrs = copy_tensors(state.model.state_dict()), state.learning_rates
    step.moments = copy_tensors(flatten_nested(comparable_state(state.state_dict())["optimizer"]))
    examine_step(step, plan, rerun)
    return step


def train_to_step(rerun: InProcessRun, step: int) -> None:
    """Train until the run has made so many steps."""
    state, training = rerun.state, rerun.training

    def stop_at_step() -> bool:
        if state.progress.step >= step:
            raise Stopped
        return False

    while state.progress.step < step:
        begin_epoch(rerun)
        if state.schedule.is_at_end:
            raise UserError(
                f"--step {step} is after the last step with the settings of the checkpoint. Add --max_steps {step}."
            )
        with contextlib.suppress(Stopped):
            train.train_one_epoch(replace(training, consensus=mock.Mock(step=stop_at_step)))
        training.reporter.finish_log_point()


def begin_epoch(rerun: InProcessRun) -> None:
    """At the end of an epoch, begin the next one, as a run does."""
    state, has_schedule = rerun.state, ModelHooks.from_module(fork).lr_factor is not ModelHooks.lr_factor
    if state.schedule.is_epoch_complete:
        if has_schedule and state.schedule.is_evaluation_due and "val" in rerun.training.held_out:
            train.validate(rerun.training)  # the fork's schedule may depend on it
        state.schedule.end_epoch()


def copy_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def examine_step(step: ReplayedStep, plan: list[MicroBatch], rerun: InProcessRun) -> None:
    """Compute the micro-batches once more with the weights before the step, and then each sample by itself."""
    hooks, config, loader, device = rerun.training.hooks, rerun.config, rerun.loader, rerun.loader.device
    epoch = step.epoch
    model = hooks.create_model(config, device)
    model.load_state_dict(step.before)

    terms = hooks.find_part(LossTerms)

    def compute_loss(batch: Any, micro_batch: MicroBatch) -> tuple[Tensor, Any]:
        seed_device(device, "step", config.seed, step.number - 1, micro_batch.number)
        with rerun.state.precision.autocast():
            total, loss_count = hooks.compute_loss(model, batch)["loss"][:2]
            if terms:
                return terms.compute_mean(total), 0.0
            return total, loss_count

    count, gradients_are_finite = 0.0, True
    if terms:
        batches = [loader.fetch_samples(planned.indices, epoch)[2] for planned in plan]
        terms.set_divisors(torch.stack([terms.count_terms(batch) for batch in batches]).sum(0))
        count = 1.0
    for micro_batch in sorted(plan, key=lambda planned: planned.number):
        label, batch = f"micro-batch {micro_batch.number}", loader.fetch_samples(micro_batch.indices, epoch)[2]
        step.indices += micro_batch.indices
        step.micro_batches.append(micro_batch.indices)
        step.outputs.append([])
        step.batches.append(map_tensors(lambda tensor: tensor.cpu(), batch))
        model.train()
        with note_non_finite(model, batch, step.places, label, step.outputs[-1]):
            total, loss_count = compute_loss(batch, micro_batch)
        step.micro_losses.append(total.item())
        total.backward()
        count += float(loss_count)
        if not total.isfinite():
            step.places.setdefault(label, "in compute_loss, after the model")
        if gradients_are_finite and not is_finite([p.grad for p in model.parameters()]):
            gradients_are_finite = False
            step.places.setdefault(label, explain_backward(functools.partial(compute_loss, batch, micro_batch)))
    step.gradients = {name: p.grad.cpu() / count for name, p in model.named_parameters() if p.grad is not None}
    model.load_state_dict(step.before)
    model.eval()
    for index in step.indices:
        label, batch = f"sample {index}", loader.fetch_samples([index], epoch)[2]
        with torch.no_grad(), rerun.state.precision.autocast(), note_non_finite(model, batch, step.places, label):
            total, loss_count = hooks.compute_loss(model, batch)["loss"][:2]
        loss_count = torch.as_tensor(loss_count)
        step.losses.append(torch.where(loss_count == 0, 0.0, total / loss_count).sum().item())
        if not is_finite(total):
            step.places.setdefault(label, "in compute_loss, after the model")


def is_finite(value: Any) -> bool:
    return all(tensor.isfinite().all() for tensor in list_tensors(value) if tensor.is_floating_point())


@contextlib.contextmanager
def note_non_finite(
    model: nn.Module, batch: Any, origins: dict[str, str], label: str, outputs: list[tuple[str, int]] | None = None
) -> Iterator[None]:
    """Note the first module of the forward pass whose output is not finite, and in `outputs` all of them."""
    if not is_finite(batch):
        origins[label] = "in the batch itself, before the model"

    def note_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if outputs is not None:
            name = f"{names[module] or 'the model'} ({type(module).__name__})"
            outputs.append((name, fingerprint_tensors("output", list_tensors(output))))
        if not is_finite(output):
            relation = "in" if is_finite(inputs) else "before"
            origins.setdefault(label, f"{relation} {names[module] or 'the model'} ({type(module).__name__})")

    names = {module: name for name, module in model.named_modules()}
    hooks = [module.register_forward_hook(note_output) for module in names]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def explain_backward(loss: Callable[[], tuple[Tensor, Any]]) -> str:
    """Return the operation whose backward pass gives NaN."""
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            loss()[0].backward()
    except RuntimeError as error:
        return f"in the backward pass: {str(error).splitlines()[0]}"
    return "in the backward pass, by a sum that is too large"


def print_step(step: ReplayedStep) -> None:
    samples = f"{len(step.indices)} samples in {len(step.micro_batches)} micro-batches"
    print(f"epoch {step.epoch + 1}, {samples}, learning rate {step.lrs[0]:.6g}")
    print(f"loss {step.loss:.9g}, gradient norm {step.norm:.9g}")
    worst = sorted(zip(step.losses, step.indices, strict=True), key=lambda pair: (math.isfinite(pair[0]), -pair[0]))
    print("These samples have the largest losses, in evaluation mode with the weights before the step:")
    print(format_table([["sample", "loss"], *([index, f"{loss:.6g}"] for loss, index in worst[:ROWS_SHOWN])]))
    norms = {name: gradient.double().norm().item() for name, gradient in step.gradients.items()}
    largest = sorted(norms, key=lambda name: (math.isfinite(norms[name]), -norms[name]))[:ROWS_SHOWN]
    print("These parameters have the largest gradients:")
    rows = [[name, f"{norms[name]:.6g}", f"{step.before[name].double().norm().item():.6g}"] for name in largest]
    print(format_table([["parameter", "norm", "norm of the weights"], *rows]))
    if step.places:
        print("Values that are not finite arise here:")
        print(format_table([["in", "where"], *([label, origin] for label, origin in step.places.items())]))


def find_differing_state(path: Path, state: dict[str, Any]) -> list[str]:
    """Return the names of the values that are not bitwise equal to those in a checkpoint."""
    both = [comparable_state(payload) for payload in (checkpoint.read_checkpoint(path)[0], state)]
    saved, current = (
        flatten_nested({key: value for key, value in contents.items() if key != "progress"}) for contents in both
    )
    return [name for name in saved if hash_nested(saved[name]) != hash_nested(current.get(name))]


def compare_records(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Compare records of the run with those of the replay, and return whether they are equal."""
    gaps: dict[str, float] = {}
    for run_record, replay_record in pairs:
        for name, value in run_record.items():
            if name not in TIMING_FIELDS and value != replay_record.get(name):
                is_number = isinstance(value, float) and isinstance(replay_record.get(name), float)
                gap = abs(value - replay_record[name]) / max(abs(value), 1e-30) if is_number else math.inf
                gaps[name] = max(gap, gaps.get(name, 0.0))
    if not pairs:
        print("The run has no record of this step or later ones to compare with.")
    else:
        steps = f"{pairs[0][0]['step']} to {pairs[-1][0]['step']}"
        shares = {name: f" by {gap:.1e} of its value" for name, gap in gaps.items() if gap < math.inf}
        text = ", ".join(name + shares.get(name, "") for name in gaps)
        if gaps:
            print(f"The records of the run from step {steps} differ in {text}.")
        else:
            print(f"The records of the run from step {steps} are bitwise equal.")
    return not gaps


if __name__ == "__main__":
    repair_standard_streams()
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        exit_with_error(error)

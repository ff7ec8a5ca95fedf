"""Optimizer step, schedule, average, progress: a skipped step changes no bit, not even the first one."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from forged import MICRO_BATCH
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.distributed.context import DistributedContext
from utils.distributed.device import has_fast_bf16
from utils.settings.errors import UserError
from utils.training.first_passes import evaluate_once, train_twice
from utils.training.hooks import ModelHooks
from utils.training.optimizer import lr_factor
from utils.training.parts.create import create_parts
from utils.training.parts.part import Part
from utils.training.parts.weight_average import WeightAverage
from utils.training.precision import Precision
from utils.training.state import TrainState

AVERAGED = {}
AVERAGED["ema_decay"] = 0.9

CPU = torch.device("cpu")
FLOAT32 = Precision("cpu", None)
SAMPLES = 4


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    setup_distributed(TrainingConfig(backend="gloo"))
    yield
    cleanup_distributed()


def hooks_with(groups):
    return ModelHooks(create_model=None, param_groups=groups, compute_loss=None)


def make(precision=FLOAT32, model=None, groups=None, **changes):
    """The state of a run with 10 epochs of 10 steps."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    config = TrainingConfig(**{"warmup_epochs": 0} | changes)
    state = TrainState(model, hooks_with(lambda *_: groups or [{"params": model.parameters()}]), config, precision)
    ctx = DistributedContext(0, 0, 1, CPU)
    state.parts += create_parts((), model, None, config, ctx, precision)
    sampler = GlobalBatchSampler(range(40), batch_size=4, micro_batches_per_step=1, assignment=Assignment(0, 1))
    state.allocate_metrics({"loss": (0.0, 4)})
    state.plan_schedule(sampler)
    return state


def step(state, gradient=None, more_loss=0.0):
    """An optimizer step with computed gradients, or with all of them set to one value. more_loss: without gradient."""
    loss = state.model(torch.randn(4, 3)).square().sum()
    state.step_sums.add({"loss": (loss + more_loss, 4)}, MICRO_BATCH)
    state.step_sums.start_reduce(MICRO_BATCH)
    state.backward(loss, is_padding=False)
    if gradient is not None:
        for p in state.model.parameters():
            p.grad.fill_(gradient)
    state.update_if_finite(SAMPLES)
    state.advance(SAMPLES)


def load(state, source):
    state.load_state_dict(copy.deepcopy(source.state_dict()))


def snapshot(state):
    parts = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()["state"]}
    if average := state.find_part(WeightAverage):
        parts["average"] = average.state_dict()
    return copy.deepcopy(parts)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.guarantee("weights")
def test_the_passes_before_the_first_step_leave_the_state_unchanged():
    """A run that is stopped before its first step saves its initial state."""
    state = make(**AVERAGED)
    before, batch = snapshot(state), torch.randn(4, 3)

    def loss(net, batch):
        return {"loss": (net(batch).square().sum(), 4)}

    train_twice(state.model, batch, state, loss)
    assert evaluate_once(batch, state, loss) == ["loss"] and same(snapshot(state), before)
    assert all(p.grad is None for p in state.model.parameters())


class Shrunk(Part):
    """Half of each parameter, to be evaluated and saved beside the model."""

    def __init__(self, model):
        self._model = model

    def _half(self):
        return {name: value / 2 for name, value in self._model.state_dict().items()}

    def save(self, state):
        state["shrunk"] = self._half()

    @contextmanager
    def _applied(self):
        before = copy.deepcopy(self._model.state_dict())
        self._model.load_state_dict(self._half())
        yield
        self._model.load_state_dict(before)

    def weights(self):
        return {"shrunk": self._applied()}


def test_weights_that_a_part_adds_are_those_of_the_checkpoint():
    state = make(model=nn.Linear(3, 1), **AVERAGED)
    state.parts.append(Shrunk(state.model))
    payload = copy.deepcopy(state.state_dict())
    for saved in (payload, payload | {"ema": {}}):
        weights = state.saved_weight_contexts(saved)
        assert list(weights) == [name for name in ("model", "ema", "shrunk") if saved[name]]
        with weights["shrunk"]:
            assert same(state.model.state_dict(), payload["shrunk"])


def test_memory_that_runs_out_while_weights_are_loaded_is_no_wrong_checkpoint(monkeypatch):
    state = make()
    payload = copy.deepcopy(state.state_dict())

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(state.model, "load_state_dict", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        state.load_state_dict(payload)


@pytest.mark.guarantee("not-finite")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_non_finite_gradient_changes_nothing(optimizer, bad, steps_before):
    state = make(optimizer=optimizer, clip_grad_norm=1.0, lr=0.01, **AVERAGED)
    for _ in range(steps_before):
        step(state)
    bad_steps = [steps_before + 1]
    if not steps_before and optimizer == "adamw":
        step(state, gradient=bad)  # Adam creates its state in its first step
        bad_steps.append(2)
    before = snapshot(state)
    step(state, gradient=bad)
    assert same(before, snapshot(state))
    step(state)
    after = snapshot(state)
    assert not same(before["model"], after["model"])
    assert all(value.isfinite().all() for value in after["model"].values())
    skipped = state.read_skipped_steps()
    assert [skip.step for skip in skipped] == bad_steps and state.progress.skipped_steps == len(bad_steps)
    assert state.progress.step == bad_steps[-1] + 1 and state.progress.skipped_in_row == 0
    assert state.read_skipped_steps() == []


@pytest.mark.guarantee("not-finite")
def test_a_non_finite_loss_with_finite_gradients_changes_nothing():
    state = make(**AVERAGED)
    step(state)
    before = snapshot(state)
    step(state, more_loss=float("inf"))
    assert same(before, snapshot(state)) and [skip.step for skip in state.read_skipped_steps()] == [2]


@pytest.mark.guarantee("thawed")
def test_a_parameter_that_is_trainable_only_later_is_an_error_at_that_step():
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = make(model=model)
    step(state)
    model[0].weight.requires_grad_(True)
    expected = (
        r"0.weight was frozen at the start and got requires_grad_\(True\) before step 2, .*or train the parameter in a"
    )
    with pytest.raises(UserError, match=expected):
        step(state)


@pytest.mark.guarantee("weights")
def test_the_learning_rate_is_a_function_of_the_step_and_skipped_steps_count():
    factors = [lr_factor(TrainingConfig(), step, 10, 4, None) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[7] == pytest.approx(0.5) and factors[10] == 0
    config = TrainingConfig(lr=0.4, min_lr=0.1)  # nanoGPT's schedule
    ends = [lr_factor(config, step, 10, 0, None) for step in (0, 5, 10, 99)]
    assert ends == [1.0, pytest.approx(0.25 + 0.75 * 0.5), 0.25, 0.25]
    state = make(lr=0.2)
    for gradient in (None, float("nan"), None):
        step(state, gradient)
    assert state.learning_rates == [0.2 * factor for factor in state.compute_lr_factors(2, state.progress)]


NO_VALIDATION = "--{} has no effect, since there is no validation set. Leave this flag out."
TOO_PATIENT = "--patience {} has no effect, since at most {} evaluations come before the last one. Use a smaller"


@pytest.mark.parametrize(
    ("settings", "has_validation", "expected"),
    [
        ({}, False, []),
        ({"best_metric": "max:nonsense"}, False, [NO_VALIDATION.format("best_metric max:nonsense")]),
        ({"patience": 3}, False, [NO_VALIDATION.format("patience 3")]),
        (
            {"eval_every_steps": 5, "best_metric": "loss"},
            False,
            [NO_VALIDATION.format("best_metric loss"), NO_VALIDATION.format("eval_every_steps 5")],
        ),
        ({"patience": 8}, True, []),  # of 10 evaluations, after each epoch of 10 steps
        ({"patience": 9}, True, [TOO_PATIENT.format(9, 9)]),
        ({"patience": 1, "eval_every": 0}, True, [TOO_PATIENT.format(1, 0)]),
        ({"patience": 1, "eval_every": 5}, True, [TOO_PATIENT.format(1, 1)]),
        ({"patience": 18, "eval_every": 0, "eval_every_steps": 5}, True, []),
        ({"patience": 19, "eval_every": 0, "eval_every_steps": 5}, True, [TOO_PATIENT.format(19, 19)]),
        ({"patience": 9, "eval_every_steps": 10}, True, [TOO_PATIENT.format(9, 9)]),  # of both at the same steps
        ({"patience": 17, "eval_every_steps": 4}, True, []),  # 24 and 9, of which 4 coincide
        ({"patience": 29, "eval_every_steps": 4}, True, [TOO_PATIENT.format(29, 29)]),
        ({"patience": 2, "max_steps": 30}, True, [TOO_PATIENT.format(2, 2)]),
        (
            {"warmup_epochs": 20},
            True,
            ["The warm-up has 200 steps, but the run has 100, so the run ends at 50.0% of the learning"],
        ),
    ],
)
def test_settings_without_an_effect_are_said(settings, has_validation, expected):
    state = make(**settings)
    state.progress.best_metric = "max:top1" if has_validation else ""
    warnings = state.schedule.warnings
    assert len(warnings) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(warnings, expected, strict=True))


@pytest.mark.parametrize(
    ("step", "best_value", "counted", "expected"),
    [
        (50, 0.5, 3, []),  # one of the four evaluations that are left before the last is enough
        (50, 0.5, 0, []),
        (70, 0.5, 1, [TOO_PATIENT.format(4, 2)]),
        (70, 0.5, 2, []),
        (50, None, 0, [TOO_PATIENT.format(4, 4)]),  # another validation set: the first of them is the best
    ],
)
def test_after_a_resume_patience_has_what_is_counted_and_what_is_left(step, best_value, counted, expected):
    state = make(patience=4)
    progress = state.progress
    progress.best_metric, progress.step = "max:top1", step
    progress.best_value, progress.evaluations_since_best = best_value, counted
    warnings = state.schedule.warnings
    assert len(warnings) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(warnings, expected, strict=True))
    progress.step = 100
    assert state.schedule.warnings == warnings  # at the end it is the same


def test_patience_counts_evaluations_without_a_better_value():
    state = make(patience=2)
    progress = state.progress
    values = [(0.5, True), (0.4, False), (0.6, True), (0.6, False), (float("nan"), False)]
    assert [progress.record_value(value, 1) for value, _ in values] == [is_best for _, is_best in values]
    assert (progress.best_value, progress.evaluations_since_best) == (0.6, 2)
    assert state.schedule.is_patience_over and state.schedule.is_finished
    assert make().progress.record_value(3.0, -1)


def test_the_state_tells_the_loop_when_to_evaluate_and_when_the_run_is_over():
    state = make(max_steps=35, eval_every=2)
    due = []
    while not state.schedule.is_finished:
        while not (state.schedule.is_at_end or state.schedule.is_epoch_complete):
            step(state)
        due += [state.progress.step] * state.schedule.is_evaluation_due
        state.schedule.end_epoch()
    assert due == [20, 35]
    assert (state.progress.epoch, state.progress.samples_in_epoch) == (3, 20)  # a longer run continues this epoch
    state.progress.evaluated_step = 35
    assert not state.schedule.is_evaluation_due


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_momenta_are_restored_to_their_parameters_in_any_order_of_groups(optimizer):
    source = make(optimizer=optimizer, clip_grad_norm=0.1)
    step(source)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = [{"params": list(net[2].parameters())[::-1]}, {"params": list(net[:2].parameters())}]
    other = make(model=net, groups=groups, optimizer=optimizer, clip_grad_norm=0.1)
    load(other, source)
    for state in (source, other):
        torch.manual_seed(1)
        step(state)
    assert same(other.model.state_dict(), source.model.state_dict())
    for param, source_param in zip(other.model.parameters(), source.model.parameters(), strict=True):
        assert same(other.optimizer.state[param], source.optimizer.state[source_param])


def test_a_checkpoint_whose_optimizer_has_other_parameters_is_rejected():
    payload, frozen = make().state_dict(), make().model
    frozen[0].requires_grad_(False)
    other = make(model=frozen)
    with pytest.raises(UserError, match="optimizer has different parameters. Use"):
        other.load_state_dict(payload)
    payload["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(5)  # a fused kernel would write out of bounds
    with pytest.raises(UserError, match="optimizer has different parameters. Use"):
        make().load_state_dict(payload)


def test_a_parameter_outside_the_model_is_rejected():
    net, other = make().model, nn.Parameter(torch.zeros(2))
    with pytest.raises(
        UserError, match="holds a parameter that is not in the model.*. Register the parameter in the model"
    ):
        make(model=net, groups=[{"params": [*net.parameters(), other]}])


@pytest.mark.guarantee("changed-settings")
def test_a_resume_takes_learning_rate_and_decay_from_the_config():
    source, target = make(lr=0.1, weight_decay=0.1, momentum=0.8), make(lr=0.02, weight_decay=0.3, momentum=0.9)
    step(source)
    load(target, source)
    group = target.optimizer.param_groups[0]
    assert (group["base_lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.3, 0.9)
    assert same(target.optimizer.state_dict()["state"], source.optimizer.state_dict()["state"])


@pytest.mark.guarantee("precision")
@pytest.mark.parametrize(
    ("changes", "fast", "device", "expected"),
    [
        ({}, True, "cpu", None),
        ({}, True, "cuda", torch.bfloat16),
        ({}, False, "cuda", torch.float16),
        ({"use_amp": False}, True, "cuda", None),
        ({"amp_dtype": "fp16"}, True, "cpu", torch.float16),
        ({"amp_dtype": "bf16"}, False, "cpu", torch.bfloat16),
    ],
)
def test_the_precision_follows_the_hardware_unless_given(changes, fast, device, expected):
    config = TrainingConfig(**changes)  # with the defaults, which are what a user gets
    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=torch.device(device), fast_bf16=fast
    )
    assert precision.dtype is expected and precision.has_loss_scaling is (expected is torch.float16)
    assert has_fast_bf16(CPU) is False


@pytest.mark.guarantee("weights", "not-finite")
def test_the_average_warms_up_and_counts_only_steps_that_are_taken():
    """The first update copies; a short run's average does not hold its first weights, nor does a resumed one's."""
    state = make(**AVERAGED)
    expected, taken = None, 0
    for number in range(120):
        step(state, gradient=math.nan if number in (0, 3, 40) else None)
        weight = state.model[0].weight.detach().double()
        if number not in (0, 3, 40):
            decay = min(0.9, taken / (9 + taken))
            expected = torch.lerp(weight, expected, decay) if taken else weight
            taken += 1
            average = state.find_part(WeightAverage).state_dict()["0.weight"]
            torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)
        if number in (2, 60):
            state.read_skipped_steps()
            before, state = state, make(**AVERAGED)
            load(state, before)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_optimizer_takes_the_memory_format_of_the_parameters(optimizer):
    """Fused kernels ignore strides: state in another layout would be applied to the wrong weights."""

    def train(state):
        torch.manual_seed(state.progress.step)
        loss = state.model(torch.randn(2, 2, 5, 5)).square().sum()
        state.step_sums.add({"loss": (loss, 4)}, MICRO_BATCH)
        state.backward(loss, is_padding=False)
        state.update_if_finite(SAMPLES)
        state.advance(SAMPLES)

    layouts = (torch.channels_last, torch.contiguous_format)
    whole, other = (make(model=nn.Conv2d(2, 3, 3).to(memory_format=layout), optimizer=optimizer) for layout in layouts)
    for _ in range(3):
        train(whole)
    load(other, whole)
    train(whole), train(other)
    # convolutions round differently in another layout
    torch.testing.assert_close(other.model.weight, whole.model.weight, rtol=1e-4, atol=1e-6)


def test_momentum_turned_on_at_a_resume_starts_at_zero():
    before, after = make(momentum=0.0), make(momentum=0.9)
    step(before)
    load(after, before)
    buffers = [state["momentum_buffer"] for state in after.optimizer.state.values()]
    assert len(buffers) == len(list(after.model.parameters())) and not any(buffer.any() for buffer in buffers)


def test_a_parameter_in_no_group_keeps_its_value_and_collects_no_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    state, before = make(model=model, groups=[{"params": list(model[0].parameters())}]), model[1].weight.clone()
    for _ in range(2):
        step(state)
    assert model[1].weight.grad is None and torch.equal(model[1].weight, before)


def test_the_mean_gradient_norm_does_not_depend_on_where_a_resume_divides_an_interval():
    norms = set()
    for cut in range(12):
        state = make(lr=0.01)
        for number in range(12):
            step(state)
            state.log_window.norms[-1] = torch.tensor(0.1 * (number + 1), dtype=torch.float64)  # with bits to round
            if number == cut:
                state.read_skipped_steps()  # as a save does
        state.read_skipped_steps()
        norms.add(state.log_window.means()["grad_norm"])
    assert len(norms) == 1

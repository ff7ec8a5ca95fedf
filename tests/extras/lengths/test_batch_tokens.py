"""--batch_tokens in real runs: the same micro-batches and bits on any number of ranks and after kills."""

import itertools
import random
import signal
from unittest import mock

import pytest
import torch
from packing import micro_batches
from test_exact_reduction import train_until  # extra: exact

import train
from line_tasks import Lines
from plain_loop import plain_loop
from ranks import run_ranks
from tasks import TASKS, config_of, using
from test_predict_and_export import predict_lines
from training import relative, train_flags
from utils.settings.errors import UserError

SIZE, EPOCHS, BUDGET, PER_STEP = 90, 3, 30, 4
FLAGS = f"--batch_tokens {BUDGET} --batch_size 64 --global_batch_size {BUDGET * PER_STEP} --bucket_window 2".split()
FLAGS += f"--no-use_amp --dataset_size {SIZE} --epochs {EPOCHS} --lr 0.05 --clip_grad_norm 1 --record_samples".split()
FIXED = "--batch_tokens 0 --bucket_window 100 --global_batch_size 64".split()


def planned():
    """For each epoch the global batches, each a list of micro-batches."""
    lengths, steps = Lines(SIZE, "train").lengths, []
    for epoch in range(EPOCHS):
        packed = micro_batches(lengths, BUDGET, seed=42, epoch=epoch, window=2)
        steps.append([packed[first : first + PER_STEP] for first in range(0, len(packed), PER_STEP)])
    return steps


def check_samples(runs, name):
    wanted = [sorted(itertools.chain(*step)) for step in itertools.chain(*planned())]
    assert runs.samples(name) == dict(enumerate(wanted, 1))


@pytest.mark.guarantee("lengths", "exact-ranks")  # extra: exact
@pytest.mark.parametrize("worlds", [(3,), pytest.param((2, 4, 5), marks=pytest.mark.slow)])
def test_runs_on_any_number_of_ranks_have_the_same_bits(runs, worlds):
    flags = [*FLAGS, "--reduction", "exact", "--num_workers", 1]
    for ranks in (1, *worlds):
        runs.train(ranks, f"on-{ranks}", *flags, task="lines")
        check_samples(runs, f"on-{ranks}")
    for ranks in worlds:
        runs.assert_same("on-1", f"on-{ranks}")
    record, lengths = runs.records("on-1", "train")[0], Lines(SIZE, "train").lengths
    steps = [*itertools.chain(*planned()[0])][: 5 * PER_STEP]
    padded = sum(max(lengths[k] for k in indices) * len(indices) for indices in steps)
    tokens = sum(lengths[k] for indices in steps for k in indices)
    assert record["step"] == 5 and record["padding"] == 1 - tokens / padded
    assert record["tokens_per_s"] == pytest.approx(tokens / record["step_s"] / 5)
    assert f"{record['tokens_per_s']:,.0f} tokens/s ({record['padding']:.0%} padding)" in runs.log("on-1")


@pytest.mark.guarantee("lengths", "exact-ranks")  # extra: exact
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_a_run_that_is_killed_and_continues_on_other_ranks_has_the_bits_of_the_uninterrupted_one(runs, seed):
    """Over three epochs, after SIGKILLs and a SIGTERM at random steps."""
    flags, chain, clock, step = [*FLAGS, "--reduction", "exact"], (2, 3, 1, 2), random.Random(seed), 0
    words = runs.words("parts", *flags, "--save_every_steps", 2, "--resume_from", "auto")
    for ranks, number in zip(chain[:-1], (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=True):
        step, victim = step + clock.randint(3, 5), clock.randrange(ranks)
        print(f"seed {seed}: {ranks} ranks, {number.name} on rank {victim} after step {step}")
        if number == signal.SIGTERM:
            assert run_ranks(ranks, train_until, words, number, step, victim, "lines") == ["preempted"] * ranks
        else:
            with pytest.raises(AssertionError, match="exit codes .*-9"):
                run_ranks(ranks, train_until, words, number, step, victim, "lines")
    assert run_ranks(chain[-1], train_until, words, number, 0, 0, "lines") == ["completed"] * chain[-1]
    assert [record["world_size"] for record in runs.events("parts", "resumed")] == list(chain[1:])
    runs.train(1, "whole", *flags, task="lines")
    runs.assert_same("whole", "parts")
    check_samples(runs, "parts")


@pytest.mark.guarantee("lengths")
@pytest.mark.parametrize(
    ("task", "ranks", "flags"),
    [
        ("lines", 4, "--num_workers 1"),
        pytest.param("lines", 2, "", marks=pytest.mark.slow),
        ("blocks", 3, "--sharding zero3"),  # extra: sharding
    ],
)
def test_weights_equal_the_plain_loop(runs, task, ranks, flags):
    """Between numbers of ranks only the order of sums differs: 1e-12 allows a few hundred roundings."""
    runs.train(ranks, "ours", *FLAGS, *flags.split(), task=task, dtype=torch.float64)
    check_samples(runs, "ours")
    packed = [[[torch.tensor(indices) for indices in step] for step in epoch] for epoch in planned()]
    with using(task):
        *_, (model, *_) = plain_loop(config_of(runs.words("ours", *FLAGS), torch.float64), PER_STEP, packed=packed)
    assert relative(runs.last("ours")["model"], model.state_dict()) < 1e-12


@pytest.mark.guarantee("lengths")
def test_evaluations_and_outputs_are_those_of_batches_by_number(runs):
    """Up to the rounding of sums in another order, and of rows beside other rows."""
    runs.train(3, "packed", *FLAGS, "--max_steps", 4, task="lines", dtype=torch.float64)
    runs.train(1, "again", *FLAGS, "--max_steps", 4, "--eval_batch_size", 2, task="lines", dtype=torch.float64)
    packed, again = (runs.records(name, "eval")[-1] for name in ("packed", "again"))
    assert packed["count"] == again["count"] == 7
    assert packed["loss"] == pytest.approx(again["loss"], rel=1e-12) and packed["accuracy"] == again["accuracy"]
    outputs = []
    for ranks, budget in ((1, BUDGET), (3, BUDGET), (1, 0)):
        out = runs.root / f"{ranks}-{budget}.pt"
        words = [runs.checkpoints("packed")[-1], "--split", "train", "--out", out, "--batch_tokens", budget]
        words += ["--global_batch_size", 0] + ["--bucket_window", 100] * (not budget)
        run_ranks(ranks, predict_lines, words)
        outputs.append(torch.load(out, weights_only=True)["logits"])
    for one, three, by_number, length in zip(*outputs, Lines(SIZE, "train").lengths, strict=True):
        assert torch.equal(one, three)
        torch.testing.assert_close(one[: length - 1], by_number[: length - 1])


def resume(words, longer):
    """Resume with lengths that are so much longer. Returns the state, or the error."""
    plain = Lines.__init__

    def create(self, *given):
        plain(self, *given)
        self.lengths = [length + longer for length in self.lengths]

    with mock.patch.object(Lines, "__init__", create):
        try:
            return train_flags(words, task="lines")["state"]
        except UserError as error:
            return str(error)


@pytest.mark.guarantee("lengths")
def test_a_resume_with_another_plan_is_refused(runs):
    runs.train(1, "run", *FLAGS, "--max_steps", 4, task="lines")
    resumed = [*FLAGS, "--resume_from", "auto"]
    for change, longer, expected in (
        (["--bucket_window", 3], 0, "--bucket_window is 3, but the checkpoint has --bucket_window 2."),
        (["--batch_tokens", 60], 0, "--batch_tokens is 60, but the checkpoint has --batch_tokens 30."),
        (["--batch_size", 5], 0, "--batch_size is 5, but the checkpoint has --batch_size 64."),
        (
            ["--global_batch_size", 90],
            0,
            "The global batch has 90 tokens per optimizer step, but the checkpoint has 120.",
        ),
        (
            ["--global_batch_size", 0],
            0,
            "The global batch has 60 tokens per optimizer step, but the checkpoint has 120.",
        ),
        ([], 1, "The lengths of the training samples differ from the checkpoint's"),
        (
            ["--batch_tokens", 0, "--bucket_window", 100, "--global_batch_size", 64],
            0,
            "--batch_tokens is 0, but the checkpoint has --batch_tokens 30.",
        ),
    ):
        for text in run_ranks(2, resume, runs.words("run", *resumed, *change), longer):
            assert expected in text and "--init_from" in text
    assert runs.last("run")["progress"]["step"] == 4
    flags = [*resumed, "--global_batch_size", 0, "--grad_accum_steps", PER_STEP // 2]  # as many micro-batches per step
    assert run_ranks(2, resume, runs.words("run", *flags), 0) == ["completed"] * 2
    check_samples(runs, "run")


class Normed(torch.nn.Module):
    """BatchNorm over the samples, which has no variance of one."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 16)

    def forward(self, ids):
        rows = torch.nn.functional.one_hot(ids % 4, 4).float().mean(1)
        return self.head(self.norm(rows))[:, None].expand(-1, ids.shape[1], -1)


def train_with_batch_norm(words):
    with mock.patch.dict(TASKS["lines"], create_model=lambda config, device: Normed()):
        return resume(words, 0)


def test_a_model_that_cannot_take_one_sample_is_refused_at_the_start(runs):
    for more in ([], ["--max_steps", 2]):
        [text] = run_ranks(1, train_with_batch_norm, runs.words("run", *FLAGS, *more))
        assert "A micro-batch of the run has one sample, for which BatchNorm has no variance" in text


class Costly(Lines):
    """Counts how often its lengths are read."""

    reads: list[int] = []

    @property
    def lengths(self):
        self.reads.append(1)
        return [len(line) for line in self.lines]

    @lengths.setter
    def lengths(self, value):
        pass


def train_on_costly(words):
    with mock.patch.dict(TASKS["lines"], create_dataset=lambda config, split: {"train": Costly(90, split)}.get(split)):
        train_flags(words, task="lines")
    return len(Costly.reads)


@pytest.mark.guarantee("lengths")
def test_lengths_are_read_once_per_file_system(runs):
    assert run_ranks(3, train_on_costly, runs.words("run", *FLAGS, "--max_steps", 2)) == [1, 0, 0]


def shapes_before_the_first_step(words):
    """The shapes of the batches of the passes before the first step."""
    plain, shapes = TASKS["lines"]["compute_loss"], []

    def loss(net, lines):
        shapes.append((net.training, *lines.shape))
        return plain(net, lines)

    stop = mock.patch.object(train, "run_training", lambda *_: {"state": "completed"})
    with mock.patch.dict(TASKS["lines"], compute_loss=loss), stop:
        train_flags(words, task="lines")
    return sorted({*shapes})


@pytest.mark.guarantee("lengths")
def test_the_longest_and_the_most_samples_are_computed_before_the_first_step(runs):
    lengths, held_out = (sorted(Lines(*which).lengths) for which in ((SIZE, "train"), (7, "val")))
    most = max(k for k in range(1, SIZE) if lengths[k - 1] * k <= BUDGET)
    few = max(k for k in range(1, 8) if held_out[k - 1] * k <= BUDGET)
    [shapes] = run_ranks(1, shapes_before_the_first_step, runs.words("run", *FLAGS))
    assert {*shapes} >= {
        (True, BUDGET // lengths[-1], lengths[-1]),
        (True, most, lengths[most - 1]),
        (False, BUDGET // held_out[-1], held_out[-1]),
        (False, few, held_out[few - 1]),
    }
    in_order, every = Lines(SIZE, "train").lengths, itertools.chain(*itertools.chain(*planned()))
    most_tokens = max(samples * length for is_training, samples, length in shapes if is_training)
    assert most_tokens >= max(max(in_order[k] for k in indices) * len(indices) for indices in every)


def graphs_by_the_first_and_the_last_step(words):  # extra: compile
    from torch._dynamo.utils import counters

    graphs, plain, plain_compile = [], train.run_training, torch.nn.Module.compile

    def run(*given):
        graphs.append(counters["stats"]["unique_graphs"])
        outcome = plain(*given)
        graphs.append(counters["stats"]["unique_graphs"])
        return outcome

    def compile_in_place(self, mode, dynamic):
        plain_compile(self, dynamic=dynamic, backend="aot_eager")

    with mock.patch.object(train, "run_training", run), mock.patch.object(torch.nn.Module, "compile", compile_in_place):
        train_flags(words, task="blocks")
    return graphs


@pytest.mark.guarantee("compile")  # extra: compile
def test_a_compiled_model_takes_all_shapes_and_is_compiled_before_the_first_step(runs):
    words = runs.words("run", *FLAGS, "--compile", "default", "--max_steps", 8)
    [(first, last)] = run_ranks(1, graphs_by_the_first_and_the_last_step, words, deadline=250)
    assert first == last > 0

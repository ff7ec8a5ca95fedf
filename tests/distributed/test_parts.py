"""utils/training/parts: each moment is called on all ranks, in the order that docs/parts.md gives."""

import inspect
import re
from unittest import mock

import pytest
import torch

import train
from config import TrainingConfig
from ranks import ROOT, run_ranks
from tasks import using
from utils.run import resume
from utils.training.parts import create as parts_module
from utils.training.parts.create import create_parts
from utils.training.parts.part import Part

MOMENTS = [name for name, value in vars(Part).items() if inspect.isfunction(value)]
FLAGS = "--dataset_size 32 --max_steps 6 --epochs 9 --log_interval 2 --save_every_steps 4 --num_workers 0".split()


class Recorder(Part):
    """Notes the moments at which it is called.

    calls: where each recorder notes its number and the moment.
    """

    def __init__(self, number, calls):
        self.number = number
        self.calls = calls


def noting(name):
    plain = getattr(Part, name)

    def moment(self, *args, **options):
        self.calls.append((self.number, name))
        if name == "begin_read":  # without values there is nothing to finish
            return torch.zeros(1, dtype=torch.float64)
        return plain(self, *args, **options)

    return moment


for moment_name in MOMENTS:
    setattr(Recorder, moment_name, noting(moment_name))


def moments_of_a_run(flags):
    calls = []
    recorders = [Recorder(0, calls), Recorder(1, calls)]

    def with_recorders(*args, **options):
        return [*create_parts(*args, **options), *recorders]

    with using("images"), mock.patch.object(resume, "create_parts", with_recorders):
        train.train(TrainingConfig.from_args(flags))
    first, second = ([name for number, name in calls if number == index] for index in (0, 1))
    assert first == second
    in_order = [number for number, name in calls if name != "close"]  # close: also from the end of the list
    assert in_order == [0, 1] * (len(in_order) // 2)
    before_training, training = first[: first.index("start")], first[first.index("start") :]
    # ranks that write allocate their copy
    return [name for name in before_training if name != "save"] + training


@pytest.mark.guarantee("weights")
def test_every_moment_is_called_on_all_ranks_alike(runs):
    """Fresh, and resumed after the run has ended, which loads a checkpoint."""
    fresh, other = run_ranks(2, moments_of_a_run, runs.words("run", *FLAGS))
    assert fresh == other
    more = runs.words("run", *FLAGS, "--max_steps", 8, "--resume_from", "auto")
    resumed, other = run_ranks(2, moments_of_a_run, more)
    assert resumed == other
    assert {*fresh, *resumed} == {*MOMENTS}
    assert "before_load" not in fresh and "after_load" not in fresh
    at_the_start = [resumed.index(name) for name in ("first_passes", "before_load", "after_load", "start")]
    assert at_the_start == sorted(at_the_start)
    in_a_step = ["see_progress", "after_forward", "before_update", "after_update"]
    steps = [name for name in fresh[fresh.index("start") :] if name in in_a_step[1:]]
    assert steps == in_a_step[1:] * 6
    assert fresh.count("see_progress") == 6 + fresh.count("begin_evaluation")
    assert fresh.count("log_values") == 3  # at steps 2, 4 and 6
    assert fresh[-1] == "close"


def test_the_page_lists_the_moments_and_the_parts_that_use_them():
    page = (ROOT / "docs/parts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE)
    kinds = [kind for kind in vars(parts_module).values() if inspect.isclass(kind) and issubclass(kind, Part)]
    assert [name for name, _ in rows] == MOMENTS
    for name, shown in rows:
        class_names = {kind.__name__ for kind in kinds if kind is not Part and name in vars(kind)}
        assert {*re.findall(r"`(\w+)`", shown)} == class_names, name


def example_of_the_page():
    """The part, the line of create_parts and the test that the page shows."""
    page = (ROOT / "docs/parts.md").read_text()
    blocks = re.findall(r"^   ```python\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) for block in blocks]


def train_with_the_example(flags):
    names = {}
    exec(compile(example_of_the_page()[0], "largest_weight.py", "exec"), names)

    def with_the_example(hook_parts, model, **options):
        return [*create_parts(hook_parts, model, **options), names["LargestWeight"](model)]

    with using("images"), mock.patch.object(resume, "create_parts", with_the_example):
        return train.train(TrainingConfig.from_args(flags))


def test_the_example_of_the_page_works(runs):
    """Its test is run, but for the flag, without which the part is in the list here."""
    blocks = example_of_the_page()
    assert len(blocks) == 4 and "log_largest_weight" in blocks[1] and "log_largest_weight" in blocks[2]
    names = {}
    exec(compile(blocks[3], "test_largest_weight.py", "exec"), names)
    case = names["test_the_largest_weight_is_that_of_the_checkpoint"]

    def start(ranks, name, *flags):
        flags = [flag for flag in flags if flag != "--log_largest_weight"]
        return run_ranks(ranks, train_with_the_example, runs.words(name, *flags))

    with mock.patch.object(runs, "train", start):
        case(runs)

# extra: template
"""Nothing is read from the device between two log points. What a step sends: test_comm_hooks.py."""

import traceback
from pathlib import Path
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import run_ranks
from tasks import training_under
from training import train_flags
from utils.training.state import TrainState

# four steps of two micro-batches on each of two ranks; the log point is the last of them
FLAGS = "--dataset_size 64 --epochs 1 --grad_accum_steps 2 --log_interval 4 --clip_grad_norm 1".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--amp_dtype fp16 --record_samples --num_workers 1 --save_every 0".split()
READS = tuple(f"aten::{name}" for name in "_local_scalar_dense equal nonzero is_nonzero masked_select unique".split())


class Reads(TorchDispatchMode):
    """Records where an operation copies a tensor's value to the host."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.startswith(READS):
            frames = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_stack(limit=6)]
            # DataLoader draws a seed for its workers on the host, once per epoch
            if not any("dataloader.py" in frame for frame in frames):
                self.places.append(" < ".join(reversed(frames[:-1])))
        return function(*args, **(kwargs or {}))


def reads_by_step(flags, reads_in_step, task="images"):
    """The reads up to the end of each step of an epoch. reads_in_step: inject one `.item()` into this step."""
    mode, seen, is_read, plain = Reads(), {}, [], TrainState.backward

    def done(step):
        seen[step] = list(mode.places)

    def backward(self, loss, loss_scale):
        if len(seen) + 1 == reads_in_step and not is_read:
            is_read.append(loss.item())
        plain(self, loss, loss_scale)

    with training_under(mode, done), mock.patch.object(TrainState, "backward", backward):
        train_flags(flags, task=task)
    return seen, mode.places


@pytest.mark.guarantee(
    "no-reads",
    "terms",
)
@pytest.mark.parametrize(
    ("reads_in_step", "task", "expected"),
    [
        (0, "images", 0),
        (2, "images", 1),
        (0, "terms", 0),
    ],
)
def test_three_steps_read_nothing_and_an_injected_item_call_is_detected(runs, reads_in_step, task, expected):
    """With accumulation, clipping, averaged weights, scaler, finite check, recorded samples and metrics on, on two
    ranks."""
    for seen, in_all in run_ranks(2, reads_by_step, runs.words("run", *FLAGS), reads_in_step, task):
        assert list(seen) == [1, 2, 3, 4]
        assert len(seen[3]) == expected, seen[3]
        assert len(in_all) > expected  # the log point reads


@pytest.mark.guarantee("no-reads")
def test_a_log_point_reads_nothing_until_the_device_has_had_time_to_reach_it(runs):
    """Of 12 steps the fifth is a log point, whose values are read after the ninth. The first one compares buffers."""
    flags = [*FLAGS, "--dataset_size", "192", "--log_interval", "5"]
    for seen, _ in run_ranks(2, reads_by_step, runs.words("run", *flags), 0, "images"):
        reads = {step: [place for place in seen[step] if "buffers.py" not in place] for step in (9, 10)}
        assert len(seen) == 12 and reads[9] == [] and reads[10]

"""--sharding: bytes that each rank holds of a GPT with 25 M parameters, and what building and saving it take."""

import contextlib
import ctypes
import functools
import os
import re
import resource
import socket
from pathlib import Path
from unittest import mock

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ranks import ROOT, run_ranks
from tasks import TASKS
from training import train_flags
from utils import assembly
from utils.distributed.dtensor import local_shard
from utils.memory import read_process_memory
from utils.run.checkpoints import Checkpoints

FLAGS = "--dataset_size 16 --epochs 1 --max_steps 1 --eval_every 0 --no-use_amp --optimizer adamw".split()
MB = 2**20


def gpt(config, device, depth=8):
    """The model of docs/recipes/gpt.md, for the lines of tasks.py: 25 M parameters with the default depth."""
    text = (ROOT / "docs/recipes/gpt.md").read_text()
    code = re.search(r"^```python\n(# model\.py.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    exec(code, recipe := {})
    return recipe["GPT"](vocabulary=16, context=9, width=512, depth=depth, dropout=0.0).to(device)


def return_freed_memory():
    """Let each freed tensor leave this process's memory at once, so that the figures are those of living tensors."""
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD; by default it grows up to 32 MB


@contextlib.contextmanager
def measured(peaks, name):
    """Note the growth of this process's resident memory: at its peak, over what there was at the start; once."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = read_process_memory("VmRSS")
    yield
    peaks.setdefault(name, read_process_memory("VmHWM") - before)


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counted(words, nodes):
    """Bytes of parameters, gradients and optimizer state of this rank, and the peaks of building and saving."""
    return_freed_memory()
    sizes, plain_state, plain_save = {}, assembly.create_train_state, Checkpoints.save

    def create_state(*args, **options):
        with measured(sizes, "building"):
            sizes["state"] = plain_state(*args, **options)
        return sizes["state"]

    def note_gradients(optimizer, *_):
        sizes["gradients"] = size_of(p.grad for group in optimizer.param_groups for p in group["params"])

    def save(checkpoints, *args, **options):
        with measured(sizes, "saving"):
            plain_save(checkpoints, *args, **options)
            checkpoints.finish_writing()  # before the evaluation gathers parameters

    handle = register_optimizer_step_pre_hook(note_gradients)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (
        mock.patch.dict(TASKS["blocks"], {"create_model": gpt}),
        mock.patch.object(socket, "gethostname", lambda: f"node{rank * nodes // ranks}"),
        mock.patch.object(assembly, "create_train_state", create_state),
        mock.patch.object(Checkpoints, "save", save),
    ):
        train_flags(words, task="blocks")
    handle.remove()
    state = sizes["state"]
    parameters = size_of(local_shard(p) for p in state.model.parameters())
    moments = size_of(tensor for values in state.optimizer.state.values() for tensor in values.values())
    return parameters, sizes["gradients"], moments, sizes["building"], sizes["saving"]


@pytest.mark.guarantee("sharding")
@pytest.mark.slow
def test_a_rank_holds_its_part_of_parameters_gradients_and_optimizer_state(runs):
    """Prints the table of docs/sharding.md."""
    whole = run_ranks(1, counted, runs.words("one", *FLAGS), 1)[0][:3]
    assert 25e6 < whole[0] / 4 < 26e6
    print("\n| ranks | sharding | parameters | gradients | optimizer | sum | 1/W of DDP | building | saving |")
    for ranks in (2, 4):
        for sharding in ("none", "zero2", "zero3", "hybrid"):
            nodes = 2 if sharding == "hybrid" and ranks == 4 else 1
            words = runs.words(f"{sharding}-{ranks}", *FLAGS, "--sharding", sharding)
            rows = run_ranks(ranks, counted, words, nodes, deadline=240)
            most = [max(values) for values in zip(*rows, strict=True)]
            figures = [*most[:3], sum(most[:3]), sum(whole) / ranks]
            peaks = [f"{values[0] / MB:.0f}, {max(values[1:]) / MB:.0f}" for values in [*zip(*rows, strict=True)][3:]]
            shown = " | ".join([*(f"{value / MB:.1f}" for value in figures), *peaks])
            print(f"| {ranks} | {sharding} | {shown} |", flush=True)
            shards = 1 if sharding == "none" else ranks // nodes
            assert all(value <= 1.02 * total / shards for value, total in zip(most[:3], whole, strict=True))
            assert sum(parameters for parameters, *_ in rows) == whole[0] * ranks // shards
            if sharding != "none":
                for rank, (parameters, _, moments, building, saving) in enumerate(rows):
                    assert saving < 2 * (parameters + moments)
                    assert building < (0 if rank else whole[0]) + parameters + 0.4 * whole[0]


def train_within(words, limit):
    """Train with a limit on private writable memory above what the process has before."""
    return_freed_memory()
    resource.setrlimit(resource.RLIMIT_DATA, (read_process_memory("VmData") + limit, resource.RLIM_INFINITY))
    with mock.patch.dict(TASKS["blocks"], {"create_model": functools.partial(gpt, depth=16)}):
        return train_flags(words, task="blocks")["state"]


@pytest.mark.guarantee("sharding")
@pytest.mark.slow
def test_a_model_that_does_not_fit_under_ddp_trains_under_zero3(runs):
    """Under DDP parameters, gradients and optimizer state take 768 MB, under zero3 on 4 ranks 192 MB.

    The limit is RLIMIT_DATA: the address space of torch's libraries alone is many gigabytes.
    """
    limit = 700 * MB
    with pytest.raises(AssertionError, match="(?i)memory"):
        run_ranks(4, train_within, runs.words("ddp", *FLAGS), limit)
    assert run_ranks(4, train_within, runs.words("zero3", *FLAGS, "--sharding", "zero3"), limit) == ["completed"] * 4

"""torch.compile of the model: all of it before the first step, how long it took, and a word where it happens again.

What is compiled depends on the batch size, so each size that an epoch or an evaluation has is compiled on its own (a short last
batch must not make the full ones slower). The model is compiled in place: it stays the module it was, with the same keys.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from config import Refused, TrainingConfig


def check_compiler(mode: str, device: torch.device, named: str) -> None:
    """Raise Refused where this machine lacks what torch.compile needs to build its kernels. named: by the environment, CC or CXX."""
    if mode == "off":
        return
    on_cuda = device.type == "cuda"
    kind, known = ("C", ["gcc", "clang"]) if on_cuda else ("C++", ["g++"])
    if not any(map(shutil.which, [named] if named else known)):
        looked = named or " nor ".join(known)
        raise Refused(f"compile={mode}: needs a {kind} compiler, and there is no {looked}; install {known[0]}, or give --compile off")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise Refused(f"compile={mode}: needs the headers of this Python (Python.h); install python3-dev, or give --compile off")
    if on_cuda and importlib.util.find_spec("triton") is None:
        raise Refused(f"compile={mode}: needs triton, which is not installed; install it, or give --compile off")


class Compiling:
    """The model is compiled at its next calls. Make it on all ranks."""

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        import torch._dynamo  # seconds, of which a run without --compile knows nothing

        torch.compiler.reset()  # of an earlier run in this process: its code and its listeners
        # cut at DDP's buckets, so that they overlap with what comes; torch cannot cut blocks that compute again, nor at very small buckets
        can_cut = not config.activation_checkpointing and not 0 < config.bucket_cap_mb < 1
        torch._dynamo.config.optimize_ddp = can_cut
        self._mode, self._seconds, self._began, self._say = config.compile, 0.0, 0.0, None
        torch._dynamo.on_compile_start(self._start)
        torch._dynamo.on_compile_end(self._end)
        model.compile(mode=config.compile, dynamic=False)

    def finish(self, sizes: dict[str, list[int]], log: Callable[..., None], warn: Callable[..., None]) -> None:
        """All passes were made that the run will make. What is compiled from here on is said, once. Raises Refused where nothing was."""
        if not self._seconds:
            raise Refused(
                f"compile={self._mode}: torch {torch.__version__} finds nothing to compile in the model, a bare nn.Sequential as a rule; "
                "give it a class of its own with a forward, or --compile off"
            )
        shown = ", ".join(f"{' and '.join(map(str, each))} in {name}" for name, each in sizes.items() if each)
        log("compiled (%s) in %.1f s, for batches of %s", self._mode, self._seconds, shown)
        self._say = warn

    def _start(self, _: Any) -> None:
        self._began = perf_counter()
        if self._say:
            self._say(
                "torch.compile compiles again in the middle of the run, and training waits: as a rule a batch of another shape; "
                "make batches of few shapes (crop, pad), or give --compile off"
            )
            self._say = None

    def _end(self, _: Any) -> None:
        self._seconds += perf_counter() - self._began

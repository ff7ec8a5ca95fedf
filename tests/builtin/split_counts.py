"""Run a recipe for a split model in a fork, and count parameters, traffic and passes of its second step.

python split_counts.py SCRIPT FLAGS; rank 0 writes counts.json.
"""

import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SENT, PASSES = defaultdict(lambda: [0, 0]), []  # kind: messages and elements


def note(kind, tensor):
    SENT[kind][0] += 1
    SENT[kind][1] += tensor.numel()


class Traffic(TorchDispatchMode):
    """Counts the collectives of DTensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back as operations on local tensors
        name = function.__name__.split(".")[0]
        if function.namespace == "_c10d_functional" and name.startswith("all_"):
            note(name, args[0])
        return function(*args, **(kwargs or {}))


class CountingStage(PipelineStage):
    def forward_one_chunk(self, number, *args, **options):
        PASSES.append(("F", self.stage_index, number, 1))
        return super().forward_one_chunk(number, *args, **options)

    def backward_one_chunk(self, number, *args, **options):
        PASSES.append(("B", self.stage_index, number, 2 if options.get("full_backward", True) else 1))
        return super().backward_one_chunk(number, *args, **options)

    def backward_weight_one_chunk(self, number, *args, **options):
        PASSES.append(("W", self.stage_index, number, 1))
        return super().backward_weight_one_chunk(number, *args, **options)

    def get_fwd_send_ops(self, number):
        return self.noted(super().get_fwd_send_ops(number))

    def get_bwd_send_ops(self, number):
        return self.noted(super().get_bwd_send_ops(number))

    def noted(self, operations):
        for each in operations:
            note("send", each.tensor)
        return operations


def main(script, *words):
    recipe, loop = importlib.import_module(script.removesuffix(".py")), importlib.import_module("model_parallel")
    recipe.PipelineStage = CountingStage
    base = recipe.Pipeline if script == "pipeline.py" else recipe.TensorParallel

    class Counted(base):
        def passes(self, global_batch, step):
            SENT.clear(), PASSES.clear()
            with Traffic():
                sums = super().passes(global_batch, step)
            if step == 1:
                found, ranks = {"traffic": SENT, "passes": PASSES}, [None] * dist.get_world_size()
                dist.all_gather_object(ranks, json.dumps(found))
                if dist.get_rank() == 0:
                    Path("counts.json").write_text(f"[{', '.join(ranks)}]")
            return sums

    sys.argv[:] = [script, *words]
    loop.train(Counted)


if __name__ == "__main__":
    main(*sys.argv[1:])

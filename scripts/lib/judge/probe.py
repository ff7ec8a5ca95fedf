# extra: judge
"""Try what a fork does with its flags, in a process of its own.

python probe.py FORK RESULT.json outputs OUTPUTS.pt [flags of train.py]
    What does the evaluation make of given outputs of a network, for one batch? The first process makes OUTPUTS.pt with
    a new network. Another process gets these outputs, whatever its network is. Its metrics are equal if it computes the
    same quantity. RESULT.json has sum and count of each metric, how often the network was called, and the functions
    of the template that code of the fork has replaced.

python probe.py FORK RESULT.json weights - [flags of train.py]
    Does create_model draw weights from generators that it seeds itself? RESULT.json has "is_seeded".
"""

from __future__ import annotations

import copy
import inspect
import sys
from pathlib import Path
from typing import Any

FORK = Path(sys.argv[1])
RESULT_FILE = Path(sys.argv[2])
KIND = sys.argv[3]
OUTPUTS_FILE = Path(sys.argv[4])
TEMPLATE_MODULES = ("config", "dataset", "ddp_utils", "train")  # modules (dataset.py is the same in both forks)
sys.path[:1] = [str(FORK), str(FORK / "scripts")]

import torch
from torch import nn

import dataset
import model
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from utils.data.loader import create_evaluation_dataloader
from utils.data.sets import DataSets, load_data
from utils.distributed.context import DistributedContext
from utils.files import replace_json
from utils.rng import seed_device
from utils.training.hooks import ModelHooks


def probe_outputs(sets: DataSets, ctx: DistributedContext) -> dict[str, Any]:
    """Return the metrics of one held-out batch, from the outputs in OUTPUTS_FILE, or from those of a new network."""
    loader = create_evaluation_dataloader(next(iter(sets.held_out.values())), sets.config, ctx)
    batch = next(iter(loader))
    net: Any = create_network(sets.config, ctx).eval()
    outputs: list[Any] = []
    is_first = not OUTPUTS_FILE.exists()

    def save_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(copy.deepcopy(output))

    if is_first:
        net.register_forward_hook(save_output)
    else:
        outputs = torch.load(OUTPUTS_FILE, map_location=ctx.device, weights_only=False)  # by code that runs here too
        given = iter(outputs)
        net.forward = lambda *args, **kwargs: next(given)
    with torch.no_grad():
        metrics = ModelHooks.from_module(model, sets.config, ctx.device).compute_loss(net, batch)
    if is_first:
        torch.save(outputs, OUTPUTS_FILE)
    sums = {}
    for name, entry in metrics.items():
        sums[name] = [torch.as_tensor(value).double().sum().item() for value in entry[:2]]
    return {"calls": len(outputs), "metrics": sums, "replaced": find_replaced_functions()}


def find_replaced_functions() -> dict[str, str]:
    """Return the functions in modules of the template that code of the fork has replaced, each with its place."""
    origins: dict[str, str] = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if not file.startswith(f"{FORK}/utils/") and name not in TEMPLATE_MODULES:
            continue
        values = {f"{name}.{key}": value for key, value in vars(module).items()}
        for key, value in [*values.items()]:
            if isinstance(value, type) and value.__module__ == name:
                values |= {f"{key}.{member}": function for member, function in vars(value).items()}
        for key, value in values.items():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            code = getattr(function, "__code__", None)
            if code and code.co_filename != file and is_fork_file(Path(code.co_filename)):
                origins[key] = f"{Path(code.co_filename).relative_to(FORK)}: {code.co_qualname}"
    return origins


def is_fork_file(file: Path) -> bool:
    """Return whether a file is the fork's, and not the template's or that of an environment in the fork's folder."""
    if not file.is_relative_to(FORK) or file.is_relative_to(sys.prefix):
        return False
    return file.relative_to(FORK).parts[0].removesuffix(".py") not in ("utils", "scripts", *TEMPLATE_MODULES)


def probe_weights(sets: DataSets, ctx: DistributedContext) -> dict[str, Any]:
    """Return whether the weights change if code outside the template seeds a generator with another number."""
    from lib.verify.randomness import replace_seeds
    from utils.training.fingerprint import fingerprint_parameters

    plain = fingerprint_parameters(create_network(sets.config, ctx))
    with replace_seeds():
        reseeded = fingerprint_parameters(create_network(sets.config, ctx))
    return {"is_seeded": plain != reseeded}


def create_network(config: TrainingConfig, ctx: DistributedContext) -> nn.Module:
    seed_device(ctx.device, "probe", config.seed)  # replace_seeds replaces torch.manual_seed
    return model.create_model(config, ctx.device)


def main() -> None:
    config = TrainingConfig.from_args(sys.argv[5:])
    ctx = setup_distributed(config)
    sets = load_data(dataset, config, ctx)
    tried = probe_weights(sets, ctx) if KIND == "weights" else probe_outputs(sets, ctx)
    replace_json(RESULT_FILE, tried)
    cleanup_distributed()


if __name__ == "__main__":
    main()

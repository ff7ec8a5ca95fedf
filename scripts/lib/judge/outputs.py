# extra: judge
"""What the evaluation of a fork and its flags makes of given outputs of the network, for one batch.

python outputs.py FORK OUTPUTS.pt RESULT.json [flags of train.py]

The first process makes OUTPUTS.pt, with a new network. Another one gets its outputs from there, whatever its network
is: its metrics are equal if it computes the same quantity. RESULT.json has sum and count of each metric, and how often
the network was called.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

FORK, OUTPUTS, RESULT = (Path(word) for word in sys.argv[1:4])
sys.path[0] = str(FORK)

import torch

import dataset
import model
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from utils.data.loader import create_evaluation_dataloader
from utils.data.sets import load_data
from utils.files import replace_json
from utils.training.seams import Seams


def main() -> None:
    config = TrainingConfig.from_args(sys.argv[4:])
    ctx = setup_distributed(config)
    sets = load_data(dataset, config, ctx)
    loader = create_evaluation_dataloader(next(iter(sets.held_out.values())), sets.config, ctx)
    batch = next(iter(loader))
    torch.manual_seed(config.seed)
    net: Any = model.create_model(sets.config, ctx.device).eval()
    outputs: list[Any] = []
    is_first = not OUTPUTS.exists()
    if is_first:
        net.register_forward_hook(lambda module, args, output: outputs.append(copy.deepcopy(output)))
    else:
        outputs = torch.load(OUTPUTS, map_location=ctx.device, weights_only=False)  # by code that runs here too
        given = iter(outputs)
        net.forward = lambda *args, **kwargs: next(given)
    with torch.no_grad():
        metrics = Seams.of(model, ctx.device).compute_loss(net, batch)
    if is_first:
        torch.save(outputs, OUTPUTS)
    sums = {
        name: [torch.as_tensor(each).double().sum().item() for each in entry[:2]] for name, entry in metrics.items()
    }
    replace_json(RESULT, {"calls": len(outputs), "metrics": sums})
    cleanup_distributed()


if __name__ == "__main__":
    main()

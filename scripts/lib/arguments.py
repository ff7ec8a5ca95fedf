"""Check that a model can be called with what `predict` and `example_inputs` of model.py pass to it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from utils.settings.errors import UserError

MISSING_FUNCTION = """model.py has no {}. Add it, for example like this, if the model takes two tensors of a batch:
    def predict(model, batch): return {{"output": model(batch[0], batch[1])}}  # {{name: tensor [B, ...]}}
    def example_inputs(batch): return batch[0], batch[1]  # the model's arguments"""


def check_arguments(model: nn.Module, inputs: Any, function: str) -> None:
    """Raise UserError if the model's `forward` does not take this number of arguments.

    Args:
        model: the model.
        inputs: the arguments.
        function: the function of model.py that would pass them.
    """
    try:
        if isinstance(inputs, Tensor):
            raise TypeError("The inputs are not a tuple.")
        inspect.signature(model.forward).bind(*inputs)
    except TypeError:
        raise UserError(MISSING_FUNCTION.format(function)) from None
    except ValueError:  # functions of C++ have no signature
        pass

"""Take the weights of another file: find the state dict in the file, and give its tensors the names of the model.

None of the file's code runs, since torch.load gets `weights_only=True`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.logger import LOGGER_NAME, RANK_0_WARNING, join_first
from utils.settings.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

LOGGER = logging.getLogger(LOGGER_NAME)
# Of several state dicts in a file, the first one under these names is taken.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module", "net")
# what is left out of names, unless two names would become one: a model may have a "module" of its own
WRAPPER_PATTERNS = (
    r"(?<![^.])(_orig_mod|_\w+_module|module)\.",  # of torch.compile, activation checkpointing, FSDP, Fabric and DDP
    r"(?<![^.])(_orig_mod|_\w+_module)\.",
    r"(?!)",  # nothing
)
FILE_TYPE_MESSAGES = {  # what a file is, by its first bytes, or by what torch says about it
    r"\0error": "is empty. Give another file.",
    r"version https://git-lfs": "is a pointer of Git LFS. Get the file itself with git lfs pull.",
    r"[^\0-\x08\x0e-\x1f]+\0error": "is a text file, such as an error page. Give the file of weights itself.",
    # torch itself loads a file whose name ends with .safetensors, if that package is installed
    r".{5}\0{3}\{": "is a safetensors file. Give its state dict. After pip install safetensors, this command saves "
    "the state dict: "
    "python -c \"import torch, safetensors.torch as s; torch.save(s.load_file('{path}'), '{path}-weights.pt')\"",
    r".*\0error.*TorchScript": "is a TorchScript archive. Give its state dict, which this command saves: "
    "python -c \"import torch; torch.save(torch.jit.load('{path}').state_dict(), '{path}-weights.pt')\"",
    r".*\0error.*Unsupported global: GLOBAL (\S+)": "holds the Python object {0}. Give its state dict. This command "
    "saves the state dict, and runs code of the file, so use the command only if you trust the file: "
    "python -c \"import torch; x = torch.load('{path}', weights_only=False); "
    "x = (x.get('state_dict') or x.get('model') or x.get('ema') or x) if isinstance(x, dict) else x; "
    "x = x.state_dict() if hasattr(x, 'state_dict') else x; "
    "torch.save({{k: torch.as_tensor(v) for k, v in x.items() if hasattr(v, 'shape')}}, '{path}-weights.pt')\"",
}


class Weights(dict[str, "Tensor"]):
    """Weights by name, and the class names of the checkpoint that they come from."""

    classes: Any = ()


def describe_unreadable(path: Path, header: bytes, error: Exception) -> str:
    """Return the message for a file that torch.load refuses, which says what the file is instead.

    Args:
        header: the first 512 bytes of the file.
        error: what torch.load raised.
    """
    begin_and_error = f"{header.decode('latin-1')}\0error {error}"
    for pattern, text in FILE_TYPE_MESSAGES.items():
        match = re.match(pattern, begin_and_error, re.DOTALL)
        if match:
            return f"--init_from {path} " + text.format(*match.groups(), path=path)
    return f"--init_from {path} is truncated, damaged or not written by torch.save. Give another file."


def find_state_dict(content: Any, path: Path) -> Weights:
    """Find the state dict in what a file holds. Raises UserError if there is none, or several under unknown names."""
    weights = Weights(_find_innermost_state_dict(content, path))
    if not weights:
        content_description = list(content) if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"--init_from {path} holds no weights of one model but {content_description!s:.300}. Give a checkpoint or"
            " a state dict."
        )
    if isinstance(content.get("provenance"), dict):
        weights.classes = content["provenance"].get("classes") or ()
    return weights


def _find_innermost_state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Find the innermost dict of tensors that is not the state of an optimizer or of a module.

    Returns:
        The dict. It is empty if there is none, or if there are several under unknown names.
    """
    from torch import Tensor

    if not isinstance(content, dict) or "param_groups" in content:
        return {}
    inner = {}
    for name, value in content.items():
        weights = _find_innermost_state_dict(value, path)
        if weights and not str(name).endswith("_extra_state"):
            inner[name] = weights
    if not inner:
        return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if len(inner) > 1:
        known_names = [name for name in STATE_DICT_KEYS if name in inner]
        if not known_names:
            return {}
        text = "--init_from %s holds the state dicts %.300s. The weights are taken from %r."
        LOGGER.info(text, path, list(inner), known_names[0])
        return inner[known_names[0]]
    return next(iter(inner.values()))


def load_matching_weights(
    model: nn.Module,
    weights: dict[str, Tensor],
    source: str,
    requires_all: bool = False,
    kept_names: Collection[str] = (),
) -> None:
    """Load the weights that match the model by name and shape, and log the others (a head of another size).

    Args:
        source: the name of the weights in messages.
        requires_all: whether weights of all floating-point tensors are needed.
        kept_names: names of weights that the model has already, from create_model.

    Raises:
        UserError: if less than half of the model and not nearly all of the weights fit, if one is not finite, or if
            one is missing that `requires_all` or frozen.
    """
    state_dict = model.state_dict()
    weights = match_parameter_names(weights, state_dict, source)
    fitting = {}
    unused = []
    for name, value in weights.items():
        if name in state_dict and state_dict[name].shape == value.shape:
            fitting[name] = value
        else:
            unused.append(name)
    missing = [name for name in state_dict if name not in fitting]

    # Tensors are counted, since one new embedding or head may have most of the numbers. A file that is used but for its
    # head may start a larger model: its other parts are new, and get no tensor at all.
    in_started = _list_names_in_started_parts(state_dict, fitting)
    is_other_model = 2 * len(fitting) < len(state_dict) and 6 * len(unused) >= len(weights)
    if is_other_model or 2 * len(fitting) < len(in_started):
        raise UserError(
            f"{len(fitting)} of the {len(weights)} tensors of --init_from {source} fit the model, which has"
            f" {len(state_dict)}. Only the file has: {join_first(unused, 5) or 'none'}. Only the model has:"
            f" {join_first(missing, 5)}. Give weights of this model, or rename them in initial_weights of model.py."
        )
    if requires_all:
        needed = [name for name, value in state_dict.items() if value.is_floating_point()]
    else:
        needed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    random = [name for name in missing if name in needed and name not in kept_names]
    if random:
        raise UserError(
            f"--init_from {source} has no {join_first(random, 5)} of this model's shape."
            " Give weights of the whole model."
        )
    try:
        _require_finite(fitting, state_dict, source)
        state_dict.update(fitting)  # which has the versions of its modules (MNASNet asks for its own)
        model.load_state_dict(state_dict)
    except (NotImplementedError, RuntimeError) as error:  # of tensors that are sharded, quantized or without values
        raise UserError(
            f"--init_from {source} cannot be loaded ({' '.join(str(error).split()):.200}). Save whole, dense tensors."
        ) from None
    text = "%d of %d tensors were loaded from --init_from %s. Kept from create_model: %s. Not used from the file: %s."
    missing_names = ", ".join(missing) or "none"
    unused_names = ", ".join(unused) or "none"
    LOGGER.info(text, len(fitting), len(state_dict), source, missing_names, unused_names)


def _list_names_in_started_parts(state_dict: dict[str, Any], fitting: Collection[str]) -> list[str]:
    """List the tensors of those parts of the model that get a fitting tensor.

    The names of two parts differ in their first component, after the letters that all names share.
    """
    shared = len(commonprefix(list(state_dict)))  # noqa: RUF071
    parts = {name: name[shared:].partition(".")[0] for name in state_dict}
    started_parts = {parts[name] for name in fitting}
    return [name for name in state_dict if parts[name] in started_parts]


def _require_finite(fitting: dict[str, Tensor], state_dict: dict[str, Any], source: str) -> None:
    """Raise UserError for weights with infinities or NaN. A buffer of the model may be infinite, such as a mask."""
    import torch

    for name, value in fitting.items():
        is_dense = value.layout is torch.strided  # of a sparse tensor torch does not tell
        if is_dense and not value.isfinite().all() and state_dict[name].isfinite().all():
            raise UserError(
                f"{name} of --init_from {source} has values that are not finite. Give weights without NaN or infinity."
            )


def match_parameter_names(weights: dict[str, Tensor], state_dict: dict[str, Any], source: str) -> dict[str, Tensor]:
    """Give the weights the model's names, if these differ by wrappers anywhere and by one prefix of all names.

    Args:
        state_dict: the state dict of the model.
        source: the name of the weights in messages.

    Returns:
        The weights by their new names. Weights that the model does not have keep their names.
    """
    for wrappers in WRAPPER_PATTERNS:
        weight_names = {re.sub(wrappers, "", name): name for name in weights}
        model_names = {re.sub(wrappers, "", name): name for name in state_dict}
        if len(weight_names) == len(weights) and len(model_names) == len(state_dict):
            break
    prefix = _find_common_prefix(weight_names, model_names)
    matched = {}
    for name, original in weight_names.items():
        short = name.removeprefix(prefix)
        if short in weight_names:
            short = name
        matched[model_names.get(short, original)] = weights[original]
    if matched.keys() != weights.keys():
        LOGGER.info("Wrappers and prefixes were removed from the names of the tensors in --init_from %s.", source)
    return matched


def _find_common_prefix(weight_names: Iterable[str], model_names: Iterable[str]) -> str:
    """Return what most of the model's names have in front of them in the file; nothing if two prefixes fit equally."""
    counts: Counter[str] = Counter()
    for name in weight_names:
        prefix = ""
        suffix = name
        while suffix:
            if suffix in model_names:
                counts[prefix] += 1
            part, _, suffix = suffix.partition(".")
            prefix += f"{part}."
    highest = max(counts.values(), default=0)
    prefixes = [prefix for prefix in counts if counts[prefix] == highest]
    return prefixes[0] if len(prefixes) == 1 else ""


def warn_of_changed_classes(weights: dict[str, Tensor], train_set: Any, source: str) -> None:
    """Warn if the checkpoint of these weights had other classes, or had them in another order."""
    saved = list(getattr(weights, "classes", ()))
    current = list(getattr(train_set, "classes", ()))
    differing = [pair for pair in zip_longest(saved, current, fillvalue="") if pair[0] != pair[1]]
    if differing and saved and current:
        text = "%d class names of --init_from %s differ from those of the data. The first is %r there and %r here."
        saved_name, current_name = differing[0]
        LOGGER.log(RANK_0_WARNING, text, len(differing), source, saved_name, current_name)

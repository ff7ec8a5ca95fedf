# extra: verify
"""Find what a run remembers outside its checkpoints.

Such values are in attributes, lists, dicts, arrays and globals of a fork's own code.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from config import TrainingConfig
from lib.values import flatten_nested, hash_nested
from train import Training
from utils.distributed.dtensor import local_shard

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE_PATHS = ("utils", "scripts", "tests", "train.py", "config.py", "ddp_utils.py")
IMAGES_FOLDER = str(ROOT / "utils" / "extras" / "images")
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
GENERATOR_TYPES = (torch.Generator, random.Random)
MAX_ENTRIES = 1000  # entries of a container that are compared
MAX_ARRAY_BYTES = 64 * 2**20  # larger arrays are data rather than memory
SHIPPED_FIELDS = """augment augment_repeats auto_augment channels_last crop_ratio crop_scale cutmix_alpha dataset freeze
    image_size in_channels interpolation label_smoothing mixup_alpha model norm_weight_decay num_classes random_erase
    resize_size sync_bn train_size""".split()
CACHE = "cache"  # the kind of a generator, which may be seeded before each use, and of what functools.lru_cache keeps


@functools.cache
def find_file_owner(file: str) -> str:
    """Return whose file it is: "you", the "template", or "" for a package."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return ""
    return "template" if path.relative_to(ROOT).parts[0] in TEMPLATE_PATHS else "you"


def is_fork_file(file: str) -> bool:
    return find_file_owner(file) == "you"


def list_fork_modules() -> list[ModuleType]:
    return [module for module in [*sys.modules.values()] if is_fork_file(getattr(module, "__file__", None) or "")]


def parse_modules(modules: Iterable[ModuleType | None]) -> list[ast.AST]:
    """Return the nodes of the syntax trees of these modules. Modules in C are left out."""
    files = [file for module in modules if (file := getattr(module, "__file__", None) or "").endswith(".py")]
    return [node for file in files for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))]


def record_field_reads() -> set[str]:
    """Return a set to which the config's fields are added that the fork's code reads from now on.

    The code of the shipped images counts as the fork's.
    """
    read: set[str] = set()
    kind: Any = TrainingConfig
    plain = kind.__getattribute__

    def record_read(self: TrainingConfig, name: str) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if is_fork_file(file) or file.startswith(IMAGES_FOLDER):
            read.add(name)
        return plain(self, name)

    kind.__getattribute__ = record_read
    return read


def find_mentioned_fields() -> set[str]:
    """Return the attributes of a config that code of the fork mentions, also in branches that were not run."""
    nodes = [node for node in parse_modules(list_fork_modules()) if isinstance(node, ast.Attribute)]
    pairs = [(ast.unparse(node.value).rpartition(".")[2], node.attr) for node in nodes]
    return {name for owner, name in pairs if re.search("conf|cfg|args", owner)}


class HiddenState:
    """The values that can be reached from the roots, by path. `restore` gives them back to their owners.

    Args:
        roots: objects and modules by name.
        saved: containers and tensors that a checkpoint holds.
    """

    def __init__(self, roots: dict[str, Any], saved: Iterable[Any] = ()) -> None:
        self.values: dict[str, tuple[str, str]] = {}  # by path, the kind ("" or CACHE) and the value as text
        self._seen = {id(value): value for value in saved}
        self._saved_pointers = {local_shard(value).data_ptr() for value in saved if isinstance(value, Tensor)}
        self._undo: list[Callable[[], Any]] = []
        for path, root in roots.items():
            self._visit(path, root)

    def restore(self) -> None:
        for undo in self._undo:
            with suppress(AttributeError, TypeError):  # some values are read-only, such as members of an Enum
                undo()

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN_TYPES):
            text = repr(value)
            self.values[path] = "", text if len(text) < 60 else f"{text[:20]}... ({hash_nested(text)})"
        elif id(value) not in self._seen:
            self._seen[id(value)], is_of_numpy = value, type(value).__module__.startswith("numpy")
            if isinstance(value, Tensor) or (is_of_numpy and hasattr(value, "nbytes")):
                with suppress(RuntimeError, TypeError, NotImplementedError):  # "meta" or sparse tensors have no data
                    self._visit_array(path, value)
            elif isinstance(value, GENERATOR_TYPES) or (is_of_numpy and hasattr(value, "bit_generator")):
                self._visit_generator(path, value)
            elif isinstance(value, dict | list | tuple | set | deque):
                self._visit_container(path, value)
            elif isinstance(value, functools._lru_cache_wrapper):
                if is_fork_class(value):
                    self.values[path] = CACHE, str(value.cache_info().currsize)
                    self._undo.append(value.cache_clear)
            else:
                self._visit_object(path, value)

    def _visit_array(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = local_shard(value.detach())
            if value.data_ptr() in self._saved_pointers:
                return
        if value.nbytes > MAX_ARRAY_BYTES or getattr(value, "filename", None) or "object" in str(value.dtype):
            return
        copy = value.clone() if isinstance(value, Tensor) else value.copy()
        self.values[path] = "", f"{list(value.shape)} {hash_nested(copy)[:8]}"
        is_fixed = not isinstance(value, Tensor) and not value.flags.writeable
        self._undo += [] if is_fixed else [lambda: value.__setitem__(..., copy)]

    def _visit_generator(self, path: str, value: Any) -> None:
        get: Any = getattr(value, "get_state", None) or getattr(value, "getstate", lambda: value.bit_generator.state)
        self.values[path] = CACHE, hash_nested(get())

    def _visit_container(self, path: str, value: Any) -> None:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if isinstance(value, dict):
            self._undo.append(lambda: restore_dict(value, copy))
        elif not isinstance(value, tuple):
            add = value.update if isinstance(value, set) else value.extend
            self._undo.append(lambda: (value.clear(), add(copy)))
        entries = dict.fromkeys(copy, True) if isinstance(value, set) else copy
        if isinstance(value, list | tuple | deque):
            self.values[f"len({path})"] = "", str(len(copy))
            entries = dict(enumerate(copy))
        for key in list(entries)[:: 1 + len(entries) // MAX_ENTRIES]:
            self._visit(f"{path}[{key!r:.40}]", entries[key])

    def _visit_object(self, path: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            if is_fork_file(getattr(value, "__file__", None) or ""):
                self._visit_attributes(path, vars(value), {name for name in vars(value) if name.startswith("__")})
        elif isinstance(value, FunctionType):
            if is_fork_file(value.__code__.co_filename):
                self._visit_attributes(path, vars(value))
                self._visit(f"{path}.__defaults__", value.__defaults__ or ())
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    with suppress(ValueError):  # the cell may not be set yet
                        self._visit(f"{path}.{name}", cell.cell_contents)
                        self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        elif isinstance(value, type):
            for name, member in dict(vars(value)).items() if is_fork_class(value) else ():
                if not name.startswith("__"):
                    self._visit(f"{path}.{name}", member)
                    self._undo.append(functools.partial(setattr, value, name, member))
        elif isinstance(value, nn.Module):
            inner = value._modules | value._parameters | value._buffers
            for name, member in inner.items():
                self._visit(f"{path}.{name}", member)
            self._visit_attributes(path, vars(value), vars(nn.Module()).keys())
        elif isinstance(value, torch.optim.Optimizer):
            standard_names = vars(torch.optim.SGD([torch.zeros(1)])).keys() - {"state", "param_groups"}
            self._visit_attributes(path, vars(value), standard_names | {"grad_scale", "found_inf"})
        elif hasattr(value, "__dict__") and (isinstance(value, Dataset) or is_fork_class(type(value))):
            self._visit_attributes(path, vars(value))

    def _visit_attributes(self, path: str, values: dict[str, Any], left_out: Iterable[str] = ()) -> None:
        remembered = {name: value for name, value in values.items() if name not in left_out}
        self._undo.append(lambda: restore_dict(values, remembered, left_out))
        for name, value in remembered.items():
            self._visit(f"{path}.{name}", value)


def is_fork_class(kind: Any) -> bool:
    return is_fork_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def restore_dict(values: dict[Any, Any], remembered: dict[Any, Any], left_out: Iterable[str] = ()) -> None:
    """Give a dict these entries again.

    The entries in `left_out` stay as they are, and so do names that torch.compile has added to a module.
    """
    for name in [name for name in values if name not in remembered and name not in left_out]:
        if not str(name).startswith("__"):
            del values[name]
    for name, value in remembered.items():  # the update of a Counter would add
        values[name] = value


def collect_hidden_state(training: Training, other_roots: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what a training and the other roots remember, apart from the state that a checkpoint holds."""
    state, optimizer = training.state, training.state.optimizer
    saved = [*flatten_nested(state.state_dict()).values(), *flatten_nested([*optimizer.state.values()]).values()]
    roots = {type(state.model).__name__: state.model, type(optimizer).__name__: optimizer}
    return HiddenState(roots | other_roots, [*saved, optimizer.state]).values


def find_lost_state(middle: dict, end: dict, resumed: dict) -> tuple[list[str], list[str]]:
    """Return the values that a resumed run has lost, and those that may be a cache.

    A cache is filled once, with values that do not change.

    Args:
        middle, end: the values that the uninterrupted run remembers after its first epoch and at its end.
        resumed: the values that a run remembers that was resumed shortly before its end.
    """
    missing = "", "None"
    lost: dict[str, str] = {}
    caches: dict[str, str] = {}
    for path in end | resumed:
        (kind, end_value), (_, resumed_value) = end.get(path, missing), resumed.get(path, missing)
        before = middle.get(path, missing)
        if end_value != resumed_value:
            is_filled_once = "None" in (end_value, resumed_value) and before in (missing, (kind, end_value))
            target = caches if CACHE in (kind, resumed.get(path, missing)[0]) or is_filled_once else lost
            name = path.removeprefix("len(").partition("[")[0].rstrip(")")
            target.setdefault(name, f"{path} is {end_value}, but {resumed_value} in a resumed run")
    return list(lost.values()), [name for name in caches if name not in lost]

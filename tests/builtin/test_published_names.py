# extra: template
"""The names that other code imports stay where they are, whatever moves behind them."""

import importlib
import inspect
import re

import pytest

from ranks import ROOT

PUBLISHED = {
    "config": "TrainingConfig UserError UnreadableSample unless_auto yours setting",
    "ddp_utils": "DistributedContext setup_distributed cleanup_distributed is_main_process save_checkpoint"
    " load_checkpoint wrap_ddp unwrap",
    "model": "MiniResNet create_model wrap_ddp compute_loss param_groups",
    "dataset": "SyntheticImageDataset create_dataset is_prepared prepare_data create_distributed_dataloader",
    "train": "main train train_one_epoch Training assemble",
    "utils.metrics": "MetricTracker compute_accuracy all_reduce_scalar Metrics count_correct",
    "utils.logger": "setup_logger log_training_step log_epoch_summary",
    "utils.rng": "derive_seed seed_device draw_integers sample_draws",
    "utils.example.augment": "augment_images choose crop_and_flip crops_of crops_of_epoch normalize"
    " LARGEST_CROP_SIZE MAX_TABLE",
}
PARAMETERS = {
    "ddp_utils.setup_distributed": ["config"],
    "ddp_utils.cleanup_distributed": [],
    "ddp_utils.is_main_process": ["rank"],
    "ddp_utils.wrap_ddp": ["model", "config", "ctx"],
    "dataset.create_distributed_dataloader": ["dataset", "config", "ctx"],
    "train.main": ["argv"],
    "train.train": ["config"],
    "train.train_one_epoch": ["training"],
    "utils.logger.setup_logger": ["rank"],
}


@pytest.mark.parametrize("module", PUBLISHED)
def test_published_names_can_be_imported(module):
    names = set(PUBLISHED[module].split())
    assert not names - vars(importlib.import_module(module)).keys()


def list_imports_of_docs():
    """The (module, name) pairs that code in the docs imports from this repository. A recipe has a model.py and a
    dataset.py of its own."""
    pairs = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        imports = re.findall(
            r"^[+ ]*from ((?:utils|scripts|config|ddp_utils|train)\b[\w.]*) import (.+)", page.read_text(), re.M
        )
        for module, names in imports:
            pairs |= {(module, name.split(" as ")[0].strip()) for name in names.strip("()").split(",") if name.strip()}
    return sorted(pairs)


@pytest.mark.parametrize(("module", "name"), list_imports_of_docs())
def test_what_code_in_the_docs_imports_exists(module, name):
    if not hasattr(importlib.import_module(module), name):
        importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("utils.checkpoint.stored.local_checkpoint", "utils.checkpoint.remote.local_checkpoint"),
        ("utils.checkpoint.format.take_weights", "utils.checkpoint.weights.load_matching_weights"),
    ],
)
def test_names_of_the_version_before_can_be_imported(old, new):
    before, now = (
        getattr(importlib.import_module(name.rpartition(".")[0]), name.split(".")[-1]) for name in (old, new)
    )
    assert before is now


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_functions_take_their_parameters_by_name(name):
    module, _, function = name.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    expected = PARAMETERS[name]
    assert [*parameters][: len(expected)] == expected


def test_a_context_is_frozen_and_has_the_published_fields():
    context = importlib.import_module("ddp_utils").DistributedContext
    made = context(rank=1, local_rank=0, world_size=2, device="cpu")
    with pytest.raises(AttributeError):
        made.rank = 0

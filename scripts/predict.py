"""Run a checkpoint over a data set and write its outputs: each sample once, in the order of the data set.

    python scripts/predict.py CKPT [--split val] [--out FILE] [--no-ema] [flags of train.py]
    torchrun --standalone --nproc-per-node=4 scripts/predict.py CKPT ...      # FILE on storage shared by all ranks

The averaged weights of --ema_decay are used if the checkpoint has them, since they selected the best checkpoint.
--no-ema takes the plain weights. The config is read from the checkpoint, and flags override it (--data_dir,
--batch_size, ...). Outputs are computed in float32. --use_amp asks for the mixed precision of training. The training
set keeps its augmentation. For images, --augment none turns it off. A set without labels is what
create_dataset(config, "predict") returns, with any labels. Training and evaluation never ask for that split.

FILE is by default predictions.pt beside the checkpoint's folder. torch.load(FILE, weights_only=True) returns
{name: tensor [N, ...]}, with the names that predict(model, batch) in model.py returns. If shapes differ between
batches, it returns a list of N tensors for each name. FILE is written atomically, and FILE.json describes it:
checkpoint, weights, split, samples, precision. Each rank first writes its part beside FILE (FILE.rank0, ...). Parts
left by a killed process are removed by the next completed run.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import dataset as your_data
import model as fork
from config import TrainingConfig
from ddp_utils import cleanup_distributed, load_checkpoint, setup_distributed
from scripts.lib.arguments import check_arguments
from scripts.lib.row_order import check_row_order
from scripts.lib.weights import WEIGHT_TITLES, add_ema_flag, choose_weights
from utils.checkpoint import format as checkpoint
from utils.checkpoint.remote import local_checkpoint
from utils.data.loader import GlobalBatchLoader, create_evaluation_dataloader
from utils.data.sets import choose_split_name, load_data
from utils.distributed.collectives import on_all_ranks, on_rank_0, require_equal
from utils.distributed.context import DistributedContext
from utils.files import TEMPORARY_SUFFIX, replace_file, replace_json
from utils.logger import RANK_0_WARNING, setup_logger, show_progress_bar
from utils.rng import seed_evaluation
from utils.run.command_line import repair_standard_streams
from utils.run.exit import exit_with_error, supervise_ranks
from utils.run.resume import compare_evaluation_data, create_train_state
from utils.run.start import check_ranks_equal
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks, first_tensor
from utils.training.outputs import NAMES_DIFFER, OutputCollector, sort_by_sample
from utils.training.state import TrainState

FLOAT32_SETTINGS = {"use_amp": False, "amp_dtype": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "checkpoint", help="path or URL of a checkpoint, or of a run, of which the best checkpoint is taken"
    )
    parser.add_argument("--split", default="val", help="train, val, test or predict (default: val)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write (default: predictions.pt, see above)"
    )
    add_ema_flag(parser)
    options, flags = parser.parse_known_args()
    is_remote, options.checkpoint = "://" in options.checkpoint, local_checkpoint(options.checkpoint)
    default_folder = Path() if is_remote else options.checkpoint.parent.parent
    saved = checkpoint.read_checkpoint(options.checkpoint)[0]["config"]
    config = TrainingConfig.from_args(
        flags, saved | {"init_from": "", "resume_from": "", "overwrite": False} | FLOAT32_SETTINGS
    )
    out = options.out or default_folder / "predictions.pt"
    ctx = setup_distributed(config)
    with supervise_ranks(out.parent, config, ctx):
        check_ranks_equal(config, ctx)
        write_predictions(options, config, out, ctx)
    cleanup_distributed()


def write_predictions(options: argparse.Namespace, config: TrainingConfig, out: Path, ctx: DistributedContext) -> None:
    """Compute and write the outputs. Raises UserError."""
    logger = setup_logger(ctx.rank)
    sets = load_data(your_data, config, ctx)
    data: dict[str, Any] = {"train": sets.train, **sets.held_out}
    if options.split == "predict":
        data["predict"] = on_all_ranks(lambda: your_data.create_dataset(sets.config, "predict"), ctx)
    dataset = on_all_ranks(lambda: choose_split(data, options.split), ctx)
    hooks = ModelHooks.from_module(fork, sets.config, ctx.device)
    state = on_all_ranks(lambda: create_train_state(hooks, sets.config, ctx, is_resumed=True), ctx)
    payload = load_checkpoint(options.checkpoint, ctx, state.sharded_parameters())
    on_all_ranks(lambda: check_out(options, out), ctx)
    kind = on_all_ranks(lambda: choose_weights(payload, options.ema, options.checkpoint), ctx)
    for line in on_all_ranks(lambda: compare_evaluation_data(payload, sets.config, options.split, sets), ctx):
        logger.log(RANK_0_WARNING, "changed: %s", line)
    on_all_ranks(lambda: state.load_model_weights(payload, kind), ctx)
    loader = on_all_ranks(lambda: create_evaluation_dataloader(dataset, sets.config, ctx), ctx)

    def on_progress(step: int) -> None:
        show_progress_bar(logger, step, loader.sampler.passes_per_epoch, "predicting")

    split = choose_split_name(dataset, options.split)
    seed = functools.partial(seed_evaluation, ctx.device, sets.config.seed, "predict", split)
    outputs = on_all_ranks(lambda: predict(hooks, state, loader, seed, on_progress), ctx)
    require_equal(sorted(outputs.batches_by_name), f"{NAMES_DIFFER} ({{first}} and {{other}})", ctx)
    part = out.with_name(f"{out.name}.rank{ctx.rank}")
    try:
        on_all_ranks(lambda: write_tensors(part, outputs.to_dict()), ctx)
        on_rank_0(lambda: merge_rank_files(out, len(loader.dataset), ctx), ctx)
        described = {
            "checkpoint": str(options.checkpoint),
            "weights": kind,
            "split": options.split,
            "samples": len(loader.dataset),
            "precision": state.precision.title,
        }
        on_rank_0(lambda: replace_json(out.with_name(f"{out.name}.json"), described), ctx)
    finally:
        part.unlink(missing_ok=True)
    names, samples = ", ".join(outputs.batches_by_name), len(loader.dataset)
    text = "%s was written: %s of %d samples, computed with the %s."
    logger.info(text, out, names, samples, WEIGHT_TITLES[kind])
    loader.close()


def check_out(options: argparse.Namespace, out: Path) -> None:
    """Raise UserError if the outputs cannot be written to this file."""
    if out.suffix not in (".pt", ".pth"):
        raise UserError(f'--out must end in .pt or .pth, since predictions are a torch file, got "{out}".')
    if out.exists() and out.samefile(options.checkpoint):
        raise UserError(f"--out {out} is the checkpoint itself. Give another file.")


def choose_split(data: dict[str, Any], split: str) -> Any:
    """Return the data set of this split. Raises UserError if the data has none."""
    if data.get(split) is None:
        available = [name for name, dataset in data.items() if dataset is not None]
        raise UserError(f'--split must be one of {", ".join(available)}, which the data has, got "{split}".')
    return data[split]


@torch.no_grad()
def predict(
    hooks: ModelHooks, state: TrainState, loader: GlobalBatchLoader, seed_micro_batch, on_progress
) -> OutputCollector:
    """Return the outputs for this rank's samples.

    Args:
        hooks: the functions of the fork's module.
        state: the state with the model.
        loader: the loader of the samples.
        seed_micro_batch: a function that is called with the indices of each micro-batch.
        on_progress: a function that is called after each micro-batch.

    Raises:
        UserError: if the outputs of a batch are in another order than its samples.
    """
    net, outputs = state.model.eval(), OutputCollector(hooks.predict, seed_micro_batch)

    def predict_batch(batch: Any) -> dict[str, torch.Tensor]:
        with state.precision.autocast():
            return hooks.predict(net, batch)

    for step, micro_batch in enumerate(loader.micro_batches(epoch=0), 1):
        first = first_tensor(micro_batch.batch)
        # the default `predict` says what the fork lacks
        if step == 1 and hooks.predict is ModelHooks.predict and first is not None:
            check_arguments(net, (first,), "predict(model, batch)")
        with state.precision.autocast():
            outputs.add(net, micro_batch.batch, micro_batch.indices, micro_batch.is_padding)
        if step == 1:  # the workers have started by now
            size, batch_size = len(loader.dataset), min(map(len, loader.list_example_indices()))
            check_row_order(predict_batch, lambda rows: loader.fetch_samples(rows)[2], size, batch_size)
        on_progress(step)
    return outputs


def write_tensors(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: torch.save(value, file))


def merge_rank_files(out: Path, samples: int, ctx: DistributedContext) -> None:
    """Merge the files of all ranks into one, in the order of the samples."""
    parts = [torch.load(out.with_name(f"{out.name}.rank{rank}"), weights_only=True) for rank in range(ctx.world_size)]
    write_tensors(out, sort_by_sample(parts, samples))
    part = re.compile(rf"{re.escape(out.name)}\.rank\d+(\..+{re.escape(TEMPORARY_SUFFIX)})?")
    for file in out.parent.iterdir():  # a killed process with more ranks may have left files too
        if part.fullmatch(file.name):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    repair_standard_streams()
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        exit_with_error(error)

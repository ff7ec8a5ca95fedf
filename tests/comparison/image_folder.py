# extra: template and images
"""Images per second of our image folder loader beside torchvision's ImageFolder, presets and DataLoader:

python tests/comparison/image_folder.py FOLDER [--workers N] [--rounds N] [--batches N] [--train_size N] [flags]

FOLDER holds train/<class>/*. Both use the same workers, batch size and flags, and take turns. The flags are those of
train.py. The ratio is ours / theirs, the median over the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import argparse
import statistics
import time
from collections.abc import Iterable

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import dataset
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from utils.data.loader import create_distributed_dataloader
from utils.data.sets import load_data

POLICIES = {"ra": "RandAugment", "ta_wide": "TrivialAugmentWide", "augmix": "AugMix", "autoaugment": "AutoAugment"}


def preset(config: TrainingConfig, mean: list[float], std: list[float]) -> v2.Compose:
    """ClassificationPresetTrain of torchvision's references, with its default backend PIL."""
    mode = v2.InterpolationMode(config.interpolation)
    parts = [v2.RandomResizedCrop(config.train_size, interpolation=mode, antialias=True), v2.RandomHorizontalFlip(0.5)]
    if config.auto_augment != "none":
        parts.append(getattr(v2, POLICIES[config.auto_augment])(interpolation=mode))
    parts += [v2.PILToTensor(), v2.ToDtype(torch.float, scale=True), v2.Normalize(mean, std)]
    parts += [v2.RandomErasing(p=config.random_erase)] if config.random_erase else []
    return v2.Compose([*parts, v2.ToPureTensor()])


def rate(batches: Iterable, batch_size: int, count: int) -> float:
    """Images per second after the first three batches, which include the start of the workers."""
    for number, _ in enumerate(batches):
        if number == 2:
            began = time.perf_counter()
        if number == count + 2:
            break
    return (number - 2) * batch_size / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=40, help="measured per turn [40]")
    options, flags = parser.parse_known_args()
    common = ["--dataset", "imagefolder", "--data_dir", str(options.folder), "--augment", "resized_crop"]
    config = TrainingConfig.from_args([*common, "--num_workers", str(options.workers), *flags])
    ctx = setup_distributed(config)
    sets = load_data(dataset, config, ctx)
    config, data = sets.config, sets.train
    loader, _ = create_distributed_dataloader(data, config, ctx)
    ref_set = ImageFolder(str(options.folder / "train"), preset(config, data.mean.tolist(), data.std.tolist()))

    def our_batches() -> Iterable:
        for epoch in range(10**6):
            yield from loader.micro_batches(epoch)

    def their_batches() -> Iterable:
        while True:
            yield from DataLoader(ref_set, config.batch_size, shuffle=True, num_workers=options.workers, drop_last=True)

    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {options.workers} workers, {flags}")
    pairs = []
    for number in range(options.rounds):
        turns = [our_batches, their_batches][:: 1 if number % 2 else -1]
        rates = {make_batches: rate(make_batches(), config.batch_size, options.batches) for make_batches in turns}
        pairs.append((rates[our_batches], rates[their_batches]))
        print("ours {:,.0f}, theirs {:,.0f} images/s, ratio {:.2f}".format(*pairs[-1], pairs[-1][0] / pairs[-1][1]))
    ratios = [ours / other for ours, other in pairs]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), n={len(ratios)}")
    loader.close()
    cleanup_distributed()


if __name__ == "__main__":
    main()

"""Fingerprints of decoded samples: are data without a list of sizes the same on all machines and after a resume?

They err on the side of being alike: nothing that may differ between equal data sets may end a run. They cost two
seconds at the start. Who trains on data that may change, or that lies on several machines, needs them.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from utils.data.changes import SampleFingerprint, are_fingerprints_alike
from utils.data.loader import has_getitems
from utils.data.sampler import MapDataset, MicroBatch
from utils.data.worker import Fetcher
from utils.distributed.collectives import broadcast_json, on_all_ranks, require_equal
from utils.distributed.context import DistributedContext
from utils.rng import derive_seed, draw_uniform, sample_draws
from utils.settings.errors import UserError

MAX_SAMPLES, MAX_SECONDS = 64, 2.0  # of each data set: how many are compared, and for how long they are fetched
MAX_ARRAYS_PER_SAMPLE, VALUES_PER_ARRAY = 16, 4096  # of a sample; of an array, to twice as many


def compare_sample_fingerprints(
    sets: dict[str, MapDataset], seed: int, sentence: str, ctx: DistributedContext
) -> list[list[SampleFingerprint | None]]:
    """Sample fingerprints of each data set. Collective. Raises UserError with the sentence if a rank has other samples.

    A training set whose file sizes are known has none. A held-out set has: another resize_size makes other samples of
    the same files, on which metrics are not comparable.
    """

    def fingerprint_sets() -> list[list[SampleFingerprint | None]]:
        has_sizes = getattr(sets["train"], "has_sizes", False)
        return [
            [] if split == "train" and has_sizes else sample_fingerprints(dataset, seed)
            for split, dataset in sets.items()
        ]

    local_fingerprints = on_all_ranks(fingerprint_sets, ctx)
    first = broadcast_json(local_fingerprints, ctx)
    are_alike = all(map(are_fingerprints_alike, local_fingerprints, first))
    require_equal(first if are_alike else local_fingerprints, sentence, ctx)
    return local_fingerprints


def sample_fingerprints(dataset: MapDataset, seed: int) -> list[SampleFingerprint | None]:
    """Fingerprints of samples that are spread over the data set.

    None for a sample that cannot be fetched, or that is not the same when it is fetched again with the same seed.
    """
    size, count = len(dataset), min(MAX_SAMPLES, len(dataset))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    fetcher, ends = Fetcher(dataset, has_getitems(dataset), seed), time.monotonic() + MAX_SECONDS
    fingerprints: list[SampleFingerprint | None] = []
    for position in order:
        if fingerprints and time.monotonic() > ends:
            break
        batch = MicroBatch(0, 0, [position * size // count], is_padding=False, is_last=True, micro_batches_in_step=1)
        try:
            first_fingerprint, second_fingerprint = (
                fingerprint_of_sample(fetcher.__getitems__(batch)[1]) for _ in range(2)
            )
            fingerprints.append(first_fingerprint if first_fingerprint == second_fingerprint else None)
        except Exception:  # the run meets it when it needs this sample
            fingerprints.append(None)
    return fingerprints


def fingerprint_of_sample(sample: Any) -> SampleFingerprint:
    """A digest of the texts and integers in a sample, then the norm and a random projection of each array of floats,
    pixels or audio. Objects of other kinds are left out."""
    exact: list[Any] = []
    sums: list[float] = []

    def add_value(value: Any) -> None:
        if isinstance(value, UserError):  # returned by Fetcher
            raise value
        if isinstance(value, dict):
            add_value([[str(key), value[key]] for key in sorted(value, key=str)])
        elif isinstance(value, list | tuple):
            exact.append(len(value))
            for item in value:
                add_value(item)
        elif isinstance(value, str):  # the data may be mounted elsewhere on another machine
            exact.append(os.path.basename(value) if os.path.exists(value) else value)
        elif isinstance(value, int | bytes | None):
            exact.append(value)
        elif isinstance(value, float | Tensor):
            add_array(torch.as_tensor(value).detach().cpu())
        elif hasattr(value, "__array_interface__"):  # numpy's and Pillow's
            add_array(torch.as_tensor(sys.modules["numpy"].array(value)))

    def add_array(array: Tensor) -> None:
        array = torch.view_as_real(array) if array.is_complex() else array
        flat = array.reshape(-1)[:: max(1, array.numel() // VALUES_PER_ARRAY)]
        exact.append((str(array.dtype), *array.shape))
        if flat.dtype in (torch.int64, torch.int32, torch.bool):
            exact.append(flat.tolist())
        elif len(sums) < 2 * MAX_ARRAYS_PER_SAMPLE:
            flat = flat.double().nan_to_num(0, 0, 0)
            sums.extend([flat.norm().item(), flat.dot(_create_projection()[: len(flat)]).item()])

    add_value(sample)
    return [derive_seed(exact), *sums]


@functools.cache
def _create_projection() -> Tensor:
    return draw_uniform(sample_draws(0, 0, torch.zeros(1, dtype=torch.int64), 2 * VALUES_PER_ARRAY)[0]).double() - 0.5

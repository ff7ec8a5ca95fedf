"""Random numbers as functions of a key: no generator state has to be saved, and they do not depend on the rank.

The order of an epoch is keyed by (seed, epoch). A sample's draws are keyed by (seed, epoch, index), or by all indices
of its micro-batch if `__getitems__` fetches that at once. Dropout is keyed by (seed, step, micro-batch). What a
function of model.py draws in an evaluation is keyed by (seed, its name, split, the first sample of its micro-batch).
"""

from __future__ import annotations

import hashlib
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def derive_seed(*key: object) -> int:
    """Return a seed below 2^63 from the SHA-256 of the key's parts."""
    text = ("/%s" * len(key) % key)[1:]  # "/".join takes twice as long, and a micro-batch has a thousand parts
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_host(*key: object) -> None:
    """Seed the global generators of Python, torch (on the CPU) and numpy (if it is imported)."""
    seed = derive_seed(*key)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_device(device: torch.device, *key: object) -> None:
    """Seed the device's own generator (dropout and the like) and that of the CPU.

    A forward pass that drops layers draws on the CPU, since a read from the device would wait for the device. Each
    generator takes about 2 us, where torch.manual_seed takes 100.
    """
    seed = derive_seed(*key)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def seed_evaluation(
    device: torch.device,
    seed: int,
    hook: str,
    split: str,
    indices: Sequence[int],
) -> None:
    """Seed the device's generator and that of the CPU, before a function of model.py gets the micro-batch of a set."""
    seed_device(device, "evaluation", seed, hook, split, indices[0])


def preserve_rng_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that leaves torch's generators as they were before it."""
    devices = []
    if device.type == "cuda":
        devices.append(device.index)
    return torch.random.fork_rng(devices)


def sample_draws(
    seed: int,
    epoch: int,
    indices: Tensor,
    count: int,
) -> Tensor:
    """Return `count` random 32-bit numbers for each sample, a pure function of (seed, epoch, index).

    Args:
        indices: int64 [B], the samples' indices in the data set.

    Returns:
        int64 [B, count], each in [0, 2^32).
    """
    numbers_of_sample = torch.arange(count, device=indices.device)
    numbers = indices.unsqueeze(1) * count + numbers_of_sample
    bits = hash_bits(numbers, derive_seed("sample", seed, epoch))
    return _shift_right(bits, 32)


def hash_bits(numbers: Tensor, key: int) -> Tensor:
    """Return 64 random bits for each number, a pure function of the number and the key.

    The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as
    tensor operations on int64. Their products wrap, so the bits are the same on every device.
    """
    x = numbers * _to_signed(0x9E3779B97F4A7C15) + key
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def draw_integers(draws: Tensor, high: int) -> Tensor:
    """Return int64 in [0, high), from 32-bit draws. The bias is below high / 2^32. Raises ValueError above 2^31."""
    if high > 2**31:
        raise ValueError(
            f"high must be at most 2^31, since the draws have 32 bits, got {high}."
            " Draw with torch.randint(high, ()) in __getitem__."
        )
    return (draws * high) >> 32


def draw_uniform(draws: Tensor) -> Tensor:
    """Return float32 in [0, 1), from 32-bit draws, exact on every device."""
    return (draws >> 8).float() * 2.0**-24


def _to_signed(constant: int) -> int:
    """Return the int64 with the bits of an unsigned constant of at least 2^63."""
    return constant - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return a logical right shift. torch's own keeps the sign."""
    mask = 2 ** (64 - bits) - 1
    return (x >> bits) & mask


def find_diverged_ranks(digests: list[int]) -> list[int]:
    """Return the ranks whose digest differs from the most common one. Of two ranks that differ, this is the second."""
    usual = statistics.mode(digests)  # the first one of equally common ones
    return [rank for rank, digest in enumerate(digests) if digest != usual]

"""Model FLOPs utilization (MFU): the operations of the passes in a second, over the peak of the devices.

The definition is that of Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B. Operations are counted by
torch's FlopCounterMode, however. It knows matrix products, convolutions and attention, and it counts activations that
are recomputed too.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.batch import list_tensors
from utils.data.sampler import MicroBatch
from utils.logger import LOGGER_NAME
from utils.training.parts.part import Part

# TFLOP/s of dense 16-bit matrix products, from data sheets, by words in the device's name; the first entry that fits
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "A40": 149.7,
    "A6000": 154.8,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "4090": 165.2,
    "3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}


def find_peak_flops(device_name: str, dtype: torch.dtype | None, has_tf32: bool) -> float:
    """Return the peak of a device in operations per second, or 0 if the peak is not known.

    Args:
        dtype: of autocast, or None for float32. The peak of float32 is known where it is computed as TF32, at half the
            speed of 16 bits.
    """
    words = set(re.split(r"\W+", device_name))
    peak = 0.0  # of 16 bits
    for name, tflops in PEAK_TFLOPS.items():
        if words.issuperset(name.split()):
            peak = 1e12 * tflops
            break
    if dtype is not None:
        return peak
    return peak / 2 if has_tf32 else 0.0


class FlopCounter(Part):
    """Counts the operations of the passes of this rank, for the `mfu` of train records.

    Operations are counted once, for one micro-batch. Other micro-batches need as many operations per element of their
    tensors.

    Args:
        peak_flops: of the device, in operations per second; 0 if it is not known.
    """

    def __init__(self, peak_flops: float) -> None:
        self._peak_flops = peak_flops
        self._flops_per_element = 0.0
        self._element_count = 0  # since the last log point
        self._logged_elements = 0  # up to the last log point

    @classmethod
    def create(cls, device: torch.device, dtype: torch.dtype | None) -> FlopCounter:
        """Return the part for a CUDA device.

        Args:
            dtype: of autocast.
        """
        device_name = torch.cuda.get_device_name(device)
        has_tf32 = torch.cuda.is_tf32_supported()
        return cls(find_peak_flops(device_name, dtype, has_tf32))

    def first_passes(self, run_passes: Callable[[], object], batch: Any) -> None:
        try:
            with FlopCounterMode(display=False) as counter:
                run_passes()
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # an operation of the model that torch cannot count
            logging.getLogger(LOGGER_NAME).info("The operations cannot be counted (%s), so no MFU is shown.", error)
            return
        flops_per_pass = counter.get_total_flops() / 2
        self._flops_per_element = flops_per_pass / max(1, count_elements(batch))

    def micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in stream:
            if not micro_batch.is_padding:
                self._element_count += count_elements(micro_batch.batch)
            yield micro_batch

    def begin_read(self, is_log_point: bool) -> None:
        if is_log_point:
            self._logged_elements = self._element_count
            self._element_count = 0

    def log_values(self, seconds: float) -> dict[str, float]:
        """Return the seconds that the device would need at its peak, over those of the steps; NaN if not known."""
        if not self._peak_flops or not self._flops_per_element or not seconds:
            return {"mfu": math.nan}
        flops = self._flops_per_element * self._logged_elements
        return {"mfu": flops / self._peak_flops / seconds}


def count_elements(batch: Any) -> int:
    """Return the number of elements of all tensors in a batch."""
    return sum(tensor.numel() for tensor in list_tensors(batch))

"""The precision of a run: mixed by default on GPUs, the same on all ranks, and printed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The autocast type of the run (None: plain float32) and whether gradients are scaled (float16 only)."""

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def choose(cls, *, use_amp: bool, amp_dtype: str, device: torch.device, fast_bf16: bool) -> Precision:
        """fast_bf16: whether all ranks have it. A CPU computes in float32 unless asked: bf16 can be slower."""
        auto = None if device.type != "cuda" else torch.bfloat16 if fast_bf16 else torch.float16
        dtype = {"auto": auto, "bf16": torch.bfloat16, "fp16": torch.float16}[amp_dtype.removesuffix("_params")]
        return cls(device.type, dtype if use_amp else None)

    @property
    def has_loss_scaling(self) -> bool:
        return self.dtype is torch.float16

    @property
    def name(self) -> str:
        return str(self.dtype or torch.get_default_dtype()).removeprefix("torch.")

    @property
    def title(self) -> str:
        """For the banner: the name, and how float32 matrix products are computed."""
        if not (self.device_type == "cuda" and torch.cuda.is_tf32_supported()):
            return self.name
        return f"{self.name}, TF32 for the rest" if self.dtype else f"{self.name} as TF32"

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device_type, self.dtype) if self.dtype else nullcontext()

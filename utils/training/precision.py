"""The precision of a run: mixed by default on GPUs, the same on all ranks, and printed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The autocast type of the run, and whether gradients are scaled (float16 only)."""

    device_type: str
    dtype: torch.dtype | None  # None: plain float32

    @classmethod
    def choose(
        cls,
        *,
        use_amp: bool,
        amp_dtype: str,
        device: torch.device,
        fast_bf16: bool,
    ) -> Precision:
        """Return the precision for these settings.

        Args:
            amp_dtype: "auto", "bf16", "fp16", or one of the last two with "_params". A CPU computes in float32 with
                "auto", since bf16 can be slower there.
            fast_bf16: whether the devices of all ranks compute fast in bf16.
        """
        name = amp_dtype.removesuffix("_params")
        if not use_amp:
            return cls(device.type, None)
        if name == "auto":
            if device.type != "cuda":
                return cls(device.type, None)
            name = "bf16" if fast_bf16 else "fp16"
        return cls(device.type, AMP_DTYPES[name])

    @property
    def has_loss_scaling(self) -> bool:
        return self.dtype is torch.float16

    @property
    def name(self) -> str:
        return str(self.dtype or torch.get_default_dtype()).removeprefix("torch.")

    @property
    def title(self) -> str:
        """Return the text for the banner: the name, and how float32 matrix products are computed."""
        if self.device_type != "cuda" or not torch.cuda.is_tf32_supported():
            return self.name
        if self.dtype is None:
            return f"{self.name} as TF32"
        return f"{self.name}, TF32 for the rest"

    def autocast(self) -> AbstractContextManager:
        """Return the context in which forward passes run."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

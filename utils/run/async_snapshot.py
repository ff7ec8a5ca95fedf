"""Copies the state after a step while training continues, and compares the ranks: a checkpoint holds what all have."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.archive import map_payload
from utils.checkpoint.layouts import Payload
from utils.checkpoint.pinned_buffers import PinnedBuffers
from utils.distributed.collectives import broadcast_json, gather_rows
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import local_shard
from utils.rng import find_diverged_ranks
from utils.settings.errors import TrainingError
from utils.training.fingerprint import (
    fingerprint_buffers,
    fingerprint_position,
    fingerprint_weights,
    format_fingerprint,
)
from utils.training.state import TrainState


class AsyncSnapshot:
    """Copies the state. All ranks call its methods.

    Args:
        is_writer: whether this rank writes the copy.
        metadata: what a payload holds beside the state.
        shard_count: rank r has the shard r % shard_count of the state.
        thread_ctx: the context of the thread, which speaks to those of other ranks (`layouts.create_thread_context`).
    """

    def __init__(
        self, state: TrainState, is_writer: bool, metadata: Payload, shard_count: int, thread_ctx: DistributedContext
    ) -> None:
        self._state, self._is_writer, self._metadata, self._ctx = state, is_writer, metadata, thread_ctx
        # ranks of equal weights
        self._replicas = [range(shard, thread_ctx.world_size, shard_count) for shard in range(shard_count)]
        # raises now if no checkpoint can hold it; later only values change
        map_payload(metadata, lambda tensor: tensor)
        self._pinned_buffers = PinnedBuffers()
        if is_writer:  # now: pinning gigabytes takes seconds. Adam's two tensors and a step per parameter come later
            late = [
                local_shard(p) for p in state.parameters_by_tensor if p.requires_grad and p not in state.optimizer.state
            ]
            _, pairs = self._pinned_buffers.allocate_copy(state.state_dict())
            self._pinned_buffers.reserve(
                [*(tensor for _, tensor in pairs), *late, *late, *(torch.empty(()) for _ in late)]
            )
        self._stream = torch.Stream(thread_ctx.device) if thread_ctx.device.type != "cpu" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending_copy: Future[Payload] | None = None  # begun, and not finished
        self._rank_with_other_buffers: int | None = None  # on rank 0: the first rank whose buffers differ from its own

    def start(self) -> Future[Payload]:
        """Start to copy the state as it is now. Finish the copy before weights or optimizer state change.

        Returns:
            The payload, where this rank writes. TrainingError on all ranks if they differ.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
        """
        state = self._state.state_dict()
        payload, pairs = self._pinned_buffers.allocate_copy(state) if self._is_writer else (Payload(), [])
        position = fingerprint_position(self._state.progress)
        # buffers at once: the next forward pass changes them
        buffers = fingerprint_buffers(self._state.model)
        addresses = {buffer.data_ptr() for buffer in self._state.model.buffers()}
        _copy_tensors([pair for pair in pairs if pair[1].data_ptr() in addresses])
        later = [pair for pair in pairs if pair[1].data_ptr() not in addresses]
        event = torch.accelerator.current_stream().record_event() if self._stream else None
        self._pending_copy = self._thread.submit(
            self._complete_copy, payload | self._metadata, later, buffers, position, event
        )
        return self._pending_copy

    def _complete_copy(
        self,
        payload: Payload,
        pairs: list[tuple[Tensor, Tensor]],
        buffer_fingerprint: Tensor,
        position: int,
        event: Any,
    ) -> Payload:
        """In the thread: complete the copy, and compare the ranks. Returns the payload.

        Args:
            buffer_fingerprint: `fingerprint_buffers` of the step.
            position: `fingerprint_position` of the step.
        """
        digests = self._copy_and_fingerprint(pairs, buffer_fingerprint, event)
        payload["provenance"]["fingerprint"] = self._compare_ranks(digests, position)
        return payload

    def _copy_and_fingerprint(
        self, pairs: list[tuple[Tensor, Tensor]], buffer_fingerprint: Tensor, event: Any
    ) -> list[int]:
        """The digest of this rank's weights and optimizer state, and that of its buffers."""
        if self._stream:
            torch.accelerator.set_device_index(self._ctx.device)
        with self._stream or nullcontext():
            if self._stream and event:
                self._stream.wait_event(event)
            _copy_tensors(pairs)
            weights = int(fingerprint_weights(self._state))  # reads from the device, so the copies are complete
            digests = [weights, int(buffer_fingerprint)]
            if self._stream:
                self._stream.synchronize()
        return digests

    def _compare_ranks(self, digests: list[int], position: int) -> str:
        """The fingerprint of the state. digests: this rank's, of weights and of buffers."""
        rows = gather_rows(torch.tensor(digests), self._ctx)  # of all ranks, on rank 0
        weights, buffers = zip(*rows, strict=True)
        if self._ctx.is_main:
            differing = [rank for rank, fingerprint in enumerate(buffers) if fingerprint != buffers[0]]
            self._rank_with_other_buffers = differing[0] if differing else None
        groups = self._replicas if self._ctx.is_main else []
        diverged_ranks = [
            ranks[index] for ranks in groups for index in find_diverged_ranks([weights[rank] for rank in ranks])
        ]
        weights_fingerprint = sum(weights[ranks[0]] for ranks in groups)
        fingerprint = format_fingerprint(weights_fingerprint + buffers[0] + position)
        diverged_ranks, fingerprint = broadcast_json([sorted(diverged_ranks), fingerprint], self._ctx)
        if diverged_ranks:
            diverged_text = ", ".join(f"rank {rank} on {self._ctx.hosts[rank]}" for rank in diverged_ranks)
            raise TrainingError(
                f"{diverged_text}: has different weights or optimizer state than the other ranks, so nothing was saved;"
                " look for faulty memory or code that treats ranks differently (scripts/verify.py),"
                " then --resume_from auto",
                diverged_ranks[0],
                self._ctx.hosts[diverged_ranks[0]],
            )
        return fingerprint

    def finish(self) -> float:
        """Wait until the copy is complete; returns the seconds. Raises TrainingError on all ranks if they differ."""
        began, copy, self._pending_copy = time.perf_counter(), self._pending_copy, None
        if copy:
            copy.result()
        return time.perf_counter() - began

    def pop_rank_with_other_buffers(self) -> int | None:
        """After `finish`, on rank 0: the first rank whose persistent buffers differ from rank 0's; None if none does,
        or if it was taken before."""
        rank, self._rank_with_other_buffers = self._rank_with_other_buffers, None
        return rank

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the copy in progress."""
        wait([self._pending_copy] if self._pending_copy else [], seconds)

    def close(self) -> None:
        self._thread.shutdown(wait=False)  # after a failure it may wait for a rank that is gone
        self._pinned_buffers.release()


def _copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)

"""Copies the state after a step while training continues, and compares the ranks: a checkpoint holds what all have."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
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
    """Copies the state while training continues, and compares the ranks. All ranks call the methods.

    `start` copies the buffers at once, since the next forward pass changes them. A thread copies all other tensors,
    whose values stay until `finish` is called before the next update.

    Args:
        is_writer: whether this rank writes the copy.
        metadata: what a payload holds beside the state.
        shard_count: rank r has the shard r % shard_count of the state.
        thread_ctx: the context of the thread, which speaks to those of other ranks (`layouts.create_thread_context`).
    """

    def __init__(
        self, state: TrainState, is_writer: bool, metadata: Payload, shard_count: int, thread_ctx: DistributedContext
    ) -> None:
        self._state = state
        self._is_writer = is_writer
        self._metadata = metadata
        self._ctx = thread_ctx
        # for each shard, the ranks that have it: their weights are equal
        self._replicas = [range(shard, thread_ctx.world_size, shard_count) for shard in range(shard_count)]
        # raises now if no checkpoint can hold the metadata; later only values change
        map_payload(metadata, lambda tensor: tensor)
        self._pinned_buffers = PinnedBuffers()
        if is_writer:
            self._reserve_memory()
        self._stream: torch.Stream | None = None
        if thread_ctx.device.type != "cpu":
            self._stream = torch.Stream(thread_ctx.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending_copy: Future[Payload] | None = None  # begun, and not finished
        self._rank_with_other_buffers: int | None = None  # on rank 0: the first rank whose buffers differ from its own

    def _reserve_memory(self) -> None:
        """Allocate the memory for all copies now, since pinning gigabytes takes seconds.

        This counts two tensors and a step for each parameter that has no optimizer state yet, as Adam creates them.
        """
        optimizer = self._state.optimizer
        _, pairs = self._pinned_buffers.allocate_copy(self._state.state_dict())
        tensors = [tensor for _, tensor in pairs]
        for parameter in self._state.parameters_by_tensor:
            if parameter.requires_grad and parameter not in optimizer.state:
                shard = local_shard(parameter)
                tensors += [shard, shard, torch.empty(())]
        self._pinned_buffers.reserve(tensors)

    def start(self) -> Future[Payload]:
        """Start to copy the state as it is now. Finish the copy before weights or optimizer state change.

        Returns:
            The future of the payload, which is empty where this rank writes nothing. The future raises TrainingError on
            all ranks if they differ.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
        """
        state = self._state.state_dict()
        payload = Payload()
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._is_writer:
            payload, pairs = self._pinned_buffers.allocate_copy(state)
        position = fingerprint_position(self._state.progress)

        # buffers at once: the next forward pass changes them
        buffer_fingerprint = fingerprint_buffers(self._state.model)
        buffer_addresses = {buffer.data_ptr() for buffer in self._state.model.buffers()}
        buffer_pairs = []
        later_pairs = []
        for pair in pairs:
            _, tensor = pair
            if tensor.data_ptr() in buffer_addresses:
                buffer_pairs.append(pair)
            else:
                later_pairs.append(pair)
        _copy_tensors(buffer_pairs)

        event = None
        if self._stream:
            event = torch.accelerator.current_stream().record_event()
        self._pending_copy = self._thread.submit(
            self._complete_copy,
            payload=payload | self._metadata,
            pairs=later_pairs,
            buffer_fingerprint=buffer_fingerprint,
            position=position,
            event=event,
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
        """Complete the copy, and compare the ranks. Return the payload. This runs in the thread.

        Args:
            pairs: the memory, and the tensor to copy into it.
            buffer_fingerprint: `fingerprint_buffers` of the step.
            position: `fingerprint_position` of the step.
            event: when the device has computed the state; None on a CPU.
        """
        digests = self._copy_and_fingerprint(pairs, buffer_fingerprint, event)
        payload["provenance"]["fingerprint"] = self._compare_ranks(digests, position)
        return payload

    def _copy_and_fingerprint(
        self, pairs: list[tuple[Tensor, Tensor]], buffer_fingerprint: Tensor, event: Any
    ) -> list[int]:
        """Copy the tensors. Return the digest of this rank's weights and optimizer state, and that of its buffers."""
        stream_context: AbstractContextManager = nullcontext()
        if self._stream:
            torch.accelerator.set_device_index(self._ctx.device)
            stream_context = self._stream
        with stream_context:
            if self._stream and event:
                self._stream.wait_event(event)
            _copy_tensors(pairs)
            weights = int(fingerprint_weights(self._state))  # reads from the device, so the copies are complete
            digests = [weights, int(buffer_fingerprint)]
            if self._stream:
                self._stream.synchronize()
        return digests

    def _compare_ranks(self, digests: list[int], position: int) -> str:
        """Compare the digests of all ranks on rank 0, and return the fingerprint of the state on every rank.

        Args:
            digests: those of weights and of buffers, of this rank.

        Raises:
            TrainingError: on all ranks, if ranks have other weights or optimizer state than the rest.
        """
        rows = gather_rows(torch.tensor(digests), self._ctx)  # of all ranks, on rank 0
        weights, buffers = zip(*rows, strict=True)
        diverged_ranks: list[int] = []
        weights_fingerprint = 0
        if self._ctx.is_main:
            differing = [rank for rank, digest in enumerate(buffers) if digest != buffers[0]]
            self._rank_with_other_buffers = differing[0] if differing else None
            for ranks in self._replicas:
                replica_digests = [weights[rank] for rank in ranks]
                diverged_ranks += [ranks[index] for index in find_diverged_ranks(replica_digests)]
                weights_fingerprint += replica_digests[0]
        fingerprint = format_fingerprint(weights_fingerprint + buffers[0] + position)
        diverged_ranks, fingerprint = broadcast_json([sorted(diverged_ranks), fingerprint], self._ctx)
        if diverged_ranks:
            diverged_text = ", ".join(f"rank {rank} on {self._ctx.hosts[rank]}" for rank in diverged_ranks)
            raise TrainingError(
                f"The weights or the optimizer state of {diverged_text} differ from those of the other ranks, so"
                " nothing was saved. Look for faulty memory or code that treats ranks differently, then start again"
                " with --resume_from auto.",
                diverged_ranks[0],
                self._ctx.hosts[diverged_ranks[0]],
            )
        return fingerprint

    def finish(self) -> float:
        """Wait until the copy is complete. Return the seconds. Raise TrainingError on all ranks if they differ."""
        began = time.perf_counter()
        copy = self._pending_copy
        self._pending_copy = None
        if copy:
            copy.result()
        return time.perf_counter() - began

    def pop_rank_with_other_buffers(self) -> int | None:
        """Return, on rank 0 after `finish`, the first rank whose persistent buffers differ from rank 0's.

        Returns:
            None if no rank differs, or if it was taken before.
        """
        rank = self._rank_with_other_buffers
        self._rank_with_other_buffers = None
        return rank

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the copy in progress."""
        if self._pending_copy:
            wait([self._pending_copy], seconds)

    def close(self) -> None:
        """End the thread, and give the memory back."""
        self._thread.shutdown(wait=False)  # after a failure it may wait for a rank that is gone
        self._pinned_buffers.release()


def _copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Start to copy the second tensor of each pair into the first one."""
    if not pairs:
        return
    views, tensors = zip(*pairs, strict=True)
    with torch.no_grad():
        torch._foreach_copy_(views, tensors, non_blocking=True)

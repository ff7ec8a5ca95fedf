"""What a run records: metrics.jsonl, and the files of the samples that each rank has computed."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from utils.data.sampler import GlobalBatchSampler
from utils.files import AppendOnlyFile, drop_records, read_records, replace_non_finite
from utils.logger import LOGGER_NAME, RANK_0_WARNING, format_count, join_first
from utils.run.provenance import format_utc_time
from utils.run.run_lock import Ownership
from utils.training.log_window import StepRecord, are_all_steps_empty

METRICS_FILE = "metrics.jsonl"
START_EVENTS = ("started", "resumed")  # the first event of each attempt


class RunRecords:
    """The records of a run, as seen by one rank. Only rank 0 writes metrics.jsonl, and each rank its own samples.

    Args:
        folder: of the run.
        ownership: is checked before each write.
    """

    def __init__(self, folder: Path, rank: int, ownership: Ownership) -> None:
        self._folder = folder
        self._rank = rank
        self._ownership = ownership
        self._append_files: dict[str, AppendOnlyFile] = {}  # by the name of the file
        self._pending_start_event: list[dict[str, Any]] = []  # the first event of this attempt, until it is written
        # measured once, since the system's clock may jump during the attempt
        self._clock_offset = time.time() - time.monotonic()

    def append(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a record to metrics.jsonl, on rank 0. Non-finite numbers become null.

        Returns:
            The record, on every rank.
        """
        record = replace_non_finite({"kind": kind} | values)
        if self._rank == 0:
            self._write(METRICS_FILE, [*self._pending_start_event, record])
            self._pending_start_event = []
        return record

    def append_event(self, event: str, step: int, **values: Any) -> None:
        """Append an event to metrics.jsonl, with the time."""
        self.append("event", event=event, step=step, **values, time=self.format_timestamp())

    def append_start(self, started_at: float, is_resumed: bool, values: dict[str, Any]) -> None:
        """Append the first event of this attempt, which no later attempt drops.

        Args:
            started_at: when the process of this attempt started, by time.monotonic.
            values: further entries of the event.
        """
        name = "resumed" if is_resumed else "started"
        event = {"kind": "event", "event": name} | values
        event["seconds"] = round(time.monotonic() - started_at, 3)
        event["time"] = self.format_timestamp()
        self._pending_start_event = [event]
        # A folder with a metrics.jsonl holds a run (`ExistingRun.has_run`). So the file is created with the record that
        # follows this event, when there is something to continue.
        if self._rank == 0 and (self._folder / METRICS_FILE).exists():
            self._write(METRICS_FILE, self._pending_start_event)
            self._pending_start_event = []

    def append_skipped_steps(self, skipped_steps: list[StepRecord], sampler: GlobalBatchSampler) -> None:
        """Append an event for each skipped optimizer step, with the samples of its global batch, and warn of them."""
        for skipped in skipped_steps:
            order = sampler.epoch_order(skipped.epoch)
            end = skipped.first_sample + skipped.samples
            self.append_event(
                "skipped_step",
                step=skipped.step,
                epoch=skipped.epoch + 1,  # records count epochs from 1
                indices=order[skipped.first_sample : end].tolist(),
                reason=skipped.skip_reason,
            )
        if not skipped_steps:
            return
        if are_all_steps_empty(skipped_steps):
            text = "The run skipped %s without targets: %s."
        else:
            text = "The run skipped %s with a non-finite loss or gradient: %s."
        count = format_count(skipped_steps, "optimizer step")
        steps = join_first([str(skipped.step) for skipped in skipped_steps], 5)
        logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, count, steps)

    def append_samples(self, epoch: int, step: int, indices: list[int]) -> None:
        """Append the samples that this rank computed in a committed step to the rank's own file, on every rank."""
        record = {"epoch": epoch, "step": step, "indices": indices}
        self._write(f"samples/rank{self._rank}.jsonl", [record])

    def read(self, kind: str = "") -> list[dict[str, Any]]:
        """Read the records of this kind from metrics.jsonl, or all records."""
        records = []
        for _offset, _line, record in read_records(self._folder / METRICS_FILE):
            if kind in ("", record["kind"]):
                records.append(record)
        return records

    def drop_later(self, step: int, keeps_evaluation: bool, has_test: bool) -> None:
        """Drop the records that a run which resumes at this step writes again. `RunFolder.rewind` checks the owner.

        Args:
            keeps_evaluation: keep the records of an evaluation at this step, which will not be repeated.
            has_test: a test set is evaluated at the end of the run.
        """

        def is_kept(record: dict[str, Any]) -> bool:
            # the time of every attempt counts (utils/report/goodput.py)
            if record.get("event") in START_EVENTS:
                return True
            # a test was made at the end of the run, which may have been shorter, so its step may be an earlier one
            if has_test and record.get("split") == "test":
                return False
            if record["step"] == step:
                is_of_evaluation = record["kind"] == "eval" or record.get("event") in ("best", "evaluation")
                return keeps_evaluation or not is_of_evaluation
            return record["step"] < step

        def is_settled(record: dict[str, Any]) -> bool:
            # nothing before such a record is dropped, since the steps of train records never go down
            return record["kind"] == "train" and record["step"] < step

        def is_sample_kept(record: dict[str, Any]) -> bool:
            return record["step"] <= step

        def is_sample_settled(record: dict[str, Any]) -> bool:
            return record["step"] < step

        drop_records(self._folder / METRICS_FILE, is_kept, is_settled)
        for path in self._folder.glob("samples/rank*.jsonl"):
            drop_records(path, is_sample_kept, is_sample_settled)

    def format_timestamp(self) -> str:
        """Return the time as records and status.json have it."""
        return format_utc_time(self._clock_offset + time.monotonic())

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        self._ownership.require_owner()
        if name not in self._append_files:
            self._append_files[name] = AppendOnlyFile(self._folder / name)
        file = self._append_files[name]
        for record in records:
            file.append(json.dumps(record))

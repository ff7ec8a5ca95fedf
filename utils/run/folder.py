"""The run folder: what it is, who owns it, and its three parts: records, status and checkpoint files."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import replace_json
from utils.logger import LOGGER_NAME, RANK_0_WARNING
from utils.run.checkpoint_files import CheckpointFiles
from utils.run.run_lock import Ownership, RunLock
from utils.run.run_records import RunRecords
from utils.run.run_status import RunStatus
from utils.run.start_decision import DID_NOT_EXIST, StartDecision, restore_existing_run
from utils.settings.errors import StartError, TrainingError, UserError


class RunFolder:
    """The folder of one run, as seen by one rank. Calls for what only rank 0 may write are ignored on other ranks.

    The methods of `records`, `status` and `checkpoint_files` each write one kind of file. Those of this class write
    lock.json, or several kinds of files in an order that a kill in between must not break.

    An attempt calls `status.mark_running`, `rewind`, `checkpoint_files.restore_best`, `mark_training` (lock.json) and
    `record_start` (first event), in this order. A start that is refused is undone (`report_failure`): until
    `mark_training`, renamed folders get their old names back, and until `record_start`, status.json gets its earlier
    content back.

    Args:
        host: of this rank.
        lock: on rank 0, and on the first rank of each node whose folder is its own.
        companions: the programs beside this rank, if there are any.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_folder: Path,
        rank: int,
        host: str,
        start_decision: StartDecision,
        lock: RunLock | None,
        companions: Any = None,
    ) -> None:
        self.folder = folder
        self.checkpoint_folder = checkpoint_folder
        self.rank = rank
        self.start_decision = start_decision
        self.companions = companions
        self.notes = list(start_decision.notes)  # lines to log at the start
        self.lock = lock
        self._renamed_folders = start_decision.renamed_folders
        self.ownership = Ownership(folder, checkpoint_folder, start_decision.token)
        self.records = RunRecords(folder, rank, self.ownership)
        self.status = RunStatus(
            folder=folder,
            rank=rank,
            host=host,
            attempt=start_decision.attempt,
            ownership=self.ownership,
            is_node_leader=self.is_node_leader,
            format_timestamp=self.records.format_timestamp,
        )
        self.checkpoint_files = CheckpointFiles(
            folder=folder,
            checkpoint_folder=checkpoint_folder,
            resume_path=self.resume_path,
            attempt=start_decision.attempt,
            ownership=self.ownership,
            add_note=self.notes.append,
        )

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_local(self) -> bool:
        """Return whether this rank is the first one of a node whose run folder is not rank 0's."""
        return self.lock is not None and not self.is_main

    @property
    def is_node_leader(self) -> bool:
        """Return whether this rank writes the files that a run folder has once.

        This is rank 0, and the first rank of a node with a folder of its own.
        """
        return self.is_main or self.is_node_local

    @property
    def resume_path(self) -> Path | None:
        """Return the checkpoint that this attempt resumes from, if any."""
        if self.start_decision.resume_from:
            return Path(self.start_decision.resume_from)
        return None

    @property
    def log_file(self) -> Path:
        """Return the log of this rank."""
        return self.folder / "logs" / f"rank{self.rank}.log"

    # ---- the start ----

    def rewind(self, step: int, keeps_evaluation: bool = False, has_test: bool = False) -> None:
        """Before a resumed run writes: drop records that it will write again and move checkpoints of later steps aside.

        Args:
            keeps_evaluation: keep the records of an evaluation at this step, which will not be repeated.
            has_test: a test set is evaluated at the end.
        """
        self.ownership.require_owner()
        # checkpoints come before records, so that after a kill in between no attempt resumes from a later step
        self.checkpoint_files.move_later_aside(step)
        self.records.drop_later(step, keeps_evaluation, has_test)

    def mark_training(self) -> None:
        """Write to lock.json that the folder is at the step from which this attempt trains.

        From now on a restart of this launch continues the run in the folder.
        """
        self._update_lock()

    def record_start(self, started_at: float, position: dict[str, int], **values: Any) -> None:
        """Write the first event of this attempt, and the status.

        Args:
            started_at: when its process started, by time.monotonic.
            position: epoch, step and samples_seen.
        """
        event_values = position | values | self.status.pop_previous_attempt()
        self.records.append_start(started_at, is_resumed=self.resume_path is not None, values=event_values)
        self.status.mark_started(**position)

    # ---- the end ----

    def mark_ended(self) -> None:
        """Tell the programs beside this rank how this attempt has ended. status.json tells everybody else before."""
        if self.companions:
            with suppress(OSError):  # a full disk
                self._update_lock(ended=self.status.state)

    def report_failure(self, error: BaseException, step: int = 0) -> None:
        """Undo a start that was refused, or write that the run failed. End the programs beside this rank.

        Rank 0 writes an error that all ranks have, and any other error is written by the first rank that finds the run
        still running.

        Args:
            step: the last one that this rank has completed.
        """
        # a UserError that names a rank is the same on all ranks (`on_all_ranks`), and a TrainingError is not
        is_of_all_ranks = getattr(error, "rank", None) is not None and not isinstance(error, TrainingError)
        is_writer = self.is_main or not is_of_all_ranks
        # if another job has taken over the folder, status.json describes that job's run
        if is_writer and self.ownership.may_be_owner():
            is_undone = self._undo_start(error)
            if not is_undone:
                self.status.write_failure(error, step)
        if self.companions:
            self.companions.stop()

    def _undo_start(self, error: BaseException) -> bool:
        """Undo what a refused start has changed in the folder. Returns whether it had changed something."""
        if not isinstance(error, UserError):
            return False
        moved = self._renamed_folders
        if isinstance(error, StartError):
            # another attempt may succeed, and continues with what was fetched into a folder that did not exist
            moved = [[original, backup] for original, backup in moved if backup != DID_NOT_EXIST]
        if moved:
            restore_existing_run(moved)
            return True
        return self.status.restore_previous()

    def close(self) -> None:
        """Release the folder."""
        if self.lock is not None:
            self.lock.close()

    # ---- what all of this uses ----

    def _update_lock(self, **values: Any) -> None:
        """Write to lock.json, if this rank has a lock. From now on no failure undoes the renaming of folders."""
        if self.lock is not None:
            self.ownership.require_owner()
            decision = self.start_decision
            self.lock.write(launch_id=decision.launch_id, attempt=decision.attempt, has_trained=True, **values)
        self._renamed_folders = []

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the run, on rank 0."""
        if self.is_main:
            self.ownership.require_owner()
            replace_json(self.folder / name, value)

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning, on rank 0."""
        logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, *values)

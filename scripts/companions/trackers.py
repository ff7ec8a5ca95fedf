# extra: companions
"""Weights & Biases, MLflow and Trackio behind one interface, which scripts/companions/track.py uses."""

from __future__ import annotations

import json
import os
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WANDB_SETTINGS = {"console": "off", "save_code": False, "disable_git": True, "x_disable_meta": True, "init_timeout": 30}
WANDB_SETTINGS |= {"x_transaction_log_flush_interval": 0.2}  # seconds, after which a kill loses nothing
MLFLOW_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # track.py tries again
MLFLOW_VARIABLES |= {"MLFLOW_DISABLE_TELEMETRY": "true"}
BLOCK_BYTES = 32768
Rows = list[tuple[int, dict[str, float]]]  # the step of each record, and its values by name, such as "train/loss"


class Tracker:
    """A run in a tracker. After an error a new object takes its place.

    Attributes:
        id: the run's identity in the tracker. `open` may replace it by one that the tracker chooses.
        project, name, settings, folder: the project, name, settings and folder of the run.
    """

    project_variable, remedy = "", ""  # the remedy is for a user whose run the tracker rejects

    def __init__(self, id: str, project: str, settings: dict[str, Any], folder: Path) -> None:
        self.id, self.project, self.settings, self.folder, self.name = id, project, settings, folder, folder.name

    def open(self, sent_steps: dict[str, int]) -> dict[str, int]:
        """Continue the run or begin it.

        Returns:
            The last step that the tracker has, by group. If the tracker does not tell, it is `sent_steps`.
        """
        raise NotImplementedError

    def send(self, rows: Rows) -> None:
        """Send rows. It returns when the rows cannot be lost, or when `open` would find that they are missing."""
        raise NotImplementedError

    def close(self, state: str, step: int, summary: dict[str, float]) -> None:
        if summary:
            self.send([(step, summary)])


class Wandb(Tracker):
    project_variable, remedy = "WANDB_PROJECT", "Run `wandb login`, or set WANDB_MODE=offline."

    def open(self, sent_steps: dict[str, int]) -> dict[str, int]:
        import wandb

        wandb.teardown()  # a failed try may have left something
        mode, url = (getattr(wandb.setup().settings, name) for name in ("mode", "base_url"))
        if mode in ("online", "shared"):  # a try to begin without a network would leave a folder
            check_reachable(url)
        settings = wandb.Settings(
            **{name: value for name, value in WANDB_SETTINGS.items() if name in wandb.Settings.model_fields}
        )
        init_args = {"project": self.project, "dir": os.environ.get("WANDB_DIR") or self.folder}
        self._run = run = wandb.init(id=self.id, name=self.name, resume="allow", settings=settings, **init_args)
        run.config.update(self.settings, allow_val_change=True)
        rows = [dict(run.summary)] if run.resumed else []
        if run.offline:  # `resume` has no effect on an offline run
            files = Path(run.settings.wandb_dir).glob(f"offline-run-*-{self.id}/*.wandb")
            rows = [row for file in files for row in read_offline_rows(file)]
        stored_steps = find_last_steps(rows) or (sent_steps if run.offline or run.resumed else {})
        last = [*(int(row.get("_step", -1)) for row in rows), *stored_steps.values()]
        self._next_row = max([run.step, *(step + 1 for step in last)])
        return stored_steps

    def send(self, rows: Rows) -> None:
        for step, values in rows:
            self._next_row = max(self._next_row, step)  # a row of an earlier step would be ignored
            self._run.log(values, step=self._next_row)

    def close(self, state: str, step: int, summary: dict[str, float]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=int(state not in ("completed", "preempted")))


class Mlflow(Tracker):
    project_variable, remedy = "MLFLOW_EXPERIMENT_NAME", "Set MLFLOW_TRACKING_URI and the variables of its login."

    def open(self, sent_steps: dict[str, int]) -> dict[str, int]:
        for name, value in MLFLOW_VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient()
        project = client.get_experiment_by_name(self.project)
        experiment_id = project.experiment_id if project else client.create_experiment(self.project)
        queries = [f"{name} = '{self.id}'" for name in ("attributes.run_id", "tags.key")]  # or begun, but not noted
        runs = [run for query in queries for run in client.search_runs([experiment_id], query)]
        run = runs[0] if runs else client.create_run(experiment_id, run_name=self.name, tags={"key": self.id})
        self.id = run.info.run_id
        client.update_run(self.id, status="RUNNING")
        # a parameter cannot be changed later, so that only new ones are logged
        params = [
            Param(name, str(value)[:6000]) for name, value in self.settings.items() if name not in run.data.params
        ]
        for at in range(0, len(params), 100):
            client.log_batch(self.id, params=params[at : at + 100])
        return find_last_steps([run.data.metrics])

    def send(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(name, value, now, step) for step, scalars in rows for name, value in scalars.items()]
        for at in range(0, len(values), 1000):
            self._client.log_batch(self.id, metrics=values[at : at + 1000])

    def close(self, state: str, step: int, summary: dict[str, float]) -> None:
        super().close(state, step, summary)
        self._client.set_terminated(self.id, {"completed": "FINISHED", "preempted": "KILLED"}.get(state, "FAILED"))


class Trackio(Tracker):
    project_variable, remedy = "TRACKIO_PROJECT", "Run `hf auth login`, or unset TRACKIO_SPACE_ID."

    def open(self, sent_steps: dict[str, int]) -> dict[str, int]:
        import trackio

        self._is_local = not os.environ.keys() & {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_STORAGE_MODE"}
        if not self.id.startswith(f"{self.name}-"):  # Trackio resumes by name, and other runs may have the same
            self.id = f"{self.name}-{self.id[:8]}"
        if self._is_local:
            return find_last_steps(trackio.SQLiteStorage.get_logs(self.project, self.id))
        self.send([])  # sends what Trackio has kept while its server was out of reach
        return sent_steps

    def send(self, rows: Rows) -> None:
        import trackio

        if url := os.environ.get("TRACKIO_SERVER_URL"):
            check_reachable(url.partition("?")[0])  # Trackio would keep what it cannot send
        init_args = {"project": self.project, "name": self.id, "resume": "allow", "embed": False}
        run = trackio.init(**init_args, config=self.settings, auto_log_cpu=False, auto_log_gpu=False)
        for step, values in rows:
            run.log(values, step=step)
        run.finish()  # otherwise a thread would send them later, which only prints errors
        for step, values in rows[-1:] if self._is_local else []:
            stored_values = trackio.SQLiteStorage.get_metric_values(self.project, self.id, [*values][-1], step=step)
            if not stored_values:
                raise OSError(f"Trackio has not stored step {step}")

    def close(self, state: str, step: int, summary: dict[str, float]) -> None:
        import trackio

        if not self._is_local and trackio.SQLiteStorage.has_pending_data(self.project):
            raise OSError("Trackio keeps records that its server lacks")
        super().close(state, step, summary)


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def check_reachable(url: str) -> None:
    """Raise OSError if no server answers at the URL."""
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=10).close()


def find_last_steps(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last step of each group, which is the largest of its values called `step`."""
    steps: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            group, _, last = name.rpartition("/")
            if group and last == "step":
                steps[group] = max(steps.get(group, -1), int(value))
    return steps


def read_offline_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Return the rows in the file of an offline run, which a kill may have cut.

    The file has the format of LevelDB's logs.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)  # kind 1 is a whole record, and 2, 3 and 4 are its parts
        whole, at = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4) and at <= len(data):
            items = Record.FromString(whole).history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < 7:
            at += left

# extra: verify
"""Ask elsewhere.py, which runs beside the checks, for the data and the schedule in a new process."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from lib.values import hash_nested
from utils.data.changes import are_fingerprints_alike
from utils.data.sets import identify_dataset
from utils.extras.sketches import sample_fingerprints  # extra: sketches

MAX_SECONDS = 120.0  # the checks wait so long for the new process
NAME_VARIABLES = ("USER", "LOGNAME", "LNAME", "USERNAME", "HOSTNAME")
RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # these count the attempts before this one
CHANGED_ENVIRONMENT = (
    "another hash seed, clock, date, time zone, user, host name, number of restarts and order of files"
)
NO_ANSWER = "no answer"


class NewProcess:
    """Starts elsewhere.py with this question and environment, apart from what CHANGED_ENVIRONMENT names."""

    def __init__(self, question: dict[str, Any], environment: dict[str, str]) -> None:
        hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        changed = (
            dict.fromkeys(NAME_VARIABLES, "elsewhere")
            | {"PYTHONHASHSEED": hash_seed, "TZ": "XYZ-11:30"}
            | dict.fromkeys(RESTART_VARIABLES, "1")
        )
        command = [sys.executable, str(Path(__file__).with_name("elsewhere.py"))]
        self._output = tempfile.TemporaryFile("w+")  # with a pipe, the process would wait for a reader
        self._process = subprocess.Popen(
            command,
            text=True,
            env=environment | changed,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
        )
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(question | {"imports": find_datetime_packages()}))

    def answer(self, name: str) -> tuple[Any, str]:
        """Return the answer and an empty text, or None and the reason why there is no answer."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_SECONDS)
        self.end()
        self._output.seek(0)
        answers = dict(json.loads(line) for line in self._output if line.endswith("\n"))
        value, problem = answers.get(name, (None, f"{NO_ANSWER}, exit code {self._process.returncode}"))
        return value, problem

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def find_datetime_packages() -> list[str]:
    """Return the packages in this process that derive classes from `datetime`, such as pandas.

    Their import would crash after elsewhere.py has replaced `datetime`.
    """
    names = {kind.__module__.partition(".")[0] for kind in datetime.datetime.__subclasses__()}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return sorted(name for name, file in files.items() if file and "site-packages" in file)


def summarize_dataset(dataset: Any, seed: int) -> Any:
    """Return what is compared of a data set. A plain subset does not say that the sizes of its files are known."""
    if dataset is None:
        return None
    summary: list[Any] = [identify_dataset(dataset), []]
    summary[1] = sample_fingerprints(Subset(dataset, range(len(dataset))), seed)  # extra: sketches
    return summary


def hash_order(dataset: Any, seed: int) -> str:
    """Return a digest of an epoch's order, if the data set gives the order."""
    return (
        hash_nested(torch.as_tensor(dataset.epoch_order(seed, 1, len(dataset))))
        if hasattr(dataset, "epoch_order")
        else ""
    )


def are_summaries_equal(summary_a: Any, summary_b: Any) -> bool:
    if summary_a is None or summary_b is None:
        return summary_a is summary_b
    # ---- extra: sketches ----
    (identity_a, samples_a), (identity_b, samples_b) = summary_a, summary_b
    if identity_a == identity_b and are_fingerprints_alike(samples_a, samples_b):
        return True
    # ---- end of sketches ----
    return summary_a == summary_b

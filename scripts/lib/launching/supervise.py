# extra: launcher
"""Run torchrun to completion, with signals, retries and the exit code of the launch."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.lib.launching.hosts import forward_signals
from scripts.lib.launching.plan import SIGNALS, LaunchPlan
from scripts.lib.launching.rendezvous import NodesMissing, find_nodes, print_status
from scripts.lib.processes import end_process, list_children, start_process
from utils.files import read_json, replace_json
from utils.settings.errors import EXIT_PREEMPTED

ORPHANED_AFTER_S = {"static": 30, "c10d": 120}  # under c10d torchrun may be waiting for new nodes


class Stopped(Exception):
    """A signal arrived while torchrun was not running."""


class Launch:
    """Makes all attempts of one launch on this node."""

    def __init__(self, plan: LaunchPlan, env: dict[str, str]) -> None:
        self._plan, self._env = plan, env | plan.settings
        self._env["LAUNCH_ID"] = env.get("LAUNCH_ID") or f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"
        self._torchrun: subprocess.Popen | None = None
        self._signal_count, self._is_waiting = 0, True  # it waits for nodes or for the next attempt
        # A Slurm job, which ignores USR1 here, is requeued. A new attempt in it would be cut off.
        self._is_requeued = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    def _on_signal(self, number: int, _: object) -> None:
        """Ask the ranks to save at the first signal, after which torchrun exits. End torchrun at later ones."""
        self._signal_count += 1
        if self._is_waiting:
            self._is_waiting = False
            raise Stopped
        if self._torchrun and self._signal_count > 1:
            self._torchrun.send_signal(signal.SIGKILL if number == signal.SIGINT else signal.SIGTERM)
        elif self._torchrun:
            for pid in list_children(self._torchrun.pid) or [self._torchrun.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def run(self) -> int:
        """Make attempts until one is final, and return its exit code. Raises UserError."""
        attempts, pause = self._plan.retries + 1, 5
        with tempfile.TemporaryDirectory() as folder, suppress(Stopped):
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(number, self._on_signal)
            if self._env.pop("LAUNCH_OVER_SSH", ""):
                threading.Thread(target=forward_signals, daemon=True).start()
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            with suppress(ValueError, OSError):  # torchrun hosts the store, which has three connections of each rank
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            self._env["TORCHELASTIC_ERROR_FILE"] = str(Path(folder, "error.json"))  # of the first rank that fails
            for attempt in range(1, attempts + 1):
                code = self._run_attempt(attempt == 1)
                is_final = code in (0, 2) or self._signal_count or not self._plan.is_training
                if is_final or attempt == attempts or (code == EXIT_PREEMPTED and self._is_requeued):
                    return code
                print_status(f"The exit code was {code}. Attempt {attempt + 1} of {attempts} starts in {pause} s.")
                self._is_waiting = True
                time.sleep(pause)
                pause = min(2 * pause, 60)
        return EXIT_PREEMPTED

    def _run_attempt(self, is_first: bool) -> int:
        plan = self._plan
        status_file, error_file = plan.run_folder / "status.json", Path(self._env["TORCHELASTIC_ERROR_FILE"])
        error_file.unlink(missing_ok=True)
        if plan.nodes.max_nodes > 1:
            try:
                self._env["LAUNCH_ID"] = find_nodes(plan.nodes, plan.patience, self._env["LAUNCH_ID"], is_first)
            except NodesMissing as missing:
                print_status(str(missing))
                return 1
        before = read_json(status_file)
        self._is_waiting = False
        self._torchrun = start_process(plan.command, env=self._env)
        if self._signal_count:  # a signal has arrived while torchrun was being started
            self._torchrun.terminate()
        if plan.nodes.max_nodes > 1:
            seconds = ORPHANED_AFTER_S[plan.nodes.backend]
            threading.Thread(target=end_orphan, args=(self._torchrun, seconds), daemon=True).start()
        code = self._torchrun.wait()
        self._torchrun = None
        if self._signal_count and code == -signal.SIGTERM:  # torchrun was still starting
            raise Stopped
        if plan.is_training:
            return determine_exit_code(
                code, status_file, before, read_json(error_file), is_alone=plan.nodes.max_nodes == 1
            )
        return code if code >= 0 else 128 - code


def end_orphan(torchrun: subprocess.Popen, seconds: float) -> None:
    """End a torchrun that keeps running after its ranks have exited, because the other nodes and the store are gone."""
    last_seen_at, had_ranks = time.monotonic(), False
    while torchrun.poll() is None:
        if list_children(torchrun.pid):
            last_seen_at, had_ranks = time.monotonic(), True
        if had_ranks and time.monotonic() - last_seen_at > seconds:
            text = f"The ranks of torchrun exited {seconds} s ago, and the other nodes are gone."
            print_status(f"{text} torchrun is ended now.")
            end_process(torchrun)
        time.sleep(1)


def determine_exit_code(
    torchrun_code: int, status_file: Path, status_before: dict[str, Any], error: dict[str, Any], is_alone: bool
) -> int:
    """Return the exit code of an attempt, and print the first failure of a failed one.

    Args:
        torchrun_code: the exit code of torchrun.
        status_file: the path of status.json.
        status_before: the content of that file before the attempt.
        error: the error file of the first failing rank, as copied by torchrun.
        is_alone: whether no other node writes `status_file`.
    """
    status, message = read_json(status_file), error.get("message", "")
    message = message.get("message", "") if isinstance(message, dict) else str(message)
    state = status.get("state") if status != status_before else ""
    if message.startswith("UserError: "):
        return 2
    if state == "preempted":
        return EXIT_PREEMPTED
    if torchrun_code == 0:
        return 0
    if state == "running" and is_alone:  # no rank survived to write the state
        cause = message or f"Every rank was killed (torchrun's exit code: {torchrun_code})."
        state, host = "failed", socket.gethostname()
        status |= {"state": state, "error": cause, "rank": 0, "host": host}
        with suppress(OSError):
            replace_json(status_file, status)
    if state == "failed":
        print(f"launch.sh: Rank {status['rank']} on {status['host']} failed: {status['error']}", file=sys.stderr)
    return 1

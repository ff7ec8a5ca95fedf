"""Starts programs of scripts/companions: beside training, or to wait for their answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from config import TrainingConfig
from utils.distributed.context import environment_without_launcher
from utils.settings.errors import StartError, UserError

EXIT_OTHER_OWNER = 76  # exit code: another job owns the run
COMPANIONS_FOLDER = Path(__file__).resolve().parents[3] / "scripts/companions"


def create_companion_plan(
    config: TrainingConfig, rank: int, host: str, token: str, launch_id: str, **details: Any
) -> dict[str, Any]:
    """What the programs beside training know (scripts/companions/follow.py). details: see there."""
    folders = {"folder": str(config.run_folder.absolute()), "checkpoints": str(config.checkpoint_folder.absolute())}
    identity = {"rank": rank, "host": host, "token": token, "launch_id": launch_id}
    return folders | identity | {"config": config.to_dict()} | details


def start_program(name: str, plan: dict[str, Any], *flags: str, **options: Any) -> subprocess.Popen:
    """Start a program in a session of its own. plan: what it reads from its standard input, as JSON."""
    words = [sys.executable, str(COMPANIONS_FOLDER / f"{name}.py"), str(plan.get("folder", "")), *flags]
    env = environment_without_launcher()  # what it starts must not wait for other ranks
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env=env, **options)
    pipe, process.stdin = cast(BinaryIO, process.stdin), None
    with suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps(plan | {"parent": os.getpid()}).encode())
    return process


def call_program(name: str, plan: dict[str, Any], title: str, *flags: str) -> dict[str, Any]:
    """Wait for a program's answer.

    title: what it is called in messages.

    Raises:
        UserError: the answer, if the program rejects the plan; StartError if another attempt may succeed.
    """
    process = start_program(name, plan, *flags, stdout=subprocess.PIPE)
    try:
        answer = json.loads(process.communicate()[0])
    except ValueError:
        raise StartError(
            f"The program of {title} ended with exit code {process.returncode}. See its error above, then start again."
        ) from None
    if "problem" in answer:
        raise (StartError if answer["is_transient"] else UserError)(answer["problem"])
    return answer


def kill_session(session_id: int) -> None:
    """SIGKILL a program that `start_program` has started, and what it has started itself: they are in one session."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[3]) == session_id:
                os.kill(int(file.parent.name), signal.SIGKILL)

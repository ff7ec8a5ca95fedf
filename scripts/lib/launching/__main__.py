# extra: launcher
"""The program behind scripts/launch.sh. It needs only the standard library, so that it starts at once."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from utils.settings.errors import UserError, exit_on_user_error

with exit_on_user_error():  # a setting of config.py may be declared in a wrong way
    from config import TrainingConfig, can_train_longer

from scripts.lib.launching.hosts import Hosts
from scripts.lib.launching.plan import (
    TRAINING_PROGRAM,
    choose_program,
    create_launch_plan,
    create_parser,
    launch_folder,
    read_flags,
    read_nodes,
)
from scripts.lib.launching.rendezvous import print_status
from scripts.lib.launching.supervise import Launch, read_json
from scripts.lib.processes import start_process


def main(argv: Sequence[str], env: dict[str, str]) -> int:
    if any(word.partition("=")[0] in ("--help", "-h") for word in argv):
        print(create_parser({}).format_help(), flush=True)
        os.execv(sys.executable, [sys.executable, "train.py", *argv])
    try:
        return launch(argv, env)
    except UserError as error:
        host, text = socket.gethostname(), str(error)
        print_status(text if host in text else f"{host}: {text}")
        return 2


def launch(argv: Sequence[str], env: dict[str, str]) -> int:
    """Launch a run as these words and variables ask for, and return the exit code. Raises UserError."""
    options, flags = read_flags([*argv], env)
    config = TrainingConfig.from_args(flags)  # the flag --print-config exits here
    if options.hosts:
        hosts = Hosts(options, argv, env)
        if options.dry_run:
            print(*hosts.commands, sep="\n")
            return 0
        return detach(argv, config) if options.detach else hosts.run(reconnects=options.retries != "0")
    status, saved = (read_json(config.run_folder / name) for name in ("status.json", "config.json"))
    is_training = choose_program(options) == TRAINING_PROGRAM
    saved = saved or {"epochs": status.get("epoch", math.inf), "max_steps": 0}  # config.json may be lost
    is_completed = status.get("state") == "completed" and not can_train_longer(vars(config), saved)
    if read_nodes(options).max_nodes > 1 and is_training and config.resume_from == "auto" and is_completed:
        # the other nodes may be gone, so that this one must not wait for them
        print_status(f"The run in {config.run_folder} is completed. There is nothing left to do.")
        return 0
    plan = create_launch_plan(options, flags, config, env)
    if options.detach and not options.dry_run:
        return detach(argv, config)
    if not options.dry_run:
        create_folders(config, has_run=is_training and plan.nodes.max_nodes > 1)
    variables = shlex.join(f"{name}={value}" for name, value in plan.settings.items())
    print_status(f"The ranks get these variables: {variables}")
    if options.dry_run:
        print(shlex.join(plan.command))
        return 0
    return Launch(plan, env).run()


def create_folders(config: TrainingConfig, has_run: bool = False) -> None:
    """Create the folder of torchrun's output, and that of the run. Raises UserError.

    An NFS client that has looked for a folder before another node creates it does not see it for up to 30 s.
    """
    host = socket.gethostname()
    try:
        for folder in [launch_folder(config) / host, *([config.run_folder] if has_run else [])]:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{host} cannot write to the folder that holds --run_dir {config.run_folder} ({error.strerror})."
        raise UserError(f"{text} Mount this folder for writing, or give another --run_dir.") from None


def detach(argv: Sequence[str], config: TrainingConfig) -> int:
    """Start this program again without --detach, in the background."""
    create_folders(config)
    log = launch_folder(config) / f"{socket.gethostname()}-{time.strftime('%Y%m%dT%H%M%S')}.log"
    words = [sys.executable, "-m", "scripts.lib.launching", *(word for word in argv if word != "--detach")]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the new process inherits this
    with log.open("w") as file:
        child = start_process(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    print(f"launch.sh: Process {child.pid} runs in the background. See its output with: tail -f {log}")
    print(f"launch.sh: Save and stop the run with: kill -TERM {child.pid}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))

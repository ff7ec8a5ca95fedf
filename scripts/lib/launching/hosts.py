# extra: launcher
"""Run launch.sh on each host over ssh (--hosts), print its output, and forward signals."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, TextIO

from scripts.lib.launching.plan import SIGNALS
from scripts.lib.launching.rendezvous import PATIENCE_S, print_status
from scripts.lib.processes import start_process
from utils.settings.errors import EXIT_PREEMPTED

SSH_COMMAND = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 --".split()
CONNECTION_LOST = 255  # ssh's exit code if it has no connection, or no longer
RECONNECT_S = 10.0
GRACE_S = 30.0  # the other hosts have this time to end on their own
LOCAL_VARIABLES = re.compile(
    r"HOME|HOST|HOSTNAME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|TERM|_|(DBUS|DISPLAY|SSH|TMUX|XDG).*"
)
RANK_LINE = re.compile(rb"\[\S+ \d+\] ")  # the ranks' output names the host


class Hosts:
    """Runs one launch.sh per host, in this directory and with this environment. The first host is node 0."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str], env: dict[str, str]) -> None:
        self._hosts = hosts = options.hosts.split(",")
        env = {
            name: value for name, value in env.items() if name.isidentifier() and not LOCAL_VARIABLES.fullmatch(name)
        }
        env = {"LAUNCH_ID": secrets.token_hex(8)} | env | {"LAUNCH_OVER_SSH": "1"}
        words = [word for word in argv if word != "--detach"]
        address = options.master_addr or hosts[0].rpartition("@")[2]
        words += ["--hosts=", f"--nnodes={options.nnodes if ':' in options.nnodes else len(hosts)}"]
        words += [f"--master-addr={address}"]
        self._exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        self.commands = [shlex.join(["scripts/launch.sh", *words, f"--node-rank={k}"]) for k in range(len(hosts))]
        self._connections: dict[int, Any] = {}
        self._exit_codes: dict[int, int] = {}  # by the number of the host, after launch.sh has ended for good
        self._signals: list[int] = []

    def run(self, reconnects: bool) -> int:
        """Run the job on all hosts, and return its exit code.

        Args:
            reconnects: whether to run launch.sh again on a host that was lost, such as one that reboots.
        """
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda number, _: self._signals.append(number))
        for k in range(len(self._hosts)):
            threading.Thread(target=self._run_host, args=(k, reconnects), daemon=True).start()
        sent: dict[subprocess.Popen, int] = {}
        failed_at = 0.0
        while len(self._exit_codes) < len(self._hosts):
            time.sleep(0.1)
            for connection in [*self._connections.values()]:
                for number in self._signals[sent.get(connection, 0) :]:
                    with suppress(OSError):  # it has ended
                        os.write(connection.stdin.fileno(), b"%d\n" % number)
                sent[connection] = len(self._signals)
            if any([*self._exit_codes.values()]):
                failed_at = failed_at or time.monotonic()
            if failed_at and time.monotonic() - failed_at > GRACE_S and not self._signals:
                print_status("The other hosts are stopped now.")
                self._signals.append(signal.SIGTERM)
        codes = {*self._exit_codes.values()}
        return 2 if 2 in codes else 1 if codes - {0, EXIT_PREEMPTED} else max(codes)

    def _run_host(self, k: int, reconnects: bool) -> None:
        ends = 0.0
        while True:
            code, was_connected = self._run_host_once(k)
            if was_connected:
                ends = time.monotonic() + PATIENCE_S
            if code == CONNECTION_LOST:
                host = self._hosts[k]
                text = f"{host} has no connection."
                print_status(f"{text} Check that `ssh {host} true` works without a password.")
            if code != CONNECTION_LOST or not reconnects or self._signals or time.monotonic() > ends:
                break
            time.sleep(RECONNECT_S)
        self._exit_codes[k] = code

    def _run_host_once(self, k: int) -> tuple[int, bool]:
        """Run launch.sh on one host. Return the exit code, and whether there was a connection."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        connection: Any = start_process([*SSH_COMMAND, self._hosts[k], "exec bash -s"], **pipes)
        script = ["echo", f"cd {shlex.quote(os.getcwd())} || exit 2", *self._exports, f"exec {self.commands[k]}"]
        with suppress(OSError):  # it has ended
            # the script goes through stdin, because ps would show it among the arguments
            connection.stdin.write(os.fsencode("".join(f"{line}\n" for line in script)))
            connection.stdin.flush()
        self._connections[k] = connection
        streams = ((connection.stderr, sys.stderr), (connection.stdout, sys.stdout))
        copies = [threading.Thread(target=self._copy_output, args=(k, *pair), daemon=True) for pair in streams]
        copies[0].start()
        was_connected = bool(connection.stdout.readline())  # the script begins with an `echo`
        copies[1].start()
        code = connection.wait()
        for copy in copies:
            copy.join(2.0)  # a shared connection (ControlPersist) may keep stderr open
        return code, was_connected

    def _copy_output(self, k: int, source: BinaryIO, target: TextIO) -> None:
        label = f"[{self._hosts[k].rpartition('@')[2]}] "
        for line in source:
            target.write(("" if RANK_LINE.match(line) else label) + line.decode(errors="replace"))
            target.flush()


def forward_signals() -> None:
    """Raise, on a host, the signals that arrive on stdin, and SIGTERM if the connection is lost."""
    while text := os.read(0, 64):
        for number in text.split():
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)

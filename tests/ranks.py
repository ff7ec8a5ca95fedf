"""Real processes for tests: ranks forked from a warm server, and launches. Each has a deadline; none is left behind."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 120.0  # seconds
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # scripts find this Python in it
MARK = "DDP_TEST_PROGRAM"
SECONDS_TO_GO = 3.0  # for processes that a program leaves behind to end by themselves

# Ranks are forked from a server that has imported everything and has no threads: a fork of pytest itself, in which
# a thread may hold a libc lock at that moment, sometimes hangs.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["warm"])
STORES = """
import sys, torch.distributed as dist
stores = []
for line in sys.stdin:
    stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    print(stores[-1].port, flush=True)
"""


@functools.cache
def _store_server() -> subprocess.Popen:
    server = subprocess.Popen([sys.executable, "-c", STORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # closing its input is not enough: a DataLoader worker forked from this process holds a copy of the pipe
    atexit.register(server.kill)
    return server


def new_store() -> str:
    """The port of a new store, like that of torchrun's agent, in a process that lives as long as pytest."""
    server = _store_server()
    print(file=server.stdin, flush=True)
    return server.stdout.readline().strip()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Run function(*args) in ranks with torchrun's variables; returns their results, by rank.

    Raises AssertionError, with the output of the ranks, when one fails or the deadline passes.
    """
    common = launch_variables(world_size)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        ranks = []
        for rank, file in enumerate(files):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
            ranks.append(CONTEXT.Process(target=_be_a_rank, args=(file, own, function, args)))
            ranks[-1].start()
        ends = time.monotonic() + deadline
        try:
            while any(rank.is_alive() for rank in ranks) and time.monotonic() < ends:
                time.sleep(0.01)
                if any(rank.exitcode for rank in ranks):
                    ends = min(ends, time.monotonic() + 1)  # the others print their errors
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        codes = [rank.exitcode for rank in ranks]
        if any(codes):
            texts = [f"--- rank {rank}\n{file.with_suffix('.out').read_text()}" for rank, file in enumerate(files)]
            reason = f"-9: ended by the test, after {deadline} s or when another rank failed"
            raise AssertionError("\n".join([f"exit codes {codes} ({reason})", *texts]))
        return [pickle.loads(file.read_bytes()) for file in files]


def launch_variables(world_size: int) -> dict[str, str]:
    """The variables that torchrun sets to the same values on all ranks."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": new_store(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store | {"WORLD_SIZE": str(world_size)}


def _be_a_rank(file: Path, env: dict[str, str], function: Callable[..., Any], args: tuple) -> None:
    output = os.open(file.with_suffix(".out"), os.O_WRONLY | os.O_CREAT)
    _begin(output, env)
    try:
        file.write_bytes(pickle.dumps(function(*args)))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _begin(output: int, env: dict[str, str]) -> None:
    """Set up a process forked from the server: print to a file, and look like a newly started process."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()  # a crash prints its stack to the redirected stderr
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # for DataLoader workers
    import warm

    warm.be_quick()


@dataclass
class Ended:
    """How a launched program ended."""

    code: int
    out: str
    err: str
    left: int  # processes that it left behind; they were ended

    @property
    def text(self) -> str:
        return self.out + self.err


def launch(
    command: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: Path = ROOT, deadline: float = DEADLINE
) -> Ended:
    """Run a program until it ends. Raises AssertionError, with its output, when the deadline passes."""
    return finish(start(command, env=env, cwd=cwd), deadline)


def start(command: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.Popen:
    """Start a program in a new session. It prints to files: a pipe would stay open as long as its children."""
    mark = str(uuid.uuid4())
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: mark}
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    words = [str(word) for word in command]
    program = subprocess.Popen(words, env=everything, cwd=cwd, stdout=files[0], stderr=files[1], start_new_session=True)
    program.mark, program.files = f"{MARK}={mark}".encode(), files
    return program


def finish(program: subprocess.Popen, deadline: float = DEADLINE) -> Ended:
    """Wait for the end of a program from `start`, and end the processes that it left behind."""
    try:
        program.wait(deadline)
        is_late = False
    except subprocess.TimeoutExpired:
        is_late = True
    left, (out, err) = stop(program), _printed(program)
    assert not is_late, f"{program.args} took more than {deadline} s\n{out}\n{err}"
    return Ended(program.returncode, out, err, left)


def _printed(program: subprocess.Popen) -> list[str]:
    texts = []
    for file in program.files:
        file.seek(0)
        texts.append(file.read())
        file.close()
    return texts


def stop(program: subprocess.Popen) -> int:
    """End a program that this test started, and what it left behind (marked by a variable). Returns their number."""
    if program.poll() is None:
        program.terminate()
        try:
            program.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
    ends = time.monotonic() + SECONDS_TO_GO
    # the checkpoint writer notices the end slightly later
    while (left := marked(program)) and time.monotonic() < ends:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, also if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def marked(program: subprocess.Popen) -> list[int]:
    """The processes that the program left; none if there is no /proc."""

    def has_mark(process: Path) -> bool:
        return program.mark in (process / "environ").read_bytes().split(b"\0")

    pids, is_its = [], program.is_mine if isinstance(program, WarmLaunch) else has_mark
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if is_its(process) and int(process.name) != os.getpid():
                pids.append(int(process.name))
    return pids


class WarmLaunch:
    """`python script words`, or with ranks as torchrun would launch it, forked from the server; used like `start`.

    The agent replaces torchrun: it forwards SIGTERM and SIGINT to the ranks' process groups, ends all ranks when
    one fails, gives them 30 s, and exits with 1. Tests of torchrun's output or restarts need a real launch.
    """

    def __init__(self, ranks: int, script: Path, words: Sequence[object], env: dict[str, str] | None = None) -> None:
        self.args = [str(script), *map(str, words)]
        # with a name, since the inode of a deleted file may be reused once it is closed
        self.files = [tempfile.NamedTemporaryFile("w+", prefix=f"{uuid.uuid4()}-") for _ in range(2)]
        self.mark = os.path.realpath(self.files[0].name)
        opened = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self.files]
        common = launch_variables(ranks) if ranks else {}
        if ranks:
            names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
            common |= {"TORCHELASTIC_RUN_ID": "none"} | dict.fromkeys(names, "0")
        self._process = CONTEXT.Process(target=_be_an_agent, args=(ranks, self.args, opened, common | (env or {})))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def is_mine(self, process: Path) -> bool:
        """Whether a process of /proc belongs to this launch: it has inherited the agent's output file."""
        return any(os.readlink(file) == self.mark for file in (process / "fd").iterdir())


def _be_an_agent(ranks: int, words: list[str], outputs: list[str], env: dict[str, str]) -> None:
    os.setsid()
    out, err = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in outputs)
    _begin(out, env)
    os.dup2(err, 2)
    if not ranks:
        _run_script(words)
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: heard.append(number))
    pids = {}
    for rank in range(ranks):
        if not (pid := os.fork()):
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _run_script(words)
        pids[pid] = rank
    code = 0
    while pids and not code and not heard:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            del pids[pid]
            code = status and 1
        time.sleep(0.01)
    _end_ranks(pids, heard[0] if heard else signal.SIGTERM)
    os._exit(1 if heard else code)


def _end_ranks(pids: dict[int, int], number: int) -> None:
    """As torchrun does: send the signal to each rank's process group, and SIGKILL to what is left after 30 s."""
    ends = time.monotonic() + 30
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        pids.pop(pid, None)
        for pid in pids if time.monotonic() > ends else ():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _run_script(words: list[str]) -> NoReturn:
    """Run a script as the interpreter does, including its exit: threads are joined, then atexit handlers run."""
    sys.argv, code = words, 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def torchrun(world_size: int, *flags: str | Path, script: str = "train.py", **options: Any) -> Ended:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return launch([*launcher, script, *flags], **options)


def copy_repository(target: Path) -> Path:
    """Copy the files that git tracks or would track, as they are in the working tree."""
    need("git")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    for name in (name for name in names if (ROOT / name).exists()):  # not deleted and not yet committed
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


def slow(*values: object) -> Any:
    """Parameters of a case that only --all runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def need(tool: str) -> None:
    """Require a system tool for this test."""
    if shutil.which(tool) is None:
        lack(f"{tool} is not installed")


def package(name):
    """Import a package that only tests need. If it is missing, the test is skipped, or fails if CI is set."""
    if os.environ.get("CI"):
        importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed (scripts/test.sh installs it)")


def lack(what: str) -> NoReturn:
    """Skip the test for what this machine lacks or forbids; fail instead if CI is set."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)

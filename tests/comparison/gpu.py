# extra: benchmark and template
"""scripts/test.sh --cuda: what only a GPU can show, in two calls of a few minutes. It installs nothing.

    scripts/test.sh --cuda first          at most 200 s: the machine, 40 steps in each mode, tests that compile nothing
    scripts/test.sh --cuda                at most 300 s: figures, then the tests that compile
    scripts/test.sh --cuda STEP           one step: facts, modes or tests of the first call; loops, accuracy, checkpoint
                                          or compiled of the second; or ceilings, profile, changes, verify, compile, or
                                          accuracy95, which takes about four minutes to 95 % on CIFAR-10

    --out DIR          where all files go [cuda-report]: a JSON file and the output of each call, kernels.txt, a trace
    --data_dir DIR     where CIFAR-10 is, as torchvision's files or as cifar10-jpeg.tar.xz [data]; else synthetic images

It needs one GPU, PyTorch, torchvision, pytest and tensorboard. What compiles needs a C compiler, Python's headers and
triton too. Each step is a process with a limit. If it does not end in time, it prints the stacks of its threads and is
ended with all that it has started; the figures of its finished parts are kept. What comes last may not get its turn.
The exit code is 1 if a step failed, 3 if a step or a test was skipped. CUDA_TEST_ON_CPU=1 runs every step on the CPU in
tiny sizes, which skips the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import argparse
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lib.processes import list_children
from utils.files import replace_json
from utils.table import format_table

IS_TINY = os.environ.get("CUDA_TEST_ON_CPU", "") == "1"
PYTEST = "-m pytest -v -rA -p no:cacheprovider -o faulthandler_timeout=80 tests/distributed/test_cuda.py".split()
PYTEST += ["tests/extras/compile/test_compile_on_a_gpu.py"]  # extra: compile
AGAINST = (
    "--amp_dtype fp16",
    "--cache device",  # extra: cache
    "--log_interval 1000",
    "--no-channels_last",
)
# what a step is told
FOLDER, OUT, DATA = (Path(os.environ.get(f"CUDA_STEP_{name}", ".")) for name in ("FOLDER", "OUT", "DATA"))
ENDS = float(os.environ.get("CUDA_STEP_ENDS", "inf"))  # in seconds since the epoch
COMMON = ["--backend", "gloo", "--image_size", "8"] if IS_TINY else []
Note = Callable[[dict[str, Any]], None]  # notes figures of a step
HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
SECONDS_TO_DUMP = 5.0  # before its limit a step that has not ended is told to print its stacks
LARGEST_OUTPUT = 1_500_000  # bytes of a step's output that are kept
PR_SET_CHILD_SUBREAPER = 36
# no name service, and one machine: the interface need not be found by the name of the host
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
VARIABLES |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "KINETO_LOG_LEVEL": "99", "GLOG_minloglevel": "2"}


class Step(NamedTuple):
    """A step: its limit in seconds, to which what earlier steps have left is added, and its command after `python`."""

    limit: float
    command: list[str]


def own(name: str, limit: float) -> Step:
    """A step of gpu_steps.py."""
    return Step(limit, ["tests/comparison/gpu_steps.py", name])


def benchmark_flags() -> list[str]:
    sizes = "--rounds 1 --steps 2 --batch_size 4" if IS_TINY else "--rounds 3 --steps 30 --batch_size 256"
    more = " --backend gloo --image_size 8" if IS_TINY else ""
    return [*(sizes + more).split(), *(f"--against={flags}" for flags in AGAINST)]


FIRST = {
    "facts": own("facts", 15),
    "modes": own("modes", 100),
    "tests": Step(85, [*PYTEST, "-k", "not compiled"]),
}
FULL = {
    "loops": own("loops", 85),
    "accuracy": own("accuracy", 100),
    "checkpoint": own("checkpoint", 30),
    "compiled": Step(85, [*PYTEST, "-k", "compiled"]),
}
ALONE = {  # by name only
    "ceilings": own("ceilings", 20),
    "profile": own("profile", 60),
    "changes": Step(
        60, ["scripts/benchmark.py", *benchmark_flags(), "--json", "{figures}", "--run_dir", "{folder}/run"]
    ),
    "verify": Step(
        90, "scripts/verify.py --model mobilenet_v2 --image_size 32 --dataset_size 48 --run_dir {folder}/run".split()
    ),
    "compile": own("compile", 90),  # extra: compile
    "accuracy95": own("accuracy95", 300),
}
BY_NAME = FIRST | FULL | ALONE
TOTAL = {"first": 200.0, "full": 300.0}  # seconds


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh --cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="?", default="full", choices=["first", "full", *BY_NAME], metavar="first | STEP")
    parser.add_argument("--out", type=Path, default=Path("cuda-report"), metavar="DIR")
    parser.add_argument("--data_dir", default="data", metavar="DIR")
    options = parser.parse_args(words)
    if not IS_TINY and subprocess.run([sys.executable, "-c", HAS_GPU]).returncode:
        print("--cuda: this machine has no visible CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES")
        return 2
    plan = {"first": FIRST, "full": FULL}.get(options.what) or {options.what: BY_NAME[options.what]}
    return run(options.what, plan, options.out.absolute(), os.path.abspath(options.data_dir))


def run(what: str, plan: dict[str, Step], out: Path, data_dir: str) -> int:
    """Run the steps, write WHAT.json, WHAT.out and WHAT.err to `out`, and print the table. Returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in ("out", "err"):
        (out / f"{what}.{kind}").write_text("")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a step leaves behind becomes a child of this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a step that is late is aborted
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step too
    results: dict[str, Any] = {}
    rows = [["step", "result", "", "seconds"]]
    ends_all = time.monotonic() + TOTAL.get(what, sum(step.limit for step in plan.values()))
    ends = time.monotonic()
    for name, step in plan.items():
        began, ends = time.monotonic(), ends + step.limit
        limit = min(ends, ends_all) - began
        if limit < 2 * SECONDS_TO_DUMP:
            outcome, text, figures = "skipped", "no time was left", {}
        else:
            outcome, text, figures = run_step(name, step.command, limit, out / what, data_dir)
        seconds = time.monotonic() - began
        results[name] = {"outcome": outcome, "text": text, "seconds": round(seconds, 1), **figures}
        rows.append([name, outcome, text, f"{seconds:.0f}"])
        print(f"{outcome:<8} {name:<11} {text}  [{seconds:.0f} s]", flush=True)
        replace_json(out / f"{what}.json", results)  # after each step: a machine may be taken away
    print("", format_table(rows, [3]), f"wrote {out}", sep="\n")
    outcomes = [row[1] for row in rows[1:]]
    return 1 if "FAILED" in outcomes else 3 if "skipped" in outcomes else 0


def run_step(name: str, command: list[str], limit: float, log: Path, data_dir: str) -> tuple[str, str, dict[str, Any]]:
    """Run a step. Returns ok, skipped or FAILED, a sentence, and the figures that it has noted."""
    files = [log.with_suffix(".out"), log.with_suffix(".err")]
    starts = []
    with tempfile.TemporaryDirectory(prefix="cuda-", ignore_cleanup_errors=True) as folder:
        figures_file = Path(folder, "found.json")
        places = {"{folder}": folder, "{figures}": str(figures_file)}
        words = [re.sub(r"\{\w+\}", lambda match: places.get(match[0], match[0]), word) for word in command]
        own = {"CUDA_STEP_FOLDER": folder, "CUDA_STEP_OUT": str(log.parent), "CUDA_STEP_DATA": data_dir}
        own |= {"CUDA_STEP_ENDS": str(time.time() + limit - 2 * SECONDS_TO_DUMP)}
        for file in files:
            with open(file, "a") as stream:
                stream.write(f"\n==== {name} ====\n")
            starts.append(file.stat().st_size)
        with open(files[0], "ab") as out, open(files[1], "ab") as err:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | VARIABLES | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code = wait(process, limit)
        figures = read_json(figures_file)
    texts = [take(file, start) for file, start in zip(files, starts, strict=True)]
    figures |= {"tests": tests} if (tests := tests_in(texts[0])) else {}
    text = figures.pop("text", "") or changes_of(figures) or summary_of(texts[0]) or summary_of(texts[1])
    is_skipped = figures.pop("skipped", False)
    if code == 0:
        return "skipped" if is_skipped or re.search(r"\d+ skipped", text) else "ok", text, figures
    for kind, output in zip(("stdout", "stderr"), texts, strict=True):
        print("\n".join([f"---- {name}: the end of {kind}", *output.splitlines()[-25:]]), flush=True)
    why = f"did not end in {limit:.0f} s" if code is None else f"exit code {code}"
    return "FAILED", f"{why}: {text}" if text else why, figures


def wait(process: subprocess.Popen, limit: float) -> int | None:
    """The exit code of a step, or None if it is late; then its processes print their stacks. None of them is left."""
    try:
        return process.wait(limit - SECONDS_TO_DUMP)
    except subprocess.TimeoutExpired:
        send(signal.SIGABRT, descendants(os.getpid()))  # faulthandler prints the stacks of all threads
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_DUMP - 1)
        return None
    finally:  # also if this command is told to end
        ends = time.monotonic() + SECONDS_TO_DUMP  # a process that waits in the driver cannot be killed
        while (left := descendants(os.getpid())) and time.monotonic() < ends:
            send(signal.SIGKILL, left)
            process.poll()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    children = list_children(pid)
    return [*children, *(descendant for child in children for descendant in descendants(child))]


def take(file: Path, start: int) -> str:
    """What a step has printed to a file, in which the middle of a long output is left out."""
    data = file.read_bytes()
    text = data[start:]
    if len(text) > LARGEST_OUTPUT:
        half = LARGEST_OUTPUT // 2
        text = text[:half] + f"\n... {len(text) - 2 * half} bytes left out ...\n".encode() + text[-half:]
        file.write_bytes(data[:start] + text)
    return text.decode(errors="replace")


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def tests_in(out: str) -> dict[str, str]:
    """The finished tests in the output of `pytest -v`, each with its result."""
    return dict(re.findall(r"^(\S+\.py::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", out, re.MULTILINE))


def changes_of(figures: dict[str, Any]) -> str:
    """What scripts/benchmark.py has found: the time of a step with each change, over the step as given."""
    rows = figures["measured"][-1]["rows"] if "measured" in figures else {}
    return ", ".join(f"{name.removeprefix('with ')} {row['wall_ratio']:.3f}" for name, row in rows.items())


def summary_of(out: str) -> str:
    """The line of pytest or verify.py that says how many passed; else the last one."""
    summaries = re.findall(
        r"^=* ?(\d+ (?:passed|failed|skipped|deselected)[^=]*?) =*$|^(\d+ of \d+ invariants hold.*)", out, re.M
    )
    lines = out.rstrip().splitlines()
    return "".join(summaries[-1]) if summaries else lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())

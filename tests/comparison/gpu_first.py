# extra: benchmark and template
"""The steps of `scripts/test.sh --cuda first`, run by gpu_steps.py."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import train
from comparison.gpu import COMMON, FOLDER, IS_TINY, ROOT, Note
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark.in_process_run import InProcessRun
from utils.cpus import count_usable_cpus
from utils.memory import format_bytes, read_free_memory
from utils.run import provenance

MODES = {  # 40 steps each
    "bf16": "--amp_dtype bf16",
    "fp16": "--amp_dtype fp16",
    "adamw, ema, clipping": "--optimizer adamw --lr 1e-3 --ema_decay 0.99 --clip_grad_norm 1",
    "workers": "--num_workers 2",
    "cache on the device": "--cache device",  # extra: cache
    "accumulation": "--grad_accum_steps 4",
    "saves": "--save_every_steps 10",
    "evaluations": "--eval_every_steps 10",
    "deterministic": "--deterministic",  # last, since libraries keep some of it
}
SECONDS_OF_A_MODE = 25


def facts(note: Note) -> str:
    """What a figure depends on, and what may be missing."""
    info: dict[str, Any] = {
        "versions": provenance.collect_package_versions(),
        "time": provenance.format_utc_time(),
        "host": socket.gethostname(),
    }
    commands = {"nvidia-smi": "nvidia-smi", "compiler": f"{os.environ.get('CC', 'cc')} --version"}
    commands |= {"disk": f"df -h {ROOT} {FOLDER} /dev/shm", "free": "free -g", "cpu": "lscpu"}
    for name, command in commands.items():
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=5)
            info[name] = (done.stdout or done.stderr).strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            info[name] = f"{type(error).__name__}: {error}"
        print(f"---- {name}\n{info[name]}", flush=True)
        note(info)
    for file in ("/proc/self/cgroup", "/etc/hosts", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max"):
        info[file] = Path(file).read_text() if Path(file).exists() else "missing"
    info["has_headers"] = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    info["packages"] = [name for name in ("triton", "numpy", "PIL", "xdist") if importlib.util.find_spec(name)]
    try:
        info["own address"] = socket.gethostbyname(info["host"])
    except OSError as error:
        info["own address"] = str(error)
    info |= {
        "python": sys.version,
        "kernel": platform.release(),
        "cpus": count_usable_cpus(),
        "free_memory": read_free_memory(),
    }
    info["device"] = "cpu" if IS_TINY else torch.cuda.get_device_name()
    print(json.dumps(info, indent=1), flush=True)
    note(info)
    compiler = "a C compiler" if " " in info["compiler"].partition("\n")[0] and shutil.which("cc") else "no C compiler"
    room = f"{info['cpus']} CPUs, {format_bytes(info['free_memory'] or 0)} free"
    return f"{info['device']}, torch {torch.__version__}, Python {platform.python_version()}, {room}, {compiler}"


def modes(note: Note) -> str:
    """train.py for 40 steps in each mode, in one process, then 40 steps that may not wait for the device."""
    results: dict[str, Any] = {}
    for name, flags in MODES.items():
        results[name] = one_mode(name, lambda flags=flags: forty_steps(flags.split()))
        note({"modes": results})
    results["no wait for the device"] = one_mode("waits", waits)
    note({"modes": results})
    if failed := [f"{name} ({result['error']})" for name, result in results.items() if "error" in result]:
        raise RuntimeError(f"{len(failed)} of {len(results)} modes failed: {'; '.join(failed)}")
    return f"{len(results)} modes, {sum(result['seconds'] for result in results.values()):.0f} s"


def one_mode(name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a mode, or its error; an alarm ends it if it takes too long."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS_OF_A_MODE} s")

    print(f"---- {name}", flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_OF_A_MODE)
    try:
        measured = action()
    except Exception as error:
        traceback.print_exc()
        measured = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        signal.alarm(0)
        cleanup_distributed()
    return measured | {"seconds": round(time.monotonic() - began, 2)}


def forty_steps(flags: list[str]) -> dict[str, Any]:
    folder = FOLDER / f"mode-{len(list(FOLDER.iterdir()))}"
    steps, size = (4, "48") if IS_TINY else (40, "2560")
    limits = ["--max_steps", str(steps), "--dataset_size", size, "--run_dir", str(folder), "--log_interval", "10"]
    summary = train.train(TrainingConfig.from_args([*COMMON, *flags, *limits]))
    wrong = [name for name in ("loss", "top1") if not 0 <= summary["final"].get(name, -1) < 100]
    if (summary["state"], summary["steps"]) != ("completed", steps) or wrong:
        raise RuntimeError(f"ended with {summary}")
    rates = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in rates if record["kind"] == "train"][-1]
    shutil.rmtree(folder)
    return {"step_s": last["step_s"], "loss": last["loss"], "final": summary["final"], "wall_s": summary["wall_s"]}


def waits() -> dict[str, Any]:
    """An epoch with torch's warnings of operations that wait for the device: there are none, also at a log point."""
    config = TrainingConfig.from_args([*COMMON, "--log_interval", "10"])
    ctx = setup_distributed(config)
    ours = InProcessRun(config, ctx, FOLDER / "waits", 4 if IS_TINY else 40)
    ours.train_epoch()
    if ctx.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ours.train_epoch()
    if ctx.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    ours.close()
    places = Counter(f"{w.filename}:{w.lineno}" for w in heard if "synchroniz" in str(w.message))
    if places:
        raise RuntimeError(f"waits for the device: {dict(places)}")
    return {"warnings": len(heard)}

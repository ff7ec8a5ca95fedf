"""scripts/test.sh --cuda: what only a GPU can show, in nine minutes: one table, and a JSON file with all figures.

    scripts/test.sh --cuda [--json FILE] [--data_dir DIR]

tests        tests/distributed/test_cuda.py
verify       scripts/verify.py on a model with dropout
speed        this template, the plain and the minimal loop and the DDP tutorial's, at three batch sizes
checkpoint   a checkpoint of 10 GB: how long it blocks training, how long it takes, and whether it holds the state
accuracy     CIFAR-10 to 93 % if DIR (default: data) has it, else the same run on synthetic images
compile      the step of this template with each --compile mode

It needs one GPU, PyTorch, torchvision, pytest and tensorboard, and installs nothing. The compile step and the
tests of compilation need a C compiler and triton too. The exit code is 1 if a step failed, 3 if a step or a test was
skipped. CUDA_TEST_ON_CPU=1 runs every step on the CPU in tiny sizes, which skips the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from comparison import speed
from config import TrainingConfig, UserError
from ddp_utils import cleanup_distributed, setup_distributed
from lib import processes
from lib.benchmark.ours import Ours
from lib.benchmark.turns import synchronize
from utils.batch import tensors_in
from utils.checkpoint import format as checkpoint
from utils.data.images import cifar10_folder
from utils.files import replace_json
from utils.memory import free_memory
from utils.run import provenance
from utils.table import format_table

IS_TINY = os.environ.get("CUDA_TEST_ON_CPU", "") == "1"
# seconds, 530 together; a step may also use what the steps before it have left
LIMITS = {"tests": 130, "verify": 70, "speed": 110, "checkpoint": 70, "accuracy": 70, "compile": 80}
COMMON = ["--backend", "gloo", "--image_size", "8"] if IS_TINY else []
BATCHES, ROUNDS, STEPS = ((4, 8), 1, 2) if IS_TINY else ((64, 256, 1024), 3, 20)
# bytes of a checkpoint with AdamW and averaged weights, which are four copies of the parameters, and its model
LARGE = ((10.3e9, "regnet_y_128gf"), (1.4e9, "vit_b_16"), (0.05e9, "mini_resnet"))
GOAL = 0.93  # top1 on CIFAR-10
RECIPE = "--batch_size 512 --epochs 20 --lr 0.4 --weight_decay 5e-4 --label_smoothing 0.1 --warmup_epochs 2"


class Skipped(Exception):
    """The step cannot run here. The message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test.sh --cuda", allow_abbrev=False)
    parser.add_argument("--json", type=Path, default=Path("cuda.json"), metavar="FILE", help="figures [cuda.json]")
    parser.add_argument("--data_dir", default="data", metavar="DIR", help="where CIFAR-10 is, if at hand [data]")
    options = parser.parse_args()
    if not (IS_TINY or torch.cuda.is_available()):
        print("--cuda: this machine has no visible CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES")
        return 2
    began = time.monotonic()
    device = "cpu" if IS_TINY else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": device, "versions": provenance.versions(), "time": provenance.now()}
    print(f"{device}: {', '.join(f'{name} {text}' for name, text in found['versions'].items() if text)}", flush=True)
    rows = [["step", "result", "", "seconds"]]
    ends = began
    for name in LIMITS:
        started, ends = time.monotonic(), ends + LIMITS[name]
        limit = ends - started
        outcome, text, figures = run_step(name, options.data_dir, limit)
        seconds = time.monotonic() - started
        found[name] = {"outcome": outcome, "text": text, "seconds": round(seconds, 1), **figures}
        rows.append([name, outcome, text, f"{seconds:.0f}"])
        print(f"{outcome:<8} {name:<11} {text}  [{seconds:.0f} s]", flush=True)
        replace_json(options.json, found)  # after each step: a machine may be taken away
    print("", format_table(rows, [3]), "", *figure_tables(found), f"wrote {options.json}", sep="\n")
    return exit_code([row[1] for row in rows[1:]])


def exit_code(outcomes: list[str]) -> int:
    return 1 if "FAILED" in outcomes else 3 if "skipped" in outcomes else 0


def run_step(name: str, data_dir: str, limit: float) -> tuple[str, str, dict[str, Any]]:
    """Run a step in a process of its own. Returns ok, skipped or FAILED, a sentence, and figures."""
    with tempfile.TemporaryDirectory(prefix="cuda-") as folder:
        command = {
            "tests": ["-m", "pytest", "-q", "tests/distributed/test_cuda.py"],
            "verify": ["scripts/verify.py", *verify_flags(folder)],
        }.get(name, [__file__, name, folder, data_dir])
        try:
            ended = processes.run([sys.executable, *command], limit, cwd=ROOT)
        except subprocess.TimeoutExpired:
            ended = None
        file = Path(folder, "found.json")
        figures = json.loads(file.read_text()) if file.exists() else {}
    if ended is None:
        return "FAILED", f"did not end in {limit:.0f} s", figures
    if ended.returncode:
        lines = (ended.stdout + ended.stderr).rstrip().splitlines()
        print("\n".join(lines[-40:]), flush=True)
        return "FAILED", f"exit code {ended.returncode}: {lines[-1] if lines else 'no output'}", figures
    text, is_skipped = figures.pop("text", "") or summary_of(ended.stdout), figures.pop("skipped", False)
    return "skipped" if is_skipped or re.search(r"\d+ skipped", text) else "ok", text, figures


def summary_of(out: str) -> str:
    """The line of pytest or verify.py that says how many passed."""
    found = re.findall(r"^\d+ (?:passed|skipped).*|^\d+ of \d+ invariants hold.*", out, re.MULTILINE)
    return found[-1] if found else out.rstrip().splitlines()[-1]


def verify_flags(folder: str) -> list[str]:
    model = "--model mobilenet_v2 --image_size 32 --dataset_size 48".split()  # has dropout
    return [*COMMON, *model, "--run_dir", f"{folder}/run"]


# ---- steps, in a process of their own: each returns its sentence and figures ----


def speed_step(folder: Path, data_dir: str, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The four loops at each batch size, and the host cost with a model that costs nothing."""
    config = TrainingConfig.from_args([*COMMON])
    ctx = setup_distributed(config)
    found: dict[str, Any] = {"batches": {}, "rounds": ROUNDS, "steps": STEPS}
    found["host"] = speed.host_cost(config, ctx, STEPS, ROUNDS, folder / "tiny")
    for size in BATCHES:
        config = TrainingConfig.from_args([*COMMON, "--batch_size", str(size)])
        comparison = speed.Comparison(config, ctx, STEPS, folder / f"of-{size}", with_tutorial=True)
        flops, dtype = speed.flops_per_sample(comparison.ours), comparison.ours.state.precision.dtype
        peak = speed.peak_flops(ctx.device, dtype or torch.float32)
        rows = comparison.run(ROUNDS)
        equal = comparison.equality()
        found["batches"][size] = {"rows": rows, "equality": equal, "flops_per_sample": flops, "peak_flops": peak}
        note(found)
    ratios = [
        each["rows"][speed.TUTORIAL]["step_s"] / each["rows"][speed.TEMPLATE]["step_s"]
        for each in found["batches"].values()
    ]
    shown = ", ".join(f"{ratio:.2f}x at {size}" for size, ratio in zip(BATCHES, ratios, strict=True))
    cost = found["host"]["over_plain_us"]
    cleanup_distributed()
    return found | {"text": f"over the tutorial: {shown}; {cost:+.0f} us host time over the plain loop"}


def checkpoint_step(folder: Path, data_dir: str, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Save once in the middle of training, then read the file and compare it with the state at the save."""
    model = largest(folder)
    flags = f"--model {model} --image_size 32 --batch_size 2 --optimizer adamw --lr 1e-5 --ema_decay 0.99".split()
    flags += "--save_every_minutes 0 --save_every 0 --keep_last 2 --hang_timeout 0".split()
    config = TrainingConfig.from_args([*COMMON[:2], *flags])
    ctx, steps = setup_distributed(config), 3 if IS_TINY else 10
    ours = Ours(config, ctx, folder / "run", steps)
    checkpoints, run = ours.training.checkpoints, ours.training.attempt.run
    plain_s = min(timed(ours.epoch, ctx.device) for _ in range(3)) / steps
    expected = [tensor.to("cpu", copy=True) for tensor in state_of(ours.state.state_dict())]
    step, began = ours.state.progress.step, time.perf_counter()
    checkpoints.save(now=True)
    during_s = timed(ours.epoch, ctx.device) / steps
    checkpoints.finish_writing()
    written_s, blocked_s = (
        time.perf_counter() - began,
        [event["blocked_s"] for event in run.records("event") if event["event"] == "checkpoint"][-1],
    )
    path = checkpoint.step_path(run.checkpoints, step)
    began = time.perf_counter()
    saved = state_of(checkpoint.read(path)[0])
    read_s, size = time.perf_counter() - began, path.stat().st_size
    is_equal = len(saved) == len(expected) and all(map(torch.equal, expected, saved))
    began = time.perf_counter()
    with open(folder / "reference.pt", "wb") as file:
        torch.save(ours.state.state_dict(), file)
        os.fsync(file.fileno())
    found = {"model": model, "bytes": size, "blocked_s": blocked_s, "written_s": written_s, "read_s": read_s}
    found |= {"torch_save_s": time.perf_counter() - began, "step_s": plain_s, "step_during_s": during_s}
    ours.close()
    cleanup_distributed()
    if not is_equal:
        raise RuntimeError(f"{path}: does not hold the state at the save")
    text = (
        f"{size / 1e9:.1f} GB blocked training for {1000 * blocked_s:.0f} ms, was on the disk after {written_s:.1f} s"
    )
    return found | {"text": f"{text} and read in {read_s:.1f} s; torch.save and fsync: {found['torch_save_s']:.1f} s"}


def state_of(payload: dict[str, Any]) -> list[torch.Tensor]:
    return tensors_in([payload[key] for key in ("model", "ema", "optimizer")])


def largest(folder: Path) -> str:
    """The model with the largest checkpoint for which GPU, memory and disk have space."""
    if IS_TINY:
        return "mini_resnet"
    room = os.statvfs(folder)
    for size, model in LARGE:
        limits = (torch.cuda.mem_get_info()[0] / 2, (free_memory() or 0) / 4.5, room.f_bavail * room.f_frsize / 3.5)
        if size < min(limits):
            return model
    raise Skipped("needs 200 MB of disk and memory")


def compile_step(folder: Path, data_dir: str, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The median step of an epoch in each mode, and the seconds until the first step."""
    size, found = BATCHES[1], {}
    for mode in ("off",) if IS_TINY else ("off", "default", "reduce-overhead"):  # a CPU compiles for minutes
        config = TrainingConfig.from_args(
            [*COMMON, "--batch_size", str(size), "--compile", mode, "--hang_timeout", "0"]
        )
        began = time.perf_counter()
        try:
            ctx = setup_distributed(config)
        except UserError as error:  # no compiler
            raise Skipped(str(error)) from None
        ours = Ours(config, ctx, folder / mode, STEPS)
        start_s = time.perf_counter() - began
        ours.epoch()
        step_s = statistics.median(timed(ours.epoch, ctx.device) / STEPS for _ in range(5))
        log = ours.training.attempt.run.log_file.read_text()
        ours.close()
        cleanup_distributed()
        found[mode] = {"start_s": start_s, "step_s": step_s, "skipped_graphs": "without CUDA graphs" in log}
        note({"batch_size": size, "modes": found})
    base = found["off"]["step_s"]
    text = ", ".join(
        f"{mode} {1000 * each['step_s']:.2f} ms ({base / each['step_s']:.2f}x)" for mode, each in found.items()
    )
    return {"batch_size": size, "modes": found, "text": f"batch {size}: {text}"}


def accuracy_step(folder: Path, data_dir: str, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train with train.py, and read its summary."""
    is_real = not IS_TINY and cifar10_folder(Path(data_dir)).exists()
    data = ["--dataset", "cifar10", "--data_dir", data_dir] if is_real else ["--dataset_size", "50000", "--epochs", "3"]
    data = [*COMMON, "--dataset_size", "64", "--epochs", "1", "--batch_size", "8"] if IS_TINY else data
    command = [sys.executable, ROOT / "train.py", *RECIPE.split(), *data, "--run_dir", folder / "run"]
    ended = processes.run(command, sum(LIMITS.values()), cwd=ROOT)  # the step has a limit
    if ended.returncode:
        raise RuntimeError((ended.stdout + ended.stderr)[-3000:])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    top1, rate = summary["best_value"], summary["samples_per_s"]
    text = f"top1 {top1:.4f} after {summary['epochs']} epochs in {summary['wall_s']:.0f} s, {rate:,.0f} images/s"
    if is_real and top1 < GOAL:
        raise RuntimeError(f"CIFAR-10: {text}; expected {GOAL}")
    where = "CIFAR-10" if is_real else f"synthetic images, because {data_dir} has no CIFAR-10"
    return {"summary": summary, "dataset": "cifar10" if is_real else "synthetic", "text": f"{where}: {text}"}


def timed(action: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def figure_tables(found: dict[str, Any]) -> list[str]:
    """The loops at each batch size as Markdown, for docs/benchmarks.md."""
    lines = []
    for size, each in found["speed"].get("batches", {}).items():
        lines += [
            f"| batch {size} | step | wall over plain | control | samples/s | of peak | memory |",
            "|---" * 7 + "|",
        ]
        for name, row in each["rows"].items():
            share = row["samples_per_s"] * each["flops_per_sample"] / each["peak_flops"]
            cells = [
                name,
                f"{1000 * row['step_s']:.2f} ms",
                f"{row['wall_over_plain']:.3f}",
                f"{row['control_wall']:.3f}",
            ]
            cells += [f"{row['samples_per_s']:,.0f}", f"{share:.0%}", f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def be_a_step(name: str, folder: Path, data_dir: str) -> None:
    """Write the figures of a step to a file, also those of a part of it."""
    file = folder / "found.json"
    step = {"speed": speed_step, "checkpoint": checkpoint_step, "compile": compile_step, "accuracy": accuracy_step}[
        name
    ]
    try:
        found = step(folder, data_dir, lambda found: replace_json(file, found))
    except Skipped as reason:
        found = {"skipped": True, "text": str(reason)}
    replace_json(file, found)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LIMITS:
        be_a_step(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())

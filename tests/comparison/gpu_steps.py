# extra: benchmark and template
"""The steps of gpu.py, each in a process of its own: python tests/comparison/gpu_steps.py NAME

A step gets a function that notes its figures so far, and returns the sentence for the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import json
import os
import shutil
import statistics
import subprocess
import tarfile
import time
from collections.abc import Callable
from typing import Any

import torch

from comparison import gpu_first, speed
from comparison.gpu import COMMON, DATA, ENDS, FOLDER, IS_TINY, OUT, Note
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark.in_process_run import InProcessRun
from lib.benchmark.turns import synchronize
from utils.batch import list_tensors
from utils.checkpoint import format as checkpoint
from utils.example.cifar10 import cifar10_folder
from utils.files import replace_json

BATCHES, STEPS, ROUNDS = ((4, 8), 2, 1) if IS_TINY else ((64, 256, 1024), 40, 5)
ARCHIVE = "cifar10-jpeg.tar.xz"
GOALS = {20: 0.93, 80: 0.95}  # top1 on CIFAR-10 by epochs; the JPEGs are lossy
LOSSY = {20: 0.88, 80: 0.88}  # 20 epochs: 0.894 on an H100
RECIPE = "--batch_size 512 --lr 0.4 --weight_decay 5e-4 --label_smoothing 0.1 --warmup_epochs 2"


class Skipped(Exception):
    """The step cannot run here. The message says why."""


def ceilings(note: Note) -> str:
    """What this device reaches: a copy, a matrix product, and the convolution of the model's widest stage."""
    device = torch.device("cpu" if IS_TINY else "cuda")
    size = 2**20 if IS_TINY else 2**28
    x = torch.empty(size, device=device)
    y = torch.empty_like(x)
    limits = {"copy_bytes_per_s": 8 * size / best(lambda: y.copy_(x), device)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        limits[f"matmul_{str(dtype)[6:]}_flops"] = speed.peak_flops(device, dtype, seconds=0.1 if IS_TINY else 0.5)
    for batch in BATCHES:
        images = torch.randn(batch, 64, 32, 32, device=device).to(memory_format=torch.channels_last)
        conv = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
            seconds = best(lambda conv=conv, images=images: conv(images), device)
        limits[f"conv64_bf16_batch_{batch}_flops"] = 2 * batch * 64 * 64 * 9 * 32 * 32 / seconds
    launch = torch.zeros((), device=device)
    limits["launch_s"] = timed(lambda: [launch.add_(1) for _ in range(1000)], device) / 1000
    note(limits)
    shown = [f"copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s", f"launch {1e6 * limits['launch_s']:.1f} us"]
    shown += [f"{name.removesuffix('_flops')} {value / 1e12:.3g}" for name, value in limits.items() if "_flops" in name]
    return ", ".join(shown) + " TFLOP/s"


def best(action: Callable[[], object], device: torch.device, tries: int = 10) -> float:
    """The seconds of the fastest of some tries; before them come two that do not count."""
    return min([timed(action, device) for _ in range(tries + 2)][2:])


def loops(note: Note) -> str:
    """The loops in turns, at the largest batch size and at smaller ones while there is time; then equal losses."""
    ctx = setup_distributed(TrainingConfig.from_args([*COMMON]))
    measured: dict[str, Any] = {"batches": {}}
    for size in reversed(BATCHES):
        began = time.time()
        config = TrainingConfig.from_args([*COMMON, "--batch_size", str(size)])
        comparison = speed.Comparison(config, ctx, STEPS, FOLDER / f"of-{size}")
        flops, dtype = speed.flops_per_sample(comparison.ours), comparison.ours.state.precision.dtype
        turns = 3 * timed(comparison.ours.train_epoch, ctx.device)  # of the three loops
        rounds = max(1, int(min(ROUNDS, (ENDS - time.time()) / turns / 4 - 1)))
        peak = speed.peak_flops(ctx.device, dtype or torch.float32, seconds=0.2)
        rows = comparison.run(rounds, print)
        about = {"rounds": rounds, "steps": STEPS, "flops_per_sample": flops, "peak_flops": peak}
        measured["batches"][size] = about | {"rows": rows}
        print(f"batch {size}, {STEPS} steps, n = {rounds} rounds\n{speed.table(rows, flops, peak)}", flush=True)
        note(measured)
        if ENDS - time.time() < 2 * (time.time() - began):
            break
    cleanup_distributed()
    config = TrainingConfig.from_args([*COMMON, "--deterministic", "--log_interval", "1"])
    comparison = speed.Comparison(config, setup_distributed(config), min(STEPS, 20), FOLDER / "deterministic")
    comparison.run(1)
    note({"equality": (equal := comparison.equality())})
    cleanup_distributed()
    if equal["equal"] < equal["intervals"]:
        raise RuntimeError(f"losses of template and plain loop, with --deterministic: {equal}")
    ratios = {size: result["rows"][speed.TEMPLATE]["wall_over_bare"] for size, result in measured["batches"].items()}
    rates = {size: result["rows"][speed.TEMPLATE]["samples_per_s"] for size, result in measured["batches"].items()}
    return "over the bare loop: " + ", ".join(
        f"{ratio:.3f} at {size} ({rates[size]:,.0f} images/s)" for size, ratio in ratios.items()
    )


def profile(note: Note) -> str:
    """20 steps at the smallest and the largest batch: a table of kernels of both, and a trace of the first."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not IS_TINY)
    key, by_size, steps = "cpu" if IS_TINY else "cuda", {}, 2 if IS_TINY else 20
    (OUT / "kernels.txt").write_text("")
    for size in (BATCHES[0], BATCHES[-1]):
        config = TrainingConfig.from_args([*COMMON, "--batch_size", str(size), "--log_interval", "1000"])
        ours = InProcessRun(config, setup_distributed(config), FOLDER / f"profile-{size}", steps)
        ours.train_epoch()
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = timed(ours.train_epoch, ours.training.attempt.ctx.device)
        events = profiler.key_averages()
        with open(OUT / "kernels.txt", "a") as file:
            table = events.table(sort_by=f"self_{key}_time_total", row_limit=60, max_name_column_width=90)
            file.write(f"batch {size}, {steps} steps in {seconds:.4f} s (profiled)\n{table}\n")
        kernels = [event for event in profiler.events() if "CUDA" in str(event.device_type)]
        busy = sum(event.time_range.elapsed_us() for event in kernels)
        by_size[size] = {
            "step_s": seconds / steps,
            "kernels_per_step": len(kernels) / steps,
            "busy_us_per_step": busy / steps,
        }
        if size == BATCHES[0]:
            trace = OUT / "trace.json.gz"
            profiler.export_chrome_trace(str(trace))
            if trace.stat().st_size > 16 * 2**20:
                trace.unlink()
        ours.close()
        cleanup_distributed()
        note({"profile": by_size})
    return "; ".join(
        f"batch {size}: {result['kernels_per_step']:.0f} kernels, {result['busy_us_per_step']:.0f} us busy of"
        f" {1e6 * result['step_s']:.0f} us a step"
        for size, result in by_size.items()
    )


def accuracy(note: Note, epochs: int = 20) -> str:
    """Train with train.py, and read its summary."""
    source, data = find_data()
    data = [*COMMON, "--dataset_size", "64", "--batch_size", "8", "--epochs", "1"] if IS_TINY else data
    command = [sys.executable, ROOT / "train.py", *RECIPE.split(), "--epochs", str(epochs), *data]
    # in this step's process group, so that it is ended with the step
    done = subprocess.run([str(word) for word in [*command, "--run_dir", FOLDER / "run"]], cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"train.py ended with exit code {done.returncode}")
    summary = json.loads((FOLDER / "run" / "summary.json").read_text())
    top1, rate = summary["best_value"], summary["samples_per_s"]
    note({"summary": summary, "dataset": source})
    training = summary["time"]["training_s"] + summary["time"]["data_wait_s"]
    text = f"{source}: top1 {top1:.4f} after {summary['epochs']} epochs, {training:.1f} s of training"
    text += f", {summary['wall_s']:.1f} s in all, {rate:,.0f} images/s"
    goal = {"CIFAR-10": GOALS, "CIFAR-10 as lossy JPEGs": LOSSY}.get(source, {}).get(epochs, 0.0)
    if top1 < goal:
        raise RuntimeError(f"{text}; expected {goal}")
    return text


def accuracy95(note: Note) -> str:
    return accuracy(note, epochs=80)


def find_data() -> tuple[str, list[str]]:
    """Where images come from, for the sentence, and the flags: torchvision's files, an archive of JPEGs, synthetic."""
    if IS_TINY:
        return "synthetic images", []
    if cifar10_folder(DATA).exists():
        return "CIFAR-10", ["--dataset", "cifar10", "--data_dir", str(DATA)]
    if (archive := DATA / ARCHIVE).exists():
        images = FOLDER / "images"
        images.mkdir()
        with tarfile.open(archive) as tar:
            tar.extractall(images, filter="data")
        flags = ["--dataset", "imagefolder", "--data_dir", str(images)]
        flags += ["--cache", "device"]  # extra: cache
        return "CIFAR-10 as lossy JPEGs", flags
    return f"synthetic images, because {DATA} has neither CIFAR-10 nor {ARCHIVE}", ["--dataset_size", "50000"]


def save(note: Note) -> str:
    """Save once in the middle of training, then read the file and compare it with the state at the save."""
    flags = f"--model {'mini_resnet' if IS_TINY else 'resnet50'} --image_size 32 --batch_size 8 --optimizer adamw"
    flags += " --ema_decay 0.99"
    flags += " --lr 1e-5 --save_every_minutes 0 --save_every 0 --keep_last 2 --hang_timeout 0"
    config = TrainingConfig.from_args([*COMMON[:2], *flags.split()])
    ctx, steps = setup_distributed(config), 3 if IS_TINY else 10
    ours = InProcessRun(config, ctx, FOLDER / "run", steps)
    checkpoints, run = ours.training.checkpoints, ours.training.attempt.run
    plain_s = min(timed(ours.train_epoch, ctx.device) for _ in range(3)) / steps
    expected = [tensor.to("cpu", copy=True) for tensor in state_of(ours.state.state_dict())]
    step, began = ours.state.progress.step, time.perf_counter()
    checkpoints.save(blocking=True)
    during_s = timed(ours.train_epoch, ctx.device) / steps
    checkpoints.finish_writing()
    written_s = time.perf_counter() - began
    blocked_s = [event["blocked_s"] for event in run.records.read("event") if event["event"] == "checkpoint"][-1]
    path = checkpoint.step_checkpoint_path(run.checkpoint_folder, step)
    began = time.perf_counter()
    saved = state_of(checkpoint.read_checkpoint(path)[0])
    measured = {"bytes": path.stat().st_size, "blocked_s": blocked_s, "written_s": written_s}
    measured |= {"read_s": time.perf_counter() - began, "step_s": plain_s, "step_during_s": during_s}
    note(measured)
    if len(saved) != len(expected) or not all(map(torch.equal, expected, saved)):
        raise RuntimeError(f"{path}: does not hold the state at the save")
    began = time.perf_counter()
    with open(FOLDER / "reference.pt", "wb") as file:
        torch.save(ours.state.state_dict(), file)
        os.fsync(file.fileno())
    note(measured | {"torch_save_s": (reference := time.perf_counter() - began)})
    ours.close()
    cleanup_distributed()
    text = f"{measured['bytes'] / 1e9:.2f} GB blocked training for {1000 * blocked_s:.0f} ms, was on the disk after"
    return f"{text} {written_s:.1f} s and read in {measured['read_s']:.1f} s; torch.save and fsync: {reference:.1f} s"


def state_of(payload: dict[str, Any]) -> list[torch.Tensor]:
    return list_tensors([payload[key] for key in ("model", "ema", "optimizer")])


def compile_modes(note: Note) -> str:  # extra: compile
    """The median step of an epoch in each mode, and the seconds until the first step."""
    if not IS_TINY and not shutil.which(os.environ.get("CC") or "gcc"):
        raise Skipped("torch.compile needs a C compiler, and there is none")
    size, by_mode, steps = BATCHES[1], {}, min(STEPS, 20)
    for mode in ("off",) if IS_TINY else ("reduce-overhead", "off", "default"):  # a CPU compiles for minutes
        flags = ["--batch_size", str(size), "--compile", mode, "--hang_timeout", "0"]
        config = TrainingConfig.from_args([*COMMON, *flags])
        began = time.perf_counter()
        ctx = setup_distributed(config)
        ours = InProcessRun(config, ctx, FOLDER / mode, steps)
        start_s = time.perf_counter() - began
        ours.train_epoch()
        step_s = statistics.median(timed(ours.train_epoch, ctx.device) / steps for _ in range(5))
        log = ours.training.attempt.run.log_file.read_text()
        ours.close()
        cleanup_distributed()
        by_mode[mode] = {"start_s": start_s, "step_s": step_s, "skipped_graphs": "without CUDA graphs" in log}
        note({"batch_size": size, "modes": by_mode})
    shown = ", ".join(f"{mode} {1000 * result['step_s']:.2f} ms" for mode, result in by_mode.items())
    return f"batch {size}: {shown}"


def timed(action: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def main(name: str) -> None:
    steps: dict[str, Callable[[Note], str]] = {"checkpoint": save}
    steps["compile"] = compile_modes  # extra: compile
    steps |= {"facts": gpu_first.facts, "modes": gpu_first.modes}
    file, noted = FOLDER / "found.json", dict[str, Any]()

    def note(figures: dict[str, Any]) -> None:
        noted.update(figures)
        replace_json(file, noted)

    try:
        note({"text": (steps.get(name) or globals()[name])(note)})
    except Skipped as reason:
        note({"skipped": True, "text": str(reason)})
    except Exception as error:
        note({"text": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1])

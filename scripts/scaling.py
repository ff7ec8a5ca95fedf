"""Weak and strong scaling, measured: how far more ranks are from as many times the speed, why, and which flags of
communication help.

python scripts/scaling.py [--ranks 1,2,4] [--rounds N] [--json FILE] [--plot FILE.svg] [flags of train.py]
scripts/launch.sh --scaling FILE.json [flags of train.py]            on each node, as the run itself; FILE on storage
that all see
python scripts/scaling.py --validate                                 how far predictions are from measurements, on this
machine

The first starts runs of 1, 2, 4 ... ranks on this machine, up to its GPUs (or cores), and measures the loop of train.py
in them: each
step with and without communication, in turns. What is not measured, the next doublings, is predicted from the step of
one rank and the
fitted all-reduce, and marked so. At the largest number of ranks the communication's flags are tried; the last line says
which to paste.

The second measures at the number of ranks that it was started with, and rank 0 measures one rank alone before. FILE
collects what was
measured: start with the first command's --json FILE, then on 2, 4 ... nodes with the same flags, and all of it is in
one table and plot.

--ranks     numbers of ranks; one rank is always among them
--rounds    of each measurement; the median counts [5]
--json      all that was measured and predicted; a file that is there already, of the same flags, is added to
--plot      a picture of it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from config import TrainingConfig, TrainingError, UserError
from scales.account import account, sentences
from scales.plot import plot
from scripts.lib.launching.plan import count_gpus
from utils.files import replace_json

LAUNCHED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
)


def read(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and those of train.py. Raises UserError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("ranks", ""), ("rounds", "5"), ("json", ""), ("plot", ""), ("job", ""), ("seconds", "1")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--validate", action="store_true")
    parser.error = lambda message: (_ for _ in ()).throw(UserError(f"{message}; see --help"))
    options, flags = parser.parse_known_args(words)
    numbers = options.ranks.split(",") if options.ranks else []
    if not all(word.isascii() and word.isdigit() and int(word) for word in numbers):
        raise UserError(f"--ranks {options.ranks}: is no list of numbers; write --ranks 1,2,4")
    if not (options.rounds.isascii() and options.rounds.isdigit() and int(options.rounds)):
        raise UserError(f"--rounds {options.rounds}: is no number of at least 1; give one")
    if options.plot and not options.plot.endswith(".svg"):
        raise UserError(f"--plot {options.plot}: the picture is an SVG; give a name that ends in .svg")
    options.ranks, options.rounds, options.seconds = (
        sorted({1, *map(int, numbers)}),
        int(options.rounds),
        float(options.seconds),
    )
    options.is_given = bool(numbers)
    return options, flags


def cores_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def room_of(config: TrainingConfig) -> int:
    """Ranks that this machine has a device for: GPUs, or cores."""
    return (count_gpus(dict(os.environ)) if config.backend in ("auto", "nccl") else 0) or cores_here()


def environment(ranks: int) -> dict[str, str]:
    """Of runs that are started here: not this process's own rank, and as many threads in each of them as the largest
    leaves for one."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHED and not name.startswith("TORCHELASTIC_")
    }
    return {"OMP_NUM_THREADS": str(max(1, cores_here() // ranks))} | kept


def start(ranks: int, jobs: list[dict[str, Any]], folder: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    """Do the jobs in so many ranks on this machine. Raises UserError or TrainingError with what they said."""
    file = folder / f"job-{ranks}.json"
    file.write_text(
        json.dumps({"jobs": jobs, "out": str(folder / f"found-{ranks}.json"), "folder": str(folder / f"of-{ranks}")})
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, __file__, "--job", file], env=env, capture_output=True, text=True, check=False
    )
    return results(folder / f"found-{ranks}.json", f"{ranks} rank(s)", done.stdout + done.stderr)


def results(file: Path, who: str, said: str) -> list[dict[str, Any]]:
    if not file.exists():
        last = "\n".join(said.strip().splitlines()[-12:])
        raise TrainingError(f"{last}\n{who}: the measurement failed; the lines above say why")
    found = json.loads(file.read_text())
    if isinstance(found, str):
        raise UserError(found)
    return found


def do_jobs(file: Path) -> None:
    """One rank of a measurement that `start` started."""
    task = json.loads(file.read_text())
    from ddp_utils import cleanup_distributed, setup_distributed

    try:
        ctx = setup_distributed(TrainingConfig.from_args(task["jobs"][0]["flags"]))
        found: Any = measure_all(task["jobs"], ctx, Path(task["folder"]))
    except UserError as refused:  # on all ranks alike
        replace_json(Path(task["out"]), str(refused))
        raise
    if ctx.is_main:
        replace_json(Path(task["out"]), found)
    cleanup_distributed()


def measure_all(jobs: list[dict[str, Any]], ctx: Any, folder: Path) -> list[dict[str, Any]]:
    from scales.measure import measure

    found = []
    for number, job in enumerate(jobs):
        config = TrainingConfig.from_args(job["flags"])
        about = {
            "cores": cores_here(),
            "room": room_of(config),
            "passes": config.grad_accum_steps if not config.global_batch_size else 1,
        }
        found.append(measure(job, config, ctx, folder / str(number)) | about)
    return found


def job_of(flags: list[str], options: argparse.Namespace, global_batch: int, is_swept: bool = False) -> dict[str, Any]:
    return {
        "flags": flags,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "global_batch": global_batch,
        "is_swept": is_swept,
    }


def open_report(file: str, flags: list[str], config: TrainingConfig, most: int) -> dict[str, Any]:
    """What a file of --json holds already. Raises UserError where it is of other flags."""
    batch = config.global_batch_size or config.batch_size * config.grad_accum_steps * most
    fresh = {"flags": flags, "global_batch": batch, "host": platform.node(), "measured": []}
    if not file or not Path(file).exists():
        return fresh
    try:
        found = json.loads(Path(file).read_text())
        flags_there, _, _ = (found[name] for name in ("flags", "global_batch", "measured"))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {file}: is there and holds no scaling; give another name") from None
    if flags_there != flags:
        raise UserError(
            f"--json {file}: holds the scaling of other flags ({' '.join(flags_there) or 'none'}); give another name"
        )
    return fresh | {name: found[name] for name in ("global_batch", "measured")}


def tell(report: dict[str, Any], jobs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print, and write what was asked for."""
    numbers = {job["ranks"] for job in jobs}
    kept = [job for job in report["measured"] if job["ranks"] not in numbers]
    report["measured"] = sorted([*kept, *jobs], key=lambda job: job["ranks"])
    report |= account(report["measured"], report["global_batch"])
    print("\n".join(sentences(report, report["measured"][0]["room"])), flush=True)
    if options.json:
        replace_json(Path(options.json), report)
    if options.plot:
        config = TrainingConfig.from_args(report["flags"])
        title = (
            f"{config.task}, {config.batch_size} a rank, global batch {report['global_batch']} (strong),"
            f" {report['measured'][0]['device']}"
        )
        Path(options.plot).write_text(plot(report, title))


def here(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure runs of this machine, one number of ranks after the other."""
    room = room_of(config)
    numbers = options.ranks if options.is_given else [2**k for k in range(room.bit_length()) if 2**k <= room]
    report = open_report(options.json, flags, config, numbers[-1])
    jobs = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in numbers:
            print(f"measuring {ranks} rank(s)", flush=True)
            job = job_of(flags, options, report["global_batch"], is_swept=ranks == numbers[-1])
            jobs += start(ranks, [job], Path(folder), environment(numbers[-1]))
    tell(report, jobs, options)


def launched(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure at the number of ranks of this launch; before they meet, rank 0 measures one rank alone, unless the file
    has it."""
    is_first, most = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    report: dict[str, Any] = {}
    jobs: list[dict[str, Any]] = []
    if is_first:
        report = open_report(options.json, flags, config, most)
        if most > 1 and not any(job["ranks"] == 1 for job in report["measured"]):
            print("measuring 1 rank", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
                jobs = start(
                    1, [job_of(flags, options, report["global_batch"])], Path(folder), environment(1) | threads
                )
    from ddp_utils import cleanup_distributed, setup_distributed
    from utils.distributed.collectives import all_gather_json

    ctx = setup_distributed(config)
    batch = all_gather_json(report.get("global_batch", 0), ctx)[0]
    if is_first:
        print(f"measuring {most} rank(s)", flush=True)
    folder = Path(f"{options.json or config.run_folder}.scaling")  # all nodes see it
    jobs += measure_all([job_of(flags, options, batch, is_swept=True)], ctx, folder)
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)
        tell(report, jobs, options)
    cleanup_distributed()


def main() -> int:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    is_rank = "RANK" in os.environ
    try:
        options, flags = read(words)
        config = TrainingConfig.from_args(flags)
        if options.validate:
            from scales.validate import validate

            validate(options)
        elif options.job:
            do_jobs(Path(options.job))
        elif is_rank:
            launched(options, flags, config)
        else:
            here(options, flags, config)
    except (UserError, TrainingError) as failure:
        if is_rank:
            leave(failure)
        print(failure, file=sys.stderr)
        return 2 if isinstance(failure, UserError) else 1
    except Exception as error:
        if not is_rank:
            raise
        leave(error)
    return 0


def leave(error: BaseException) -> None:
    """A rank does not wait for its peers."""
    from utils.run.failures import leave_after

    leave_after(error, int(os.environ["RANK"]))


if __name__ == "__main__":
    sys.exit(main())

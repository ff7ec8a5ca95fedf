"""Train to the end while something befalls the run every now and then; no hand is on it, it is only started again.

python scripts/torment.py --ranks 4 --faults 3 --every 10 -- --run_dir runs/a --epochs 4
python scripts/torment.py --ranks 2 --minutes 15 --every 60 --kinds all -- --run_dir runs/soak --epochs 1000

Each launch is `torchrun --standalone ... train.py --resume_from auto`. The faults, their victims and their moments are
drawn from
--seed. It exits 0 when the run is completed (with --minutes: when the time is over and it is still sound).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainingConfig
from utils.run.watchdog import read_place

KILLS = ("kill a rank",)
ALL = (
    "kill a rank",
    "kill rank 0",
    "kill torchrun",
    "terminate torchrun",
    "kill the writer",
    "stop a rank",
    "kill a loader worker",
)
SECONDS_TO_START = 300.0
SECONDS_TO_END = 900.0


def places(folder: Path, ranks: int) -> list:
    return [read_place(folder / "watch" / f"rank{rank}") for rank in range(ranks)]


def children(pid: int) -> list[int]:
    """Of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def is_writer(pid: int) -> bool:
    """Whether a child of rank 0 is the writer of checkpoints: it leads a session."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def strike(kind: str, launch: subprocess.Popen, folder: Path, ranks: int, rng: random.Random) -> str:
    """Do it; who it was, or an empty text where nobody of that kind was there."""
    pids = [place.pid for place in places(folder, ranks) if place]
    rank = rng.randrange(ranks)
    number = signal.SIGKILL
    if kind == "kill rank 0":
        rank, victim = 0, pids[0]
    elif kind.endswith("torchrun"):
        victim, number = launch.pid, signal.SIGTERM if kind.startswith("terminate") else signal.SIGKILL
    elif kind == "kill the writer":
        victim = next((child for child in children(pids[0]) if is_writer(child)), 0)
    elif kind == "kill a loader worker":
        victim = next((child for child in children(pids[rank]) if not is_writer(child)), 0)
    else:
        victim, number = pids[rank], signal.SIGSTOP if kind == "stop a rank" else signal.SIGKILL
    if not victim:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, number)
    whose = "" if kind.endswith(("torchrun", "writer")) else f" (rank {rank})"
    return f"{kind}{whose}"


def torment(options: argparse.Namespace, flags: list[str]) -> int:
    """Launch, strike, launch again, until it is completed or the time is over."""
    rng, began = random.Random(options.seed), time.monotonic()
    folder = TrainingConfig.from_args(flags).run_folder
    kinds, struck = (ALL if options.kinds == "all" else KILLS), 0
    log = options.log.open("a") if options.log else None
    every = f"{options.every_steps} steps" if options.every_steps else f"{options.every:g} s"
    print(f"seed {options.seed}: {options.faults or 'as many as fit'} fault(s), one about every {every}", flush=True)
    while True:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        before = [place and place.pid for place in places(folder, options.ranks)]
        launch = subprocess.Popen(
            [*command, str(ROOT / "train.py"), *flags, "--resume_from", "auto"], stdout=log, stderr=log
        )
        ends = time.monotonic() + SECONDS_TO_START
        while launch.poll() is None and time.monotonic() < ends:  # until all ranks train
            now = places(folder, options.ranks)
            if all(place and place.phase != "start" and place.pid not in before for place in now):
                break
            time.sleep(0.05)
        while launch.poll() is None and not is_over(options, began) and (not options.faults or struck < options.faults):
            if is_next(launch, options, folder, rng.uniform(0.5, 1.5)) or is_over(options, began):
                break
            kind, step = rng.choice(kinds), max(place.step for place in places(folder, options.ranks) if place)
            if who := strike(kind, launch, folder, options.ranks, rng):
                struck += 1
                print(f"{time.monotonic() - began:6.0f} s  fault {struck}: {who}, in step {step}", flush=True)
                if kind != "kill the writer":  # which is replaced, and the run goes on
                    wait_for(launch, SECONDS_TO_END)
        if is_over(options, began) and launch.poll() is None:
            launch.terminate()  # the time is over: save and stop
        try:
            launch.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            launch.kill()
            print(f"the launch did not end within {SECONDS_TO_END:.0f} s; see {folder}/logs", file=sys.stderr)
            return 1
        state = (
            json.loads((folder / "status.json").read_text())["state"] if (folder / "status.json").exists() else "gone"
        )
        print(f"{time.monotonic() - began:6.0f} s  the launch ended: {state}", flush=True)
        if state == "completed" or is_over(options, began):
            break
        if launch.returncode == 2:
            return 2
    return report(folder, struck)


def is_over(options: argparse.Namespace, began: float) -> bool:
    return bool(options.minutes) and time.monotonic() - began > 60 * options.minutes


def is_next(launch: subprocess.Popen, options: argparse.Namespace, folder: Path, share: float) -> bool:
    """Wait for the moment of the next fault: seconds of training or, where these are asked for, steps. Whether the
    launch ended meanwhile."""
    if not options.every_steps:
        return wait_for(launch, options.every * share)
    step = first = max(place.step for place in places(folder, options.ranks) if place)
    while step < first + options.every_steps * share and not wait_for(launch, 0.05):
        step = max(place.step for place in places(folder, options.ranks) if place)
    return launch.poll() is not None


def wait_for(launch: subprocess.Popen, seconds: float) -> bool:
    """Whether the launch ended within so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launch.wait(seconds)
    return launch.poll() is not None


def report(folder: Path, struck: int) -> int:
    """What it cost."""
    summary = json.loads((folder / "summary.json").read_text())
    accounts = ", ".join(f"{name.removesuffix('_s')} {seconds:.0f} s" for name, seconds in summary["ledger"].items())
    print(
        f"{struck} fault(s), {summary['restarts']} restart(s), state {summary['state']}, {summary['steps']} steps,"
        f" goodput {summary['goodput']:.1%}"
    )
    print(f"time: {summary['wall_s']:.0f} s ({accounts})")
    return 0 if summary["state"] in ("completed", "preempted") else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", type=int, default=0, help="how many (0: until the time is over)")
    parser.add_argument("--minutes", type=float, default=0.0, help="for how long (0: until the run is completed)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds of training between two faults, about")
    parser.add_argument(
        "--every-steps", type=int, default=0, help="optimizer steps between two faults, about, in place of seconds"
    )
    parser.add_argument("--kinds", choices=("kills", "all"), default="kills", help="kills: of a rank alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where the launches print (default: here)")
    parser.add_argument("flags", nargs="*", help="of train.py, behind --")
    options = parser.parse_args()
    if not options.faults and not options.minutes:
        parser.error("give --faults or --minutes")
    return torment(options, options.flags)


if __name__ == "__main__":
    sys.exit(main())

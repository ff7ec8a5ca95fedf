# extra: chaos
"""Chaos test: train to the end while faults are injected, resuming automatically after each one.

python scripts/chaos.py --ranks 4 --faults 3 --every 10 -- --run_dir runs/a --epochs 4
python scripts/chaos.py --ranks 2 --minutes 15 --kinds all -- --run_dir runs/soak --epochs 1000
python scripts/chaos.py --ranks 4,1,2 --faults 3 -- --run_dir runs/b --global_batch_size 256

Each launch is `torchrun --standalone ... train.py --resume_from auto`. --seed determines the faults, their targets and
their times. The exit code is 0 if the run is completed. With --minutes it is 0 if the time is up and the run can be
resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainingConfig
from scripts.lib.processes import list_children, running_process
from utils.files import read_json

KILL_FAULTS = ("kill a rank",)
ALL_FAULTS = (*KILL_FAULTS, "kill rank 0", "kill torchrun", "terminate torchrun", "stop a rank", "kill a worker")
START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 900.0  # deadlines of a launch


class ChaosTest:
    """Launches one run again and again, and injects faults. `ranks` is the number of ranks of the current launch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.random, self.started_at = options, random.Random(options.seed), time.monotonic()
        self.folder, self.fault_count = TrainingConfig.from_args(options.flags).run_folder, 0
        self.ranks = options.ranks[0]

    def run(self) -> int:
        """Launch until the run is completed or the time is up. Return the exit code."""
        options, log = self.options, self.options.log.open("a") if self.options.log else None
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        train, state, ranks = [ROOT / "train.py", *options.flags, "--resume_from", "auto"], "", cycle(options.ranks)
        while state != "completed" and not self.is_time_up():
            self.ranks = next(ranks)
            command = [*torchrun, f"--nproc-per-node={self.ranks}", *train]
            with running_process(command, stdout=log, stderr=log) as launch:
                self.wait_until_training(launch)
                while (
                    launch.poll() is None
                    and not self.is_time_up()
                    and self.fault_count < (options.faults or float("inf"))
                ):
                    if self.wait_for_next_fault(launch) and not self.is_time_up():
                        self.inject_fault(launch)
                if self.is_time_up():
                    launch.terminate()  # the run saves and stops
                launch.wait(END_TIMEOUT_S)
            status = self.folder / "status.json"
            state = json.loads(status.read_text())["state"] if status.exists() else "unknown"
            self.print_line(f"The launch has ended. State: {state}.")
            if launch.returncode == 2:
                return 2
        return self.print_summary()

    def read_step(self) -> int:
        """Return the last completed step, as of a second ago."""
        return read_json(self.folder / "status.json").get("step", 0)

    def is_time_up(self) -> bool:
        return bool(self.options.minutes) and time.monotonic() - self.started_at > 60 * self.options.minutes

    def print_line(self, text: str) -> None:
        print(f"{time.monotonic() - self.started_at:6.0f} s  {text}", flush=True)

    def wait_until_training(self, launch: subprocess.Popen) -> None:
        """Wait until the launch trains, which the first file that it writes shows."""
        records, ends = self.folder / "metrics.jsonl", time.monotonic() + START_TIMEOUT_S
        before = records.stat() if records.exists() else None
        while launch.poll() is None and time.monotonic() < ends:
            if records.exists() and records.stat() != before and len(list_children(launch.pid)) == self.ranks:
                return
            time.sleep(0.05)

    def wait_for_next_fault(self, launch: subprocess.Popen) -> bool:
        """Wait for a random number of seconds or steps of training. Return whether the launch is still running."""
        draw, first, began = self.random.uniform(0.5, 1.5), 0, time.monotonic()
        steps, seconds = self.options.every_steps * draw, self.options.every * draw
        while launch.poll() is None and not self.is_time_up():
            first = first or self.read_step()  # this is 0 until a resumed run has loaded its state
            if self.read_step() >= max(first, 1) + steps if steps else time.monotonic() >= began + seconds:
                return True
            time.sleep(0.05)
        return False

    def inject_fault(self, launch: subprocess.Popen) -> None:
        """Inject one fault, and wait for the launch to end if the fault ends it."""
        kind = self.random.choice(ALL_FAULTS if self.options.kinds == "all" else KILL_FAULTS)
        rank = 0
        step = self.read_step()
        pids = sorted(list_children(launch.pid))  # torchrun starts the ranks in order
        if not pids:
            return
        number = {"terminate": signal.SIGTERM, "stop": signal.SIGSTOP}.get(kind.split()[0], signal.SIGKILL)
        if kind.endswith("torchrun"):
            pid = launch.pid
        else:
            rank = 0 if kind == "kill rank 0" else self.random.randrange(len(pids))
            pid = pids[rank] if "rank" in kind else next(iter(list_children(pids[rank])), 0)
        if not pid:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        self.fault_count += 1
        rank_text = "" if kind.endswith("torchrun") else f" (rank {rank})"
        self.print_line(f"fault {self.fault_count}: {kind}{rank_text}, step {step}")
        launch.wait(END_TIMEOUT_S)

    def print_summary(self) -> int:
        summary = json.loads((self.folder / "summary.json").read_text())
        times = ", ".join(f"{name.removesuffix('_s')} {seconds:.0f} s" for name, seconds in summary["time"].items())
        counts = f"faults: {self.fault_count}, restarts: {summary['restarts']}, steps: {summary['steps']}"
        print(f"{counts}, state: {summary['state']}, goodput: {summary['goodput']:.1%}")
        print(f"time: {summary['wall_s']:.0f} s ({times})")
        return 0 if summary["state"] in ("completed", "preempted") else 1


def parse_ranks(text: str) -> list[int]:
    """Parse the value of --ranks."""
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--ranks",
        type=parse_ranks,
        default=[2],
        help="number of ranks, or those of each launch in turn, such as 4,1,2 (default: 2)",
    )
    parser.add_argument("--faults", type=int, default=0, help="number of faults (default: as many as the time allows)")
    parser.add_argument("--minutes", type=float, default=0.0, help="duration (default: until the run is completed)")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between faults (default: 60)")
    parser.add_argument("--every-steps", type=int, default=0, help="mean steps between faults, instead of --every")
    parser.add_argument(
        "--kinds",
        choices=("kills", "all"),
        default="kills",
        help="the faults: only ranks killed with SIGKILL, or all kinds (default: kills)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument("--log", type=Path, help="file for the output of the launches")
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --")
    options = parser.parse_args()
    if not options.faults and not options.minutes:
        parser.error("Give --faults or --minutes.")
    try:
        return ChaosTest(options).run()
    except subprocess.TimeoutExpired as error:
        text = f"The launch did not end within {error.timeout:.0f} s. See the logs in the run folder."
        print(text, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Check on your own model and data what this template promises, in about a minute:

torchrun --standalone --nproc-per-node=4 scripts/verify.py [flags of train.py]

A line for each invariant, with its figure or with what breaks it. Exit code 0 where all hold, else 1 (2 without
torchrun, for flags that
cannot be used). It trains for a few steps on a few samples, in a folder beside run_dir that it deletes, and writes
verified.json beside
train.py: the start of a run then says "verified with this code", or which files changed since. With two ranks a sum has
one order only:
take four. It takes the flags of train.py; resume_from, overwrite, eval_only, compile and sync_bn do not count.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from config import TrainingConfig, UserError

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    TrainingConfig.from_args()  # refuses a bad flag before torch is imported

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import record

import train
from ddp_utils import cleanup_distributed, setup_distributed
from utils.distributed.collectives import all_gather_json, is_of_a_peer, on_rank_0
from utils.files import replace_json
from utils.run import provenance
from utils.run.failures import leave_after
from verification import of_data, of_model, of_runs
from verification.fork import Broken, Fork, in_one_line, named

CHECKS = {  # in this order: what comes first is as a rule the cause of what breaks later
    "order": of_data.order,
    "content": of_data.content,
    "loss": of_model.loss,
    "parameters": of_model.parameters,
    "evaluation": of_model.evaluation,
    "gradient": of_model.gradient,
    "training": of_runs.training,
    "weights": of_runs.weights,
    "resume": of_runs.resume,
    "plain load": of_runs.plain_load,
}
NEEDED = "parameters"  # without them no training comes to its end
TRAINS = ("gradient", "training", "weights", "resume", "plain load")


@record
def main(argv: Sequence[str] | None = None) -> int:
    config = TrainingConfig.from_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    fork = prepare(config)
    report = Report(fork, sys.argv[1:] if argv is None else list(argv))
    try:
        for name, check in CHECKS.items():
            report.run(name, check)
    finally:
        fork.clean_up()
    is_passed = report.finish()
    cleanup_distributed()
    return 0 if is_passed else 1


def prepare(config: TrainingConfig) -> Fork:
    """The data of the flags, in all ranks. Raises UserError."""
    # with sync_bn the ranks do show
    config = replace(config, resume_from="", overwrite=False, eval_only=False, compile="off", sync_bn=False)
    ctx = setup_distributed(config)
    train_set, held_out, config = train.load_data(config, ctx)
    token = all_gather_json(f"{time.time_ns():x}", ctx)[0]
    fork = Fork(
        config, train_set, next(iter(held_out.values()), None), ctx, config.run_folder.parent / f".verify-{token}"
    )
    on_rank_0(lambda: fork.folder.mkdir(parents=True), ctx)
    return fork


class Report:
    """Runs the checks on all ranks, says their outcome on rank 0, and keeps it for verified.json."""

    def __init__(self, fork: Fork, flags: list[str]) -> None:
        self._fork, self._flags = fork, flags
        self._outcomes: dict[str, dict[str, object]] = {}
        self._code = provenance.code_digests()  # as it was imported
        ranks = fork.ctx.world_size
        self._say(f"verifying {fork.title} on {ranks} rank(s)")
        if ranks < 4:
            self._say(
                f"  note: with {ranks} rank(s) not every order of sums can go wrong; --nproc-per-node=4 shows more"
            )

    @property
    def broken(self) -> list[str]:
        return [name for name, outcome in self._outcomes.items() if not outcome["passed"]]

    def run(self, name: str, check: Callable[[Fork], str]) -> None:
        begin = time.monotonic()
        is_idle = name in TRAINS and NEEDED in self.broken
        logging.disable(logging.CRITICAL)  # what the short runs have to say
        try:
            if is_idle:
                raise Broken(f"not checked, since {NEEDED} is broken; mend that first")
            self._note(name, True, check(self._fork), begin)
        except Broken as broken:
            hint = (
                f" (it may follow from what is broken above: {', '.join(self.broken)})"
                if self.broken and not is_idle
                else ""
            )
            self._note(name, False, f"{broken}{hint}", begin)
        # on this rank maybe alone: the others wait for it in a collective, so all have to end
        except Exception as error:
            if not self._fork.ctx.is_main or is_of_a_peer(error):
                time.sleep(3)  # rank 0 says it where it has it too; who only lost a peer leaves the word to that one
            if not is_of_a_peer(error):
                self._note(
                    name, False, f"rank {self._fork.ctx.rank} met {in_one_line(error)}; mend that first", begin, True
                )
                self.finish(True)
            logging.disable(logging.NOTSET)
            self._fork.clean_up()
            leave_after(error, self._fork.ctx.rank)
        finally:
            logging.disable(logging.NOTSET)

    def _note(self, name: str, is_passed: bool, text: str, begin: float, is_alone: bool = False) -> None:
        seconds = time.monotonic() - begin
        self._outcomes[name] = {"passed": is_passed, "figure": text, "seconds": round(seconds, 1)}
        self._say(f"{'ok    ' if is_passed else 'BROKEN'}  {name:<11} {text}  [{seconds:.1f} s]", is_alone)

    def _say(self, text: str, is_alone: bool = False) -> None:
        if self._fork.ctx.is_main or is_alone:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def finish(self, is_alone: bool = False) -> bool:
        """Write verified.json. Whether all invariants hold."""
        now, fork = provenance.code_digests(), self._fork
        if edited := [name for name in self._code if now.get(name) != self._code[name]]:
            self._note(
                "code",
                False,
                f"{named(edited)}: edited meanwhile, so nothing is known of it; run this again",
                time.monotonic(),
                is_alone,
            )
        is_passed = not self.broken and self._outcomes.keys() == CHECKS.keys()
        if fork.ctx.is_main or is_alone:
            found = {
                "passed": is_passed,
                "time": provenance.now(),
                "ranks": fork.ctx.world_size,
                "task": fork.config.task,
                "title": fork.title,
                "flags": self._flags,
                "devices": sorted(set(fork.ctx.device_names)),
                "versions": provenance.versions(),
                "code": now | self._code,
                "invariants": self._outcomes,
            }
            try:
                replace_json(provenance.VERIFIED, found)
            except OSError as error:
                raise UserError(
                    f"{provenance.VERIFIED}: cannot be written ({error.strerror}); make its folder writable"
                ) from None
        held = [name for name in self._outcomes if name not in self.broken]
        which = f"; broken: {', '.join(self.broken)}" if self.broken else ""
        self._say(
            f"{len(held)} of {len(CHECKS)} invariants hold{which}; wrote {os.path.relpath(provenance.VERIFIED)}",
            is_alone,
        )
        return is_passed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was found out, nothing was written\n")
        os._exit(1)
    except Exception as error:
        leave_after(error, int(os.environ.get("RANK", 0)))

# extra: verify
"""Check this template's guarantees on your own model and data, in about a minute:

torchrun --standalone --nproc-per-node=4 scripts/verify.py [--json FILE] [flags of train.py]

It prints one line per invariant, with its result, or with what breaks it and the fix. The exit code is 0 if all hold,
1 if one is broken, and 2 if the checks could not run. Under torchrun each failure is 1. --json FILE writes the outcomes
and this code to a .json file.
A fork also passes with notes ("Please check"), which only you can judge, and with parts that were "not checked".
It trains for a few steps on a few samples in a temporary folder beside --run_dir, and writes verified.json beside
train.py. Runs then report "verified with this code", or which files changed since.
Use four ranks, since two ranks have only one summation order. It takes the flags of train.py, but ignores those
that resume, overwrite, copy or only evaluate a run, and those of trackers and torch.compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from lib.verify.result import RESULT

JSON_PROBLEM = RESULT.take_json_flag() if __name__ == "__main__" else ""

import io
from contextlib import redirect_stderr, redirect_stdout

from config import TrainingConfig, list_fork_settings
from utils.distributed.context import read_launch
from utils.run.command_line import check_command_line, exit_with_user_error
from utils.settings.errors import UserError


def check_flags() -> None:
    """Handle --help and bad flags, and exit, as train.py does."""
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    if JSON_PROBLEM:
        if (launch := read_launch()).rank == 0:
            print(JSON_PROBLEM, file=sys.stderr, flush=True)
        exit_with_user_error(UserError(JSON_PROBLEM, is_final=True), launch)
    err = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            TrainingConfig.from_args()
    except SystemExit as ended:
        RESULT.finish("could not run", err.getvalue().strip()) if ended.code else RESULT.withdraw()
    check_command_line()


if __name__ == "__main__":
    check_flags()  # comes before the import of torch, which takes seconds

import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TextIO

import torch._dynamo  # noqa: F401  (the first optimizer imports it, after gc.freeze)
from torch.distributed.elastic.multiprocessing.errors import record

import dataset
import model
from ddp_utils import cleanup_distributed, setup_distributed
from lib.values import error_text, format_plural, join_first_three
from lib.verify.data_checks import content, order
from lib.verify.fork import Fork, SkippedCheck
from lib.verify.hidden_state import SHIPPED_FIELDS, find_mentioned_fields, record_field_reads
from lib.verify.loss_checks import loss
from lib.verify.model_checks import evaluation, gradient, parameters
from lib.verify.new_process import NewProcess
from lib.verify.run_checks import plain_load, reduction, resume, training, weights
from lib.verify.schedule_check import schedule
from utils.data.sets import dataset_class_name, load_data
from utils.distributed import device
from utils.distributed.collectives import all_gather_json, is_peer_failure
from utils.distributed.context import environment_without_launcher
from utils.extras import verify as verified
from utils.files import replace_json
from utils.run import provenance
from utils.run.exit import exit_with_error
from utils.training.hooks import ModelHooks, check_model_module

# The checks have this order, because an early failure is usually the cause of later ones.
CHECKS = (order, content, loss, parameters, schedule, evaluation, gradient, training, weights, resume, plain_load)
TRAINING_CHECKS = CHECKS[6:]  # these are skipped if "parameters" is broken
STDOUT = sys.stdout


class DeduplicatedOutput(io.TextIOBase):
    """Standard output without lines that were printed before. The checks build the model dozens of times."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._partial_line = stream, ""
        self._seen_lines: set[str] = set()

    def write(self, text: str) -> int:
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        for line in lines:
            if self._stream and line not in self._seen_lines:
                print(line, file=self._stream)
            self._seen_lines.add(line)
        return len(text)


@record
def main(argv: Sequence[str] | None = None) -> int:
    config, read = TrainingConfig.from_args(argv), record_field_reads()
    fork = prepare_fork(config)
    checks = list(CHECKS)
    if config.reduction == "exact":  # extra: exact
        checks.append(reduction)
    try:
        if fork.ctx.is_main:
            fork.new_process = NewProcess(
                {"given": fork.given_config.to_json(), "config": fork.config.to_json()}, environment_without_launcher()
            )
        runner = CheckRunner(fork, sys.argv[1:] if argv is None else list(argv), len(checks))
        for check in checks:
            runner.run_check(check)
        runner.check_fields(read)
    finally:
        fork.clean_up()
    is_passed = runner.finish()
    cleanup_distributed()
    gc.unfreeze()
    return 0 if is_passed else 1


def prepare_fork(config: TrainingConfig) -> Fork:
    """Load the data on all ranks. Raises UserError."""
    config = replace(config, mirror="", track="none", on_checkpoint="")  # extra: companions
    config = replace(config, compile="off")  # extra: compile
    config = replace(config, resume_from="", overwrite=False, eval_only=False)
    device.configure_kernels = functools.partial(device.configure_kernels, allow_tf32=False)  # for the short runs too
    gc.freeze()  # the collection at the start of each short run need not look at imports
    ctx = setup_distributed(config)
    collected = provenance.collect_provenance(ctx.hosts, ctx.device_names, ctx.launch.git_commit)
    RESULT.values |= {"ranks": ctx.world_size}
    RESULT.values |= {name: collected[name] for name in ("git_commit", "git_dirty", "versions")}
    sys.stdout = DeduplicatedOutput(STDOUT if ctx.is_main else None)
    token = all_gather_json(time.time_ns(), ctx)[0]
    folder = config.run_folder.parent / f".verify-{token:x}"
    config = replace(config, run_dir=str(folder / "first"), checkpoint_dir="")  # these folders have no earlier run
    check_model_module(model, config, ctx)
    sets = load_data(dataset, config, ctx)
    held_out = next(iter(sets.held_out.values()), None)
    fork = Fork(
        sets.config, sets.train, held_out, ctx, folder, ModelHooks.from_module(model, sets.config, ctx.device), config
    )
    fork.choose_precision()
    return fork


class CheckRunner:
    """Runs the checks on all ranks, prints the outcomes on rank 0, and writes them to verified.json."""

    def __init__(self, fork: Fork, flags: list[str], check_count: int) -> None:
        self._fork, self._flags, self._check_count, self._is_printing = fork, flags, check_count, fork.ctx.is_main
        self._outcomes: dict[str, dict[str, object]] = {}
        self._code_checksums = provenance.compute_code_checksums()  # checksums of the code as it was imported
        ranks = format_plural(fork.ctx.world_size, "rank")
        self._task = verified.describe_task(fork.create_model(), dataset_class_name(fork.train_set))
        precision = str(fork.dtype).removeprefix("torch.")
        samples = format_plural(len(fork.train_set), "sample")
        self._print(f"Verifying {self._task} ({samples}) on {ranks}, in {precision}.")
        RESULT.values |= {"task": self._task, "samples": len(fork.train_set), "precision": precision}
        if fork.ctx.world_size < 4:
            verb = "does" if fork.ctx.world_size == 1 else "do"
            note = f"{ranks} {verb} not exercise every summation order. Use --nproc-per-node=4."
            RESULT.values["notes"] = [note]
            self._print(f"  Note: {note}")

    @property
    def broken_checks(self) -> list[str]:
        return [name for name, outcome in self._outcomes.items() if not outcome["passed"]]

    def run_check(self, check: Callable[[Fork], str]) -> None:
        name, began, broken = check.__name__.replace("_", " "), time.monotonic(), self.broken_checks
        logging.disable(logging.CRITICAL)  # silence the short runs
        try:
            if check in TRAINING_CHECKS and "parameters" in broken:
                raise SkippedCheck("This check was skipped, because parameters is broken. Fix that first.")
            self._record_outcome(name, "ok", check(self._fork), began)
        except SkippedCheck as skipped:
            self._record_outcome(name, "skipped", str(skipped), began)
        except UserError as problem:
            hint = f" The cause may be what is broken above: {', '.join(broken)}." if broken else ""
            self._record_outcome(name, "BROKEN", str(problem), began, hint)
        except Exception as error:
            # the check may have failed on this rank only, while the others wait in a collective: every rank has to exit
            rank, is_peers = self._fork.ctx.rank, is_peer_failure(error)
            if rank or is_peers:
                time.sleep(3)  # rank 0 reports first if it has the same error, and lost peers come last
            if not is_peers:
                self._is_printing = True
                text = f"Rank {rank} failed ({error_text(error)}). Fix that first."
                self._record_outcome(name, "BROKEN", text, began)
                self.finish()
            logging.disable(logging.NOTSET)
            self._fork.clean_up()
            RESULT.finish("could not run", f"Rank {rank} failed ({error_text(error)}).")  # unless it is broken
            exit_with_error(error, RESULT.exit_code)
        finally:
            logging.disable(logging.NOTSET)

    def _record_outcome(self, name: str, result: str, text: str, began: float, hint: str = "") -> None:
        """Print and keep the outcome of a check.

        Args:
            name: the name of the check.
            result: as for `Result.add_check`.
            text: what the check has found.
            began: when the check began.
            hint: a sentence after the text.
        """
        seconds = time.monotonic() - began
        RESULT.add_check(name, result, text, seconds)
        text += hint
        is_passed = result == "ok"
        self._outcomes[name] = {"passed": is_passed, "figure": text, "seconds": round(seconds, 1)}
        self._print(f"{'ok    ' if is_passed else 'BROKEN'}  {name:<11} {text}  [{seconds:.1f} s]")

    def _print(self, text: str) -> None:
        if self._is_printing:
            print(text, file=STDOUT, flush=True)

    def check_fields(self, fields_read: set[str]) -> None:
        """Check, after all other checks, that the fork's code reads its own fields.

        Args:
            fields_read: the fields that the fork's code has read meanwhile.
        """
        used_fields, given = fields_read | find_mentioned_fields(), self._fork.given_config
        unread = [setting for setting in list_fork_settings() if setting.name not in used_fields]
        names = []
        for setting in unread:
            # fields of the shipped model and data may stand in a fork without them, unless they are given
            is_given = getattr(given, setting.name) != setting.resolved_default
            if setting.name not in SHIPPED_FIELDS or is_given:
                names.append(setting.name)
        if names := all_gather_json(names, self._fork.ctx)[0]:
            text = (
                f"No code of the fork reads {join_first_three(names)} of config.py. Read each such field in model.py or"
                " dataset.py, or delete it from config.py."
            )
            self._record_outcome("fields", "BROKEN", text, time.monotonic())

    def finish(self) -> bool:
        """Write verified.json, and return whether all invariants hold."""
        now, ctx = provenance.compute_code_checksums(), self._fork.ctx
        if edited := [name for name in self._code_checksums if now.get(name) != self._code_checksums[name]]:
            text = f"These files were edited during the checks: {join_first_three(edited)}. Run verify.py again."
            self._record_outcome("code", "BROKEN", text, time.monotonic())
        broken = self.broken_checks
        is_passed = not broken and len(self._outcomes) == self._check_count
        report = {
            "passed": is_passed,
            "time": provenance.format_utc_time(),
            "ranks": ctx.world_size,
            "task": self._task,
            "flags": self._flags,
            "settings": self._fork.settings,
            "devices": sorted(set(ctx.device_names)),
            "versions": provenance.collect_package_versions(),
            "code": now | self._code_checksums,
            "invariants": self._outcomes,
            "notes": [note for check in RESULT.values["checks"] for note in check["notes"]],
            "not_checked": [part for check in RESULT.values["checks"] for part in check["not_checked"]],
        }
        if self._is_printing:
            replace_json(verified.VERIFICATION_FILE, report)
        held_count = len(self._outcomes) - len(broken)
        text = f"{held_count} of {self._check_count} invariants hold."
        if broken:
            text += f" These are broken: {', '.join(broken)}."
        if not_checked := RESULT.values["not_checked"]:
            verb = "was" if not_checked == 1 else "were"
            text += f" {format_plural(not_checked, 'part')} {verb} not checked."
        self._print(f"{text} The result is in {os.path.relpath(verified.VERIFICATION_FILE)}.")
        RESULT.finish("ok" if is_passed else "broken", text, self._is_printing)
        return is_passed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("The checks were interrupted. There is no result, and nothing was written.\n")
        RESULT.finish("could not run", "The checks were interrupted.")
        os._exit(RESULT.exit_code)
    except Exception as error:
        RESULT.finish("could not run", str(error) if isinstance(error, UserError) else error_text(error))
        exit_with_error(error, RESULT.exit_code)

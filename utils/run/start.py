"""How an attempt starts: the ranks are compared, one process locks the run folder, and all ranks see it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from config import TrainingConfig
from utils.clock import PhaseClock
from utils.distributed.collectives import broadcast_json, first_rank_where, on_all_ranks, on_rank_0
from utils.distributed.context import DistributedContext
from utils.files import is_transient
from utils.logger import setup_logger
from utils.redact import redact_config
from utils.run import provenance
from utils.run.exit import ExitReporter, supervise_ranks
from utils.run.folder import RunFolder
from utils.run.run_lock import is_owner_visible
from utils.run.start_decision import StartDecision, decide_start
from utils.settings.errors import StartError, UserError
from utils.signals import STOP_HANDLER, pop_process_start_time
from utils.table import format_table

PER_RANK_SETTINGS = ("data_dir",)  # may be mounted elsewhere on another machine; the data itself is compared later
MAX_DIFFERING_RANKS = 6  # columns of a table of differences


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a run, from `open_run`: what all its parts share."""

    config: TrainingConfig
    ctx: DistributedContext
    run: RunFolder
    clock: PhaseClock
    started_at: float  # when its process started, by time.monotonic
    logger: logging.Logger
    resources: ExitStack  # what ends or is closed with the attempt, also after a failure

    @property
    def is_stop_requested(self) -> bool:
        """Return whether this rank got a stop signal, or max_time is over."""
        elapsed_minutes = (time.monotonic() - self.started_at) / 60
        is_time_up = 0 < self.config.max_time < elapsed_minutes
        return bool(STOP_HANDLER.received) or is_time_up


@contextmanager
def open_run(config: TrainingConfig, ctx: DistributedContext) -> Iterator[Attempt]:
    """Start an attempt of the run in its folder. Until the block ends, stop signals become a flag, and all ranks are
    watched. If the block fails, the cause is written to status.json and raised.

    Raises:
        UserError: if the run cannot be started or continued.
    """
    started_at = pop_process_start_time()
    with STOP_HANDLER, supervise_ranks(config.run_folder, config, ctx) as exit_reporter:
        check_ranks_equal(config, ctx)
        run = acquire_run_folder(config, ctx, exit_reporter)
        if ctx.launch.flight_recorder_path:
            folder = Path(ctx.launch.flight_recorder_path).parent  # torch does not create it
            on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True), ctx)
        if run.start_decision.is_completed:
            logger = setup_logger(ctx.rank)
            text = "The run in %s is already completed. To train longer, increase --epochs, --max_steps or --patience."
            logger.info(text, run.folder)
        else:
            logger = setup_logger(ctx.rank, run.log_file)
        yield Attempt(
            config=config,
            ctx=ctx,
            run=run,
            clock=exit_reporter.clock,
            started_at=started_at,
            logger=logger,
            resources=exit_reporter.resources,
        )
    run.close()


def check_ranks_equal(config: TrainingConfig, ctx: DistributedContext) -> None:
    """Compare the code, settings and versions of the ranks. Collective.

    Raises:
        UserError: on every rank, with a table of the differences, if there are any.
    """
    facts = {}
    for name, value in redact_config(config).items():
        if name not in PER_RANK_SETTINGS:
            facts[name] = str(value)
    if config.reduction == "exact":  # extra: exact
        facts["CPU threads"] = str(torch.get_num_threads())
    for name, checksum in provenance.compute_code_checksums().items():
        facts[name] = checksum[:8]
    facts |= provenance.collect_package_versions()

    ranks: list[int] = []  # the first rank of each kind, from rank 0
    kinds: list[dict[str, str]] = []  # the facts of each of them
    while True:
        rank = first_rank_where(facts not in kinds, ctx)
        if rank is None or len(ranks) == MAX_DIFFERING_RANKS:
            break
        ranks.append(rank)
        kinds.append(broadcast_json(facts, ctx, rank))
    if len(ranks) == 1:
        return

    table = [["", *(f"rank {rank} on {ctx.hosts[rank]}" for rank in ranks)]]
    for name in sorted(set().union(*kinds)):
        values = [kind.get(name, "none") for kind in kinds]
        if len(set(values)) > 1:
            table.append([name, *values])
    text = "The ranks differ in code, settings or versions. Give all nodes the same ones, then start again."
    raise UserError(f"{text}\n{format_table(table)}", ranks[1], ctx.hosts[ranks[1]])


def acquire_run_folder(config: TrainingConfig, ctx: DistributedContext, exit_reporter: ExitReporter) -> RunFolder:
    """Lock the run folder and decide whether to continue the run in it, on rank 0. Collective.

    Returns:
        The folder, as this rank sees it.

    Raises:
        UserError: if the run cannot be started or continued.
    """
    launch = ctx.launch
    decide = partial(decide_start, config, ctx.host, launch_id=launch.launch_id, may_restart=launch.may_restart)
    lock = None
    decision_values = None
    decided = on_rank_0(decide, ctx)
    if decided:
        lock, decision = decided
        decision_values = dataclasses.asdict(decision)
    decision = StartDecision(**broadcast_json(decision_values, ctx))
    run = RunFolder(
        folder=config.run_folder,
        checkpoint_folder=config.checkpoint_folder,
        rank=ctx.rank,
        host=ctx.host,
        start_decision=decision,
        lock=lock,
    )
    exit_reporter.run = run  # a start that is refused from here on is undone
    if decision.is_completed:
        return run
    if config.mirror or lock:  # extra: companions
        from utils.extras.companions.node_local import add_companions

        run = add_companions(run, config, ctx)
        exit_reporter.run = run
    if run.resume_path and run.resume_path.parent == run.checkpoint_folder:
        share_checkpoint_with_nodes(run.resume_path, run, ctx)
    on_all_ranks(lambda: check_shared_storage(run.folder, decision.token, ctx), ctx)
    return run


def share_checkpoint_with_nodes(path: Path, run: RunFolder, ctx: DistributedContext) -> Path:
    """Give a checkpoint of the run to the nodes whose run folder is not rank 0's, if there are any. Collective.

    Returns:
        The path of the checkpoint. If it was a link and there are such nodes, it is the path of the file.
    """
    if run.start_decision.node_local_ranks:  # extra: companions
        from utils.extras.companions.node_local import share_checkpoint

        return share_checkpoint(path, run, ctx)
    return path


def check_shared_storage(folder: Path, token: str, ctx: DistributedContext) -> None:
    """Check that this rank sees what rank 0 has just written to the run folder, and can write there.

    Args:
        token: of the owner of the folder.

    Raises:
        UserError: if it does not see it or cannot write; StartError if another attempt may succeed.
    """
    if not is_owner_visible(folder, token):
        remedy = "Put the run folder on storage that all nodes share, at the same path"
        remedy += ", or give --mirror"  # extra: companions
        text = f"{ctx.host} does not see what rank 0 on {ctx.hosts[0]} has written to --run_dir {folder}."
        raise UserError(f"{text} {remedy}.")
    mark = folder / f".rank{ctx.rank}"
    try:
        mark.touch()
        mark.unlink()
    except OSError as error:
        kind = StartError if is_transient(error) else UserError
        text = f"{ctx.host} cannot write to --run_dir {folder} ({error.strerror})."
        raise kind(f"{text} Make this folder writable on all nodes.") from None

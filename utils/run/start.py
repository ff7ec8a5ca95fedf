"""How an attempt starts: the ranks are compared, the folder is claimed, and all see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from config import TrainingConfig
from utils.distributed.collectives import broadcast_json, first_rank_where, on_all_ranks, on_rank_0
from utils.distributed.context import DistributedContext
from utils.files import is_transient
from utils.logger import setup_logger
from utils.redact import redact_config
from utils.run import provenance
from utils.run.attempt import Attempt
from utils.run.exit import ExitReporter, supervise_ranks
from utils.run.folder import RunFolder
from utils.run.resume import share_checkpoint_with_nodes
from utils.run.run_lock import RunLock, is_owner_visible
from utils.run.start_decision import StartDecision, decide_start
from utils.settings.errors import StartError, UserError
from utils.signals import STOP_HANDLER, pop_process_start_time
from utils.table import format_table

PER_RANK_SETTINGS = ("data_dir",)  # may be mounted elsewhere on another machine; the data itself is compared later
MAX_DIFFERING_RANKS = 6  # of ranks that differ, in a table


@contextmanager
def open_run(config: TrainingConfig, ctx: DistributedContext) -> Iterator[Attempt]:
    """An attempt of the run in its folder. Until the block ends, stop signals become a flag, and all ranks are watched.

    If the block fails, the cause is written to status.json and raised.

    Raises:
        UserError: if the run cannot be started or continued.
    """
    began = pop_process_start_time()
    with STOP_HANDLER, supervise_ranks(config.run_folder, config, ctx) as exit_reporter:
        check_ranks_equal(config, ctx)
        run = acquire_run_folder(config, ctx, exit_reporter)
        if folder := ctx.launch.flight_recorder_path and Path(ctx.launch.flight_recorder_path).parent:
            on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True), ctx)  # torch does not create it
        logger = setup_logger(ctx.rank, None if run.start_decision.is_completed else run.log_file)
        if run.start_decision.is_completed:
            text = "%s: this run is already completed; to train longer, increase --epochs, --max_steps or --patience"
            logger.info(text, run.folder)
        yield Attempt(config, ctx, run, exit_reporter.clock, began, logger, exit_reporter.resources)
    run.close()


def check_ranks_equal(config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raise UserError on every rank, with a table of the differences, if code, settings or versions differ."""
    settings = {name: str(value) for name, value in redact_config(config).items() if name not in PER_RANK_SETTINGS}
    if config.reduction == "exact":  # extra: exact
        settings["CPU threads"] = str(torch.get_num_threads())
    code = {name: digest[:8] for name, digest in provenance.compute_code_checksums().items()}
    facts = settings | code | provenance.collect_package_versions()
    ranks: list[int] = []  # one of equal ranks, from rank 0
    kinds: list[dict[str, str]] = []
    while (rank := first_rank_where(facts not in kinds, ctx)) is not None and len(ranks) < MAX_DIFFERING_RANKS:
        ranks.append(rank)
        kinds.append(broadcast_json(facts, ctx, rank))
    if len(ranks) == 1:
        return
    names = sorted({name for kind in kinds for name in kind if len({other.get(name, "none") for other in kinds}) > 1})
    rows = [[name, *(kind.get(name, "none") for kind in kinds)] for name in names]
    head = ["", *(f"rank {rank} on {ctx.hosts[rank]}" for rank in ranks)]
    text = "the ranks differ in code, settings or versions; give all nodes the same ones, then start again"
    raise UserError(f"{text}\n{format_table([head, *rows])}", ranks[1], ctx.hosts[ranks[1]])


def acquire_run_folder(config: TrainingConfig, ctx: DistributedContext, exit_reporter: ExitReporter) -> RunFolder:
    """Lock the run folder and decide whether to continue the run in it, on rank 0. Collective.

    Returns:
        The folder, as this rank sees it.

    Raises:
        UserError: if the run cannot be started or continued.
    """

    def decide() -> tuple[RunLock, StartDecision]:
        launch = ctx.launch
        return decide_start(config, host=ctx.host, launch_id=launch.launch_id, may_restart=launch.may_restart)

    def create_folder(decision: StartDecision, lock: RunLock | None, companions: Any = None) -> RunFolder:
        return RunFolder(
            folder=config.run_folder,
            checkpoint_folder=config.checkpoint_folder,
            rank=ctx.rank,
            host=ctx.host,
            start_decision=decision,
            lock=lock,
            companions=companions,
        )

    lock: RunLock | None = None
    decision_values: dict[str, Any] | None = None
    decided = on_rank_0(decide, ctx)
    if decided:
        lock, decision = decided
        decision_values = dataclasses.asdict(decision)
    decision = StartDecision(**broadcast_json(decision_values, ctx))
    run = create_folder(decision, lock)
    exit_reporter.set_run(run)  # a start that is refused from here on is undone
    if decision.is_completed:
        return run
    if config.mirror or lock:  # extra: companions
        from utils.extras.companions.node_local import create_node_folder
        from utils.extras.companions.programs import create_companion_plan
        from utils.extras.companions.sidecar import Companions

        companions = None
        if config.mirror:
            node_local_ranks, own_lock = create_node_folder(config, decision, ctx)
            decision = dataclasses.replace(decision, node_local_ranks=node_local_ranks)
            lock = lock or own_lock
        if lock:
            plan = create_companion_plan(
                config=config,
                rank=ctx.rank,
                host=ctx.host,
                token=decision.token,
                launch_id=decision.launch_id,
                apart=decision.node_local_ranks,
                resume_from=decision.resume_from,
                decision=decision.mirror_decision,
            )
            companions = Companions(config, plan, ctx)
        run = create_folder(decision, lock, companions)
    exit_reporter.set_run(run)
    if run.resume_path and run.resume_path.parent == run.checkpoint_folder:
        share_checkpoint_with_nodes(run.resume_path, run, ctx)
    on_all_ranks(lambda: check_shared_storage(run.folder, decision.token, ctx), ctx)
    return run


def check_shared_storage(folder: Path, token: str, ctx: DistributedContext) -> None:
    """Raises UserError if this rank does not see what rank 0 has just written to the run folder, or cannot write there.

    token: of its owner.
    """
    if not is_owner_visible(folder, token):
        remedy = "put the run folder on storage that all nodes share, at the same path"
        remedy += ", or give --mirror"  # extra: companions
        text = f"{ctx.host} does not see what rank 0 on {ctx.hosts[0]} has written there"
        raise UserError(f"run_dir={folder}: {text}; {remedy}")
    mark = folder / f".rank{ctx.rank}"
    try:
        mark.touch()
        mark.unlink()
    except OSError as error:
        kind = StartError if is_transient(error) else UserError
        text = f"{ctx.host} cannot write there ({error.strerror}); make it writable on all nodes"
        raise kind(f"run_dir={folder}: {text}") from None

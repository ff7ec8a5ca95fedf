"""Checks before training: all ranks have the same code, settings and versions, one run folder, enough open files."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch

from config import StartError, TrainingConfig, UserError
from utils.distributed.collectives import broadcast_json, lowest_rank, on_all_ranks
from utils.distributed.context import DistributedContext
from utils.files import may_pass, read_json
from utils.redact import stored
from utils.run import provenance
from utils.table import format_table

MAY_DIFFER = ("data_dir",)  # may be mounted elsewhere on another machine; the data itself is compared later
MAX_KINDS = 6  # of ranks that differ, in a table
SECONDS_TO_SEE = 5.0  # until a file of another machine is visible on shared storage
# descriptors: per process, per rank (sockets), per worker (pipes)
FILES, FILES_PER_RANK, FILES_PER_WORKER = 128, 6, 16


def check_alike(config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raise UserError on every rank, with a table of the differences, if code, settings or versions differ."""
    settings = {name: str(value) for name, value in stored(config).items() if name not in MAY_DIFFER}
    if config.reduction == "exact":
        settings["CPU threads"] = str(torch.get_num_threads())
    code = provenance.code_digests()
    versions = provenance.versions()
    facts = settings | {name: digest[:8] for name, digest in code.items()} | versions
    ranks: list[int] = []  # one of equal ranks, from rank 0
    kinds: list[dict[str, str]] = []
    while (rank := lowest_rank(facts not in kinds, ctx)) is not None and len(ranks) < MAX_KINDS:
        ranks.append(rank)
        kinds.append(broadcast_json(facts, ctx, rank))
    if len(ranks) == 1:
        return
    names = sorted({name for each in kinds for name in each if len({one.get(name, "none") for one in kinds}) > 1})
    rows = [[name, *(each.get(name, "none") for each in kinds)] for name in names]
    head = ["", *(f"rank {rank} on {ctx.hosts[rank]}" for rank in ranks)]
    text = "the ranks differ in code, settings or versions; give all nodes the same ones, then start again"
    raise UserError(f"{text}\n{format_table([head, *rows])}", ranks[1], ctx.hosts[ranks[1]])


def sees(file: Path, token: str) -> bool:
    """Whether rank 0's lock.json is visible here, at once or after some seconds."""
    ends = time.monotonic() + SECONDS_TO_SEE
    while read_json(file).get("token") != token:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True


def check_shared(folder: Path, file: Path, token: str, ctx: DistributedContext) -> None:
    """Raises UserError on every rank if one does not see what rank 0 has just written to the run folder, or cannot
    write there itself.

    Args:
        file: in the folder; its JSON must have this `token`.
    """

    def look() -> None:
        if not sees(file, token):
            here, first = ctx.hosts[ctx.rank], ctx.hosts[0]
            remedy = "put the run folder on storage that all nodes share, at the same path, or give --mirror"
            raise UserError(f"run_dir={folder}: {here} does not see what rank 0 on {first} has written there; {remedy}")
        mark = folder / f".rank{ctx.rank}"
        try:
            mark.touch()
            mark.unlink()
        except OSError as error:
            host = ctx.hosts[ctx.rank]
            raise (StartError if may_pass(error) else UserError)(
                f"run_dir={folder}: {host} cannot write there ({error.strerror}); make it writable on all nodes"
            ) from None

    on_all_ranks(look, ctx)


def raise_file_limit(world_size: int, workers: int) -> None:
    """Raise the limit on open files to the hard limit. Raises UserError if that is not enough."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    need = FILES + FILES_PER_RANK * world_size + FILES_PER_WORKER * workers
    if soft != resource.RLIM_INFINITY and soft < need:
        how = f"ulimit -n {need}, LimitNOFILE, --ulimit"
        raise UserError(f"open files: the limit is {soft}, but about {need} are needed; raise it ({how})")

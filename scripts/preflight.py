"""Check the nodes before a run, in less than a minute. Each problem is printed with its node and a fix.

    scripts/launch.sh --preflight [flags of train.py]      # on each node, like the run itself
    torchrun --standalone --nproc-per-node=4 scripts/preflight.py [flags of train.py] [--json FILE]

It prints a table of the nodes, the all-reduce by message size, and a line for each check: OK, warning or FAILURE. It
creates the same process groups as the run and leaves the run folder unchanged. --json writes all measurements and
findings. Exit code 1 if a check failed, else 0; 2 if the ranks cannot connect or a flag is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainingConfig


def parse(argv: Sequence[str] | None = None) -> tuple[TrainingConfig, str]:
    """The config from train.py's flags, and the file given with --json."""
    parser = argparse.ArgumentParser(prog="preflight.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", default="", metavar="FILE")
    own, flags = parser.parse_known_args(argv)
    return TrainingConfig.from_args(flags), own.json


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    parse()  # rejects a bad flag before torch is imported

import dataclasses
import functools
import shutil
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import dataset
import train
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from scripts.lib.preflight import links, rates, storage, verdict
from scripts.lib.preflight.facts import gather
from scripts.lib.preflight.steps import MAX_SECONDS_OF_MODEL, Steps
from utils.data.loader import create_distributed_dataloader
from utils.data.sets import load_data
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.run import provenance
from utils.run.failures import leave_after
from utils.run.start_checks import check_alike
from utils.table import format_table
from utils.training.precision import Precision
from utils.training.seams import Seams


@record
def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    config, json_file = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the probe folder is deleted
    ctx = setup_distributed(config, must_be_alike=False)  # checked below, with the rest
    steps = Steps(config, ctx)
    check(config, ctx, steps)
    is_failed = any(each.level == verdict.FAILURE for each in steps.findings)
    if ctx.is_main:
        print("", *tables(steps.measured), *steps.findings, conclusion(steps, time.monotonic() - began), sep="\n")
        if json_file:
            found = [dataclasses.asdict(each) for each in steps.findings]
            replace_json(Path(json_file), {"measured": steps.measured, "findings": found})
    cleanup_distributed()
    return int(is_failed)


def check(config: TrainingConfig, ctx: DistributedContext, steps: Steps) -> None:
    """Run all steps; those that use model and data only if all ranks have the same code, settings and data."""
    facts, found = steps.take("facts", gather, ctx), steps.findings
    nodes = verdict.nodes_of(facts)
    leaders = [ranks[0] for ranks in nodes]
    loader = state = sizes = None

    def load() -> int:
        nonlocal config, loader
        sets = load_data(dataset, config, ctx)
        config, train_set = sets.config, sets.train
        patient = dataclasses.replace(config, hang_timeout=min(config.hang_timeout or 20.0, 20.0))  # for each batch
        loader, _ = create_distributed_dataloader(train_set, patient, ctx)
        return len(train_set)

    def create() -> dict[str, int]:
        nonlocal state
        state = train.create_state(Seams.of(train.your_model), config, ctx)
        return {"checkpoint": rates.checkpoint_size(state, config), "gradient": rates.gradient_bytes(state)}

    if steps.take("same code", check_alike, config, ctx):
        versions = ", ".join(f"{name} {version}" for name, version in provenance.versions().items() if version)
        found += verdict.findings("same code", f"the same code, settings and versions on all ranks ({versions})")
        if samples := steps.take("data", load, seconds=config.timeout):
            found += verdict.findings("data", f"the same {samples[0]:,} samples on all ranks")
            sizes = steps.take("model", create, seconds=MAX_SECONDS_OF_MODEL)
    found += verdict.host_names(facts) + verdict.network(facts) + verdict.devices(facts) + verdict.shared_memory(facts)
    run, checkpoints = config.run_folder.absolute(), config.checkpoint_folder.absolute()
    if not checkpoints.is_relative_to(run):
        check_folder(run, leaders, 0, config, ctx, steps)
        run = checkpoints
    check_folder(run, leaders, sizes[0]["checkpoint"] if sizes else 0, config, ctx, steps)

    if len(nodes) > 1:
        times = steps.take("clocks", lambda: [all_gather_json(None, ctx), time.time()][1])  # all at the same moment
        found += verdict.clocks({rank: times[rank] - times[0] for rank in leaders}, facts)
        pairs = steps.take("links", links.measure_pairs, leaders, ctx)
        found += verdict.links([pair for each in pairs for pair in each], facts)
    all_reduce = measure_all_reduce(nodes, ctx, steps) if ctx.world_size > 1 else {}

    dtype = Precision.choose(config, ctx.device, ctx.fast_bf16).dtype or torch.float32
    if speeds := steps.take("speed", rates.device_speed, ctx.device, dtype):
        found += verdict.speed("speed", [each / 1e9 for each in speeds], "GFLOP/s", facts)

    def step(passes: int = 1) -> list[float] | None:
        return steps.take("step", rates.step_seconds, state, loader, passes, seconds=MAX_SECONDS_OF_MODEL)

    if sizes and (first := step()) and (step_s := step(rates.passes_for(first))):
        samples_per_s = [min(config.batch_size, len(loader.dataset)) / each for each in step_s]
        found += verdict.speed("step", samples_per_s, "samples/s", facts)
        if all_reduce:
            accumulation = config.micro_batches_per_step(ctx.world_size) / ctx.world_size
            found += verdict.communication(step_s, sizes[0]["gradient"], all_reduce["all ranks"], accumulation)
        if read := steps.take("loader", rates.loader_rate, loader, seconds=MAX_SECONDS_OF_MODEL):
            found += verdict.loader(read, samples_per_s, facts)


def check_folder(
    folder: Path, leaders: list[int], checkpoint: int, config: TrainingConfig, ctx: DistributedContext, steps: Steps
) -> None:
    """One rank per node tests the folder. If checkpoints (of this many bytes) go there, rank 0 measures the disk."""
    created = steps.take("run folder", lambda: storage.create_probe(folder) if ctx.is_main else "")
    if not created:
        return
    probe, is_leader = Path(created[0]), ctx.rank in leaders
    try:
        if steps.take("shared folder", lambda: storage.use_folder(probe, f"rank{ctx.rank}") if is_leader else None):
            steps.findings += verdict.findings("shared folder", f"{folder}: visible and writable on every node")
        measure = functools.partial(storage.measure, probe, checkpoint, config)
        if checkpoint and (disk := steps.take("disk", lambda: measure() if ctx.is_main else None)):
            kept, where = config.keep_last + 2, f"{folder} on {ctx.hosts[0]}"
            steps.findings += verdict.disk(disk[0], checkpoint, kept, config.save_every_minutes, where)
    finally:
        if ctx.is_main:
            shutil.rmtree(probe, ignore_errors=True)


def measure_all_reduce(nodes: list[list[int]], ctx: DistributedContext, steps: Steps) -> dict[str, list]:
    """[bytes, seconds] over all ranks; with several nodes of several ranks also within and between nodes."""
    groups = {"all ranks": lambda: None}
    if 1 < len(nodes) < ctx.world_size:
        groups["within a node"] = lambda: dist.new_subgroups_by_enumeration(nodes)[0]
        groups["between nodes"] = lambda: dist.new_group([ranks[0] for ranks in nodes])
    found = {}
    for name, create in groups.items():
        times = steps.take(f"all-reduce, {name}", lambda create=create: links.all_reduce_times(create(), ctx.device))
        found[name] = max(filter(None, times), key=lambda table: table[-1][1] / table[-1][0])
    steps.measured["all-reduce"] = found
    return found


def tables(measured: dict[str, Any]) -> list[str]:
    """A row for each node, and a column for each message size."""
    facts, size = measured["facts"], verdict.size
    nodes, zeros = verdict.nodes_of(facts), [0.0] * len(facts)
    times, speeds = measured.get("clocks", zeros), measured.get("speed", zeros)
    rows = [["node", "ranks", "address", "devices", "memory", "GFLOP/s", "clock", "/dev/shm"]]
    for first, ranks in ((ranks[0], ranks) for ranks in nodes):
        node, slowest = facts[first], min(speeds[rank] for rank in ranks) / 1e9
        address, clock = f"{node['address'] or '?'} ({node['interface'] or '?'})", f"{times[first] - times[0]:+.2f} s"
        row = [node["host"], verdict.rank_range(ranks), address, f"{len(ranks)} x {node['device']}"]
        rows.append([*row, size(node["memory"]), f"{slowest:,.0f}", clock, size(node["shm"])])
    if "all-reduce" not in measured:
        return [format_table(rows), ""]
    counts = {"all ranks": len(facts), "within a node": max(map(len, nodes)), "between nodes": len(nodes)}
    columns = [["all-reduce", *map(size, links.SIZES)]]
    for name, table in measured["all-reduce"].items():
        rates_of = [(seconds, verdict.bus_bandwidth(number, seconds, counts[name])) for number, seconds in table]
        cells = [f"{seconds * 1e6:,.0f} us, {size(rate)}/s" for seconds, rate in rates_of]
        columns.append([name, *cells, *[""] * (len(links.SIZES) - len(cells))])
    return [format_table(rows), "", format_table(columns), ""]


def conclusion(steps: Steps, seconds: float) -> str:
    ok, warnings, failures = (
        sum(each.level == level for each in steps.findings) for level in (verdict.OK, verdict.WARNING, verdict.FAILURE)
    )
    left = [name for name in ("data", "model", "step", "loader") if name not in steps.measured]
    counts = f"{ok} OK, {warnings} warning{'s' * (warnings != 1)}, {failures} failure{'s' * (failures != 1)}"
    text = f"preflight: {'do not start yet' if failures else 'go'}: {counts} in {seconds:.0f} s"
    return text + (f"; not measured until that is fixed: {', '.join(left)}" if left else "")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error)

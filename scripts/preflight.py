# extra: preflight
"""Check the nodes before a run, in less than a minute. Each problem is printed with its node and a fix.

    torchrun --standalone --nproc-per-node=4 scripts/preflight.py [flags of train.py] [--json FILE]

On several nodes start it on each node, like the run itself.

It checks whether the nodes are alike and connected, and whether the storage is fit. It prints a table of the nodes, and
a line for each check: OK, warning or FAILURE. It creates the same process groups as the run and leaves the run folder
unchanged. --json writes all measurements and findings. The exit code is 0 if no check failed, 1 if one failed, and 2 if
the ranks cannot connect or a flag is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainingConfig


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[TrainingConfig, str]:
    """Return the config from train.py's flags, and the file given with --json."""
    parser = argparse.ArgumentParser(prog="preflight.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", default="", metavar="FILE")
    options, flags = parser.parse_known_args(argv)
    return TrainingConfig.from_args(flags), options.json


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    parse_arguments()  # this rejects a bad flag before torch is imported

import dataclasses
import functools
import shutil
import signal
import time
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import dataset
import train
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from scripts.lib.preflight import diagnosis, links, rates, storage
from scripts.lib.preflight.facts import collect_facts
from scripts.lib.preflight.steps import MAX_SECONDS_OF_MODEL, Steps
from utils.data.loader import create_distributed_dataloader
from utils.data.sets import load_data
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.logger import format_count
from utils.run import provenance
from utils.run.exit import exit_with_error
from utils.run.resume import create_train_state
from utils.run.start import check_ranks_equal
from utils.table import format_table
from utils.training.hooks import ModelHooks, check_model_module
from utils.training.parts.weight_average import WeightAverage
from utils.training.precision import Precision


@record
def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    config, json_file = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit deletes the probe folder
    ctx = setup_distributed(config)
    steps = Steps(config, ctx)
    run_steps(config, ctx, steps)
    is_failed = any(finding.level == diagnosis.FAILURE for finding in steps.findings)
    if ctx.is_main:
        print(
            "",
            format_nodes(steps.measured),
            "",
            *steps.findings,
            format_conclusion(steps, time.monotonic() - began),
            sep="\n",
        )
        if json_file:
            findings = [dataclasses.asdict(finding) for finding in steps.findings]
            replace_json(Path(json_file), {"measured": steps.measured, "findings": findings})
    cleanup_distributed()
    return int(is_failed)


def run_steps(config: TrainingConfig, ctx: DistributedContext, steps: Steps) -> None:
    """Run all steps. Those that use model and data run only if all ranks have the same code, settings and data."""
    facts, findings = steps.run_step("facts", collect_facts, ctx), steps.findings
    if not facts:
        return  # a finding says why
    nodes = diagnosis.group_ranks_by_node(facts)
    leaders = [ranks[0] for ranks in nodes]
    loader: Any = None
    sizes = None

    def load_samples() -> int:
        nonlocal config, loader
        check_model_module(train.your_model, config, ctx)
        sets = load_data(dataset, config, ctx)
        config, train_set = sets.config, sets.train
        loader, _ = create_distributed_dataloader(train_set, config, ctx)
        return len(train_set)

    def count_state_bytes() -> dict[str, int]:
        state = create_train_state(ModelHooks.from_module(train.your_model, config, ctx.device), config, ctx)
        gradient = sum(p.nbytes for group in state.optimizer.param_groups for p in group["params"])
        weights = sum(value.nbytes for value in state.model.state_dict().values())
        average = state.find_part(WeightAverage)
        if average:
            weights += sum(value.nbytes for value in average.state_dict().values())
        copies = 2 if config.optimizer == "adamw" else int(config.momentum > 0)
        return {"checkpoint": weights + copies * gradient, "gradient": gradient}

    def read_batches() -> int:  # this is long enough for the workers to fill /dev/shm as in a run
        ends = time.monotonic() + 2.0
        for _ in loader.micro_batches(0):
            if time.monotonic() > ends:
                break
        return loader.num_workers

    if steps.run_step("same code", check_ranks_equal, config, ctx):
        versions = ", ".join(
            f"{name} {version}" for name, version in provenance.collect_package_versions().items() if version
        )
        findings += diagnosis.create_findings(
            "same code", f"All ranks have the same code, settings and versions ({versions})."
        )
        if samples := steps.run_step("data", load_samples, seconds=config.timeout):
            findings += diagnosis.create_findings("data", f"All ranks have the same {samples[0]:,} samples.")
            if workers := steps.run_step("loader", read_batches, seconds=MAX_SECONDS_OF_MODEL):
                findings += diagnosis.create_findings(
                    "loader", f"The loader reads batches with {format_count(workers[0], 'worker')} per rank."
                )
            sizes = steps.run_step("model", count_state_bytes, seconds=MAX_SECONDS_OF_MODEL)
    findings += (
        diagnosis.diagnose_host_names(facts)
        + diagnosis.diagnose_network(facts)
        + diagnosis.diagnose_devices(facts)
        + diagnosis.diagnose_shared_memory(facts)
    )
    run, checkpoints = config.run_folder.absolute(), config.checkpoint_folder.absolute()
    if not checkpoints.is_relative_to(run):
        probe_folder(run, leaders, 0, config, ctx, steps)
        run = checkpoints
    checkpoint = sizes[0]["checkpoint"] if sizes else 0
    probe_folder(run, leaders, checkpoint, config, ctx, steps)
    if config.mirror:  # extra: companions
        measure = functools.partial(storage.measure_mirror, config.mirror, checkpoint)
        if mirror_rates := steps.run_step(
            "mirror", lambda: measure() if ctx.is_main else None, seconds=MAX_SECONDS_OF_MODEL
        ):
            findings += diagnosis.diagnose_mirror(mirror_rates[0], checkpoint, config.save_every_minutes, config.mirror)

    if len(nodes) > 1:
        times = steps.run_step("clocks", lambda: [all_gather_json(None, ctx), time.time()][1])  # all at the same moment
        if times:
            findings += diagnosis.diagnose_clocks({rank: times[rank] - times[0] for rank in leaders}, facts)
        pairs = steps.run_step("links", links.measure_pairs, leaders, ctx)
        findings += diagnosis.diagnose_links([pair for rank_pairs in pairs or [] for pair in rank_pairs], facts)
    if ctx.world_size > 1:
        number = min(rates.MAX_MESSAGE_BYTES, sizes[0]["gradient"] if sizes else rates.MAX_MESSAGE_BYTES)
        if seconds := steps.run_step("all-reduce", rates.time_all_reduce, number, ctx.device):
            text = f"An all-reduce of {diagnosis.format_size(number)} over {ctx.world_size} ranks takes"
            text += f" {1e3 * max(seconds):.2f} ms."
            findings += diagnosis.create_findings("all-reduce", text)

    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
    )
    dtype = precision.dtype or torch.float32
    if speeds := steps.run_step("speed", rates.measure_device_speed, ctx.device, dtype):
        findings += diagnosis.diagnose_speed("speed", [speed / 1e9 for speed in speeds], "GFLOP/s", facts)


def probe_folder(
    folder: Path,
    leaders: list[int],
    checkpoint_bytes: int,
    config: TrainingConfig,
    ctx: DistributedContext,
    steps: Steps,
) -> None:
    """Test the run folder with one rank per node. With a mirror, each node may have a folder of its own.

    If checkpoints go there, rank 0 measures the disk.

    Args:
        folder: the run folder.
        leaders: the lowest rank of each node.
        checkpoint_bytes: the bytes of a checkpoint (0: none goes there).
        config: the settings of the run.
        ctx: the ranks.
        steps: collects the measurements and findings.
    """
    is_leader = ctx.rank in leaders
    is_shared = True
    is_shared = not config.mirror  # extra: companions
    creates = ctx.is_main if is_shared else is_leader
    created = steps.run_step("run folder", lambda: storage.create_probe(folder) if creates else "")
    if not created:
        return
    probe = Path(created[ctx.rank] or created[0])
    try:
        if steps.run_step(
            "shared folder", lambda: storage.check_folder(probe, f"rank{ctx.rank}") if is_leader else None
        ):
            how = "visible and writable" if is_shared else "writable"
            steps.findings += diagnosis.create_findings("shared folder", f"{folder} is {how} on every node.")
        measure = functools.partial(storage.measure_disk, probe, checkpoint_bytes, config)
        if checkpoint_bytes and (disk := steps.run_step("disk", lambda: measure() if ctx.is_main else None)):
            checkpoint_count, location = config.keep_last + 2, f"{folder} on {ctx.hosts[0]}"
            steps.findings += diagnosis.diagnose_disk(
                disk[0], checkpoint_bytes, checkpoint_count, config.save_every_minutes, location
            )
    finally:
        if creates:
            shutil.rmtree(probe, ignore_errors=True)


def format_nodes(measured: dict[str, Any]) -> str:
    """Format a row for each node. There are none if a node could not report its facts."""
    facts, size = measured.get("facts", []), diagnosis.format_size
    zeros = [0.0] * len(facts)
    times, speeds = measured.get("clocks", zeros), measured.get("speed", zeros)
    rows = [["node", "ranks", "address", "devices", "memory", "GFLOP/s", "clock", "/dev/shm"]]
    for ranks in diagnosis.group_ranks_by_node(facts):
        node, slowest = facts[ranks[0]], min(speeds[rank] for rank in ranks) / 1e9
        address = f"{node['address'] or '?'} ({node['interface'] or '?'})"
        row = [node["host"], diagnosis.format_rank_range(ranks), address, f"{len(ranks)} x {node['device']}"]
        clock = f"{times[ranks[0]] - times[0]:+.2f} s"
        rows.append([*row, size(node["memory"]), f"{slowest:,.0f}", clock, size(node["shm"])])
    return format_table(rows)


def format_conclusion(steps: Steps, seconds: float) -> str:
    ok, warnings, failures = (
        sum(finding.level == level for finding in steps.findings)
        for level in (diagnosis.OK, diagnosis.WARNING, diagnosis.FAILURE)
    )
    unmeasured = [name for name in ("data", "loader", "model") if name not in steps.measured]
    counts = f"{ok} OK, {format_count(warnings, 'warning')}, {format_count(failures, 'failure')}"
    answer = "Do not start the run yet" if failures else "The run can start"
    text = f"preflight: {answer}: {counts} in {seconds:.0f} s."
    if unmeasured:
        text += f" These steps are not measured until the failures are fixed: {', '.join(unmeasured)}."
    return text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        exit_with_error(error)

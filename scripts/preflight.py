"""Look at the nodes before a run, in less than a minute: what would go wrong is said by name, with its remedy.

scripts/launch.sh --preflight [flags of train.py]                                           on each node, as the run
itself
torchrun --standalone --nproc-per-node=4 scripts/preflight.py [flags of train.py] [--json FILE]

A table by node, the all-reduce by message size, and a line for each check: OK, warning or FAILURE. Exit code 1 where
one failed, else 0
(2 where the ranks cannot meet, or for flags that cannot be used). It sets up the same groups as the run would, and
leaves its folder
as it is. --json writes all that was measured and found.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from config import TrainingConfig, TrainingError, UserError


def split(words: list[str]) -> tuple[list[str], str]:
    """The flags of train.py, and the file of --json."""
    if "--json" not in words:
        return words, ""
    place = words.index("--json")
    if place + 1 == len(words):
        sys.stderr.write("--json: names no file; write --json FILE\n")
        raise SystemExit(2)
    return words[:place] + words[place + 2 :], words[place + 1]


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    TrainingConfig.from_args(split(sys.argv[1:])[0])  # refuses a bad flag before torch is imported

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import train
from checks import links, rates, verdict
from checks.facts import Probe, gather, open_files
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from utils.batch import tensors_in
from utils.data.loader import GlobalBatchLoader, create_distributed_dataloader
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.memory import memory_explained
from utils.run.failures import leave_after
from utils.training.precision import Precision
from utils.training.state import TrainState

# seconds for one step of this, and for one that runs model and data: who takes longer is named
LONGEST, LONGEST_OF_YOURS = (
    25.0,
    60.0,
)
SECONDS_OF_A_BATCH = 20.0  # for which the loader may keep silent


class Steps:
    """One step after the other, on all ranks alike. What hangs is named, and not waited for."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._config, self._ctx, self._timeout = config, ctx, config.timeout
        self._timer = threading.Timer(0, lambda: None)
        # a connection of its own: the main thread may wait in the other's
        self._store = dist.distributed_c10d._get_default_store().clone() if ctx.world_size > 1 else None

    def take(self, name: str, action: Callable[[], Any], longest: float = LONGEST) -> list[dict[str, Any]]:
        """What each rank's action gave as {"found": plain JSON}, or {"problem": sentence} where it was refused; an
        action waits for nobody."""
        self.say(f"  {name}")
        seconds = min(self._timeout, longest)
        self._at(name, seconds)
        try:
            with memory_explained(self._config, self._ctx):
                result = {"found": action(), "problem": ""}
        except (UserError, TrainingError, OSError) as error:
            result = {"found": None, "problem": str(error)}
        self._at(f"{name}, its end", seconds)
        ranks = all_gather_json(result, self._ctx)
        self._timer.cancel()
        return ranks

    def say(self, text: str) -> None:
        if self._ctx.is_main:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def _at(self, place: str, seconds: float) -> None:
        self._timer.cancel()
        if self._store:
            self._store.set(f"preflight {place} {self._ctx.rank}", "here")
            self._timer = threading.Timer(seconds, self._give_up, [place, seconds])
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self, place: str, seconds: float) -> None:
        hosts = self._ctx.hosts
        silence = threading.Timer(
            5, self._end, [f"rank 0 on {hosts[0]} gives no answer in '{place}'; look there, then start again", 1]
        )
        silence.daemon = True
        silence.start()
        there = [rank for rank in range(len(hosts)) if self._store.check([f"preflight {place} {rank}"])]
        missing = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if rank not in there]
        text = (
            f"{', '.join(missing[:8])}: did not come to '{place}' in {seconds:.0f} s; look there (top, dmesg, its"
            " storage), then start again"
        )
        if not missing:
            which = ", ".join(list(dict.fromkeys(hosts))[:8])
            text = (
                f"{which}: all ranks came to '{place}' and none came on in {seconds:.0f} s; look at MTU and firewall"
                " between the nodes"
            )
        self._end(text, min(there))

    def _end(self, text: str, speaker: int) -> None:
        if self._ctx.rank == speaker:
            sys.stderr.write(f"{verdict.FAILURE}  {text}\n")
            sys.stderr.flush()
        time.sleep(0 if self._ctx.rank == speaker else 2)  # who ends first has torchrun end the others
        os._exit(1)


@record
def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    flags, json_file = split(sys.argv[1:] if argv is None else list(argv))
    config = TrainingConfig.from_args(flags)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    ctx = setup_distributed(config, must_be_alike=False)  # it says more
    steps = Steps(config, ctx)
    measured = measure(config, ctx, steps)
    found = judge(measured, config)
    steps.say(
        "\n".join(["", *table(measured), "", *map(str, found), conclusion(found, measured, time.monotonic() - began)])
    )
    if ctx.is_main and json_file:
        replace_json(Path(json_file), {"measured": measured, "findings": [dataclasses.asdict(each) for each in found]})
    cleanup_distributed()
    return int(any(each.level == verdict.FAILURE for each in found))


def measure(config: TrainingConfig, ctx: DistributedContext, steps: Steps) -> dict[str, Any]:
    """All that is to be known, the same on every rank: plain values, by what it is."""
    steps.say(f"preflight of {ctx.world_size} rank(s), in less than a minute:")
    facts = [each["found"] for each in steps.take("facts", lambda: gather(config, ctx))]
    nodes = verdict.nodes_of(facts)
    leaders = [ranks[0] for ranks in nodes]
    measured: dict[str, Any] = {"facts": facts, "nodes": nodes}
    is_alike = not any(each.level == verdict.FAILURE for each in [*verdict.code(facts), *verdict.config(facts)])

    held: dict[str, Any] = {}

    def load() -> int:
        train_set, _, settled = train.load_data(config, ctx)
        quick = dataclasses.replace(
            settled, hang_timeout=min(settled.hang_timeout or SECONDS_OF_A_BATCH, SECONDS_OF_A_BATCH)
        )
        held["loader"], _ = create_distributed_dataloader(train_set, quick, ctx)
        held["config"] = settled
        return len(train_set)

    def make() -> dict[str, int]:
        held["state"] = train.create_state(held["config"], ctx)
        return {"checkpoint": rates.checkpoint_size(held["state"], config)}

    if is_alike:  # else the ranks would take different ways
        measured["data"] = steps.take("data", load, config.timeout)
        if all_well(measured["data"]):
            measured["model"] = steps.take("model", make, LONGEST_OF_YOURS)
            measured["shm"] = steps.take("/dev/shm", lambda: room_for(held["loader"]), LONGEST_OF_YOURS)
    checkpoint = measured["model"][0]["found"]["checkpoint"] if all_well(measured.get("model")) else 0
    measured["folders"] = [probe(folder, checkpoint, nodes, ctx, steps) for folder in folders_of(config)]
    # for the checkpoints to come
    makes_way = config.checkpoint_folder.glob("*.pt") if config.resume_from or config.overwrite else ()
    measured["held"] = steps.take("checkpoints there", lambda: sum(path.stat().st_size for path in makes_way))[0][
        "found"
    ]

    if len(nodes) > 1:
        offsets = steps.take("clocks", lambda: links.clock_offsets(leaders, ctx))[0]["found"]
        measured["clocks"] = {int(rank): seconds for rank, seconds in offsets.items()}
        measured["pairs"] = [
            pair for each in steps.take("links", lambda: links.measure_pairs(leaders, ctx)) for pair in each["found"]
        ]
    if ctx.world_size > 1:
        measured["all_reduce"] = all_reduces(nodes, ctx, steps)
    measured["files"] = [each["found"] for each in steps.take("open files", open_files)]

    dtype = Precision.choose(config, ctx.device, ctx.fast_bf16).dtype or torch.float32
    measured["speed"] = [each["found"] for each in steps.take("speed", lambda: rates.device_speed(ctx.device, dtype))]
    if all_well(measured.get("model")):
        loader, state, settled = held["loader"], held["state"], held["config"]
        measured["step"] = steps.take(
            "step", lambda: rates.local_step(state, loader, settled, ctx.device), LONGEST_OF_YOURS
        )
        if all_well(measured["step"]) and ctx.world_size > 1:
            add_ddp(measured, state, loader, settled, ctx, steps)
        if all_well(measured["shm"]) and not any(each.level == verdict.FAILURE for each in judge_files(measured)):
            measured["loader"] = steps.take("loader", lambda: rates.loader_rate(loader, ctx.device), LONGEST_OF_YOURS)
    return measured


def room_for(loader: GlobalBatchLoader) -> dict[str, int]:
    """What the workers ask of the system. Raises UserError where /dev/shm has no room for their batches."""
    tensors = len(list(tensors_in(loader.sample_batch())))
    # two batches a worker are on their way
    return {
        "workers": loader.num_workers,
        "tensors": tensors * loader.num_workers * 2,
    }


def add_ddp(
    measured: dict,
    state: TrainState,
    loader: GlobalBatchLoader,
    config: TrainingConfig,
    ctx: DistributedContext,
    steps: Steps,
) -> None:
    """The same pass under DDP, of as many samples on all ranks. Over a network that would take long, what it would
    take."""
    mine = [each["found"] for each in measured["step"]]
    samples, rounds = (min(each[name] for each in mine) for name in ("samples", "rounds"))
    reduced = verdict.all_reduce_seconds(measured["all_reduce"]["all ranks"], mine[0]["gradient"])
    expected = max(each["step_s"] * samples / each["samples"] for each in mine) + reduced
    rounds = max(1, min(rounds, int(2 * rates.SECONDS_OF_STEPS / expected)))
    under_ddp = [{"found": expected}] * len(mine)
    if expected < 2 * rates.SECONDS_OF_STEPS:
        under_ddp = steps.take(
            "step under DDP", lambda: rates.ddp_step(state, loader, samples, rounds, config, ctx), LONGEST_OF_YOURS
        )
    for each, seconds in zip(mine, under_ddp, strict=True):
        each |= {"ddp_s": seconds["found"], "step_s": each["step_s"] * samples / each["samples"], "samples": samples}


def all_well(ranks: list[dict] | None) -> bool:
    return ranks is not None and not any(each["problem"] for each in ranks)


def folders_of(config: TrainingConfig) -> list[Path]:
    """That of the run, and that of its checkpoints where it lies elsewhere."""
    run, checkpoints = config.run_folder.absolute(), config.checkpoint_folder.absolute()
    return [run] if checkpoints.is_relative_to(run) else [run, checkpoints]


def probe(
    folder: Path, checkpoint: int, nodes: list[list[int]], ctx: DistributedContext, steps: Steps
) -> dict[str, Any]:
    """One rank of each node tries the folder, rank 0 its speed."""
    token = all_gather_json(f"{time.time_ns():x}", ctx)[0]
    tried, is_leader = Probe(folder, token), ctx.rank in [ranks[0] for ranks in nodes]
    try:
        first = steps.take(f"folder {folder}", lambda: tried.leave_token() if ctx.is_main else "")[0]["found"]
        used = steps.take(
            "the same folder on all nodes", lambda: tried.use(f"node-{ctx.rank}") if is_leader and not first else None
        )
        space = steps.take("its room and speed", lambda: tried.space(checkpoint) if ctx.is_main and not first else {})[
            0
        ]["found"]
    finally:
        tried.clean_up()
    found = {ranks[0]: used[ranks[0]]["found"] or {"problem": "", "is_seen": True} for ranks in nodes}
    found[0]["problem"] = first or found[0]["problem"]
    return {"folder": str(folder), "nodes": found, **space}


def all_reduces(nodes: list[list[int]], ctx: DistributedContext, steps: Steps) -> dict[str, list]:
    """[bytes, seconds] over all ranks, within the slowest node, between the first ranks of the nodes."""
    found = {"all ranks": steps.take("all-reduce", lambda: links.all_reduce_times(None, ctx.device))[0]["found"]}
    if 1 < len(nodes) < ctx.world_size:
        node, leaders = links.make_groups(nodes)
        within = steps.take(
            "all-reduce in each node", lambda: links.all_reduce_times(node, ctx.device) if node else None
        )
        tables = [each["found"] for each in within if each["found"]]
        found |= {"within a node": max(tables, key=lambda rows: rows[-1][1] / rows[-1][0])} if tables else {}
        between = steps.take(
            "all-reduce between nodes", lambda: links.all_reduce_times(leaders, ctx.device) if leaders else None
        )
        found["between nodes"] = between[0]["found"]
    return found


def judge(measured: dict[str, Any], config: TrainingConfig) -> list[verdict.Finding]:
    facts, pairs = measured["facts"], measured.get("pairs", [])
    found = [
        *verdict.versions(facts),
        *verdict.code(facts),
        *verdict.config(facts),
        *verdict.hosts(facts),
        *verdict.network(facts),
    ]
    found += verdict.clocks(measured.get("clocks", {0: 0.0}), facts)
    found += verdict.devices(facts) + verdict.speed(
        "speed", [each / 1e9 for each in measured["speed"]], "GFLOP/s", facts
    )
    if all_well(measured.get("data")):
        found.append(
            verdict.Finding("data", verdict.OK, f"the same {measured['data'][0]['found']:,} samples everywhere")
        )
    for name in ("data", "model", "step", "loader"):
        if name in measured and not all_well(measured[name]):
            found += verdict.problem(name, [each["problem"] for each in measured[name]], facts)
    found += verdict.folders(measured["folders"], facts)
    if all_well(measured.get("model")):
        checkpoint, last = measured["model"][0]["found"]["checkpoint"], measured["folders"][-1]
        if "free" in last:
            found += verdict.disk(
                last, checkpoint, measured["held"], config.keep_last + 2, config.save_every_minutes, facts[0]["host"]
            )
    if "shm" in measured:
        found += verdict.shared_memory([each["problem"] for each in measured["shm"]], facts)
    found += judge_files(measured)
    if len(facts) > 1:
        found += verdict.pairs(pairs, facts)
    steps = [each["found"] for each in measured["step"]] if all_well(measured.get("step")) else []
    if steps:
        found += verdict.speed("step", [each["samples"] / each["step_s"] for each in steps], "samples/s", facts)
    if len(facts) > 1 and steps:
        accumulation = config.micro_batches_per_step(len(facts)) / len(facts)
        worst = min(pairs, key=lambda each: each[3], default=None)
        nodes = [facts[ranks[0]]["host"] for ranks in measured["nodes"]]
        between = f" ({nodes[worst[0]]} - {nodes[worst[1]]}: {verdict.link(worst)})" if worst else ""
        found += verdict.communication(
            steps, measured["all_reduce"]["all ranks"], accumulation, config.batch_size, between
        )
    if steps and all_well(measured.get("loader")):
        found += verdict.loader([each["found"] for each in measured["loader"]], steps, facts)
    return found


def judge_files(measured: dict[str, Any]) -> list[verdict.Finding]:
    asked = (measured.get("shm") or [{"found": None}])[0]["found"] or {"workers": 0, "tensors": 0}
    return verdict.open_files(measured["files"], asked["workers"], asked["tensors"], measured["facts"])


def table(measured: dict[str, Any]) -> list[str]:
    """A line for each node, then one for each size of message."""
    facts, nodes, size = measured["facts"], measured["nodes"], verdict.size
    lines = [["node", "ranks", "address", "devices", "memory", "GFLOP/s", "clock", "/dev/shm", "open files"]]
    for ranks in nodes:
        first, files = facts[ranks[0]], measured["files"][ranks[0]]
        line = [
            first["host"],
            verdict.numbers(ranks).split(" ", 1)[1],
            f"{first['address'] or '?'} ({first['interface'] or '?'})",
        ]
        line += [
            f"{len(ranks)} x {first['device']}",
            size(first["memory"]),
            f"{min(measured['speed'][rank] for rank in ranks) / 1e9:,.0f}",
        ]
        line += [f"{measured.get('clocks', {}).get(ranks[0], 0) * 1000:+.1f} ms", size(first["shm"] or 0)]
        lines.append([*line, f"{files['open']} of {files['limit'] or 'any'}"])
    found = measured.get("all_reduce", {})
    ranks_of = {"all ranks": len(facts), "within a node": max(map(len, nodes)), "between nodes": len(nodes)}
    rows = [["all-reduce", *found]]
    for sent in links.SIZES if found else ():
        seconds = {name: dict(map(tuple, timed)).get(sent) for name, timed in found.items()}
        bus = {name: size(verdict.bus_bandwidth(sent, took, ranks_of[name])) for name, took in seconds.items() if took}
        rows.append(
            [
                size(sent),
                *(f"{took * 1e6:,.0f} us, bus {bus[name]}/s" if took else "" for name, took in seconds.items()),
            ]
        )
    return [*columns(lines), *columns([row for row in rows if any(row[1:])])]


def columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def conclusion(found: list[verdict.Finding], measured: dict[str, Any], seconds: float) -> str:
    counts = [sum(each.level == level for each in found) for level in (verdict.OK, verdict.WARNING, verdict.FAILURE)]
    left = [name for name in ("data", "model", "step", "loader") if name not in measured]
    more = f"; not measured until that is mended: {', '.join(left)}" if left else ""
    end = "do not start yet" if counts[2] else "go"
    return f"preflight: {end}: {counts[0]} OK, {counts[1]} warning(s), {counts[2]} failure(s) in {seconds:.0f} s{more}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:
        leave_after(error, int(os.environ.get("RANK", 0)))

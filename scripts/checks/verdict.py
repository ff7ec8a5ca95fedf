"""From what was measured to findings: pure functions of plain values, each of which gives its findings with their
remedies."""

from __future__ import annotations

import ipaddress
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from utils.run.start_checks import MAY_DIFFER

OK, WARNING, FAILURE = "OK", "warning", "FAILURE"
MUST_MATCH = ("python", "torch", "cuda", "nccl", "driver")
SECONDS_APART, SECONDS_TOO_FAR = 0.5, 5.0  # of two clocks
SLOW = 1.3  # times the median
# of a device: the share that others may hold, and bytes that CUDA and NCCL take themselves
OTHERS_MEMORY, OWN_MEMORY = (
    0.1,
    2 * 10**9,
)
BAD_LINK = 3.0  # times as slow as the links of the others
LEAST_EXCESS = 0.0005  # seconds of latency: below that it is noise
WAITED = 0.1  # of a step, for gradients or data: more is worth a word
MOST_ACCUMULATION = 64  # beyond which it is no remedy
SLOW_SAVE = 20.0  # seconds; of the 30 that torchrun gives after SIGTERM
NCCL_SHARED = 2**26  # bytes in /dev/shm for each rank of a node
SPARE_FILES = 64  # beside those open while the loader runs: logs, a checkpoint, what libraries open for a moment
FILES_OF_A_WORKER = 8  # pipes, and the batches that it hands over


@dataclass(frozen=True)
class Finding:
    """What one check came to. The text of what is not OK ends with its remedy."""

    name: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.name:<14} {self.text}"


def findings(name: str, said: Iterable[tuple[str, str]], fine: str) -> list[Finding]:
    """One for each (level, text), or that all is fine."""
    return [Finding(name, level, text) for level, text in said] or [Finding(name, OK, fine)]


def named(ranks: Iterable[int], facts: list[dict]) -> str:
    """Hosts with their ranks: node0 (rank 1), node1 (ranks 4-7)."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(facts[rank]["host"], []).append(rank)
    return ", ".join(f"{host} ({numbers(each)})" for host, each in hosts.items())


def numbers(ranks: list[int]) -> str:
    is_row = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return ("rank " if len(ranks) == 1 else "ranks ") + (
        f"{ranks[0]}-{ranks[-1]}" if is_row else ", ".join(map(str, ranks))
    )


def nodes_of(facts: list[dict]) -> list[list[int]]:
    """The ranks of each machine or container, by its lowest rank."""
    nodes: dict[str, list[int]] = {}
    for each in facts:
        nodes.setdefault(each["machine"], []).append(each["rank"])
    return list(nodes.values())


def unlike(values: list[Any]) -> tuple[Any, dict[Any, list[int]]]:
    """What most ranks have (where as many have another: as rank 0), and the ranks of each other value."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    others: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            others.setdefault(value, []).append(rank)
    return usual, others


# ---- the same everywhere ----


def versions(facts: list[dict]) -> list[Finding]:
    said, usuals = [], {}
    for name in dict.fromkeys(name for each in facts for name in each["versions"]):
        usual, others = unlike([each["versions"].get(name, "") for each in facts])
        usuals[name] = usual
        level = FAILURE if name in MUST_MATCH else WARNING
        remedy = "set OMP_NUM_THREADS alike" if name == "threads" else "install the same on all nodes"
        said += [
            (
                level,
                (
                    f"{name} is {value or 'missing'} on {named(ranks, facts)} and {usual or 'missing'} on the others;"
                    f" {remedy}"
                ),
            )
            for value, ranks in others.items()
        ]
    shown = [f"{name} {usuals[name]}" for name in MUST_MATCH if usuals.get(name)]
    return findings("versions", said, f"{', '.join(shown)} everywhere")


def code(facts: list[dict]) -> list[Finding]:
    differing: dict[int, list[str]] = {}
    names = sorted({name for each in facts for name in each["code"]})
    for name in names:
        for ranks in unlike([each["code"].get(name, "") for each in facts])[1].values():
            for rank in ranks:
                differing.setdefault(rank, []).append(name)
    by_files: dict[tuple[str, ...], list[int]] = {}
    for rank, files in sorted(differing.items()):
        by_files.setdefault(tuple(files), []).append(rank)
    said = [
        (
            FAILURE,
            f"{_some(list(files))} on {named(ranks, facts)}: not as on the others; bring the same code to all nodes",
        )
        for files, ranks in by_files.items()
    ]
    return findings("code", said, f"the same {len(names)} files everywhere")


def config(facts: list[dict]) -> list[Finding]:
    said = []
    for name in dict.fromkeys(name for each in facts for name in each["config"]):
        usual, others = unlike([each["config"].get(name) for each in facts])
        if name not in MAY_DIFFER:
            said += [
                (
                    FAILURE,
                    (
                        f"{name}={value} on {named(ranks, facts)}, {name}={usual} on the others; start all with the"
                        " same flags"
                    ),
                )
                for value, ranks in others.items()
            ]
    return findings("config", said, "the same on all ranks")


def hosts(facts: list[dict]) -> list[Finding]:
    nodes = nodes_of(facts)
    counts = Counter(facts[ranks[0]]["host"] for ranks in nodes)
    said = []
    for host in [host for host, count in counts.items() if count > 1]:
        ranks = [ranks[0] for ranks in nodes if facts[ranks[0]]["host"] == host]
        text = (
            f"{counts[host]} nodes have the host name {host} ({numbers(ranks)}), by which messages name them and NCCL"
            " tells them apart"
        )
        said.append((FAILURE, f"{text}; give each its own (hostnamectl set-hostname, docker run --hostname)"))
    return findings("host names", said, ", ".join(counts))


def network(facts: list[dict]) -> list[Finding]:
    """Nodes in one network. Routed ones (/31, /32: as clouds give them) are left to the measured links."""
    nodes = [facts[ranks[0]] for ranks in nodes_of(facts)]
    shown = [f"{each['host']} {each['address'] or 'address unknown'} ({each['interface'] or '?'})" for each in nodes]
    nets = {each["host"]: ipaddress.ip_interface(each["address"]).network for each in nodes if each["address"]}
    small = [net.prefixlen >= 31 for net in nets.values()]
    said = []
    if len(nodes) > 1 and len(set(nets.values())) > 1 and not any(small):
        said.append(
            (
                WARNING,
                (
                    f"different networks: {', '.join(shown)}; where they are not meant so, name the common interface in"
                    " NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
                ),
            )
        )
    return findings("network", said, ", ".join(shown))


def clocks(offsets: dict[int, float], facts: list[dict]) -> list[Finding]:
    said = []
    for rank, seconds in offsets.items():
        if abs(seconds) > SECONDS_APART:
            level = FAILURE if abs(seconds) > SECONDS_TOO_FAR else WARNING
            where = f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} that of {facts[0]['host']}"
            said.append(
                (
                    level,
                    (
                        f"the clock of {facts[rank]['host']} is {where}, and logs and ledger go by them; let both"
                        " follow NTP (timedatectl set-ntp true)"
                    ),
                )
            )
    worst = max(map(abs, offsets.values()), default=0.0)
    return findings("clocks", said, f"at most {worst * 1000:.1f} ms apart" if len(offsets) > 1 else "one node")


# ---- machines ----


def devices(facts: list[dict]) -> list[Finding]:
    usual, others = unlike([each["device"] for each in facts])
    said = [
        (
            WARNING,
            (
                f"{device} on {named(ranks, facts)}, {usual} on the others: the slowest sets the pace; leave it out or"
                " take like ones"
            ),
        )
        for device, ranks in others.items()
    ]
    for each in facts:
        taken = each["memory"] - each["free"]
        if each["device"] != "cpu" and taken > max(OTHERS_MEMORY * each["memory"], OWN_MEMORY):
            whose = (
                f"{named([each['rank']], facts)}: other programs hold {size(taken)} of the GPU's {size(each['memory'])}"
            )
            said.append((WARNING, f"{whose}; nvidia-smi names them, end them"))
    return findings("devices", said, f"{len(facts)} x {usual}, {size(min(each['memory'] for each in facts))}")


def speed(name: str, measured: list[float], unit: str, facts: list[dict]) -> list[Finding]:
    """measured: of each rank, more is better."""
    median, said = statistics.median_high(measured), []
    for rank, each in enumerate(measured):
        if median > SLOW * each:
            text = (
                f"{named([rank], facts)} is {median / each:.1f} times slower than the median ({each:,.0f} of"
                f" {median:,.0f} {unit})"
            )
            said.append(
                (
                    WARNING,
                    (
                        f"{text}, and all wait for it; look there for other programs, heat and power limits (top,"
                        " nvidia-smi)"
                    ),
                )
            )
    return findings(name, said, f"{min(measured):,.0f} {unit} on the slowest rank")


def folders(probes: list[dict], facts: list[dict]) -> list[Finding]:
    """probes: one for each folder, {"folder", "nodes": {lowest rank: {"problem", "is_seen"}}}."""
    said = []
    for probe in probes:
        unseen = []
        for rank, node in probe["nodes"].items():
            where = f"{probe['folder']} on {facts[rank]['host']}"
            if node["problem"]:
                said.append(
                    (
                        FAILURE,
                        (
                            f"{where}: {node['problem']}; make room or mend it there, or give a folder that all nodes"
                            " can write"
                        ),
                    )
                )
            elif not node["is_seen"]:
                unseen.append(rank)
        if unseen and not probe["nodes"][0]["problem"]:
            which = ", ".join(facts[rank]["host"] for rank in unseen)
            text = f"{probe['folder']} on {which} is not the folder of this name on {facts[0]['host']}"
            said.append((FAILURE, f"{text}; put it on storage that all nodes share and mount it there"))
    return findings(
        "run folder", said, f"{', '.join(probe['folder'] for probe in probes)}: seen and written by every node"
    )


def disk(probe: dict, checkpoint: int, held: int, kept: int, save_minutes: float, host: str) -> list[Finding]:
    """Room and speed of the checkpoints' folder, of rank 0, which writes them.

    Args:
        checkpoint: bytes of one.
        held: bytes there that will make way.
        kept: how many lie there at once, with the best, and the one that is being written.
    """
    free, rate, needed, said = probe["free"], probe["speed"], max(0, checkpoint * kept - held), []
    seconds, where = checkpoint / rate if rate else 0.0, f"{probe['folder']} on {host}"
    if free < needed:
        text = f"{where} has {size(free)} free, and {kept} checkpoints of {size(checkpoint)} need {size(needed)}"
        said.append((FAILURE, f"{text}; make room, give another --run_dir, or a smaller --keep_last"))
    if seconds > SLOW_SAVE or 0 < save_minutes * 60 < 2 * seconds:
        text = f"{where} takes {size(rate)}/s: a checkpoint of {size(checkpoint)} takes {seconds:.0f} s"
        said.append(
            (
                WARNING,
                (
                    f"{text}; take faster storage, or let the scheduler leave {2 * seconds:.0f} s between SIGTERM and"
                    " SIGKILL"
                ),
            )
        )
    fine = (
        f"{size(free)} free of {size(needed)} needed; {size(rate)}/s, a checkpoint of {size(checkpoint)} in"
        f" {seconds:.1f} s"
    )
    return findings("disk", said, fine)


def shared_memory(problems: list[str], facts: list[dict]) -> list[Finding]:
    """problems: of utils.data.worker.check_shared_memory, by rank; "" where there is room."""
    said = [
        (FAILURE, f"{facts[rank]['host']}: {text}")
        for rank, text in enumerate(problems)
        if text and is_first(rank, facts)
    ]
    for ranks in [] if said else nodes_of(facts):
        room, needed = facts[ranks[0]]["shm"], NCCL_SHARED * len(ranks)
        if facts[ranks[0]]["device"] != "cpu" and len(ranks) > 1 and room is not None and room < needed:
            text = (
                f"{facts[ranks[0]]['host']}: {size(room)} free, and NCCL shares memory there between {len(ranks)} ranks"
            )
            said.append(
                (
                    WARNING,
                    (
                        f"{text}; give it {size(needed)} (docker run --shm-size, in Kubernetes an emptyDir of medium:"
                        " Memory)"
                    ),
                )
            )
    least = min((each["shm"] for each in facts if each["shm"] is not None), default=0)
    return findings("/dev/shm", said, f"{size(least)} free" if least else "none on this system")


def open_files(opened: list[dict], workers: int, tensors: int, facts: list[dict]) -> list[Finding]:
    """opened: {"open", "limit"} of each rank, with its groups and before its loader's workers; tensors: that workers
    hand over at once."""
    said = []
    for rank, each in enumerate(opened):
        needed = each["open"] + workers * FILES_OF_A_WORKER + tensors + SPARE_FILES
        if is_first(rank, facts) and 0 < each["limit"] < needed:
            text = f"{facts[rank]['host']}: a rank may open {each['limit']} files and needs about {needed}"
            said.append(
                (
                    FAILURE,
                    (
                        f"{text}; raise it (ulimit -n 65536, docker run --ulimit nofile=65536, Slurm's"
                        " PropagateResourceLimits)"
                    ),
                )
            )
    most, least = max(each["open"] for each in opened), min(each["limit"] for each in opened)
    return findings("open files", said, f"{most} open, {least or 'no'} allowed")


def is_first(rank: int, facts: list[dict]) -> bool:
    """Whether it speaks for its node."""
    return all(each["machine"] != facts[rank]["machine"] for each in facts[:rank])


# ---- links, and what training needs of them ----


def pairs(measured: list[list], facts: list[dict]) -> list[Finding]:
    """measured: [node, node, seconds there and back, bytes a second]. Each node's best link says what the others might
    be."""
    hosts = [facts[ranks[0]]["host"] for ranks in nodes_of(facts)]
    links_of = [[each for each in measured if node in each[:2]] for node in range(len(hosts))]
    best_rate = statistics.median_high(max((each[3] for each in its), default=0.0) for its in links_of)
    best_trip = statistics.median_low(min((each[2] for each in its), default=0.0) for its in links_of)
    elsewhere = f"{size(best_rate)}/s and {best_trip * 1e6:.0f} us elsewhere; look at cable, port, interface and MTU"

    def is_bad(each: list) -> bool:
        return each[3] * BAD_LINK < best_rate or each[2] > max(BAD_LINK * best_trip, best_trip + LEAST_EXCESS)

    bad, said = [each for each in measured if is_bad(each)], []
    for host, its in zip(hosts, links_of, strict=True):
        if len(its) > 1 and all(each in bad for each in its):
            bad = [each for each in bad if each not in its]
            said.append(
                (
                    WARNING,
                    f"all links of {host} are bad: {link(max(its, key=lambda e: e[3]))} at best, {elsewhere} there",
                )
            )
    said += [
        (WARNING, f"the link {hosts[each[0]]} - {hosts[each[1]]} is bad: {link(each)}, {elsewhere} of these two")
        for each in bad
    ]
    worst = min(measured, key=lambda each: each[3], default=None)
    return findings(
        "links",
        said,
        (
            f"the slowest of {len(measured)}: {hosts[worst[0]]} - {hosts[worst[1]]}, {link(worst)}"
            if worst
            else "one node"
        ),
    )


def link(measured: list) -> str:
    return f"{size(measured[3])}/s, {measured[2] * 1e6:.0f} us there and back"


def all_reduce_seconds(table: list[tuple[int, float]], size: int) -> float:
    """Of so many bytes, between and beyond the sizes that were measured."""
    for (small, fast), (large, slow) in itertools.pairwise(table):
        if size <= large:
            return fast + (slow - fast) * max(0, size - small) / (large - small)
    return table[-1][1] * max(1.0, size / table[-1][0])


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second through the busiest link of a ring: 2 (n - 1) / n of the message (nccl-tests,
    doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * size / seconds


def communication(steps: list[dict], table: list, accumulation: float, batch_size: int, slowest: str) -> list[Finding]:
    """Whether the gradients' all-reduce hides behind the backward pass.

    Args:
        steps: of each rank {"step_s", "ddp_s", "samples", "gradient"}: a pass alone and under DDP.
        table: of all ranks' all-reduce.
        accumulation: micro-batches of a rank in a step.
        slowest: between whom, where it is known.
    """
    ranks, gradient = len(steps), steps[0]["gradient"]
    alone, under_ddp = (max(each[name] for each in steps) for name in ("step_s", "ddp_s"))
    reduced = all_reduce_seconds(table, gradient)
    waited = min(max(0.0, under_ddp - alone), reduced)  # what is more is the ranks' own unevenness
    computed = alone * batch_size / steps[0]["samples"]
    share = waited / (computed * accumulation + waited)
    # two thirds: the backward pass
    has, needed = (size(bus_bandwidth(gradient, seconds, ranks)) for seconds in (reduced, computed * 2 / 3))
    text = f"{share:.0%} of a step is spent waiting for gradients{slowest}: all-reduce gives {has}/s"
    text += f", {needed}/s hides their {size(gradient)} behind a backward pass"
    said = []
    if share > WAITED:
        wanted = math.ceil(waited / computed * (1 - WAITED) / WAITED)
        way_out = (
            f", or give --grad_accum_steps {wanted} or a larger --batch_size" if wanted <= MOST_ACCUMULATION else ""
        )
        said.append((WARNING, f"{text}; mend the network{way_out}"))
    return findings("communication", said, text)


def loader(rates: list[dict], steps: list[dict], facts: list[dict]) -> list[Finding]:
    """rates: {"rate", "workers"} of each rank, samples a second; steps: {"samples", "step_s"}."""
    said, ratios = [], []
    for rank, (read, step) in enumerate(zip(rates, steps, strict=True)):
        wanted = step["samples"] / step["step_s"]
        waited = wanted / (wanted + read["rate"]) if not read["workers"] else 1 - min(1.0, read["rate"] / wanted)
        ratios.append((waited, rank))
    waited, rank = max(ratios)
    read, wanted = rates[rank], steps[rank]["samples"] / steps[rank]["step_s"]
    text = (
        f"{named([rank], facts)}: {read['rate']:,.0f} samples/s with {read['workers']} worker(s), the step takes"
        f" {wanted:,.0f}"
    )
    if waited > WAITED:
        workers = max(1, math.ceil(1.1 * max(1, read["workers"]) * wanted / read["rate"]))
        ranks = next(ranks for ranks in nodes_of(facts) if rank in ranks)
        cpus = facts[rank]["cpus"]
        lack = (
            f" (the node has {cpus} CPUs for {len(ranks)} rank(s): smaller files, or data in memory)"
            if workers * len(ranks) > cpus
            else ""
        )
        said.append(
            (WARNING, f"{text}: {waited:.0%} of the time is spent waiting for data; give --num_workers {workers}{lack}")
        )
    return findings("loader", said, text)


def problem(name: str, problems: list[str], facts: list[dict]) -> list[Finding]:
    """A step that was refused: the sentence brings its remedy. All ranks have the same where all were told."""
    said = {text: named([rank], facts) for rank, text in reversed(list(enumerate(problems))) if text}
    is_common = len({*problems}) == 1
    return [Finding(name, FAILURE, text if is_common else f"{where}: {text}") for text, where in said.items()]


def size(number: float) -> str:
    """Bytes as people say them: 22.2 MB, 1.5 GB (powers of 1000)."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.{int(power > 0 and number < 100)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

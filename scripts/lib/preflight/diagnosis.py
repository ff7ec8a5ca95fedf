# extra: preflight
"""Turn measurements into findings, with pure functions of plain values. Each warning and failure ends with a fix."""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OK, WARNING, FAILURE = "OK", "warning", "FAILURE"
CLOCK_WARNING, CLOCK_FAILURE = 0.5, 5.0  # seconds between two clocks
SLOW_RANK_RATIO = 1.3  # times slower than the median
SLOW_LINK_RATIO = 3.0  # times slower than the links of other nodes
LATENCY_NOISE = 0.0005  # seconds
SLOW_SAVE_SECONDS = 20.0  # torchrun allows 30 s after SIGTERM
OTHER_PROGRAMS_FRACTION = 0.1  # fraction of a GPU's memory
CUDA_BYTES = 2 * 10**9  # bytes that CUDA and NCCL use themselves
NCCL_SHARED_MEMORY = 2**26  # bytes in /dev/shm for each rank of a node


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.name:<14} {self.text}"


def create_findings(
    name: str, ok_text: str, warnings: Sequence[str] = (), failures: Sequence[str] = ()
) -> list[Finding]:
    """Return one finding for each failure and warning, or OK if there is none."""
    problems = [Finding(name, FAILURE, text) for text in failures] + [Finding(name, WARNING, text) for text in warnings]
    return problems or [Finding(name, OK, ok_text)]


def create_failures(name: str, problems: list[str], hosts: Sequence[str]) -> list[Finding]:
    """Return the failures of a step, from each rank's error message ("" means that it has none).

    A message that all ranks share names no rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(problems):
        ranks_of.setdefault(text, []).append(rank)
    prefix_of = {
        text: f"{describe_ranks(ranks, hosts)}: " if len(ranks_of) > 1 else "" for text, ranks in ranks_of.items()
    }
    return [Finding(name, FAILURE, prefix_of[text] + text) for text in ranks_of if text]


def describe_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Describe hosts with their ranks, such as "node0 (rank 1), node1 (ranks 4-7)"."""
    ranks_of: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_of.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, host_ranks in ranks_of.items():
        noun = "rank" if len(host_ranks) == 1 else "ranks"
        parts.append(f"{host} ({noun} {format_rank_range(host_ranks)})")
    return ", ".join(parts)


def format_rank_range(ranks: list[int]) -> str:
    is_range = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if is_range else ", ".join(map(str, ranks))


def group_ranks_by_node(facts: list[dict]) -> list[list[int]]:
    """Return the ranks of each machine or container, in the order of its lowest rank."""
    nodes: dict[str, list[int]] = {}
    for rank, rank_facts in enumerate(facts):
        nodes.setdefault(rank_facts["machine"], []).append(rank)
    return list(nodes.values())


def list_hosts(facts: list[dict]) -> list[str]:
    """Return the host name of each rank."""
    return [rank_facts["host"] for rank_facts in facts]


def format_size(number: float) -> str:
    """Format bytes in powers of 1000, such as 22.2 MB or 1.5 GB."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.{int(power > 0 and number < 100)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def diagnose_host_names(facts: list[dict]) -> list[Finding]:
    hosts = [facts[ranks[0]]["host"] for ranks in group_ranks_by_node(facts)]
    fix = "which must be unique for NCCL. Rename these nodes (hostnamectl set-hostname, docker run --hostname)."
    repeated = [
        f"{count} nodes have the host name {host}, {fix}" for host, count in Counter(hosts).items() if count > 1
    ]
    return create_findings("host names", f"The host names are {', '.join(hosts)}.", failures=repeated)


def diagnose_network(facts: list[dict]) -> list[Finding]:
    """Warn if the nodes are in different networks. Routed addresses (/31, /32, as in clouds) are not compared."""
    nodes = [facts[ranks[0]] for ranks in group_ranks_by_node(facts)]
    shown = ", ".join(f"{node['host']} {node['address'] or 'unknown'} ({node['interface'] or '?'})" for node in nodes)
    networks = {ipaddress.ip_interface(node["address"]).network for node in nodes if node["address"]}
    is_split = len(networks) > 1 and all(subnet.prefixlen < 31 for subnet in networks)
    warnings = []
    if is_split:
        fix = "Unless that is intended, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of the common"
        fix += " network."
        warnings.append(f"The nodes are in different networks: {shown}. {fix}")
    return create_findings("network", f"The nodes are {shown}.", warnings)


def diagnose_clocks(offsets: dict[int, float], facts: list[dict]) -> list[Finding]:
    """Compare the clocks of the nodes.

    Args:
        offsets: the seconds by which the clock of a node's lowest rank is ahead of rank 0's.
        facts: the facts of each rank.
    """
    problems = []
    fix = "Logs and goodput need equal clocks. Synchronise the clocks with NTP (timedatectl set-ntp true)."
    for rank, seconds in offsets.items():
        if abs(seconds) > CLOCK_WARNING:
            offset_text = f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} that of {facts[0]['host']}"
            level = FAILURE if abs(seconds) > CLOCK_FAILURE else WARNING
            problems.append(Finding("clocks", level, f"The clock of {facts[rank]['host']} is {offset_text}. {fix}"))
    worst = max(map(abs, offsets.values()))
    return problems or create_findings("clocks", f"All clocks are within {worst:.2f} s of that of {facts[0]['host']}.")


def diagnose_devices(facts: list[dict]) -> list[Finding]:
    """Warn if ranks have different devices, drivers or threads than most ranks, or a GPU that other programs use."""
    warnings, hosts = [], list_hosts(facts)
    for name, fix in (
        ("device", "The slowest device sets the pace. Use the same devices everywhere."),
        ("driver", "Install the same NVIDIA driver on all nodes."),
        ("threads", "Set OMP_NUM_THREADS to the same value on all nodes."),
    ):
        values = [rank_facts[name] for rank_facts in facts]
        (usual, _), *rarer = Counter(values).most_common()
        for value, _ in rarer:
            ranks = [rank for rank, rank_value in enumerate(values) if rank_value == value]
            places = f"{value} on {describe_ranks(ranks, hosts)} and {usual} on the others"
            warnings.append(f"The value of {name} is {places}. {fix}")
    for rank, rank_facts in enumerate(facts):
        if rank_facts["used"] > max(OTHER_PROGRAMS_FRACTION * rank_facts["memory"], CUDA_BYTES):
            usage = f"Other programs use {format_size(rank_facts['used'])} of {format_size(rank_facts['memory'])} on"
            usage += f" the GPU of {describe_ranks([rank], hosts)}."
            warnings.append(f"{usage} End these programs (nvidia-smi lists them).")
    memory = format_size(min(rank_facts["memory"] for rank_facts in facts))
    ok = f"The ranks have {len(facts)} x {facts[0]['device']}, with {memory} of memory."
    return create_findings("devices", ok, warnings)


def diagnose_shared_memory(facts: list[dict]) -> list[Finding]:
    """Warn if /dev/shm is too small for NCCL. The step "loader" shows whether the workers' batches fit."""
    warnings = []
    for ranks in group_ranks_by_node(facts):
        node, needed = facts[ranks[0]], NCCL_SHARED_MEMORY * len(ranks)
        if node["device"] != "cpu" and len(ranks) > 1 and node["shm"] < needed:
            text = f"{node['host']} has {format_size(node['shm'])} of free shared memory"
            text += f", but NCCL needs {format_size(needed)} for {len(ranks)} ranks."
            warnings.append(
                f"{text} Raise the limit (docker run --shm-size, in Kubernetes an emptyDir of medium: Memory)."
            )
    free = format_size(min(rank_facts["shm"] for rank_facts in facts))
    return create_findings("/dev/shm", f"Each node has at least {free} of free shared memory.", warnings)


def diagnose_speed(name: str, rates: list[float], unit: str, facts: list[dict]) -> list[Finding]:
    """Warn of ranks that are slower than others.

    Args:
        name: the name of the check.
        rates: the rate of each rank (larger is faster).
        unit: the unit of the rates.
        facts: the facts of each rank.
    """
    median, hosts = statistics.median_high(rates), list_hosts(facts)
    fix = "All ranks wait for the slowest one. Check its node for other programs, heat and power limits (top,"
    fix += " nvidia-smi)."
    slow = [
        f"{describe_ranks([rank], hosts)} is {median / rate:.1f} times slower than the median of {median:,.0f} {unit}."
        f" {fix}"
        for rank, rate in enumerate(rates)
        if median > SLOW_RANK_RATIO * rate
    ]
    return create_findings(name, f"The slowest rank reaches {min(rates):,.0f} {unit}.", slow)


def diagnose_disk(
    storage: dict, checkpoint_bytes: int, checkpoint_count: int, save_minutes: float, location: str
) -> list[Finding]:
    """Judge the space and speed of the checkpoint folder.

    Args:
        storage: what storage.measure_disk() returned.
        checkpoint_bytes: the bytes of a checkpoint.
        checkpoint_count: the number of checkpoints on disk at once, including the best and the one being written.
        save_minutes: the minutes between two saves.
        location: the name of the storage in findings.
    """
    free = storage["free"]
    rate = storage["speed"]
    needed = max(0, checkpoint_bytes * checkpoint_count - storage["replaced"])
    seconds, warnings, failures = checkpoint_bytes / rate if rate else 0.0, [], []
    if free < needed:
        text = f"{location} has {format_size(free)} of free space, but {checkpoint_count} checkpoints of"
        text += f" {format_size(checkpoint_bytes)} need {format_size(needed)}."
        failures.append(f"{text} Free space, or give another --run_dir or a smaller --keep_last.")
    if seconds > SLOW_SAVE_SECONDS or 0 < save_minutes * 60 < 2 * seconds:
        text = f"A checkpoint of {format_size(checkpoint_bytes)} takes {seconds:.0f} s in {location}"
        text += f" ({format_size(rate)}/s)."
        fix = f"Use faster storage, or have the scheduler leave {2 * seconds:.0f} s between SIGTERM and SIGKILL."
        warnings.append(f"{text} {fix}")
    ok = f"{format_size(free)} are free and {format_size(needed)} are needed."
    ok += f" A checkpoint takes {seconds:.1f} s ({format_size(rate)}/s)."
    return create_findings("disk", ok, warnings, failures)


def diagnose_mirror(storage: dict, checkpoint_bytes: int, save_minutes: float, url: str) -> list[Finding]:
    """Judge the speed and guarantees of object storage, as storage.measure_mirror() found them."""
    seconds, warnings = checkpoint_bytes / storage["to"], []
    if not storage["is_exclusive"]:
        text = f"{url} cannot create an object only if it is absent. If requests take seconds, two jobs that start at"
        warnings.append(f"{text} once may both continue. Start one job at a time.")
    if 0 < save_minutes * 60 < seconds:
        text = f"The upload of a checkpoint to {url} takes {seconds:.0f} s ({format_size(storage['to'])}/s), so some"
        text += " checkpoints are left out."
        warnings.append(f"{text} Raise --save_every_minutes, or use faster storage.")
    rates = f"{format_size(storage['to'])}/s and reads {format_size(storage['from'])}/s"
    return create_findings("mirror", f"{url} writes {rates}. A checkpoint takes {seconds:.1f} s.", warnings)


def diagnose_links(measured: list[list], facts: list[dict]) -> list[Finding]:
    """Distinguish slow nodes from slow links. Links are compared with the median of the nodes' best ones.

    Args:
        measured: for each pair, [node, node, seconds of a round trip, bytes per second].
        facts: the facts of each rank.
    """
    hosts = [facts[ranks[0]]["host"] for ranks in group_ranks_by_node(facts)]
    links_of = [[link for link in measured if node in link[:2]] for node in range(len(hosts))]
    rate = statistics.median_high(max(link[3] for link in node_links) for node_links in links_of if node_links)
    trip = statistics.median_low(min(link[2] for link in node_links) for node_links in links_of if node_links)
    fix = f"Other nodes have {describe_link(trip, rate)}. Check cable, port, interface and MTU."
    max_trip = max(SLOW_LINK_RATIO * trip, trip + LATENCY_NOISE)
    slow = [link for link in measured if link[3] * SLOW_LINK_RATIO < rate or link[2] > max_trip]
    warnings = []
    for host, node_links in zip(hosts, links_of, strict=True):
        if len(node_links) > 1 and all(link in slow for link in node_links):
            slow = [link for link in slow if link not in node_links]
            best = max(node_links, key=lambda link: link[3])
            warnings.append(f"All links of {host} are slow: {describe_link(*best[2:])} at best. {fix}")
    warnings += [
        f"The link {hosts[a]} - {hosts[b]} is slow: {describe_link(*figures)}. {fix}" for a, b, *figures in slow
    ]
    a, b, *worst = min(measured, key=lambda link: link[3])
    slowest = f"{hosts[a]} - {hosts[b]}, with {describe_link(*worst)}"
    return create_findings("links", f"The slowest of {len(measured)} links is {slowest}.", warnings)


def describe_link(trip: float, rate: float) -> str:
    return f"{format_size(rate)}/s and {trip * 1e6:.0f} us round trip"

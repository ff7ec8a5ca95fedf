"""How far predictions are from measurements: of 4 ranks from 1 and 2, and of 2 ranks on a slowed link from its
all-reduce and the steps of
1 and 2 ranks without communication. It reports, and judges nothing: on a busy machine both sides are off."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from config import UserError
from scales.account import link_of, machine_of, median, step_of
from scales.prediction import step_seconds

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = (
    "--batch_size 8",
    "--batch_size 8 --bucket_cap_mb 25",
    "--batch_size 2",
    "--batch_size 8 --image_size 16",
    "--batch_size 4 --model resnet18",
    "--batch_size 4 --model mobilenet_v3_small",
)
LINKED = CONFIGS[:4]
RATES = ("1gbit", "200mbit")
FEW, MANY = (1, 2), 4
DEADLINE = 600.0  # seconds of one run of two nodes


def validate(options: argparse.Namespace) -> None:
    """Print predicted, measured and error of each configuration, and the median of the errors."""
    from scaling import cores_here, environment, job_of, start

    load, cores = os.getloadavg()[0], cores_here()
    if load > cores / 4:
        sys.stdout.write(
            f"load average {load:.1f} on {cores} cores: if other programs still run, neither side will be right; wait"
            " until they are done\n"
        )
    sys.stdout.write(f"{MANY} ranks on this machine, predicted from {' and '.join(map(str, FEW))}\n")
    jobs = [job_of(words.split(), options, 0) for words in CONFIGS]
    with tempfile.TemporaryDirectory() as folder:
        found = {ranks: start(ranks, jobs, Path(folder), environment(MANY)) for ranks in (*FEW, MANY)}
    rows = []
    for words, one, two, four in zip(CONFIGS, *found.values(), strict=True):
        seconds, _ = step_seconds(step_of(one, two), link_of(two), MANY, MANY, machine_of([one, two]))
        rows.append((words, seconds, median(four, "weak", 0)))
    errors = tell(rows)
    for rate in RATES:
        sys.stdout.write(
            f"2 ranks on a link of {rate}, predicted from its all-reduce and steps without communication\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            linked = on_two_nodes(rate, jobs[: len(LINKED)], Path(folder))
        rows = []
        # none where namespaces are not allowed
        for words, job, one, two in zip(LINKED, linked, found[1], found[2], strict=False):
            seconds, _ = step_seconds(step_of(one, two), link_of(job), 2, 2, machine_of([one, two]))
            rows.append((words, seconds, median(job, "weak", 0)))
        errors += tell(rows)
    sys.stdout.write(f"median error of all {len(errors)}: {statistics.median(errors):.1%}\n")


def tell(rows: list[tuple[str, float, float]]) -> list[float]:
    """The errors, without sign."""
    errors = [abs(predicted / measured - 1) for _, predicted, measured in rows]
    for words, predicted, measured in rows:
        figures = (
            f"predicted {predicted * 1000:9,.2f} ms   measured {measured * 1000:9,.2f} ms  "
            f" {predicted / measured - 1:+6.1%}"
        )
        sys.stdout.write(f"  {words:42} {figures}\n")
    if errors:
        sys.stdout.write(f"  median error: {statistics.median(errors):.1%}\n")
    sys.stdout.flush()
    return errors


def on_two_nodes(rate: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The jobs in two ranks, each in a network of its own, with a link of that rate between them."""
    sys.path.append(str(ROOT / "tests"))
    import pytest

    from nodes import Nodes
    from ranks import finish
    from scaling import results

    task = folder / "job.json"
    task.write_text(json.dumps({"jobs": jobs, "out": str(folder / "found.json"), "folder": str(folder / "of")}))
    try:
        with Nodes(2) as nodes:
            for node in nodes:
                node.slow(rate)
            common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500"}
            common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, ROOT / "scripts" / "scaling.py", "--job", task]
            programs = [node.start(command, env=common | {"RANK": str(rank)}) for rank, node in enumerate(nodes)]
            ended = [finish(program, DEADLINE) for program in programs]
    except pytest.skip.Exception as reason:
        sys.stdout.write(f"  not measured: {reason}\n")
        return []
    except AssertionError as late:
        raise UserError(f"{late}; two nodes took too long") from None
    return results(folder / "found.json", "2 nodes", "".join(each.text for each in ended))

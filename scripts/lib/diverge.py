# extra: replay and reports
"""Where two runs diverge: the settings that differ, the first record with another fingerprint and, with a replay, the
step and what differs first in it: samples, their content, module outputs, losses, gradients or the update."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]  # as scripts/replay.py has them

import torch

from scripts.lib.values import TIMES, plural
from utils.batch import tensors_in
from utils.files import read_lines
from utils.settings.errors import UserError
from utils.table import format_table

FIRST = ("fingerprint", "samples", "lr", "loss", "grad_norm")  # the order of the report
ORIGIN = ("versions", "code", "exact_sums", "world_size", "hosts", "devices", "precision", "cpu_threads", "identity")


class Gap(NamedTuple):
    """The records between which two runs diverge."""

    equal: int  # the last step with equal records; 0 if there is none
    step: int  # of the first records that differ; 0 if none does
    rows: list[list[Any]]  # name and values of what differs in them


class Found(NamedTuple):
    kind: str
    text: str


def settings(a: Any, b: Any, names: list[str]) -> list[list[Any]]:
    """Rows of what differs in settings, versions, code and machines."""
    rows = [[name, a.config.get(name, "-"), b.config.get(name, "-")] for name in names]
    for name in ORIGIN:
        before, here = (of_origin(run.provenance, name) for run in (a, b))
        if before != here:
            rows.append([name, before, here])
    return rows


def of_origin(provenance: dict[str, Any], name: str) -> str:
    value = provenance.get(name, "-")
    if name == "devices":
        value = sorted({rank["device"] for rank in provenance.get("ranks", [])})
    if isinstance(value, list):
        return ", ".join(value)
    return " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def records_of(run: Any) -> dict[int, dict[str, Any]]:
    """The train records by step, each with its samples if they were recorded."""
    samples: dict[int, list[int]] = {}
    for file in sorted(run.folder.glob("samples/rank*.jsonl")):
        for *_, line in read_lines(file):
            samples.setdefault(line["step"], []).extend(line["indices"])
    records = {record["step"]: record for record in run.records if record["kind"] == "train"}
    return {
        step: record | ({"samples": sorted(samples[step])} if step in samples else {})
        for step, record in records.items()
    }


def first_gap(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], has_means: bool = True) -> Gap:
    """Compare records of the same steps: by their fingerprints, or all values where one has none.

    has_means: whether both have means of equal intervals. Raises UserError if no step has two records.
    """
    steps, equal = sorted(a.keys() & b.keys()), 0
    if not steps:
        raise UserError("diverge: no step has a train record in both runs; give runs with the same --log_interval")
    for step in steps:
        one, other = a[step], b[step]
        names = {name for name in one.keys() & other.keys() if one[name] != other[name]} - {*TIMES, "time"}
        names = names if has_means else names & {"fingerprint", "samples", "lr"}
        if "fingerprint" in names or (names and not one.keys() & other.keys() & {"fingerprint"}):
            order = sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
            return Gap(equal, step, [[name, text_of(name, one, other), text_of(name, other, one)] for name in order])
        equal = step
    return Gap(equal, 0, [])


def text_of(name: str, record: dict[str, Any], other: dict[str, Any]) -> str:
    if name != "samples":
        return str(record[name])
    own = sorted({*record[name]} - {*other[name]})
    return f"{len(own)} of its own: {', '.join(map(str, own[:5]))}"


def narrowed(a: Any, b: Any, gap: Gap) -> tuple[int, int, list[Any]]:
    """The last step known to be equal, the first known to differ and the runs' fingerprints in it, by bisection of the
    checkpoints that both have."""
    from utils.checkpoint import format as checkpoint

    kept = [{checkpoint.step_of(p): p for p in checkpoint.step_checkpoints(r.folder / "checkpoints")} for r in (a, b)]
    low, high, prints = gap.equal, gap.step, [records_of(run)[gap.step].get("fingerprint") for run in (a, b)]
    while steps := [step for step in sorted(kept[0].keys() & kept[1].keys()) if low < step < high]:
        middle = steps[len(steps) // 2]
        found = [checkpoint.read(each[middle])[0]["provenance"].get("fingerprint") for each in kept]
        if found[0] == found[1]:
            low = middle
        else:
            high, prints = middle, found
    return low, high, prints


def replayed(a: Any, b: Any, gap: Gap, names: tuple[str, str]) -> str:
    """Replay both runs to the step at which they diverge, here, in one process; what differs first in it."""
    import replay

    low, high, prints = narrowed(a, b, gap)
    again = [replay.records_of(run.folder, low + 1, high) for run in (a, b)]
    steps = [step for step in sorted(again[0].keys() & again[1].keys()) if step > low]
    step = next((step for step in steps if again[0][step]["fingerprint"] != again[1][step]["fingerprint"]), 0)
    if step:
        one, other = (replay.dump_of(run.folder, step) for run in (a, b))
        return f"{until(step - 1)}; in step {step} {compare(one, other, names).text}"
    odd = [k for k in (0, 1) if prints[k] != again[k][high]["fingerprint"]]
    where = f"step {high}" if high == low + 1 else f"steps {low + 1} to {high}"
    dumps = "compare dumps of scripts/replay.py that were made where the runs were"
    if len(odd) > 1:
        causes = "sums of several ranks without --reduction exact, other machines or versions"
        return f"here the replays of {where} are equal, and repeat neither run ({causes}); {dumps}"
    run, name = (a, b)[odd[0]], names[odd[0]]
    is_alone = high == low + 1 and run.config.get("log_interval") == 1
    cause = cause_of(records_of(run)[high], again[odd[0]][high]) if is_alone else ""
    causes = "a fault that came once, or another machine or version"
    return f"{until(low)}; in {where} {name} did what its replay here does not{cause} ({causes}); {dumps}"


def until(step: int) -> str:
    return f"equal until step {step}" if step else "equal at the start"


def cause_of(record: dict[str, Any], again: dict[str, Any]) -> str:
    """What in a record is not repeated in its replay."""
    causes = {
        "lr": "its learning rate was another",
        "loss": "its loss was another, so look at samples, their content and the forward passes",
        "grad_norm": "its loss is repeated, and its gradient is not",
    }
    wrong = [text for name, text in causes.items() if record[name] != again[name]]
    return ": " + (wrong or ["loss and gradient norm are repeated, and weights or optimizer state are not"])[0]


def compare(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found:
    """What differs first in two dumps of the same step. Raises UserError if they are of different ones."""
    if a["number"] != b["number"]:
        raise UserError(f"diverge: dumps of steps {a['number']} and {b['number']}; give two of the same step")
    if a["host"] != b["host"]:
        names = (f"{names[0]} (on {a['host']})", f"{names[1]} (on {b['host']})")
    checks: Iterable[Callable[..., Found | None]] = (state, samples, content, outputs, gradients, used, update)
    return next(
        (found for check in checks if (found := check(a, b, names))), Found("", "nothing that a dump holds differs")
    )


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if name not in a or name not in b or len(unequal(a[name], b[name])) > 0]


def unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The flat places at which two tensors differ in a bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.zeros(1, dtype=torch.int64)
    size = a.element_size()
    one, other = (each.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for each in (a, b))
    return (one != other).any(1).nonzero().flatten()


def shown(tensors: dict[str, Any], others: dict[str, Any], names: list[str]) -> str:
    one, other, size = tensors.get(names[0]), others.get(names[0]), ""
    if one is not None and other is not None:
        size = f" ({len(unequal(one, other)):,} of {plural(one.numel(), 'value')})"
    return names[0] + size + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def state(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    wrong = different(a["before"], b["before"])
    text = f"the weights before it differ already: {shown(a['before'], b['before'], wrong)}" if wrong else ""
    return Found("state", text) if wrong else None


def samples(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    sizes = [[len(each) for each in dump["micro_batches"]] for dump in (a, b)]
    if sizes[0] != sizes[1]:
        return Found("samples", f"the micro-batches have {sizes[0]} samples in {names[0]} and {sizes[1]} in {names[1]}")
    for number, (one, other) in enumerate(zip(a["micro_batches"], b["micro_batches"], strict=True)):
        for place, (mine, its) in enumerate(zip(one, other, strict=False)):
            if mine != its:
                where = f"sample {place} of micro-batch {number}"
                return Found("samples", f"{where} is {mine:,} in {names[0]} and {its:,} in {names[1]}")
    return None


def content(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    for number, (one, other) in enumerate(zip(a["batches"], b["batches"], strict=True)):
        indices = a["micro_batches"][number]
        for mine, its in zip(tensors_in(one), tensors_in(other), strict=False):
            places = unequal(mine, its)
            if not len(places):
                continue
            if mine.shape != its.shape or mine.dtype != its.dtype:
                kinds = [f"{each.dtype} {list(each.shape)}" for each in (mine, its)]
                return Found("content", f"micro-batch {number} is {kinds[0]} in {names[0]}, {kinds[1]} in {names[1]}")
            whose = f"micro-batch {number}"
            if mine.ndim and len(mine) == len(indices):
                rows = sorted({*(places // (mine.numel() // len(mine))).tolist()})
                more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
                whose = f"sample {indices[rows[0]]:,}{more}"
            gap = (mine.double() - its.double()).abs().max().item()
            text = f"the content of {whose} differs between {names[0]} and {names[1]}"
            return Found("content", f"{text}: {len(places):,} of {mine.numel():,} values, by at most {gap:.3g}")
    return None


def outputs(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    """Of modules, and the losses."""
    for number, (one, other) in enumerate(zip(a["outputs"], b["outputs"], strict=True)):
        for (mine, bits), (its, others) in zip(one, other, strict=False):
            if mine != its:
                return Found("module", f"micro-batch {number} runs {mine} in {names[0]} and {its} in {names[1]}")
            if bits != others:
                return Found(
                    "module", f"the output of {mine} differs first, for micro-batch {number} with equal inputs"
                )
    for number, (loss, its_loss) in enumerate(zip(a["micro_losses"], b["micro_losses"], strict=True)):
        if repr(loss) != repr(its_loss):
            text = f"the loss of micro-batch {number} is {loss:.9g} in {names[0]} and {its_loss:.9g} in {names[1]}"
            return Found("loss", f"{text}, with equal outputs of all modules: look at compute_loss")
    return None


def gradients(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    wrong = different(a["gradients"], b["gradients"])[::-1]  # the backward pass begins with the last ones
    if not wrong:
        return None
    return Found(
        "gradient", f"the gradient of {shown(a['gradients'], b['gradients'], wrong)} differs, with equal losses"
    )


def used(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    """The gradients that the optimizer got: before, the micro-batches were computed once more, outside of the step."""
    wrong = different(a.get("used", {}), b.get("used", {}))[::-1]
    if not wrong:
        return None
    which = shown(a["used"], b["used"], wrong)
    text = f"the gradient of {which} that the optimizer gets differs; computed again outside of the step it is equal"
    return Found("gradient", f"{text}: look at what sums or changes gradients")


def update(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Found | None:
    if a["lrs"] != b["lrs"]:
        mine, its = next(pair for pair in zip(a["lrs"], b["lrs"], strict=True) if pair[0] != pair[1])
        return Found("learning rate", f"the learning rate is {mine:.9g} in {names[0]} and {its:.9g} in {names[1]}")
    wrong = different(a["after"], b["after"])
    moments = different(a.get("moments", {}), b.get("moments", {}))
    if not (wrong or moments):
        return None
    which = shown(a["after"], b["after"], wrong) if wrong else shown(a["moments"], b["moments"], moments)
    which = which if wrong else f"the optimizer's {which}"
    return Found("update", f"the update of {which} differs, with equal gradients (before clipping) and learning rates")


def report(a: Any, b: Any, names: list[str], labels: tuple[str, str], may_replay: bool) -> tuple[str, bool]:
    """One page of text, and whether the runs are equal. names: of settings that differ. Raises UserError."""
    has_means = a.config.get("log_interval") == b.config.get("log_interval")
    rows, gap = settings(a, b, names), first_gap(records_of(a), records_of(b), has_means)
    lines = [format_table([["differs", *labels], *rows])] if rows else ["settings, versions, code and machines: equal"]
    if not gap.step:
        return "\n".join([*lines, f"no difference in the records up to step {gap.equal}"]), True
    lines += [f"records: {until(gap.equal)}; in that of step {gap.step} differ:"]
    lines += [format_table([["", *labels], *gap.rows[:8]])]
    if may_replay:
        lines += [f"replay: {replayed(a, b, gap, labels)}"]
    else:
        lines += ["next: --replay repeats both runs up to there, and looks into the step"]
    return "\n".join(lines), False


def of_dumps(paths: list[Path]) -> tuple[str, bool]:
    """The report on two dumps of scripts/replay.py."""
    a, b = (torch.load(path, weights_only=True) for path in paths)
    found = compare(a, b, (paths[0].name, paths[1].name))
    return f"in step {a['number']} {found.text}", not found.kind

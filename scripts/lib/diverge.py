# extra: replay and reports
"""Find where two runs diverge.

The report has the settings that differ, and the first record with another fingerprint. With a replay, it has the step
and what differs first in it: samples, their content, module outputs, losses, gradients or the update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]  # scripts/replay.py has the same paths

import torch

from scripts.lib.values import TIMING_FIELDS, format_plural
from utils.batch import list_tensors
from utils.files import read_records
from utils.settings.errors import UserError
from utils.table import format_table

REPORT_ORDER = ("fingerprint", "samples", "lr", "loss", "grad_norm")  # the report has this order
PROVENANCE_FIELDS = (
    "versions",
    "code",
    "exact_sums",
    "world_size",
    "hosts",
    "devices",
    "precision",
    "cpu_threads",
    "identity",
)


class Divergence(NamedTuple):
    """The records between which two runs diverge."""

    last_equal_step: int  # the last step with equal records (0: there is none)
    step: int  # the step of the first records that differ (0: none does)
    rows: list[list[Any]]  # the name and the two values of whatever differs in those records


class Difference(NamedTuple):
    kind: str
    text: str


def compare_settings(a: Any, b: Any, names: list[str]) -> list[list[Any]]:
    """Return a row for each difference in settings, versions, code and machines."""
    rows = [[name, a.config.get(name, "-"), b.config.get(name, "-")] for name in names]
    for name in PROVENANCE_FIELDS:
        before, after = (format_provenance(run.provenance, name) for run in (a, b))
        if before != after:
            rows.append([name, before, after])
    return rows


def format_provenance(provenance: dict[str, Any], name: str) -> str:
    value = provenance.get(name, "-")
    if name == "devices":
        value = sorted({rank["device"] for rank in provenance.get("ranks", [])})
    if isinstance(value, list):
        return ", ".join(value)
    return " ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def read_train_records(run: Any) -> dict[int, dict[str, Any]]:
    """Return the train records by step, each with its samples if they were recorded."""
    samples: dict[int, list[int]] = {}
    for file in sorted(run.folder.glob("samples/rank*.jsonl")):
        for *_, line in read_records(file):
            samples.setdefault(line["step"], []).extend(line["indices"])
    records = {record["step"]: record for record in run.records if record["kind"] == "train"}
    return {
        step: record | ({"samples": sorted(samples[step])} if step in samples else {})
        for step, record in records.items()
    }


def find_divergence(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], has_means: bool = True) -> Divergence:
    """Compare records of the same steps, by their fingerprints, or by all values where one has no fingerprint.

    Args:
        a, b: the records of the two runs by step.
        has_means: whether both have means of equal intervals.

    Raises:
        UserError: if no step has two records.
    """
    steps, equal = sorted(a.keys() & b.keys()), 0
    if not steps:
        raise UserError(
            "--diverge needs a step with a train record in both runs, but there is none. Give runs with the same"
            " --log_interval."
        )
    for step in steps:
        record_a, record_b = a[step], b[step]
        names = {name for name in record_a.keys() & record_b.keys() if record_a[name] != record_b[name]} - {
            *TIMING_FIELDS,
            "time",
        }
        names = names if has_means else names & {"fingerprint", "samples", "lr"}
        if "fingerprint" in names or (names and not record_a.keys() & record_b.keys() & {"fingerprint"}):
            order = sorted(
                names, key=lambda name: (REPORT_ORDER.index(name) if name in REPORT_ORDER else len(REPORT_ORDER), name)
            )
            return Divergence(
                equal,
                step,
                [
                    [name, format_value(name, record_a, record_b), format_value(name, record_b, record_a)]
                    for name in order
                ],
            )
        equal = step
    return Divergence(equal, 0, [])


def format_value(name: str, record: dict[str, Any], other_record: dict[str, Any]) -> str:
    if name != "samples":
        return str(record[name])
    own_samples = sorted({*record[name]} - {*other_record[name]})
    return f"{len(own_samples)} of its own: {', '.join(map(str, own_samples[:5]))}"


def bisect_checkpoints(a: Any, b: Any, gap: Divergence) -> tuple[int, int, list[Any]]:
    """Narrow a divergence down by bisection of the checkpoints that both runs have.

    Returns:
        The last step that is known to be equal, the first step that is known to differ, and the runs' fingerprints in
        the latter.
    """
    from utils.checkpoint import format as checkpoint

    checkpoints_by_run = [
        {checkpoint.parse_step(p): p for p in checkpoint.list_step_checkpoints(r.folder / "checkpoints")}
        for r in (a, b)
    ]
    low = gap.last_equal_step
    high = gap.step
    run_fingerprints = [read_train_records(run)[gap.step].get("fingerprint") for run in (a, b)]
    common_steps = sorted(checkpoints_by_run[0].keys() & checkpoints_by_run[1].keys())
    while steps := [step for step in common_steps if low < step < high]:
        middle = steps[len(steps) // 2]
        fingerprints = [
            checkpoint.read_checkpoint(paths[middle])[0]["provenance"].get("fingerprint")
            for paths in checkpoints_by_run
        ]
        if fingerprints[0] == fingerprints[1]:
            low = middle
        else:
            high, run_fingerprints = middle, fingerprints
    return low, high, run_fingerprints


def replay_divergence(a: Any, b: Any, gap: Divergence, names: tuple[str, str]) -> str:
    """Replay both runs in this process to the step at which they diverge, and describe what differs first in it."""
    import replay

    low, high, run_fingerprints = bisect_checkpoints(a, b, gap)
    replays = [replay.record_steps(run.folder, low + 1, high) for run in (a, b)]
    steps = [step for step in sorted(replays[0].keys() & replays[1].keys()) if step > low]
    step = next((step for step in steps if replays[0][step]["fingerprint"] != replays[1][step]["fingerprint"]), 0)
    if step:
        dump_a, dump_b = (replay.dump_step(run.folder, step) for run in (a, b))
        return f"{describe_equal_steps(step - 1)} In step {step} {compare_dumps(dump_a, dump_b, names).text}"
    unrepeated = [k for k in (0, 1) if run_fingerprints[k] != replays[k][high]["fingerprint"]]
    step_range = f"step {high}" if high == low + 1 else f"steps {low + 1} to {high}"
    dumps = "Compare dumps of scripts/replay.py that were made on the machines of the runs."
    if len(unrepeated) > 1:
        causes = "Causes are sums of several ranks in another order, other machines or other versions."
        return f"Here the replays of {step_range} are equal, and repeat neither run. {causes} {dumps}"
    run, name = (a, b)[unrepeated[0]], names[unrepeated[0]]
    is_alone = high == low + 1 and run.config.get("log_interval") == 1
    cause = describe_cause(read_train_records(run)[high], replays[unrepeated[0]][high]) if is_alone else ""
    causes = "Causes are a fault that came once, another machine or another version."
    equal_steps = describe_equal_steps(low)
    return f"{equal_steps} In {step_range} {name} did what its replay here does not{cause}. {causes} {dumps}"


def describe_equal_steps(step: int) -> str:
    return f"The runs are equal until step {step}." if step else "The runs are equal at the start."


def describe_cause(record: dict[str, Any], replayed_record: dict[str, Any]) -> str:
    """Describe which values of a record are not repeated in its replay."""
    causes = {
        "lr": "its learning rate was another",
        "loss": "its loss was another, so look at samples, their content and the forward passes",
        "grad_norm": "its loss is repeated, and its gradient is not",
    }
    wrong = [text for name, text in causes.items() if record[name] != replayed_record[name]]
    return ": " + (wrong or ["loss and gradient norm are repeated, and weights or optimizer state are not"])[0]


def compare_dumps(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference:
    """Return what differs first in two dumps of the same step. Raises UserError if the steps differ."""
    if a["number"] != b["number"]:
        raise UserError(
            f"--diverge needs two dumps of the same step, but these are of steps {a['number']} and {b['number']}."
        )
    if a["host"] != b["host"]:
        names = (f"{names[0]} (on {a['host']})", f"{names[1]} (on {b['host']})")
    checks: Iterable[Callable[..., Difference | None]] = (
        compare_state,
        compare_samples,
        compare_batches,
        compare_outputs,
        compare_gradients,
        compare_used_gradients,
        compare_updates,
    )
    return next(
        (difference for check in checks if (difference := check(a, b, names))),
        Difference("", "nothing that a dump holds differs."),
    )


def find_different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if name not in a or name not in b or len(find_unequal(a[name], b[name])) > 0]


def find_unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the flat indices at which two tensors differ in a bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.zeros(1, dtype=torch.int64)
    size = a.element_size()
    bytes_a, bytes_b = (tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for tensor in (a, b))
    return (bytes_a != bytes_b).any(1).nonzero().flatten()


def describe_tensors(tensors: dict[str, Any], other_tensors: dict[str, Any], names: list[str]) -> str:
    tensor_a, tensor_b, size = tensors.get(names[0]), other_tensors.get(names[0]), ""
    if tensor_a is not None and tensor_b is not None:
        size = f" ({len(find_unequal(tensor_a, tensor_b)):,} of {format_plural(tensor_a.numel(), 'value')})"
    return names[0] + size + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def compare_state(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    wrong = find_different(a["before"], b["before"])
    if not wrong:
        return None
    subject = describe_tensors(a["before"], b["before"], wrong)
    return Difference("state", f"the weights before the step differ already: {subject}.")


def compare_samples(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    sizes = [[len(indices) for indices in dump["micro_batches"]] for dump in (a, b)]
    if sizes[0] != sizes[1]:
        return Difference(
            "samples", f"the micro-batches have {sizes[0]} samples in {names[0]} and {sizes[1]} in {names[1]}."
        )
    for number, (indices_a, indices_b) in enumerate(zip(a["micro_batches"], b["micro_batches"], strict=True)):
        for position, (index_a, index_b) in enumerate(zip(indices_a, indices_b, strict=False)):
            if index_a != index_b:
                sample = f"sample {position} of micro-batch {number}"
                return Difference("samples", f"{sample} is {index_a:,} in {names[0]} and {index_b:,} in {names[1]}.")
    return None


def compare_batches(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    for number, (batch_a, batch_b) in enumerate(zip(a["batches"], b["batches"], strict=True)):
        indices = a["micro_batches"][number]
        for tensor_a, tensor_b in zip(list_tensors(batch_a), list_tensors(batch_b), strict=False):
            positions = find_unequal(tensor_a, tensor_b)
            if not len(positions):
                continue
            if tensor_a.shape != tensor_b.shape or tensor_a.dtype != tensor_b.dtype:
                kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (tensor_a, tensor_b)]
                return Difference(
                    "content", f"micro-batch {number} is {kinds[0]} in {names[0]} and {kinds[1]} in {names[1]}."
                )
            subject = f"micro-batch {number}"
            if tensor_a.ndim and len(tensor_a) == len(indices):
                rows = sorted({*(positions // (tensor_a.numel() // len(tensor_a))).tolist()})
                and_more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
                subject = f"sample {indices[rows[0]]:,}{and_more}"
            gap = (tensor_a.double() - tensor_b.double()).abs().max().item()
            text = f"the content of {subject} differs between {names[0]} and {names[1]}"
            return Difference(
                "content", f"{text}: {len(positions):,} of {tensor_a.numel():,} values, by at most {gap:.3g}."
            )
    return None


def compare_outputs(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    """Compare the outputs of modules, and the losses. Return the first difference, if there is one."""
    for number, (outputs_a, outputs_b) in enumerate(zip(a["outputs"], b["outputs"], strict=True)):
        for (module, bits), (other_module, other_bits) in zip(outputs_a, outputs_b, strict=False):
            if module != other_module:
                return Difference(
                    "module", f"micro-batch {number} runs {module} in {names[0]} and {other_module} in {names[1]}."
                )
            if bits != other_bits:
                return Difference(
                    "module", f"the output of {module} differs first, for micro-batch {number} with equal inputs."
                )
    for number, (loss, other_loss) in enumerate(zip(a["micro_losses"], b["micro_losses"], strict=True)):
        if repr(loss) != repr(other_loss):
            text = f"the loss of micro-batch {number} is {loss:.9g} in {names[0]} and {other_loss:.9g} in {names[1]}"
            return Difference("loss", f"{text}, with equal outputs of all modules. Look at compute_loss.")
    return None


def compare_gradients(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    wrong = find_different(a["gradients"], b["gradients"])[::-1]  # the backward pass begins with the last parameters
    if not wrong:
        return None
    return Difference(
        "gradient",
        f"the gradient of {describe_tensors(a['gradients'], b['gradients'], wrong)} differs, with equal losses.",
    )


def compare_used_gradients(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    """Compare the gradients that the optimizer got.

    The gradients that were compared before come from a second computation of the micro-batches, outside of the step.
    """
    wrong = find_different(a.get("used", {}), b.get("used", {}))[::-1]
    if not wrong:
        return None
    subject = describe_tensors(a["used"], b["used"], wrong)
    return Difference(
        "gradient",
        f"the gradient of {subject} that the optimizer gets differs, but it is equal when computed again outside of the"
        " step. Look at what sums or changes gradients.",
    )


def compare_updates(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> Difference | None:
    if a["lrs"] != b["lrs"]:
        lr_a, lr_b = next(pair for pair in zip(a["lrs"], b["lrs"], strict=True) if pair[0] != pair[1])
        return Difference(
            "learning rate", f"the learning rate is {lr_a:.9g} in {names[0]} and {lr_b:.9g} in {names[1]}."
        )
    wrong = find_different(a["after"], b["after"])
    moments = find_different(a.get("moments", {}), b.get("moments", {}))
    if not (wrong or moments):
        return None
    subject = (
        describe_tensors(a["after"], b["after"], wrong)
        if wrong
        else describe_tensors(a["moments"], b["moments"], moments)
    )
    subject = subject if wrong else f"the optimizer's {subject}"
    return Difference(
        "update", f"the update of {subject} differs, with equal gradients (before clipping) and learning rates."
    )


def compare_runs(a: Any, b: Any, names: list[str], labels: tuple[str, str], may_replay: bool) -> tuple[str, bool]:
    """Return one page of text, and whether the runs are equal. Raises UserError.

    Args:
        a, b: the runs.
        names: the names of the settings that differ.
        labels: the names of the two runs.
        may_replay: whether the runs may be replayed.
    """
    has_means = a.config.get("log_interval") == b.config.get("log_interval")
    rows, gap = compare_settings(a, b, names), find_divergence(read_train_records(a), read_train_records(b), has_means)
    lines = ["Settings, versions, code and machines are equal."]
    if rows:
        lines = [format_table([["differs", *labels], *rows])]
    if not gap.step:
        return "\n".join([*lines, f"The records do not differ up to step {gap.last_equal_step}."]), True
    lines += [f"Records: {describe_equal_steps(gap.last_equal_step)} In the record of step {gap.step} these differ:"]
    lines += [format_table([["", *labels], *gap.rows[:8]])]
    if may_replay:
        lines += [f"Replay: {replay_divergence(a, b, gap, labels)}"]
    else:
        lines += [f"Add --replay to repeat both runs up to step {gap.step} and look into the step."]
    return "\n".join(lines), False


def compare_dump_files(paths: list[Path]) -> tuple[str, bool]:
    """Return the report on two dumps of scripts/replay.py, and whether they are equal."""
    a, b = (torch.load(path, weights_only=True) for path in paths)
    difference = compare_dumps(a, b, (paths[0].name, paths[1].name))
    return f"In step {a['number']} {difference.text}", not difference.kind

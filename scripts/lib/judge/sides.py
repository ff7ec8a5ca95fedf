# extra: judge
"""The two sides that are compared. A side is a fork with its settings, its runs, and the check of its code."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from scripts.lib.judge.statistics import ROUNDING_TOLERANCE
from scripts.lib.processes import run_process, running_process
from scripts.lib.verify.result import NOT_CHECKED
from utils.extras.verify import VERIFICATION_FILE
from utils.files import read_json, read_records, replace_file, replace_json
from utils.run.provenance import collect_package_versions, compute_file_checksum
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
FORK_FILES = ("train.py", "model.py", "dataset.py", "config.py", "ddp_utils.py")
JUDGE_FLAGS = ("seed", "run_dir", "checkpoint_dir", "resume_from")  # flags that the judge gives
REFUSED_FLAGS = ("overwrite", "eval_only", "mirror", "max_time")  # flags that are refused
BUDGET_SETTINGS = ("epochs", "max_steps", "dataset_size", "drop_last", "schedule_steps", "patience")
VERIFY_RANKS = 2
PROBE_FLAGS = ("--eval_batch_size", "16")  # the same for both sides
LOG_LINES = 20  # lines of a log that are printed


@dataclass
class Side:
    """One side of a comparison.

    Attributes:
        settings: the resolved settings of the config, without those in JUDGE_FLAGS.
    """

    name: str  # "A" or "B"
    argument: str
    fork: Path
    settings: dict[str, Any] = field(default_factory=dict)
    known_weights: list[str] = field(default_factory=list)  # weights that several seeds share

    @classmethod
    def from_argument(cls, name: str, argument: str, common_flags: Sequence[str]) -> Side:
        """Create a side from an argument of the command line.

        Raises:
            UserError: if this is no fork and no config, or if train.py does not take the flags.
        """
        path = Path(argument.strip())
        words = [*common_flags]
        if argument.strip() and os.path.isdir(path):  # False also for flags that are too long for a path
            if missing := [file for file in FORK_FILES if not (path / file).exists()]:
                raise UserError(
                    f"{name} is the folder {path}, which has no {missing[0]}. Give the folder of a fork, a config, or"
                    " flags."
                )
            fingerprint_file = path / "utils/training/fingerprint.py"
            fingerprint_code = fingerprint_file.read_text(encoding="utf-8") if fingerprint_file.exists() else ""
            if "def fingerprint_parameters" not in fingerprint_code:
                raise UserError(
                    f"{name} ({path}) is a fork of an older template, whose runs record no fingerprint of their initial"
                    " weights. Merge the newer template into the fork, as docs/upgrading.md shows."
                )
            side = cls(name, argument, path.resolve())
        else:
            side = cls(name, argument, ROOT)
            is_file = path.suffix in (".toml", ".json", ".yaml", ".yml") and not argument.strip().startswith("-")
            try:
                words[:0] = ["--config", str(path)] if is_file else shlex.split(argument)
            except ValueError as error:
                raise UserError(
                    f"The flags of {name} ({argument.strip()}) cannot be read ({error}). Close each quote."
                ) from None
        named = [word.split("=")[0].replace("-", "_").lstrip("_") for word in words if word.startswith("--")]
        if clash := sorted({*named} & {*JUDGE_FLAGS}):
            raise UserError(
                f"{name} has --{clash[0]}, which the judge gives itself. Leave it out, or use --first-seed and --out of"
                " the judge."
            )
        if named.count("config") > 1:  # only the last config would count
            raise UserError(f"{name} has two files of settings. Give one file, and the other settings as flags.")
        ended = run_process([sys.executable, side.fork / "train.py", *words, "--print_config"])
        if ended.returncode:
            output = (ended.stderr.strip() or ended.stdout.strip())[-500:]
            raise UserError(f"train.py does not accept the settings of {name}: {output}")
        try:
            values = tomllib.loads(ended.stdout)
        except ValueError as error:
            raise UserError(
                f"train.py --print_config of {name} prints no settings ({error}). Leave out --help, and let the fork"
                " print nothing there."
            ) from None
        default_dir = f"{values.get('run_dir')}/checkpoints"
        if values.get("checkpoint_dir", default_dir) != default_dir:
            raise UserError(f"{name} has --checkpoint_dir, which all of its runs would share. Leave it out.")
        if wrong := next((flag for flag in REFUSED_FLAGS if values.get(flag)), ""):
            raise UserError(f"{name} has --{wrong} {values[wrong]}, which does not go with a judge. Leave it out.")
        side.settings = {key: value for key, value in values.items() if key not in JUDGE_FLAGS}
        return side

    @property
    def code_checksum(self) -> str:
        """Return a digest of the files of the fork that can change a result."""
        files = sorted([*self.fork.glob("*.py"), *self.fork.glob("utils/**/*.py")])
        names = [f"{path.relative_to(self.fork)} {compute_file_checksum(path)}" for path in files]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def create_flags(self, out: Path, seed: int, folder: Path) -> list[str]:
        """Create the flags of a run.

        They give the settings as they were at the start, so that later edits of a config file do not count.
        """
        file = out / f"{self.name.lower()}.toml"
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in self.settings.items()]
        replace_file(file, lambda opened: opened.write("".join(lines).encode()))  # a kill leaves no part of it
        return ["--config", str(file), "--seed", str(seed), "--run_dir", str(folder)]

    def run_folder(self, out: Path, seed: int) -> Path:
        return out / f"{self.name.lower()}-seed{seed}"

    def train(self, out: Path, seed: int, ranks: int, has_samples: bool) -> Run:
        """Return the run of this seed, after training it to the end if it is not complete.

        Raises:
            UserError: if the run fails.
        """
        folder = self.run_folder(out, seed)
        log = folder.with_suffix(".log")
        if read_json(folder / "summary.json").get("state") != "completed":
            words = [self.fork / "train.py", *self.create_flags(out, seed, folder), "--resume_from", "auto"]
            if has_samples:
                words.append("--record_samples")
            code = run_script(words, ranks if ranks > 1 else 0, log)
            # A complete run that has lost its summary does nothing, and `Run` names the file.
            if code or read_json(folder / "summary.json").get("state", "completed") != "completed":
                print(read_log_end(log), file=sys.stderr)
                raise UserError(
                    f"The training of {self.name} with seed {seed} ended with exit code {code} and is not complete."
                    f" Repair what {log} says, and give the same command again, which keeps complete runs."
                )
        return Run(self.name, seed, folder)

    def run_probe(self, out: Path, seed: int, kind: str, *words: object) -> tuple[dict[str, Any], Path]:
        """Return what probe.py finds, or {} if it fails, and the path of its log."""
        result = out / f"{kind}-{self.name.lower()}.json"
        log = result.with_suffix(".log")
        result.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        script = Path(__file__).with_name("probe.py")
        flags = [*self.create_flags(out, seed, out / kind), *PROBE_FLAGS]
        code = run_script([script, self.fork, result, kind, *words, *flags], 0, log)
        return {} if code else read_json(result), log

    def check_weights(self, out: Path, run: Run, earlier: Sequence[Run]) -> str:
        """Check that a run does not start from the weights of an earlier one, which has another seed.

        Returns:
            A note if it does, or "".

        Raises:
            UserError: if these weights were drawn at random.
        """
        same = [earlier_run.seed for earlier_run in earlier if earlier_run.weights == run.weights]
        if not same or run.weights in self.known_weights:
            return ""
        self.known_weights.append(run.weights)
        note = f"All seeds of {self.name} start from the same weights. The interval holds for these weights only."
        if self.settings.get("init_from"):
            return note
        result, log = self.run_probe(out, run.seed, "weights", "-")
        if not result:
            return f"{note} Whether model.py draws them could not be tried: see {log}."
        if result["is_seeded"]:
            raise UserError(
                f"Seeds {same[0]} and {run.seed} of {self.name} start from the same weights, since create_model draws"
                " them from a generator that it seeds itself. Let create_model draw from torch's own generator, which"
                " has the seed of the run."
            )
        return note

    def verify(self, out: Path, seed: int) -> list[str]:
        """Let scripts/verify.py check the fork with these settings, unless it did, and return its notes on the fork.

        Raises:
            UserError: if the fork is broken.
        """
        result_file = self.fork / VERIFICATION_FILE.name
        record_file = out / f"verified-{self.name.lower()}.json"
        for saved_result in (read_json(record_file), read_json(result_file)):
            if self.is_verified(saved_result):
                print(f"scripts/verify.py has passed with the code of {self.name}.", flush=True)
                return read_remarks(saved_result)
        script = self.fork / "scripts/verify.py"
        if not script.exists():
            raise UserError(f"{self.name} ({self.fork}) has no scripts/verify.py. Restore the extra verify.")
        folder = out / f"verify-{self.name.lower()}"
        log = folder.with_suffix(".log")
        outcomes = folder.with_suffix(".json")
        words = [script, *self.create_flags(out, seed, folder), "--json", outcomes]
        if count_gpus() == 1:  # each of the ranks would need a GPU
            words += ["--backend", "gloo"]
        log.unlink(missing_ok=True)
        print(f"Running scripts/verify.py on {self.name}.", flush=True)
        code = run_script(words, VERIFY_RANKS, log)
        verified = read_json(result_file)
        if code or not self.is_verified(verified):
            lines = log.read_text(errors="replace").splitlines()
            broken = [line.split("  ")[1].strip() for line in lines if line.startswith("BROKEN  ")]
            print(read_log_end(log), file=sys.stderr)
            failure = f"ended with exit code {code}"
            if broken:
                failure = f"reports as BROKEN: {', '.join(broken)}"
            raise UserError(f"scripts/verify.py on {self.name} {failure}. See {log}, and fix that first.")
        checks = read_json(outcomes).get("checks", [])
        for kind in ("notes", "not_checked"):
            verified[kind] = [text for check in checks for text in check.get(kind, [])]
        replace_json(record_file, verified)
        return read_remarks(verified)

    def is_verified(self, verified: dict[str, Any]) -> bool:
        """Return whether this content of verified.json is that of a passed check of the present code and settings."""
        if not verified.get("passed") or verified.get("versions") != collect_package_versions():
            return False
        code = verified.get("code", {})
        files = {path.relative_to(self.fork).as_posix() for path in self.fork.glob("utils/**/*.py")}
        if not files <= code.keys():
            return False
        if any(compute_file_checksum(self.fork / name) != digest for name, digest in code.items()):
            return False
        for name, value in verified.get("settings", {}).items():
            if name != "seed" and self.settings.get(name) not in (value, "auto"):
                return False
        return True


def read_remarks(verified: dict[str, Any]) -> list[str]:
    """Return the notes in a verified.json, and the parts of checks that were not made."""
    return verified.get("notes", []) + [f"{NOT_CHECKED}{part}" for part in verified.get("not_checked", [])]


@dataclass
class Run:
    """The records of a complete run. Raises UserError if a record is missing."""

    side: str
    seed: int
    folder: Path

    def __post_init__(self) -> None:
        self.summary = read_json(self.folder / "summary.json")
        self.provenance = read_json(self.folder / "provenance.json")
        lines = [record for *_, record in read_records(self.folder / "metrics.jsonl")]
        # only the last start counts, because a run that was killed before its first checkpoint begins again
        started = [record for record in lines if record.get("event") == "started"]
        self.weights: str = started[-1].get("weights", "") if started else ""  # their digest at the start
        records = {"summary.json": self.summary, "provenance.json": self.provenance, "metrics.jsonl": self.weights}
        if lost := [name for name, content in records.items() if not content]:
            raise UserError(f"{lost[0]} in {self.folder} is incomplete. Delete the folder and give the command again.")

    def value(self, metric: str) -> float:
        """Return the metric of the last evaluation. Raises UserError if there is none, or if it is not finite."""
        final = self.summary.get("final") or {}
        run_name = f"{self.side} with seed {self.seed}"
        if metric not in final:
            remedy = "Give data with a validation set."
            if final:
                remedy = f"Choose one of {', '.join(final)}."
            raise UserError(f"The last evaluation of {run_name} has no {metric}. {remedy}")
        if final[metric] is None:
            raise UserError(
                f"The final {metric} of {run_name} is not finite. Give both sides settings that do not diverge."
            )
        return final[metric]

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each optimizer step with the samples of all ranks."""
        paths = sorted(self.folder.glob("samples/rank*.jsonl"))
        if not paths:
            raise UserError(
                f"{self.folder} has no record of its samples. Delete the folder and give the command again."
            )
        files = [(line for *_, line in read_records(path)) for path in paths]
        for step, lines in groupby(merge(*files, key=itemgetter("step")), key=itemgetter("step")):
            yield step, sorted(index for line in lines for index in line["indices"])


def find_differing_settings(a: Side, b: Side) -> list[str]:
    """Return the names of the settings that differ."""
    return [name for name in a.settings | b.settings if a.settings.get(name) != b.settings.get(name)]


def check_budget(a: Side, b: Side, ranks: int) -> None:
    """Raise UserError, before any training, if settings say that the sides would not train equally long."""

    def compute_global_batch(side: Side) -> int:
        micro_batch = side.settings.get("batch_size") or 1
        micro_batches = side.settings.get("grad_accum_steps") or 1
        return side.settings.get("global_batch_size") or micro_batch * micro_batches * ranks

    rows = [(name, a.settings.get(name), b.settings.get(name)) for name in BUDGET_SETTINGS]
    if not a.settings.get("batch_tokens") and not b.settings.get("batch_tokens"):  # otherwise only the runs show it
        rows.append(("the global batch", compute_global_batch(a), compute_global_batch(b)))
    require_equal(rows, "Give both the same, after --.")


def check_pair(a: Run, b: Run, has_samples: bool) -> None:
    """Raise UserError if the two runs had different budgets, data or orders of the data."""
    names = [("summary", "steps"), ("summary", "samples_seen"), ("summary", "world_size")]
    names += [("provenance", "global_batch_size"), ("provenance", "identity"), ("provenance", "content")]
    rows = [(f"{name} of seed {a.seed}", vars(a)[file].get(name), vars(b)[file].get(name)) for file, name in names]
    require_equal(rows, "Give both the same budget and data, after --.")
    check_held_out(a.provenance.get("held_out") or {}, b.provenance.get("held_out") or {})
    if has_samples:
        no_step: tuple[int, list[int]] = (0, [])
        for step_a, step_b in zip_longest(a.steps(), b.steps(), fillvalue=no_step):
            if step_a != step_b:
                step = max(step_a[0], step_b[0])
                raise UserError(
                    f"With seed {a.seed} A and B use other samples in step {step}. Give both one order of the data."
                )


def check_held_out(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> None:
    """Raise UserError if the evaluation sets differ, as far as both runs have read them."""
    remedy = "Evaluate both on the same data, with the same settings of the data."
    require_equal([("the evaluation sets", [*a], [*b])], remedy)
    for split, records in a.items():
        for key, left in records.items():
            right = b[split].get(key)
            if not isinstance(left, list) or not isinstance(right, list):
                require_equal([(f"{key} of {split}", left, right)], remedy)
                continue
            # these are samples, and one that was not read in time is None
            pairs = [pair for pair in zip(left, right, strict=False) if None not in pair]
            if number := sum(x != y for x, y in pairs):
                raise UserError(f"{number} of {len(pairs)} {key} of {split} differ between A and B. {remedy}")


def require_equal(rows: list[tuple[str, Any, Any]], remedy: str) -> None:
    """Raise UserError for the first of these names whose values of A and B differ."""
    for name, a, b in rows:
        if a != b:
            shown = ["none" if value in ("", None) else value for value in (a, b)]
            raise UserError(f"A and B differ in {name}: A has {shown[0]}, B has {shown[1]}. {remedy}")


def check_quantity(sides: Sequence[Side], out: Path, seed: int, metric: str) -> str:
    """Check that both evaluations compute the same from the same outputs of a network.

    Returns:
        What could not be tried, or "".

    Raises:
        UserError: if they compute something else.
    """
    outputs = out / "outputs.pt"
    results = []
    outputs.unlink(missing_ok=True)
    for side in sides:
        result, log = side.run_probe(out, seed, "outputs", outputs)
        if not result:
            return f"The metric of {side.name} could not be computed from given outputs of a network: see {log}."
        results.append(result)
    outputs.unlink()
    a, b = results
    for name in sorted(a["replaced"] | b["replaced"]):
        definitions = [origins.get(name, "the template") for origins in (a["replaced"], b["replaced"])]
        if definitions[0] != definitions[1]:
            raise UserError(
                f"{name} is that of {definitions[0]} in A and of {definitions[1]} in B, so A and B are not evaluated"
                " alike. Let no code of a fork replace a function of the template."
            )
    if not a["calls"] or metric not in a["metrics"]:
        return f"{metric} could not be computed from given outputs of a network. Only its source was compared."
    sums_a = a["metrics"][metric]
    sums_b = b["metrics"].get(metric, [])
    if len(sums_a) != len(sums_b) or not all(map(are_close, sums_a, sums_b)):
        raise UserError(
            f"A and B compute {sums_a} and {sums_b} (sum, count) for {metric} from the same outputs of a network, so"
            f" {metric} is not the same quantity. Let no setting, such as label smoothing, change what compute_loss"
            " does in evaluations."
        )
    return ""


def are_close(a: float | None, b: float | None) -> bool:
    """Return whether two numbers of a JSON file are equal up to rounding. None stands for one that is not finite."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=ROUNDING_TOLERANCE)


def run_script(argv: Sequence[object], ranks: int, log: Path) -> int:
    """Run a Python script, by torchrun if there are several ranks, and return its exit code.

    Its output is appended to `log`.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, *argv]
    with log.open("a") as file, running_process(command, stdout=file, stderr=subprocess.STDOUT) as process:
        return process.wait()


def read_log_end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()

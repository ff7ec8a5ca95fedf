# extra: judge
"""Is B better than A? Train both with the same seeds, data order and budget, and compare their final metric.

python scripts/judge.py "--lr 0.1" "--lr 0.05" --seeds 8 --metric min:loss --ranks 2 -- --max_steps 200
python scripts/judge.py . ../other-fork -- --dataset cifar10 --epochs 10

A and B are each the folder of a fork, a config file, a run's config.json, or flags in quotes. Flags for both follow --.
Each seed trains A and B. The result is the mean of the differences B - A, with its 95 % interval. The metric is that of
the last evaluation, since the best of many noisy evaluations is too good by chance. Give 5 seeds or more. Fewer than 3
are refused. The exit code is 0 if there is a verdict, also "no difference shown". It is 2 if there is none, and the
last line says why. docs/judge.md explains the result.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.judge.evaluation_code import explain_difference, list_notes
from scripts.lib.judge.statistics import CONFIDENCE_LEVEL, are_equal, find_collapsed, judge_differences
from scripts.lib.verify.result import GIVE_JSON_FILE, explain_unwritable
from utils.files import read_json, replace_json
from utils.run.command_line import repair_standard_streams
from utils.settings.checks import metric_name
from utils.settings.errors import UserError
from utils.settings.problems import describe_problem
from utils.table import format_table

MIN_SEEDS = 3
DEFAULT_SEEDS = 5
RERUN_ADVICE = "give the same command again, which keeps complete runs"
UNRECORDED_CONTENT = {  # for some settings, the content that no record shows
    "init_from": "What these weights have learned before was not compared.",
    "data_dir": "Of the training samples only names and labels were compared.",
}
MIN_SLOWDOWN = 1.25  # a side is noted whose steps take more than this many times as long in all pairs


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("a", metavar="A", help="the folder of a fork, a config file, or flags in quotes")
    add("b", metavar="B", help="the same for the other side")
    add("--seeds", type=int, default=DEFAULT_SEEDS, metavar="N", help=f"number of seeds (default: {DEFAULT_SEEDS})")
    add("--first-seed", type=int, default=0, metavar="S", help="the seeds are S, S + 1, ... (default: 0)")
    add("--metric", default="", help="min:NAME or max:NAME of the evaluations (default: best_metric of the settings)")
    add("--ranks", type=int, default=1, help="ranks of each run (default: 1)")
    add("--out", type=Path, help="folder of the runs, where a comparison continues (default: the next runs/judge-N)")
    add("--json", type=Path, metavar="FILE", help="write the result, or why there is none, to this file")
    end = argv.index("--") if "--" in argv else len(argv)
    words = []
    for word in argv[:end]:
        if word.startswith("--") and word.split("=")[0] not in parser._option_string_actions:
            word = f" {word}"  # argparse would take flags in quotes for options of its own, if they have no space
        words.append(word)
    options = parser.parse_args(words)
    options.flags = argv[end + 1 :]
    return options


class Judge:
    """One comparison of two sides. `report` is what --json writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seeds = range(options.first_seed, options.first_seed + options.seeds)
        self.notes: list[str] = []
        self.report: dict[str, Any] = {
            "verdict": None,
            "refused": "",
            "a": options.a,
            "b": options.b,
            "flags": options.flags,
            "ranks": options.ranks,
            "seeds": [*self.seeds],
            "notes": self.notes,
        }

    def run(self) -> None:
        """Compare the sides, train them and print the verdict. Raises UserError if there can be no verdict."""
        from scripts.lib.judge.sides import Side  # this imports torch

        options = self.options
        if options.seeds < MIN_SEEDS:
            raise UserError(
                f"--seeds must be at least {MIN_SEEDS}, got {options.seeds}. Fewer give no interval. {DEFAULT_SEEDS} or"
                " more are better."
            )
        if not 0 <= self.seeds[0] <= self.seeds[-1] < 2**63:
            raise UserError(f"--first-seed must let all seeds be from 0 to 2^63 - 1, got {options.first_seed}.")
        if options.ranks < 1:
            raise UserError(f"--ranks must be at least 1, got {options.ranks}.")
        self.sides = [
            Side.from_argument("A", options.a, options.flags),
            Side.from_argument("B", options.b, options.flags),
        ]
        codes = [side.code_checksum for side in self.sides]
        self.compare_sides(codes)
        self.metric = self.choose_metric()
        settings = [side.settings for side in self.sides]
        self.open_folder({"settings": settings, "code": codes, "ranks": options.ranks, "seeds": [*self.seeds]})
        for side in self.sides:
            notes = side.verify(self.out, self.seeds[0])
            self.notes += [f"Verify of {side.name}: {note}" for note in notes]
        self.print_verdict(self.train())

    def compare_sides(self, codes: list[str]) -> None:
        """Compare settings and code before any training, and note what a person has to compare. Raises UserError."""
        from scripts.lib.judge.sides import check_budget, find_differing_settings

        a, b = self.sides
        settings = {name: [a.settings.get(name), b.settings.get(name)] for name in find_differing_settings(a, b)}
        self.report["settings"] = settings
        if not settings and codes[0] == codes[1]:
            raise UserError("A and B have the same code and settings. Let them differ (flags after -- count for both).")
        check_budget(a, b, self.options.ranks)
        if a.fork != b.fork and (reason := explain_difference(a.fork, b.fork)):
            raise UserError(reason)
        self.notes += list_notes(a.fork, b.fork)
        for name, unrecorded in UNRECORDED_CONTENT.items():
            if name in settings:
                paths = " and ".join(path or "none" for path in settings[name])
                self.notes.append(f"--{name} of A and B is {paths}. {unrecorded}")

    def choose_metric(self) -> str:
        """Return --metric or the sides' best_metric. Raises UserError.

        The first evaluation settles "auto".
        """
        from utils.metrics import choose_best_metric

        metric = self.options.metric
        if not metric:
            best_metrics = {side.settings.get("best_metric", "auto") for side in self.sides}
            if len(best_metrics) > 1:
                names = " and ".join(sorted(best_metrics))
                raise UserError(f"--best_metric of A and B differs ({names}). Give --metric.")
            metric = best_metrics.pop()
        if problem := describe_problem("metric", metric, metric_name(metric)):
            raise UserError(problem)
        if metric != "auto":
            choose_best_metric(metric, [metric.rpartition(":")[2]])  # this fails if the metric needs a direction
        return metric

    def open_folder(self, request: dict[str, Any]) -> None:
        """Make the folder of the runs, or find that of the same request.

        Raises:
            UserError: if the folder has another request, or if the same sides were begun with another number of seeds.
        """
        out = self.options.out
        if not out:
            numbered = (Path(f"runs/judge-{number}") for number in count(1))
            out = next(folder for folder in numbered if is_usable_folder(folder, request))
        elif not is_usable_folder(out, request):
            self.compare_with_earlier(out, request)
            raise UserError(f"--out {out} has other files, or runs with other settings or code. Give another folder.")
        for file in sorted(out.parent.glob("*/judge.json")):
            if file.parent.resolve() != out.resolve():
                self.compare_with_earlier(file.parent, request)
        self.out = out
        self.record = read_json(out / "judge.json") or {"request": request, "judged": []}
        out.mkdir(parents=True, exist_ok=True)
        replace_json(out / "judge.json", self.record)
        self.report["out"] = str(out)
        print(f"The runs are in {out}.", flush=True)

    def compare_with_earlier(self, folder: Path, request: dict[str, Any]) -> None:
        """Note that runs in another folder are those of the same sides. Raises UserError if only some seeds are new."""
        record = read_json(folder / "judge.json")
        earlier = record.get("request", {})
        if (
            "seeds" not in earlier
            or serialize_sides(earlier) != serialize_sides(request)
            or not any(folder.glob("[ab]-seed*"))
        ):
            return
        last = earlier["seeds"][-1]
        seeds = f"seeds {earlier['seeds'][0]} to {last}"
        if earlier["seeds"] != request["seeds"] and {*earlier["seeds"]} & {*request["seeds"]}:
            raise UserError(
                f"{folder} compares the same sides with {seeds}. The number of seeds is fixed before the first run,"
                " since adding seeds until there is a verdict finds differences where there are none. Give the same"
                f" seeds again, or --first-seed {last + 1} for another comparison."
            )
        results = [f"{sentence} ({metric})" for metric, sentence in record["judged"]] or ["no result yet"]
        self.notes.append(f"{folder} compares the same sides with {seeds}. Its results are: {', '.join(results)}.")

    def train(self) -> list[dict[str, Any]]:
        """Train both sides with each seed, and return the two runs of each seed by side.

        Raises:
            UserError: if a run fails, or if A's and B's runs are not comparable.
        """
        from scripts.lib.judge.sides import check_pair, check_quantity
        from utils.metrics import choose_best_metric

        pairs: list[dict[str, Any]] = []
        for seed in self.seeds:
            is_first = not pairs
            pair = {}
            # the sides alternate, so that a machine that becomes slower or warmer is no advantage of one side
            for side in self.sides if len(pairs) % 2 == 0 else self.sides[::-1]:
                run = side.train(self.out, seed, self.options.ranks, has_samples=is_first)
                earlier = [earlier_pair[side.name] for earlier_pair in pairs]
                if earlier and run.provenance.get("code") != earlier[0].provenance.get("code"):
                    raise UserError(f"The code of {side.name} was changed between seeds. Give another --out.")
                if note := side.check_weights(self.out, run, earlier):
                    self.notes.append(note)
                pair[side.name] = run
            a, b = pair["A"], pair["B"]
            check_pair(a, b, has_samples=is_first)
            if is_first:
                self.final_metric, self.sign = choose_best_metric(self.metric, [*(a.summary.get("final") or {})])
                if note := check_quantity(self.sides, self.out, seed, self.final_metric):
                    self.notes.append(note)
            print(
                f"seed {seed}: {self.final_metric} A {a.value(self.final_metric):.6g}, B"
                f" {b.value(self.final_metric):.6g}",
                flush=True,
            )
            pairs.append(pair)
        return pairs

    def print_verdict(self, pairs: list[dict[str, Any]]) -> None:
        """Print the table, the notes and the verdict. Raises UserError if the differences have no deviation."""
        rows = []
        table = [["seed", "A", "B", "B - A"]]
        for pair in pairs:
            seed = pair["A"].seed
            a = pair["A"].value(self.final_metric)
            b = pair["B"].value(self.final_metric)
            rows.append({"seed": seed, "a": a, "b": b, "difference": b - a})
            table.append([str(seed), f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}"])
        print(format_table(table, right_aligned=range(4)))
        result = judge_differences(self.check_differences(rows), self.sign)
        self.note_slow_side(pairs)
        for side in ("A", "B"):
            self.note_collapses(side, [row[side.lower()] for row in rows])
        direction = "max" if self.sign > 0 else "min"
        self.report |= {
            "metric": self.final_metric,
            "direction": direction,
            "n": len(rows),
            "confidence": CONFIDENCE_LEVEL,
            "rows": rows,
            "mean_difference": result.mean,
            "standard_deviation": result.deviation,
            "interval": [*result.interval],
            "verdict": result.verdict,
            "sentence": result.sentence,
        }
        self.note_earlier_results(f"{direction}:{self.final_metric}", result.sentence)
        low, high = result.interval
        print(f"mean difference {result.mean:+.6g}, 95 % interval [{low:.6g}, {high:.6g}], n = {len(rows)}")
        for note in self.notes:
            print(f"Note: {note}")
        better = "higher" if self.sign > 0 else "lower"
        print(f"{result.sentence} ({direction}:{self.final_metric}, {better} is better)")

    def check_differences(self, rows: list[dict[str, Any]]) -> list[float]:
        """Return the differences, or zeros if they are zero up to rounding.

        Raises:
            UserError: if all differences are one other number.
        """
        differences = [row["difference"] for row in rows]
        values = [row[side] for side in "ab" for row in rows]
        if not are_equal(differences, values):
            return differences
        if not are_equal([0.0, *differences], values):
            raise UserError(
                f"All {len(rows)} differences of {self.final_metric} are {differences[0]:.6g} up to rounding, so"
                " their deviation is unknown. Give a finer metric, such as --metric min:loss, or other seeds."
            )
        return [0.0] * len(rows)

    def note_collapses(self, side: str, values: list[float]) -> None:
        """Note the runs of a side whose values are far worse than those of its other seeds."""
        for index in find_collapsed(values, self.sign):
            self.notes.append(
                f"With seed {self.seeds[index]} {self.final_metric} of {side} is {values[index]:.6g}, far worse than"
                f" with the other seeds. The mean depends on how often {side} collapses, which {len(values)} seeds"
                " hardly show."
            )

    def note_slow_side(self, pairs: list[dict[str, Any]]) -> None:
        """Note that each step of one side takes longer in all pairs."""
        for slow, fast in (("A", "B"), ("B", "A")):
            ratios = [compute_time_ratio(pair[slow], pair[fast]) for pair in pairs]
            if min(ratios) > MIN_SLOWDOWN:
                ratio = statistics.median(ratios)
                self.notes.append(
                    f"A step of {slow} takes {ratio:.1f} times as long as a step of {fast}. In the same time {fast}"
                    " would train longer."
                )

    def note_earlier_results(self, metric: str, sentence: str) -> None:
        """Note results of these runs by other metrics, because the best of several results is misleading."""
        results = self.record["judged"]
        other_results = [f"{name}: {result}" for name, result in results if name != metric]
        if other_results:
            self.notes.append(
                f"These runs were judged before by other metrics ({', '.join(other_results)}). Choosing among results"
                " makes an interval too narrow."
            )
        if [metric, sentence] not in results:
            results.append([metric, sentence])
            replace_json(self.out / "judge.json", self.record)


def is_usable_folder(folder: Path, request: dict[str, Any]) -> bool:
    """Return whether a folder has the runs of this request, or is empty."""
    is_same = read_json(folder / "judge.json").get("request") == request
    return is_same or not folder.exists() or not any(folder.iterdir())


def serialize_sides(request: dict[str, Any]) -> list[str]:
    """Return a text for each side of a request. The order is the same for A and B and for B and A."""
    sides = zip(request.get("settings", []), request.get("code", []), strict=True)
    return sorted(json.dumps([*side, request["ranks"]], sort_keys=True) for side in sides)


def compute_time_ratio(run: Any, other: Any) -> float:
    """Return how many times as long a sample of the first run takes (0: this is unknown)."""
    rate = run.summary.get("samples_per_s") or 0
    other_rate = other.summary.get("samples_per_s") or 0
    return other_rate / rate if rate > 0 else 0.0


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    if options.json:  # the new result may replace an earlier result, and no other file
        problem = explain_unwritable(options.json)
        is_empty = not options.json.is_file() or options.json.stat().st_size == 0
        if options.json.name == "judge.json" or not (is_empty or "verdict" in read_json(options.json)):
            problem = "it is no result of a judge"
        if problem:
            print(f"--json {options.json} cannot be written ({problem}). {GIVE_JSON_FILE}", file=sys.stderr)
            return 2
        options.json.unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores some signals
            signal.signal(number, signal.default_int_handler)  # this ends the processes that were started
    judge = Judge(options)
    try:
        judge.run()
    except UserError as error:
        judge.report["refused"] = str(error)
    except OSError as error:
        judge.report["refused"] = (
            f"{error.filename} cannot be used ({error.strerror}). Repair this or give another --out, and"
            f" {RERUN_ADVICE}."
        )
    except KeyboardInterrupt:
        judge.report["refused"] = f"The comparison was interrupted. To continue, {RERUN_ADVICE}."
    refused = judge.report["refused"]
    if refused:
        print(refused, file=sys.stderr)
    if options.json:
        replace_json(options.json, judge.report)
    return 2 if refused else 0


if __name__ == "__main__":
    repair_standard_streams()
    sys.exit(main())

# extra: judge
"""Is B better than A? Train both with the same seeds, data order and budget, and compare their final metric.

python scripts/judge.py "--lr 0.1" "--lr 0.05" --seeds 8 --metric min:loss --ranks 2 -- --max_steps 200
python scripts/judge.py . ../other-fork -- --dataset cifar10 --epochs 10

A and B are each a folder of a fork, a config file, a run's config.json, or flags in quotes; flags for both follow --.
Seeds are paired: each trains A and B. The result is the mean of the differences B - A with its 95 % interval. It is of
the last evaluation: the best of many evaluations is too good by chance, and more so the more evaluations there are.
Give 5 seeds or more: of 2 differences the interval is 7 times as wide as of 5 with the same deviation, and fewer than
3 are refused. Exit code 0: a verdict, also "no difference shown"; 2: refused or failed, with the reason.
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

from config import UserError
from utils.files import read_json, replace_json
from utils.run.command_line import open_output
from utils.table import format_table

FEWEST, USUAL = 3, 5
LONGER = 1.1  # times as long is a step that is noted, if it is so in all pairs


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("a", metavar="A", help="a fork's folder, a config file, or flags in quotes")
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--seeds", type=int, default=USUAL, metavar="N", help=f"number of seeds [{USUAL}]")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="the seeds are S, S + 1, ... [0]")
    parser.add_argument("--metric", default="", help="min:NAME or max:NAME of the evaluations [best_metric]")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each run [1]")
    parser.add_argument("--out", type=Path, help="folder of the runs; continues there [the next runs/judge-N]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, or why there is none")
    known = {option for action in parser._actions for option in action.option_strings}
    end = argv.index("--") if "--" in argv else len(argv)
    # argparse would take flags in quotes for options of its own, if there is no space in them
    words = [f" {word}" if word.startswith("--") and word.split("=")[0] not in known else word for word in argv[:end]]
    options = parser.parse_args(words)
    options.flags = argv[end + 1 :]
    return options


class Judge:
    """One comparison. `report` is what --json writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.seeds = options, range(options.first_seed, options.first_seed + options.seeds)
        given = {"a": options.a, "b": options.b, "flags": options.flags, "ranks": options.ranks}
        self.report: dict[str, Any] = {"verdict": None, "refused": "", **given, "seeds": [*self.seeds], "notes": []}

    def run(self) -> None:
        """Raises UserError if there can be no verdict."""
        from scripts.lib.judge.evaluation import difference, notes_on  # they import torch
        from scripts.lib.judge.sides import Side, check_budget, differing

        options = self.options
        if options.seeds < FEWEST:
            raise UserError(f"seeds={options.seeds}: are too few for an interval; give {FEWEST} or more, or {USUAL}")
        if options.ranks < 1:
            raise UserError(f"ranks={options.ranks}: is below 1; give 1 or more")
        a, b = self.sides = [Side.of(name, vars(options)[name.lower()], options.flags) for name in ("A", "B")]
        self.report["settings"] = {name: [each.settings.get(name) for each in (a, b)] for name in differing(a, b)}
        codes = [a.code, b.code]
        if not self.report["settings"] and codes[0] == codes[1]:
            raise UserError("A and B have the same code and settings; let them differ (flags after -- count for both)")
        check_budget(a, b, options.ranks)
        if reason := difference(a.fork, b.fork) if a.fork != b.fork else "":
            raise UserError(reason)
        self.report["notes"] += notes_on(a.fork, b.fork)
        if init_from := self.report["settings"].get("init_from"):
            text = " and ".join(value or "none" for value in init_from)
            note = f"init_from: A and B have {text}; what these weights have learned before was not compared"
            self.report["notes"].append(note)
        self.metric = self.checked_metric()
        request = {"settings": [a.settings, b.settings], "code": codes, "ranks": options.ranks}
        self.open(request | {"seeds": [*self.seeds]})
        for side in (a, b):
            notes = [f"verify of {side.name}: {note}" for note in side.verify(self.out, self.seeds[0])]
            self.report["notes"] += notes
        self.conclude(self.train())

    def checked_metric(self) -> str:
        """--metric or the sides' best_metric; "auto" is settled by the first evaluation. Raises UserError."""
        from utils.metrics import choose_best

        asked = {each.settings.get("best_metric", "auto") for each in self.sides}
        if not self.options.metric and len(asked) > 1:
            raise UserError(f"best_metric: A and B have {' and '.join(sorted(asked))}; give --metric")
        metric = self.options.metric or asked.pop()
        if metric != "auto":
            choose_best(metric, [metric.rpartition(":")[2]])  # does it need a direction?
        return metric

    def open(self, request: dict[str, Any]) -> None:
        """Make the folder of the runs, or find that of the same request. Raises UserError if it has another one, or if
        the same sides were begun with another number of seeds."""
        numbered = (Path(f"runs/judge-{number}") for number in count(1))
        for out in [self.options.out] if self.options.out else numbered:
            known = read_json(out / "judge.json")
            if known.get("request") == request or not out.exists() or not any(out.iterdir()):
                break
            if self.options.out:
                self.compare_with(out, request)
                raise UserError(f"out={out}: has other files, or runs with other settings or code; give another")
        for file in sorted(out.parent.glob("*/judge.json")):
            if file.parent != out:
                self.compare_with(file.parent, request)
        self.out, self.request = out, known or {"request": request, "judged": []}
        out.mkdir(parents=True, exist_ok=True)
        replace_json(out / "judge.json", self.request)
        self.report["out"] = str(out)
        print(f"runs: {out}", flush=True)

    def compare_with(self, folder: Path, request: dict[str, Any]) -> None:
        """Note that the runs in another folder are of the same sides. Raises UserError if only some seeds are new."""
        earlier = read_json(folder / "judge.json")
        theirs = earlier.get("request", {})
        if not any(folder.glob("[ab]-seed*")) or sides_of(theirs) != sides_of(request):
            return
        seeds = f"seeds {theirs['seeds'][0]} to {theirs['seeds'][-1]}"
        if theirs["seeds"] != request["seeds"] and {*theirs["seeds"]} & {*request["seeds"]}:
            raise UserError(
                f"seeds: {folder} compares the same sides with {seeds}, and their number is fixed before the first run,"
                " since adding seeds until there is a verdict finds differences where there are none; give the same"
                f" seeds again, or --first-seed {theirs['seeds'][-1] + 1} for another comparison"
            )
        results = [f"{sentence} ({metric})" for metric, sentence in earlier["judged"]] or ["no result yet"]
        self.report["notes"].append(f"{folder} compares the same sides with {seeds}: {'; '.join(results)}")

    def train(self) -> list[list[Any]]:
        """The runs of all seeds. Raises UserError if one fails, or A's and B's are not comparable."""
        from scripts.lib.judge.sides import check_pair, check_quantity
        from utils.metrics import choose_best

        pairs: list[list[Any]] = []
        for seed in self.seeds:
            found, is_first = {}, not pairs
            for side in self.sides if len(pairs) % 2 == 0 else self.sides[::-1]:
                run = found[side.name] = side.train(self.out, seed, self.options.ranks, has_samples=is_first)
                earlier = pairs[0]["AB".index(side.name)] if pairs else run
                if run.provenance.get("code") != earlier.provenance.get("code"):
                    raise UserError(f"{side.name}: its code was changed between seeds; give another --out")
                if note := side.check_weights(self.out, run, [pair["AB".index(side.name)] for pair in pairs]):
                    self.report["notes"].append(note)
            a, b = found["A"], found["B"]
            check_pair(a, b, has_samples=is_first)
            if is_first:
                self.name, self.sign = choose_best(self.metric, [*(a.summary.get("final") or {})])
                if note := check_quantity(self.sides, self.out, seed, self.name):
                    self.report["notes"].append(note)
            print(f"seed {seed}: {self.name} A {a.value(self.name):.6g}, B {b.value(self.name):.6g}", flush=True)
            pairs.append([a, b])
        return pairs

    def conclude(self, pairs: list[list[Any]]) -> None:
        """Print the table and the verdict. Raises UserError if the differences have no deviation."""
        from scripts.lib.judge.statistics import LEVEL, are_equal, collapsed, judged

        rows = [[pair[0].seed, *(each.value(self.name) for each in pair)] for pair in pairs]
        differences = [b - a for _, a, b in rows]
        shown = [["seed", "A", "B", "B - A"]]
        shown += [[str(s), f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}"] for s, a, b in rows]
        print(format_table(shown, numbers=range(4)))
        columns = {"A": [row[1] for row in rows], "B": [row[2] for row in rows]}
        if are_equal(differences, columns["A"] + columns["B"]):
            if not are_equal([0.0, *differences], columns["A"] + columns["B"]):
                raise UserError(
                    f"{self.name}: all {len(rows)} differences are {differences[0]:.6g}, but for rounding, so their"
                    " deviation is unknown; give a finer metric, such as --metric min:loss, or other seeds"
                )
            differences = [0.0] * len(rows)
        self.note_seconds(pairs)
        for name, values in columns.items():
            for place in collapsed(values, self.sign):
                self.report["notes"].append(
                    f"{name}, seed {rows[place][0]}: {self.name} is {values[place]:.6g}, far worse than with the other"
                    f" seeds; the mean depends on how often {name} collapses, which {len(rows)} seeds hardly show"
                )
        direction, result = "max" if self.sign > 0 else "min", judged(differences, self.sign)
        self.report |= {"metric": self.name, "direction": direction, "n": len(rows), "confidence": LEVEL}
        self.report["rows"] = [{"seed": seed, "a": a, "b": b, "difference": b - a} for seed, a, b in rows]
        self.report |= {"mean_difference": result.mean, "standard_deviation": result.deviation}
        self.report |= {"interval": [*result.interval], "verdict": result.verdict, "sentence": result.sentence}
        self.note_earlier(f"{direction}:{self.name}", result.sentence)
        low, high = result.interval
        print(f"mean difference {result.mean:+.6g}, 95 % interval [{low:.6g}, {high:.6g}], n = {len(rows)}")
        for note in self.report["notes"]:
            print(f"note: {note}")
        better = "higher" if self.sign > 0 else "lower"
        print(f"{result.sentence} ({direction}:{self.name}, {better} is better)")

    def note_seconds(self, pairs: list[list[Any]]) -> None:
        """Note that each step of one side takes longer in all pairs."""
        rates = [[run.summary.get("samples_per_s", 0) for run in pair] for pair in pairs]
        for name, slow, fast in (("A", 0, 1), ("B", 1, 0)):
            if all(pair[slow] * LONGER < pair[fast] for pair in rates) and min(map(min, rates)) > 0:
                ratio = statistics.median(pair[fast] / pair[slow] for pair in rates)
                text = f"a step of {name} takes {ratio:.1f} times as long; the other side trains longer in that time"
                self.report["notes"].append(text)

    def note_earlier(self, metric: str, sentence: str) -> None:
        """Note results of these runs by other metrics: who takes the best of several is misled."""
        others = [f"{name}: {result}" for name, result in self.request["judged"] if name != metric]
        if others:
            text = f"judged before by {', '.join(others)}; choosing among results makes an interval too narrow"
            self.report["notes"].append(text)
        if [metric, sentence] not in self.request["judged"]:
            self.request["judged"].append([metric, sentence])
            replace_json(self.out / "judge.json", self.request)


def sides_of(request: dict[str, Any]) -> list[str]:
    """A text for each side of a request, in one order for A and B and for B and A."""
    sides = zip(request.get("settings", []), request.get("code", []), strict=True)
    return sorted(json.dumps([*side, request["ranks"]], sort_keys=True) for side in sides)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started
    judge, code = Judge(options), 0
    try:
        judge.run()
    except UserError as error:
        judge.report["refused"], code = str(error), 2
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        judge.report["refused"], code = "interrupted; give the same command again, which keeps what is complete", 2
        print(judge.report["refused"], file=sys.stderr)
    if options.json:
        replace_json(options.json, judge.report)
    return code


if __name__ == "__main__":
    open_output()
    sys.exit(main())

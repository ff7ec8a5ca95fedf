# extra: reports
"""runs.py --html on forged run folders: a complete, escaped, self-contained page."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from scripts import runs as script
from utils.report.goodput import TIME_ACCOUNTS

START = 1.8e9
VOID = ("meta", "link")
HOSTILE = '<script>alert("1")</script> & <b>'


class Page(HTMLParser):
    """The tags, text and tooltips of a page; every tag must be closed."""

    def __init__(self, source):
        super().__init__()
        self.source, self.open, self.tags, self.text, self.tips, self.loaded = source, [], [], [], [], []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [
            value for name, value in attributes if re.fullmatch("(xlink:)?href|src|srcset|data|poster", name)
        ]
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            (self.tips if "title" in self.open and "svg" in self.open else self.text).append(data)


def forge(folder, attempts=((0, 0, 8),), values=(0.5, 0.75), state="completed", config=None, metric="top1", **status):
    """A run with a train and an eval record per value at steps 4, 8, ... attempts: (seconds, first step, last step)."""
    folder.mkdir(parents=True)

    def at(seconds):
        return datetime.fromtimestamp(START + seconds, UTC).isoformat(timespec="milliseconds")

    def write(name, content):
        (folder / name).write_text(json.dumps(content))

    records, ended, last = [], attempts[-1][0] + 50, {}
    for began, first, step in attempts:  # each trains from 10 s to 50 s
        event = {"kind": "event", "event": "resumed" if last else "started", "step": first, "time": at(began + 10)}
        records.append(event | {"seconds": 10, "samples_seen": 8 * first} | last)
        last = {"previous_step": step, "previous_time": at(began + 50)}
    write("status.json", {"state": state, "epoch": 2, "step": attempts[-1][2], "time": at(ended), **status})
    write("config.json", config or {"lr": 0.1})
    write("provenance.json", {"command": ["python", "train.py", HOSTILE], "git_commit": "abc", "versions": {"t": "1"}})
    if state == "completed":
        best = {
            "best_metric": metric,
            "best_value": values[-1],
            "final": {"loss": 0.25},
            "test": [{"kind": "eval", "epoch": 2, "step": 8, "split": "test", "count": 8, "auc": 0.8375}],
            "world_size": 2,
            "restarts": 0,
        }
        write(
            "summary.json",
            best | {"state": state, "wall_s": 100.0, "time": {f"{name}_s": 1.0 for name in TIME_ACCOUNTS}},
        )
    for k, value in enumerate(values, 1):
        common = {"step": 4 * k, "epoch": k, "loss": value, metric: value, "time": at(ended - 20 + 4 * k)}
        records.append({"kind": "train", **common, "data_wait_s": 0.1, "step_s": 0.4, "lr": 0.1})
        records.append({"kind": "eval", **common, "split": "val", "weights": "model", "count": 8})
        records.append({"kind": "event", "event": "evaluation", **common, "split": "val", "seconds": 1.0})
        records.append({"kind": "event", "event": "checkpoint", **common, "path": "x", "seconds": 0.5})
    event = {"kind": "event", "event": "straggler", "step": 5, "time": at(ended - 12)}
    records.append(event | {"rank": 3, "host": "node7", "times": 1.8, "cause": "data"})
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, records), "17", '{"kind": "tr']))
    return folder


@pytest.fixture
def page(tmp_path, monkeypatch):
    def read(*folders):
        file = tmp_path / "report.html"
        monkeypatch.setattr("sys.argv", ["runs.py", *map(str, folders), "--html", str(file)])
        assert script.main() == 0
        return Page(file.read_text())

    return read


def test_the_page_is_complete_self_contained_and_escaped(tmp_path, page):
    folders = [
        forge(tmp_path / "a" / HOSTILE.replace("/", "|"), config={"lr": 0.1, HOSTILE: HOSTILE}, metric="<i>f1</i>"),
        forge(tmp_path / "b", config={"lr": 0.2}, state="failed", error=HOSTILE),
    ]
    report = page(*folders)
    text = " ".join(report.text)
    assert not {"script", "b", "i"} & {*report.tags} and text.count(HOSTILE) == 8  # error, settings, commands
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\(", report.source)
    assert report.loaded == ["data:,"]  # the icon
    assert HOSTILE.replace("/", "|") in text and "node7" in text and "<i>f1</i>" in text
    for picture in re.findall("<svg.*?</svg>", report.source, re.DOTALL):
        ET.fromstring(picture)


def test_several_runs_are_in_columns_with_the_settings_that_differ_first(tmp_path, page):
    report = page(*(forge(tmp_path / f"run{k}", config={"seed": 1, "lr": k / 10}) for k in (1, 2, 3)))
    part = report.source.split("<h2>Configuration</h2>")[1]
    before = part.split("<details>")[0]
    assert "lr" in before and "0.1" in before and "0.3" in before and "seed" not in before and "seed" in part
    assert report.source.count("<th>run2</th>") == 5  # figures, times, settings twice, provenance


@pytest.mark.parametrize(
    ("attempts", "lost", "down"),
    [
        ([(0, 0, 8)], 0, 0),
        ([(0, 0, 8), (60, 4, 8), (150, 8, 20)], 1, 2),  # killed, stopped, completed
        ([(0, 0, 8), (60, 4, 9), (150, 2, 20)], 2, 2),  # the second resume had to use an older checkpoint
    ],
)
def test_the_timeline_shows_each_attempt_and_its_lost_steps(tmp_path, page, attempts, lost, down):
    report = page(forge(tmp_path / "run", attempts))
    rows = re.findall(r'<rect class="(\w+)" x="\S+" y="\S+" width="(\S+)" height="\d+"><title>', report.source)
    kinds = [kind for kind, _ in rows]
    assert [kinds.count(kind) for kind in ("start_up", "recomputed", "down")] == [len(attempts), lost, down]
    assert all(float(width) > 0 for _, width in rows)
    assert report.source.count('class="straggler"') == 2  # in the picture and in its legend
    assert f"{len(attempts)} attempt" in " ".join(report.text)
    assert len(re.findall(r"so it was killed\. The steps after \d were lost\.</td>", report.source)) == lost


def test_the_error_of_an_attempt_comes_from_the_logs(tmp_path, page):
    folder = forge(tmp_path / "run", [(0, 0, 8), (90, 4, 20)])
    (folder / "logs").mkdir()
    when = datetime.fromtimestamp(START + 52, UTC).isoformat()[:19]
    (folder / "logs" / "rank0.log").write_text(
        f"{when}.000Z 0 n epoch 1\n{when}.100Z 0 n ERROR rank 1 on node3 was killed\n"
    )
    assert "Attempt 1: rank 1 on node3 was killed. The steps after 4 were lost." in " ".join(page(folder).text)


def test_non_finite_values_are_gaps_in_the_curves(tmp_path, page):
    report = page(forge(tmp_path / "run", values=(0.5, 0.4, None, 0.3, 0.2), metric="rmse"))
    loss = re.search("<svg.*?</svg>", report.source, re.DOTALL)[0]
    assert [line.count(",") for line in re.findall('points="(.*?)"', loss)] == [2, 2, 2, 2]
    assert "run, evaluation, optimizer step 20: 0.2" in report.tips and not re.search(r"\bnan\b|None", report.source)
    assert ">rmse<" in page(forge(tmp_path / "none", values=(None,), metric="rmse"), tmp_path / "run").source


@pytest.mark.parametrize("missing", ["metrics.jsonl", "provenance.json config.json", "", "all"])
def test_a_run_that_just_started_or_lacks_files_is_shown(tmp_path, page, missing):
    folder = forge(tmp_path / "run", state="running", values=(0.5,) if missing else ())
    for name in missing.split():
        if name == "all":
            for file in folder.iterdir():
                file.write_text("" if file.name == "status.json" else "[1, {")
        else:
            (folder / name).unlink()
    text = " ".join(page(folder).text)
    assert ("unknown" if missing == "all" else "running") in text
    assert ("No attempt times are recorded" in text) == (missing in ("all", "metrics.jsonl"))


def test_a_page_is_written_only_for_runs_and_only_as_html(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["runs.py", str(tmp_path), "--html", f"{tmp_path}/a.html"])
    assert script.main() == 2 and "There is no run (a folder with a status.json) in " in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["runs.py", str(tmp_path), "--html", f"{tmp_path}/a.htm"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "Give a name that ends in .html in an existing folder." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_each_metric_and_the_step_time_have_a_plot(tmp_path, page):
    folder = forge(tmp_path / "run")
    common = {"step": 4, "epoch": 1, "loss": 0.5}
    more = [
        {"kind": "train", **common, "only_training": 0.5, "step_s": 0.5},
        {"kind": "eval", **common, "only_evaluation": 0.5, "split": "val", "weights": "model", "count": 8},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(f"\n{json.dumps(record)}" for record in more) + "\n")
    report = page(folder)
    pictures = [plot for plot in re.findall("<svg.*?</svg>", report.source, re.DOTALL) if "optimizer step<" in plot]
    by_name = {re.search(r">([^<]*)</text>(?!.*rotate)", plot[plot.index("rotate") :])[1]: plot for plot in pictures}
    names = ["loss", "top1", "only_training", "only_evaluation", "step time, s (mean of the ranks)"]
    assert not [name for name in names if name not in by_name]
    for name, lines, dashed in (("loss", 2, 1), ("only_training", 1, 0), ("only_evaluation", 1, 0)):
        lines_of = re.findall("<polyline.*", by_name[name])
        assert (len(lines_of), sum("dasharray" in line for line in lines_of)) == (lines, dashed)


@pytest.mark.parametrize("stragglers", [[], [(3, 1.8), (1, 2.5), (3, 4.0)]])
def test_ranks_that_were_slow_are_in_a_table_the_slowest_first(tmp_path, page, stragglers):
    folder = forge(tmp_path / "run")
    kept = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"straggler"' not in line]
    event = {"kind": "event", "event": "straggler", "step": 5, "host": "node7", "cause": "data"}
    kept[-2:] = [json.dumps(event | {"rank": rank, "times": times}) for rank, times in stragglers]
    (folder / "metrics.jsonl").write_text("\n".join([*kept, ""]))
    rows = re.findall(
        r"<td>run</td><td>(\d)</td><td>node7</td><td>data</td><td>(\d)</td><td>(\S+)</td>", page(folder).source
    )
    assert rows == ([("3", "2", "4"), ("1", "1", "2.5")] if stragglers else [])


def test_ten_times_the_records_do_not_make_a_larger_page(tmp_path, page):
    few, many = (
        len(page(forge(tmp_path / str(n), values=[0.5 + k % 7 / 20 for k in range(n)])).source) for n in (1000, 10000)
    )
    assert few < many < 1.1 * few < 1_500_000


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_shows_the_page_without_errors(tmp_path, page):
    page(forge(tmp_path / "run", [(0, 0, 8), (90, 4, 20)]), forge(tmp_path / "other"))
    words = "chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr --v=0 --dump-dom".split()
    ended = subprocess.run([*words, f"file://{tmp_path}/report.html"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "CONSOLE" not in ended.stderr, ended.stderr
    assert ended.stdout.count("<svg") > 10 and "</html>" in ended.stdout

"""scaling.py: what it computes from measurements, and what it rejects (real ranks: test_scaling_runs.py)."""

import json
import xml.etree.ElementTree as ET

import pytest

import scaling
from config import UserError
from lib.scaling import flags, report

# ---- flags ----


def row(change, *ratios):
    return {"change": change, "ratios": list(ratios), "step_s": 0.1}


CONTROL = row({}, 1.0, 1.02, 0.99)


def test_the_flags_to_paste_gain_more_than_the_noise():
    sweep = [CONTROL, row({"bucket_cap_mb": 0.66}, 1.1, 1.2, 0.9), row({"comm_hook": "bf16"}, 1.05, 1.3, 1.2)]
    line = "flags: --comm_hook bf16   (a step is 20.0% faster, noise 2.0%; bf16 rounds the gradients)"
    assert flags.advice(sweep) == line
    assert flags.advice(sweep[:2]) == "flags: --bucket_cap_mb 0.66   (a step is 10.0% faster, noise 2.0%)"
    none = "flags: none; no other bucket_cap_mb or comm_hook gains more than the noise of "
    assert flags.advice([CONTROL, row({"bucket_cap_mb": 11.0}, 1.015)]) == f"{none}2.0%"
    assert flags.advice([row({}, 1.0), row({"comm_hook": "fp16"}, 1.005)]) == f"{none}1.0%"  # not worth a flag
    assert flags.advice([CONTROL]) == f"{none}2.0%"


def test_equivalent_bucket_sizes_are_not_tried():
    bucket, *hooks = flags.variants("none", gradient=8 * 2**20, bucket=25 * 2**20)
    assert bucket == {"bucket_cap_mb": 6.2}  # 100 MB is the same single bucket as 25 MB
    assert hooks == [{"comm_hook": "fp16"}, {"comm_hook": "bf16"}]


# ---- the report ----


ALPHA, BETA = 1e-4, 1e-9


def job(ranks, step, alone):
    found = {"ranks": ranks, "device": "cpu", "gradient": 2**21, "bucket": 2**20}
    if ranks > 1:
        latency = 2 * (ranks - 1) * ALPHA
        largest = latency + 2 * (ranks - 1) / ranks * 2**24 * BETA
        found |= {"all_reduce": [[8, latency], [2**24, largest]], "sweep": [CONTROL]}
    found["weak"] = {"samples": 8 * ranks, "rounds": [[step, 0.001, alone]] * 3}
    found["strong"] = {"samples": 32, "rounds": [[32 * step / (8 * ranks), 0.001, alone]] * 3}
    return found


@pytest.fixture
def found():
    jobs = [job(1, 0.1, 0.1), job(2, 0.12, 0.11), job(4, 0.13, 0.11)]
    return {"measured": jobs} | report.summarize(jobs)


def test_points_are_measured_or_predicted_and_their_parts_add_up(found):
    points = {(each["mode"], each["ranks"]): each for each in found["points"]}
    assert [key for key in points if points[key]["is_predicted"]] == [("weak", 8), ("weak", 16), ("weak", 32)]
    assert all(each["compute"] + each["data"] + each["communication"] == pytest.approx(1) for each in points.values())
    two = points["weak", 2]
    assert two["communication"] == pytest.approx(0.01 / 0.12) and two["efficiency"] == pytest.approx(0.1 / 0.12)


def test_more_ranks_add_only_the_extra_time_of_the_all_reduces(found):
    assert report.link(found["measured"][-1]) == (pytest.approx(ALPHA), pytest.approx(BETA))
    eight = next(each for each in found["points"] if each["ranks"] == 8)
    messages, sent = 2 * (2 * 7 - 2 * 3), (2 * 7 / 8 - 2 * 3 / 4) * 2**21  # in two buckets
    assert eight["step_s"] == pytest.approx(0.13 + messages * ALPHA + sent * BETA)
    assert eight["global_batch"] == 64 and eight["compute"] * eight["step_s"] == pytest.approx(0.109)


def test_the_table_and_the_plot_distinguish_measured_and_predicted_points(found):
    lines = report.text(found).splitlines()
    assert [line.split()[:2] for line in lines[1:10]] == [
        *([str(2**k), "weak"] for k in range(6)),
        *([str(2**k), "strong"] for k in range(3)),
    ]
    assert [line.endswith("predicted") for line in lines[1:7]] == [False] * 3 + [True] * 3
    assert "all-reduce of 4 ranks: 100 us per message, 1.00 GB/s per link" in lines
    assert lines[-1].startswith("flags: none")
    picture = ET.fromstring(report.plot(found, "a title"))
    curves = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert [curve.get("stroke-dasharray") is not None for curve in curves] == [False, True, False]


# ---- the script ----


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "2,x"], "argument --ranks: 2,x: is not a list of numbers; write --ranks 1,2,4"),
        (["--plot", "/nowhere/x.svg"], "--plot: /nowhere/x.svg: cannot be written; give a name that ends in .svg in a"),
        (["--plot", "x.png"], "--plot: x.png: cannot be written; give a name that ends in .svg in an existing folder"),
        (["--rounds", "0"], "must be 1 or more"),
    ],
)
def test_bad_flags_are_rejected(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        scaling.parse(words)
    assert sentence in capsys.readouterr().err


def test_one_rank_is_always_measured_and_other_flags_are_passed_to_train_py():
    options, others = scaling.parse(["--ranks", "4,2", "--lr", "1"])
    assert options.ranks == [1, 2, 4] and others == ["--lr", "1"]


def test_a_file_measured_with_other_flags_is_rejected(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"flags": ["--lr", "1"], "most": 2, "measured": []}))
    with pytest.raises(UserError, match=r"was measured with other flags \(--lr 1\); give another name"):
        scaling.open_report(file, [], 2)
    file.write_text("[]")
    with pytest.raises(UserError, match="is not a report of this script; give another name"):
        scaling.open_report(file, [], 2)

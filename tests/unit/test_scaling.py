"""scripts/scaling.py: what it computes from measurements, and what it refuses (real ranks:
builtin/test_scaling_runs.py)."""

import json
import math

import pytest

import scaling
from config import TrainingConfig, UserError
from scales import account, knobs
from scales.prediction import Link, Machine, Step, efficiency, fit, step_seconds

SIZES = (8, 2**16, 2**20, 2**24)
FREE = Machine(cores=math.inf, threads=1)


@pytest.mark.parametrize(("ranks", "is_ring"), [(2, True), (4, False), (6, True)])
def test_the_fit_finds_latency_and_bandwidth_again(ranks, is_ring):
    link = Link(35e-6, 1 / 1.2e9, 0.3, is_ring)
    found = fit([(size, link.seconds(ranks, size)) for size in SIZES], ranks, 0.3, is_ring)
    assert found.alpha == pytest.approx(link.alpha, rel=1e-9) and found.beta == pytest.approx(link.beta, rel=1e-9)
    assert (found.work, found.is_ring) == (0.3, is_ring)


def test_a_ring_sends_two_messages_a_neighbour_and_nearly_twice_the_bytes():
    link = Link(alpha=1.0, beta=0.5)
    assert link.seconds(2, 100) == 2 * 1.0 + 100 * 0.5
    assert link.seconds(4, 100) == 6 * 1.0 + 150 * 0.5
    assert Link(1.0, 0.5, is_ring=False).seconds(8, 800) == 2 * 3 * 1.0 + 1400 * 0.5


def test_a_step_by_hand():
    """Data 1, two micro-batches of 2 + 4, update 3; buckets ready after 1 and 4 of the last backward pass, which ends
    at 13."""
    step = Step(seconds=16, data=1, forward=2, backward=4, ready=((1, 100), (4, 100)), passes=2)
    assert step_seconds(step, Link(0.0, 0.01), 1, 1, FREE) == (16, 0)
    # the last bucket has nothing behind which to hide
    assert step_seconds(step, Link(0.0, 0.01), 2, 2, FREE) == (
        17,
        1,
    )
    assert step_seconds(step, Link(0.0, 0.05), 2, 2, FREE) == (23, 7)  # 10 + 5 + 5, and the update after it
    assert step_seconds(step, Link(0.0, 0.05), 4, 1, FREE)[1] == pytest.approx(7 + 2 * 2.5)
    wrapped = Step(seconds=16.5, data=1, forward=2, backward=4.5, ready=((1, 100), (4.5, 100)), passes=2, wrapping=0.5)
    assert step_seconds(wrapped, Link(0.0, 0.01), 1, 1, FREE) == (16, 0)  # one rank alone has no DDP
    assert step_seconds(wrapped, Link(0.0, 0.01), 2, 2, FREE) == (17.5, 1.5)
    assert efficiency(300, 4, 100, 1) == efficiency(300, 4, 200, 2) == 0.75  # of a rank
    half = step.of(passes=1, scale=0.5)
    assert (half.seconds, half.backward, half.ready) == (16 - 12 + 3, 2, ((0.5, 100), (2, 100)))


# ---- flags ----


def row(change, *ratios):
    return {"change": change, "ratios": list(ratios), "step_s": 0.1}


CONTROL = row({}, 1.0, 1.02, 0.99)


def test_the_line_of_flags_is_of_what_gains_more_than_the_noise():
    sweep = [CONTROL, row({"bucket_cap_mb": 0.66}, 1.1, 1.2, 0.9), row({"comm_hook": "bf16"}, 1.05, 1.3, 1.2)]
    assert knobs.judge(sweep) == ({"comm_hook": "bf16", "bucket_cap_mb": 0.66}, pytest.approx(0.02))
    sweep.append(row({"comm_hook": "bf16", "bucket_cap_mb": 0.66}, 1.4, 1.4, 1.4))
    assert knobs.advice(sweep).startswith(
        "flags: --comm_hook bf16 --bucket_cap_mb 0.66   (a step is 40.0% faster, noise 2.0%; bf16 rounds"
    )
    sweep[-1]["ratios"] = [1.1]
    assert knobs.advice(sweep).startswith("flags: --comm_hook bf16   (a step is 20.0% faster")
    # within the noise:
    sweep = [CONTROL, row({"bucket_cap_mb": 11.0}, 1.015), {"change": {"comm_hook": "fp16"}, "problem": "is not known"}]
    assert (
        knobs.advice(sweep)
        == "flags: none; no other setting of bucket_cap_mb or comm_hook gains more than the noise of 2.0%"
    )
    assert knobs.judge([row({}, 1.0), row({"comm_hook": "fp16"}, 1.005)])[0] == {}  # nor what is not worth a flag


def test_buckets_that_would_be_the_same_are_not_tried():
    sizes = [change.get("bucket_cap_mb") for change in knobs.variants(TrainingConfig(bucket_cap_mb=25), 8 * 2**20)]
    assert sizes == [6.2, None, None]  # 100 MB would be the one bucket that 25 is
    hooks = [change.get("comm_hook") for change in knobs.variants(TrainingConfig(comm_hook="bf16"), 8 * 2**20)]
    assert hooks == [None, None, "none", "fp16"]


# ---- the account and its picture ----


def job(ranks, step, alone):
    profile = {
        "plain": 0.06,
        "forward": 0.02,
        "backward": 0.04,
        "ready": [[0.0, 100], [0.02, 2**20], [0.04, 2**20]],
        "gradient": 2**21,
    }
    link = Link(1e-4, 1e-9, 0.5)
    found = {
        "ranks": ranks,
        "here": ranks,
        "device": "cpu",
        "threads": 1,
        "cores": 2,
        "room": 2,
        "passes": 1,
        "batch": 8,
    }
    found["profile"] = profile
    found["half"] = {"batch": 4, "plain": 0.03} if ranks == 1 else {}
    if ranks > 1:
        found |= {"all_reduce": [[size, link.seconds(ranks, size)] for size in SIZES], "work": 0.5, "sweep": [CONTROL]}
    found["weak"] = {"samples": 8 * ranks, "rounds": [[step, 0.001, alone]] * 3}
    found["strong"] = found["weak"] if ranks == 2 else {"samples": 16, "rounds": [[1.9 * step, 0.002, alone]] * 3}
    return found


@pytest.fixture
def report():
    return account.account([job(1, 0.1, 0.1), job(2, 0.12, 0.11)], 16)


def test_points_are_measured_or_predicted_their_shares_add_up_and_the_table_says_so(report):
    points = {(each["mode"], each["ranks"]): each for each in report["points"]}
    assert {key: each["is_predicted"] for key, each in points.items()} == {
        (mode, ranks): ranks > 2 for mode in ("weak", "strong") for ranks in (1, 2, 4, 8, 16)
    }
    assert all(each["compute"] + each["data"] + each["communication"] == pytest.approx(1) for each in points.values())
    two = points["weak", 2]
    assert two["communication"] == pytest.approx(0.01 / 0.12) and two["efficiency"] == pytest.approx(0.1 / 0.12)
    assert points["strong", 2]["efficiency"] == pytest.approx(0.19 / 2 / 0.12)
    # on another machine: here they would share cores
    assert points["weak", 4]["here"] == 2 and 0.8 < points["weak", 4]["efficiency"] < 0.9
    assert points["weak", 8]["efficiency"] < points["weak", 4]["efficiency"]
    # half the micro-batch
    assert points["strong", 4]["global_batch"] == 16 and points["strong", 4]["step_s"] < points["weak", 4]["step_s"]
    assert report["link"]["alpha"] == pytest.approx(1e-4) and report["advice"].startswith("flags: none")
    lines = account.sentences(report, 2)
    assert [line.split()[:2] for line in lines[1:11]] == [
        [str(2**k), mode] for mode in ("weak", "strong") for k in range(5)
    ]
    assert [line.endswith("predicted") for line in lines[1:6]] == [False, False, True, True, True]
    assert any("100 us a message, 1.00 GB/s a link" in line for line in lines)
    assert any(line.startswith("beyond 2 ranks: on more machines like this one") for line in lines)
    assert lines[-1].startswith("flags: ")


# ---- the script ----


def test_what_the_script_refuses(tmp_path):
    for words, sentence in (
        (["--ranks", "2,x"], "write --ranks 1,2,4"),
        (["--rounds", "0"], "give one"),
        (["--plot", "a.png"], "ends in .svg"),
    ):
        with pytest.raises(UserError, match=sentence):
            scaling.read(words)
    assert scaling.read(["--ranks", "4,2", "--lr", "1"])[0].ranks == [1, 2, 4] and scaling.read(["--lr", "1"])[1] == [
        "--lr",
        "1",
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"flags": ["--lr", "1"], "global_batch": 8, "measured": []}))
    with pytest.raises(UserError, match=r"holds the scaling of other flags \(--lr 1\); give another name"):
        scaling.open_report(str(file), [], TrainingConfig(), 2)
    file.write_text("[]")
    with pytest.raises(UserError, match="holds no scaling; give another name"):
        scaling.open_report(str(file), [], TrainingConfig(), 2)

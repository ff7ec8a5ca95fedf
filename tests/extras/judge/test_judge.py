# extra: judge
"""scripts/judge.py: verdicts and refusals of whole comparisons, most of which train a stand-in that takes no time."""

import json
import shutil
import signal
import sys
import time

import pytest

import judge
from ranks import ROOT, finish, launch, start
from scripts.lib.judge import sides
from scripts.lib.judge.evaluation_code import explain_difference
from training import SIZE
from utils.run.provenance import collect_package_versions, compute_file_checksum

TRAIN = """
import json, sys, time
from pathlib import Path
from config import TrainingConfig

config, fork = TrainingConfig.from_args(), Path(__file__).parent
folder, changes = config.run_folder, json.loads((fork / "changes.json").read_text())
(folder / "samples").mkdir(parents=True, exist_ok=True)
with (fork / "started").open("a") as file:
    print(folder.name, config.seed, config.lr, config.resume_from, file=file)
if (folder / "status.json").exists():
    sys.exit()  # the run is complete
while (fork / "wait").exists():
    time.sleep(0.01)
if (fork / "fails").exists():
    sys.exit("the cause\\nis above")
steps = config.max_steps or config.epochs
loss = changes.get("final", {"loss": config.lr * (1 + 0.01 * config.seed)})
if "by_seed" in changes:
    loss = {"loss": changes["by_seed"][config.seed]} | changes.get("more", {})
held_out = {"val": {"identity": "13 samples, ff", "content": "", "sketches": changes.get("sketches", [[1], None, [3]])}}
records = {
    "summary.json": {"state": "completed", "steps": steps, "samples_seen": 8 * steps, "world_size": 1, "final": loss,
                     "samples_per_s": 100.0},
    "provenance.json": {"code": changes.get("codes", [1, 1])[config.seed % 2], "global_batch_size": config.batch_size,
                        "identity": "64 samples, aa", "content": "", "held_out": held_out},
}
for name, values in records.items():
    (folder / name).write_text(json.dumps(values | changes.get(name, {})))
(folder / "status.json").touch()
weights = changes.get("weights", [f"w{seed}" for seed in range(9)])[config.seed]
(folder / "metrics.jsonl").write_text(json.dumps({"kind": "event", "event": "started", "weights": weights}) + "\\n")
order = changes.get("order", 1)
if config.record_samples and order:
    lines = [{"step": step, "indices": [step, step + order]} for step in range(1, steps + 1)]
    (folder / "samples/rank0.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""
VERIFY = """
import json, os, sys
from pathlib import Path

fork = Path(__file__).parent.parent
if os.environ["RANK"] == "0":
    with (fork / "verifications").open("a") as file:
        print(*sys.argv[1:], file=file)
    if (fork / "broken").exists():
        print("BROKEN  plain load  does not open  [0.1 s]", flush=True)
        sys.exit(1)
    (fork / "verified.json").write_text((fork / "passed.json").read_text())
    notes = [
        {"notes": ["a sample is in both sets"], "not_checked": []},
        {"notes": [], "not_checked": ["the data in a new process"]},
    ]
    Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"checks": notes}))
"""
MODEL = """
import torch
from losses import smooth
from utils.metrics import count_correct as correct

RATE = 0.1


class Net(torch.nn.Module):
    pass


def helper(x):
    return smooth(x) * RATE


def compute_loss(model, batch):
    return {"loss": (helper(model(batch)), 1), "top1": (correct(batch), 1)}


def unused():
    return 1
"""
ALL = ("--max_steps", "3")


@pytest.fixture
def fork(tmp_path):
    return make_fork(tmp_path / "fork")


@pytest.fixture
def no_probe(monkeypatch):
    monkeypatch.setattr(sides, "check_quantity", lambda *_: "")


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch):
    monkeypatch.setattr(judge.signal, "signal", lambda *_: None)


def make_fork(folder, **texts):
    """A fork with the real config, and scripts that take no time. texts: of other files."""
    for name in ("utils/training", "scripts"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "config.py", folder)
    (folder / "utils/extras").symlink_to(ROOT / "utils/extras")
    files = {"train.py": TRAIN, "model.py": MODEL, "dataset.py": "x = 1\n", "scripts/verify.py": VERIFY}
    files |= {
        "ddp_utils.py": "",
        "losses.py": "def smooth(x):\n    return x\n",
        "utils/metrics.py": "def count_correct(x):\n    return x\n",
        "utils/training/fingerprint.py": "def fingerprint_parameters(model):\n    return 1\n",
    }
    for name, text in (files | {"changes.json": "{}"} | texts).items():
        (folder / name).write_text(text)
    paths = [path for path in folder.glob("**/*.py") if "scripts" not in path.parts]
    code = {path.relative_to(folder).as_posix(): compute_file_checksum(path) for path in paths}
    report = {"passed": True, "versions": collect_package_versions(), "code": code, "settings": {"seed": 42}}
    (folder / "passed.json").write_text(json.dumps(report))
    shutil.copy(folder / "passed.json", folder / "verified.json")
    return folder


def other_fork(fork, texts=(), **changes):
    """A fork beside it, with these files, or whose runs record other values."""
    files = {"more.py": "", "changes.json": json.dumps(changes)}
    return make_fork(fork.with_name("other"), **files | dict(texts))


def run(tmp_path, *words, flags=ALL):
    """The exit code and the report."""
    code = judge.main([*map(str, words), "--json", str(tmp_path / "report.json"), "--", *flags])
    return code, json.loads((tmp_path / "report.json").read_text())


def test_a_verdict_of_forks_has_paired_seeds_in_alternating_order(tmp_path, fork, no_probe, capsys):
    other, out = other_fork(fork, final={"loss": 0.1}), tmp_path / "out"
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--out", out, flags=(*ALL, "--lr", "0.5"))
    assert code == 0 and result["verdict"] == "B" and result["direction"] == "min" and result["n"] == 3, result
    assert [row["seed"] for row in result["rows"]] == [0, 1, 2] and result["rows"][1]["a"] == pytest.approx(0.505)
    low, high = result["interval"]
    assert low < result["mean_difference"] < high < 0 and result["mean_difference"] == pytest.approx(-0.405)
    assert "B is better (min:loss, lower is better)" in capsys.readouterr().out
    assert (fork / "started").read_text().split("\n")[0] == "a-seed0 0 0.5 auto"
    times = {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    assert sorted(times, key=times.get) == ["a-seed0", "b-seed0", "b-seed1", "a-seed1", "a-seed2", "b-seed2"]


@pytest.mark.parametrize(
    ("words", "flags", "reason"),
    [
        ("--seeds 2", "", "--seeds must be at least 3, got 2. Fewer give no interval. 5 or more are better."),
        ("--ranks 0", "", "--ranks must be at least 1, got 0."),
        ("--first-seed -1", "", "--first-seed must let all seeds be from 0 to 2^63 - 1, got -1."),
        ("--first-seed 9223372036854775806", "", "2^63 - 1, got 9223372036854775806."),
        ("--metric Min:loss", "", '--metric must be auto, NAME, min:NAME or max:NAME, got "Min:loss".'),
        ("", "--help", "train.py --print_config of A prints no settings"),
        ("--metric top9", "", "--best_metric top9 needs a direction. Give min:top9 or max:top9."),
        ("--metric min:top9", "", "--best_metric must be a metric that evaluations report (loss"),
        ("", "--seed 3", "A has --seed, which the judge gives itself. Leave it out"),
        ("", "--run-dir x", "A has --run_dir, which the judge gives itself. Leave it out"),
        ("", "--max_time 3", "A has --max_time 3.0, which does not go with a judge. Leave it out."),
        ("", "--max_step 3", "train.py does not accept the settings of A: --max_step"),
    ],
)
def test_bad_options_are_refused(tmp_path, fork, no_probe, words, flags, reason):
    other = other_fork(fork)
    words = [*words.split(), "--out", tmp_path / "out"]
    code, result = run(tmp_path, fork, other, *words, flags=[*ALL, *flags.split()])
    assert code == 2 and reason in result["refused"] and result["verdict"] is None


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("--lr 0.1", "--lr=0.1", "A and B have the same code and settings"),
        (
            "--max_steps 4",
            "--max_steps 3",
            "A and B differ in max_steps: A has 4, B has 3. Give both the same, after",
        ),
        ("--dataset_size 64", "--dataset_size 32", "dataset_size: A has 64, B has 32. Give both the same"),
        ("--batch_size 8", "--grad_accum_steps 2", "the global batch: A has 8, B has 128. Give both the same"),
        ("--drop_last", "--lr 0.1", "drop_last: A has True, B has False. Give both the same"),
        (
            "--best_metric loss",
            "--best_metric max:top1",
            "--best_metric of A and B differs (loss and max:top1). Give --metric.",
        ),
        ("shared.toml", "--lr 0.1", "A has --checkpoint_dir, which all of its runs would share. Leave it out."),
        ("missing.toml", "--lr 0.1", "--config missing.toml cannot be read"),
        ("--config missing.toml", "--lr 0.1", "--config missing.toml cannot be read"),
        ("missing.toml", "--config=other.toml", "--config missing.toml cannot be read"),
        ("--config=a.toml --config b.toml", "--lr 0.1", "A has two files of settings. Give one file, and the other"),
        (
            "--data_dir it's",
            "--lr 0.1",
            "The flags of A (--data_dir it's) cannot be read (No closing quotation). Close each quote.",
        ),
        (
            "tests",
            "--lr 0.1",
            "A is the folder tests, which has no train.py. Give the folder of a fork, a config, or flags.",
        ),
    ],
)
def test_settings_that_are_no_fair_comparison_are_refused_before_training(tmp_path, a, b, reason):
    if a == "shared.toml":
        (tmp_path / a).write_text('checkpoint_dir = "one"\n')
        a = tmp_path / a
    code, result = run(tmp_path, a, b, "--out", tmp_path / "out", flags=())
    assert code == 2 and reason in result["refused"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"summary.json": {"steps": 2}}, "steps of seed 0: A has 3, B has 2. Give both the same budget and data"),
        ({"summary.json": {"samples_seen": 9}}, "samples_seen of seed 0: A has 24, B has 9"),
        ({"provenance.json": {"global_batch_size": 7}}, "global_batch_size of seed 0: A has 64, B has 7"),
        ({"provenance.json": {"identity": "63 samples, aa"}}, "A has 64 samples, aa, B has 63 samples, aa"),
        ({"provenance.json": {"content": "ee"}}, "content of seed 0: A has none, B has ee"),
        ({"provenance.json": {"held_out": {}}}, "the evaluation sets: A has ['val'], B has []. Evaluate both on the"),
        ({"sketches": [[1], [2], [4]]}, "1 of 2 sketches of val differ between A and B. Evaluate both on the same"),
        ({"order": 2}, "With seed 0 A and B use other samples in step 1. Give both one order of the data."),
        ({"order": 0}, "b-seed0 has no record of its samples. Delete the folder and give the command again."),
        ({"final": {"loss": None}}, "The final loss of B with seed 0 is not finite. Give both sides settings that do"),
        ({"final": {"top1": 1.0}}, "The last evaluation of B with seed 0 has no loss. Choose one of top1."),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused_after_the_first_pair(tmp_path, fork, no_probe, changes, reason):
    code, result = run(tmp_path, fork, other_fork(fork, **changes), "--out", tmp_path / "out")
    assert code == 2 and reason in result["refused"], result["refused"]
    assert len((fork / "started").read_text().splitlines()) == 1


@pytest.mark.parametrize("record", ["summary.json", "provenance.json", "metrics.jsonl"])
@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_records_that_are_lost_are_named(tmp_path, fork, no_probe, record, is_there):
    other, out = other_fork(fork, final={"loss": 9.0}), tmp_path / "out"
    words = (fork, other, "--seeds", 3, "--out", out)
    assert run(tmp_path, *words)[0] == 0
    file = out / "b-seed0" / record
    file.write_text("") if is_there else file.unlink()
    code, result = run(tmp_path, *words)
    text = f"{record} in {out / 'b-seed0'} is incomplete. Delete the folder and give the command again."
    assert code == 2 and result["refused"] == text
    shutil.rmtree(out / "b-seed0")
    code, result = run(tmp_path, *words)
    assert code == 0 and result["verdict"] == "A"


def test_code_that_was_edited_between_seeds_is_refused(tmp_path, fork, no_probe):
    code, result = run(tmp_path, fork, other_fork(fork, codes=[1, 2]), "--out", tmp_path / "out")
    assert code == 2 and result["refused"] == "The code of B was changed between seeds. Give another --out."


@pytest.mark.parametrize("side", "AB")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_fork_of_an_older_template_is_refused_in_a_sentence(tmp_path, fork, side, is_there):
    other = other_fork(fork)
    old = {"A": fork, "B": other}[side]
    digests = old / "utils/training/fingerprint.py"
    digests.write_text("def fingerprint(state):\n    return 1\n") if is_there else digests.unlink()
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "out")
    assert code == 2 and result["refused"].startswith(
        f"{side} ({old}) is a fork of an older template, whose runs record"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "is_verified"),
    [
        ({}, True),
        ({"settings": {"seed": 7, "lr": 0.1, "image_size": 8}}, True),
        ({"settings": {"lr": 0.2}}, False),
        ({"versions": {}}, False),
        ({"passed": False}, False),
        ({"code": {}}, False),
        ({"code": {"model.py": "0"}}, False),
    ],
)
def test_a_check_counts_only_for_the_same_code_versions_and_settings(fork, changes, is_verified):
    side = sides.Side("A", "", fork, {"lr": 0.1, "image_size": "auto"})
    report = json.loads((fork / "verified.json").read_text())
    code = report["code"] | changes.get("code", {}) if changes.get("code") != {} else {}
    assert side.is_verified(report | changes | {"code": code}) == is_verified


SAME_WEIGHTS = "All seeds of B start from the same weights."


@pytest.mark.parametrize(
    ("probed", "message"),
    [
        ({"is_seeded": True}, "Seeds 0 and 2 of B start from the same weights, since create_model draws them from a"),
        ({"is_seeded": False}, f"{SAME_WEIGHTS} The interval holds for these weights only."),
        ({}, f"{SAME_WEIGHTS} The interval holds for these weights only. Whether model.py draws them could not be"),
    ],
)
def test_seeds_that_start_from_the_same_weights(tmp_path, fork, no_probe, monkeypatch, probed, message):
    other = other_fork(fork, weights=["w0", "w1", "w0", "w0"])
    calls = []
    monkeypatch.setattr(sides.Side, "run_probe", lambda *words: calls.append(words) or (probed, "the log"))
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "out", "--seeds", 4)
    assert len(calls) == 1
    if probed.get("is_seeded"):
        assert code == 2 and result["refused"].startswith(message)
        assert "seed3" not in (fork / "started").read_text()
    else:
        assert code == 0 and len(result["notes"]) == 1 and result["notes"][0].startswith(message)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_differences_without_a_deviation_are_no_result(tmp_path, fork, no_probe, scale):
    """The values are floats, so that equal differences of accuracies are not the same bits."""
    other = other_fork(fork, by_seed=[18 * scale, 19 * scale, 17 * scale])
    (fork / "changes.json").write_text(json.dumps({"by_seed": [17 * scale, 18 * scale, 16 * scale]}))
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "out", "--seeds", 3)
    assert code == 2 and result["verdict"] is None
    text = f"All 3 differences of loss are {scale:g} up to rounding, so their deviation is unknown. Give a finer"
    assert result["refused"].startswith(text)


def test_differences_that_are_zero_but_for_rounding_show_no_difference(tmp_path, fork, no_probe):
    other = other_fork(fork, by_seed=[0.1 + 0.2, 0.4, 0.5])
    (fork / "changes.json").write_text('{"by_seed": [0.3, 0.4, 0.5]}')
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "out", "--seeds", 3)
    assert code == 0 and result["verdict"] == "none" and result["interval"] == [0.0, 0.0]


def test_runs_that_collapse_are_named_by_side_and_seed(tmp_path, fork, no_probe):
    other = other_fork(fork, by_seed=[0.40, 2.30, 0.41, 0.42])
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "out", "--seeds", 4)
    assert code == 0 and result["verdict"] == "none"
    assert result["notes"] == [
        "With seed 1 loss of B is 2.3, far worse than with the other seeds. The mean depends on how often B collapses,"
        " which 4 seeds hardly show."
    ]


EDITS = {  # of a file: what is named, or "" if it does not evaluate
    "the function": ("model.py", MODEL.replace(', 1), "top1"', ', 2), "top1"'), "model.py: compute_loss"),
    "what it calls": ("model.py", MODEL.replace("* RATE", "+ RATE"), "model.py: helper"),
    "a constant of that": ("model.py", MODEL.replace("0.1", "0.2"), "model.py: RATE"),
    "a file that it imports": ("losses.py", "def smooth(x):\n    return 2 * x\n", "losses.py"),
    "the data": ("dataset.py", "x = 2\n", "dataset.py"),
    "an import of the data": ("dataset.py", "import losses\n", "dataset.py"),
    "the template": ("utils/metrics.py", "def count_correct(x):\n    return 2 * x\n", "utils/metrics.py"),
    "a summary": ("model.py", f"{MODEL}\n\ndef summarize(outputs):\n    return 1\n", "model.py: summarize"),
    "the network": ("model.py", MODEL.replace("    pass", "    width = 2"), ""),
    "another function": ("model.py", MODEL.replace("return 1", "return 2"), ""),
    "a comment": ("model.py", MODEL.replace("RATE = 0.1", "RATE = 0.1  # tuned"), ""),
}


@pytest.mark.parametrize("edit", EDITS)
def test_other_code_of_the_evaluation_is_refused_by_file_and_function(tmp_path, fork, edit):
    name, text, named = EDITS[edit]
    other = other_fork(fork, {name: text})
    assert bool(explain_difference(fork, other)) == bool(named), explain_difference(fork, other)
    if named:
        code, result = run(tmp_path, fork, other, "--out", tmp_path / "out")
        assert code == 2 and result["refused"].startswith(
            f"{named} computes the metric, but is not the same in A and B."
        )
        assert not (fork / "started").exists()


def test_what_the_judge_cannot_compare_is_a_note(tmp_path, fork, no_probe):
    """Weights of a file on one side, slower steps, another train.py, and code that may reach held-out data."""
    slow = {"samples_per_s": 40.0, "state": "completed", "final": {"loss": 9.0}, "steps": 3, "samples_seen": 24}
    texts = {"train.py": f"{TRAIN}\nextra = 1\n", "model.py": f"{MODEL}\n{READS}"}
    other = other_fork(fork, texts, **{"summary.json": slow | {"world_size": 1}})
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--out", tmp_path / "out")
    assert code == 0 and result["notes"] == [
        "In B, `from dataset import create_dataset` (model.py: create_dataset) leads to data. Does it learn from"
        " held-out samples?",
        "In B, `create_dataset` (model.py: after_step) leads to data. Does it learn from held-out samples?",
        "train.py is not the same in A and B. Do both train alike, and record what they did?",
        "A step of B takes 2.5 times as long as a step of A. In the same time A would train longer.",
    ]


READS = """
from dataset import create_dataset


def after_step(model, progress, taken):
    create_dataset(None, "val")
"""


def test_weights_of_a_file_on_one_side_are_a_note(tmp_path, fork, no_probe, monkeypatch):
    for name, text in (("a.toml", "lr = 0.1"), ("b.toml", "lr = 0.2\ninit_from = 'weights.pt'")):
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(sides, "ROOT", fork)
    code, result = run(tmp_path, tmp_path / "a.toml", tmp_path / "b.toml", "--seeds", 3, "--out", tmp_path / "out")
    text = "--init_from of A and B is none and weights.pt. What these weights have learned before was not compared."
    assert code == 0 and result["notes"] == [text], result


def test_broken_code_is_not_judged_and_verified_code_is_verified_once(tmp_path, fork, no_probe):
    other, words = other_fork(fork, final={"loss": 9.0}), ["--out", tmp_path / "out", "--seeds", 3]
    (other / "verified.json").unlink()
    (other / "broken").touch()
    code, result = run(tmp_path, fork, other, *words)
    assert code == 2 and result["refused"].startswith("scripts/verify.py on B reports as BROKEN: plain load. See "), (
        result
    )
    assert not (fork / "started").exists()
    (other / "broken").unlink()
    for _ in range(2):
        code, result = run(tmp_path, fork, other, *words)
        assert code == 0 and result["verdict"] == "A"
        assert result["notes"] == [
            "Verify of B: a sample is in both sets",
            "Verify of B: Not checked: the data in a new process",
        ]
        (other / "verified.json").unlink(missing_ok=True)  # of another check since: the folder of the runs knows
    assert (other / "verifications").read_text().count(f"--config {tmp_path / 'out' / 'b.toml'} --seed 0") == 2
    assert not (fork / "verifications").exists()
    (other / "scripts/verify.py").unlink()
    (other / "losses.py").write_text("def smooth(x):\n    return x  # edited\n")
    code, result = run(tmp_path, fork, other, "--out", tmp_path / "next")
    assert code == 2 and result["refused"] == f"B ({other}) has no scripts/verify.py. Restore the extra verify."


def test_a_run_that_fails_is_named_with_the_end_of_its_log(tmp_path, fork, no_probe, capsys):
    other = other_fork(fork, final={"loss": 0.2})
    (other / "fails").touch()
    words = (fork, other, "--out", tmp_path / "out", "--seeds", 3)
    code, result = run(tmp_path, *words)
    assert (
        code == 2
        and f"Repair what {tmp_path / 'out' / 'b-seed0.log'} says, and give the same command" in result["refused"]
    )
    assert "the cause\nis above" in capsys.readouterr().err
    (other / "fails").unlink()
    code, result = run(tmp_path, *words)
    assert code == 0 and result["verdict"] == "A"  # the loss of the stand-in is lr
    assert (fork / "started").read_text().count("a-seed0") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_judge_that_was_interrupted_continues_where_it_was(tmp_path, fork, no_probe, monkeypatch, number):
    other = other_fork(fork, final={"loss": 2.0})
    (other / "wait").touch()
    words = [fork, other, "--seeds", "3", "--json", tmp_path / "report.json"]
    command = [sys.executable, ROOT / "scripts/judge.py", *words, "--", *ALL]
    (tmp_path / "report.json").write_text('{"verdict": "A"}')
    started = start(command, cwd=tmp_path)
    ends = time.monotonic() + 60
    while "b-seed0" not in ((other / "started").read_text() if (other / "started").exists() else ""):
        assert time.monotonic() < ends and started.poll() is None
        time.sleep(0.02)
    assert not (tmp_path / "report.json").exists()  # the earlier one is of other runs
    started.send_signal(number)
    ended = finish(started, 30)
    assert (
        ended.code == 2
        and "The comparison was interrupted. To continue, give the same command again" in ended.err
        and not ended.left
    ), ended.text
    assert json.loads((tmp_path / "report.json").read_text())["refused"].startswith("The comparison was interrupted.")
    (other / "wait").unlink()
    monkeypatch.chdir(tmp_path)  # the runs are in runs/judge-1 there
    code, result = run(tmp_path, *words[:4])
    assert code == 0 and result["n"] == 3 and result["out"] == "runs/judge-1" and not result["notes"], result
    assert [line.split()[0] for line in (other / "started").read_text().splitlines()] == [
        *("b-seed0", "b-seed0", "b-seed1", "b-seed2")
    ]
    code, result = run(tmp_path, *words[:4], flags=(*ALL, "--lr", "0.3"))
    assert code == 0 and result["out"] == "runs/judge-2" and not result["notes"]
    code, result = run(tmp_path, *words[:4], "--out", "runs/judge-1", flags=(*ALL, "--lr", "0.3"))
    assert code == 2 and "runs with other settings or code. Give another folder." in result["refused"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path, fork):
    (tmp_path / "file").touch()
    code, result = run(tmp_path, fork, other_fork(fork), "--out", tmp_path / "file")
    assert code == 2 and "cannot be used (Not a directory). Repair this or give another --out" in result["refused"], (
        result
    )


@pytest.mark.parametrize("name", ["model.py", "judge.json", "missing/report.json", "folder.json", "config.json"])
def test_a_result_that_could_not_be_written_is_refused_before_training(tmp_path, fork, capsys, name):
    """Nor does it take the place of another file. An empty file, as mktemp makes, or an earlier result is replaced."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    words = [fork, other_fork(fork), "--out", tmp_path / "out", "--json", tmp_path / name, "--", *ALL]
    assert judge.main([*map(str, words)]) == 2 and not (tmp_path / "out").exists()
    assert ". Give the name of a .json file in an existing folder" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == '{"lr": 0.1}'


def test_settings_of_any_length_and_letters_reach_the_runs(tmp_path, fork, no_probe, monkeypatch):
    """Those of a file that a kill has cut are written again."""
    monkeypatch.setattr(sides, "ROOT", fork)
    (tmp_path / "b.yaml").write_text("lr: 0.3\n")
    words = ("--data_dir /tmp/" + 50 * "\U0001f600" + 300 * "x/", f"--config {tmp_path / 'b.yaml'}", "--seeds", 3)
    (fork / "fails").touch()
    assert run(tmp_path, *words, "--out", tmp_path / "out")[0] == 2
    (fork / "fails").unlink()
    (tmp_path / "out/b.toml").write_text("")
    code, result = run(tmp_path, *words, "--out", tmp_path / "out")
    assert code == 0 and [row["b"] for row in result["rows"]] == pytest.approx([0.3, 0.303, 0.306])


def test_the_number_of_seeds_is_fixed_before_the_first_run(tmp_path, fork, no_probe):
    """In the folder of the runs and beside it, also if A and B are exchanged."""
    other = other_fork(fork, final={"loss": 9.0})
    first = tmp_path / "runs/first"
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--out", first)
    assert code == 0 and result["verdict"] == "A"
    count = (fork / "started").read_text()
    text = f"{first} compares the same sides with seeds 0 to 2. The number of seeds is fixed before the first run"
    second = tmp_path / "runs/second"
    for pair, out in ((fork, other), first), ((fork, other), second), ((other, fork), second):
        for seeds in (("--seeds", 4), ("--seeds", 3, "--first-seed", 2)):
            code, result = run(tmp_path, *pair, *seeds, "--out", out)
            assert code == 2 and result["refused"].startswith(text), result["refused"]
            assert result["refused"].endswith("or --first-seed 3 for another comparison.")
    assert (fork / "started").read_text() == count


def test_other_comparisons_of_the_same_sides_and_other_metrics_are_notes(tmp_path, fork, no_probe):
    final = {"loss": 9.0, "top1": 0.5}
    other, out = other_fork(fork, final=final), tmp_path / "runs/first"
    (fork / "changes.json").write_text(
        json.dumps({"by_seed": [0.1, 0.11, 0.12, 0.1, 0.2, 0.15], "more": {"top1": 0.5}})
    )
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--out", out, "--metric", "min:loss")
    assert code == 0 and not result["notes"]
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--out", out, "--metric", "max:top1")
    text = "These runs were judged before by other metrics (min:loss: A is better). Choosing among results makes"
    assert code == 0 and result["notes"] == [f"{text} an interval too narrow."]
    code, result = run(tmp_path, fork, other, "--seeds", 3, "--first-seed", 3, "--out", out.with_name("second"))
    text = f"{out} compares the same sides with seeds 0 to 2. Its results are: A is better (min:loss), no difference"
    assert code == 0 and result["notes"][0].startswith(text)


IN_EVALUATION = """    loss = F.cross_entropy(logits, labels, reduction="sum")
    top = """


@pytest.mark.parametrize("is_smoothed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_setting_that_changes_what_an_evaluation_computes_is_found(tmp_path, is_smoothed):
    """The outputs of the networks differ, and are not what is compared."""
    for name in ("config.py", "dataset.py", "ddp_utils.py", "utils", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "model.py").read_text()
    assert text.count(IN_EVALUATION) == 1
    smoothed = IN_EVALUATION.replace('"sum")', '"sum", label_smoothing=config.label_smoothing)')
    (tmp_path / "model.py").write_text(text.replace(IN_EVALUATION, smoothed) if is_smoothed else text)
    common = ["--dataset_size", "16", *SIZE, "--batch_size", "4", "--backend", "gloo"]
    pair = [
        sides.Side.from_argument(name, flags, common) for name, flags in (("A", ""), ("B", "--label_smoothing 0.1"))
    ]
    for side in pair:
        side.fork = tmp_path
    if is_smoothed:
        with pytest.raises(sides.UserError, match="so loss is not the same quantity. Let no setting"):
            sides.check_quantity(pair, tmp_path, 0, "loss")
    else:
        assert sides.check_quantity(pair, tmp_path, 0, "loss") == ""
        assert "only its source" in sides.check_quantity(pair, tmp_path, 0, "auc")


def test_numbers_that_are_not_finite_are_equal_to_each_other(tmp_path, monkeypatch):
    """They are null in the files."""
    pair = [sides.Side(name, "", tmp_path) for name in "AB"]
    probed = {"calls": 1, "replaced": {}, "metrics": {"auc": [None, 4.0]}}
    monkeypatch.setattr(sides.Side, "run_probe", lambda *_: (tmp_path / "outputs.pt").touch() or (probed, "the log"))
    assert sides.check_quantity(pair, tmp_path, 0, "auc") == ""
    assert sides.are_close(1.0, 1.0) and not sides.are_close(None, 1.0) and not sides.are_close(1.0, None)


@pytest.mark.slow
def test_two_configs_of_this_fork_are_judged_on_two_ranks(tmp_path):
    flags = f"--dataset_size 64 {' '.join(SIZE)} --epochs 1 --batch_size 16 --backend gloo".split()
    (tmp_path / "b.toml").write_text("lr = 1e-9\n")
    words = ["--lr=0.01", tmp_path / "b.toml", "--seeds", "3", "--ranks", "2", "--metric", "min:loss"]
    words += ["--out", tmp_path / "out", "--json", tmp_path / "report.json", "--", *flags]
    ended = launch([sys.executable, ROOT / "scripts/judge.py", *words], deadline=400)
    result = json.loads((tmp_path / "report.json").read_text())
    assert ended.code == 0 and result["n"] == 3 and not result["notes"], ended.text
    assert result["settings"] == {"lr": [0.01, 1e-9]}
    summaries = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*-seed*/summary.json"))]
    assert [entry["final"]["loss"] for entry in summaries] == [row[side] for side in "ab" for row in result["rows"]]
    assert {entry["world_size"] for entry in summaries} == {2}

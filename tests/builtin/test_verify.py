# extra: verify and template
"""scripts/verify.py passes on the template, and names the broken invariant of faulty forks (tests/faults/*.patch)."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

import forks
from ranks import ROOT, WarmLaunch, copy_repository, finish, need, stop, torchrun
from training import wait_until

FLAGS = "--image_size 8 --dataset_size 60 --backend gloo".split()
GIVEN = "--dataset_size 24 --schedule linear --warmup_epochs 0.1".split()
GIVEN += ["--ema_decay", "0.9"]
PATCH = ["patch", "-s", "-p1", "-F0"]  # no fuzz: it plants lines where they are wrong
FAULTS = sorted((ROOT / "tests" / "faults").glob("*.patch"))
DEFAULT = ("rank_dependent_parameter",)
ALONE = ("unseeded_noise", "forgotten_set_epoch", "momentum_left_out")  # one process detects them too
RANKS = int(os.environ.get("VERIFY_RANKS", "2"))  # for the faults; 0: one process, without those that need ranks
LAUNCHED = ("salted_order",)  # forked processes share the salt of hash()
INVARIANTS = "order,content,loss,parameters,schedule,evaluation,gradient,training,weights,resume,plain load".split(",")


def outcomes(text):
    """{invariant: ok or BROKEN} of the lines that verify printed."""
    lines = re.findall(r"^(ok    |BROKEN)  ([a-z ]{11}) ", text, re.MULTILINE)
    return {name.strip(): outcome.strip() for outcome, name in lines}


def same_in_json(fork, ended):
    """What --json FILE holds is what was printed."""
    report = json.loads((fork / "found.json").read_text())
    assert {check["name"]: check["result"].replace("skipped", "BROKEN") for check in report["checks"]} == outcomes(
        ended.out
    )
    assert all(f" {check['text']}" in ended.out for check in report["checks"])
    broken = [check for check in report["checks"] if check["result"] == "BROKEN"]
    assert all(check["fix"] and check["text"].endswith(f". {check['fix']}") for check in broken)
    assert (report["result"], report["exit_code"]) == (("broken", 1) if broken else ("ok", 0)), ended.text
    return report["exit_code"] == ended.code and f"\n{report['text']} The result is in verified.json." in ended.out


@pytest.mark.guarantee("ranks-alike", "verify")
def test_the_template_passes_and_runs_report_it_until_a_file_changes(tmp_path):
    fork = copy_repository(tmp_path)
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS, "--json", "found.json", *GIVEN)
    assert ended.code == 0 and same_in_json(fork, ended), ended.text
    assert outcomes(ended.out) == dict.fromkeys(INVARIANTS, "ok") and list(outcomes(ended.out)) == INVARIANTS
    report = json.loads((fork / "verified.json").read_text())
    assert report["passed"] and report["ranks"] == 2 and list(report["invariants"]) == INVARIANTS
    assert {"train.py", "model.py", "dataset.py", "config.py", "utils/data/loader.py"} <= report["code"].keys()
    text = "The run has 10 steps without warm-up. lr_factor is 1 at step 0"
    assert re.search(rf"^ok +schedule +{text}", ended.out, re.MULTILINE)
    assert report["flags"] == [*FLAGS, *GIVEN] and report["versions"]["torch"]
    assert not list((fork / "runs").iterdir())  # the short runs were deleted

    def train(*flags):
        words = [*FLAGS, *flags, "--max_steps", 1, "--run_dir", "runs/one", "--overwrite"]
        ended = forks.run(fork, 0, "train.py", *words)
        origin = json.loads((fork / "runs" / "one" / "provenance.json").read_text())
        return re.search(r"^  verify +(.*)", ended.out, re.MULTILINE)[1], origin["verified"]

    message, is_verified = train(*GIVEN)
    assert is_verified and message.startswith(
        "The model and data are verified with this code: MiniResNet on SyntheticImageDataset, 2 rank"
    )
    with (fork / "utils/training/optimizer.py").open("a") as file:
        file.write("# mine\n")
    assert train() == ("This code has changed since scripts/verify.py was run: utils/training/optimizer.py.", False)


def test_every_fault_can_be_planted_in_todays_code():
    """A patch that applies to other lines, reversed or not at all tests nothing; without --all nobody would see it."""
    need("patch")
    commands = {path.stem: [*PATCH, "-N", "--dry-run", "-i", path] for path in FAULTS}
    ended = {name: subprocess.run(words, cwd=ROOT, capture_output=True, text=True) for name, words in commands.items()}
    failed = {name: result.stdout + result.stderr for name, result in ended.items() if result.returncode}
    assert ended and not failed


def fault(path):
    return pytest.param(path, id=path.stem, marks=() if path.stem in DEFAULT else pytest.mark.slow)


@pytest.mark.guarantee("other-buffers", "verify")
@pytest.mark.parametrize("patch", [fault(path) for path in FAULTS])
def test_a_fault_in_a_fork_is_named_with_a_fix(tmp_path, patch):
    need("patch")
    fork, text, began = copy_repository(tmp_path), patch.read_text(), time.monotonic()
    subprocess.run(PATCH, cwd=fork, input=text, text=True, check=True)
    if not RANKS and "needs: ranks" in text:
        pytest.skip("one rank cannot show it")
    if RANKS and patch.stem in LAUNCHED:
        ended = torchrun(2, *FLAGS, script="scripts/verify.py", cwd=fork, env={"PYTHONPATH": str(fork)})
    else:
        flags = re.findall(r"^flags: (.*)", text, re.MULTILINE)
        words = ["--json=found.json", *FLAGS, *" ".join(flags).split()]
        ended = forks.run(fork, 0 if patch.stem in ALONE else RANKS, "scripts/verify.py", *words)
    if rejected := re.search(r"^rejected: (.*)", text, re.MULTILINE):
        assert ended.code == 1 and rejected[1] in json.loads((fork / "found.json").read_text())["text"], ended.text
        return
    broken = [name for name, outcome in outcomes(ended.out).items() if outcome == "BROKEN"]
    found_in = re.search(r"^alone: (.*)", text, re.MULTILINE) if not RANKS else None
    expected = (found_in or re.search(r"^breaks: (.*)", text, re.MULTILINE))[1].split(", ")
    print(f"| {patch.stem} | {', '.join(broken)} | {time.monotonic() - began:.0f} s |")  # shown with -rP
    assert ended.code == 1 and set(expected) <= set(broken), ended.text
    assert patch.stem in LAUNCHED or same_in_json(fork, ended)
    for name in expected:
        line = re.search(rf"^BROKEN  {name} .*", ended.out, re.MULTILINE)[0]
        assert re.search(r"\. [A-Z].*\.", line)  # what was seen, the cause and the fix are sentences
        assert "was skipped" not in line, ended.text  # because of another fault
    report = json.loads((fork / "verified.json").read_text())
    assert (
        not report["passed"]
        and [name for name, invariant in report["invariants"].items() if not invariant["passed"]] == broken
    )


ADDED = {  # to model.py
    "LayerDrop": """
def forward(self, x):
    x = self.stem(x)
    for number, stage in enumerate(self.stages):
        if not (number in (1, 3) and self.training and torch.rand(()) < 0.9):
            x = stage(x)
    return self.head(x.mean(dim=(2, 3)))


MiniResNet.forward = forward
""",
    "lr_factor": """
def param_groups(model, config):
    head, *trunk = [*model.parameters()][::-1]
    return [{"params": trunk, "name": "trunk", "lr": config.lr / 10}, {"params": [head], "name": "head"}]


def lr_factor(config, step, total_steps, warmup_steps, progress):
    return {"trunk": 0.0 if step < 3 else 1.0, "head": 1 - step / total_steps}
""",
    "after_step": """
class Taught(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        teacher.load_state_dict(student.state_dict())
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, x):
        return (self.student(x), self.teacher(x)) if self.training else self.student(x)


plain_model = create_model


def create_model(config, device):
    return Taught(plain_model(config, device), plain_model(config, device))


def compute_loss(model, batch):
    found = model(batch[0])
    logits, taught = found if isinstance(found, tuple) else (found, found)
    loss = F.cross_entropy(logits, batch[1], reduction="sum") + 0.01 * (logits - taught).square().sum()
    return {"loss": (loss, len(logits))}


def after_step(model, progress, taken):
    for mine, its in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        mine.lerp_(its, 0.1 * taken)
""",
}


@pytest.mark.guarantee(
    "after-step",
    "group-factors",
    "unused",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("after_step", "--ema_decay 0.9"),
        ("after_step", "--sharding zero3"),
        ("lr_factor", ""),
        ("LayerDrop", "--find_unused_parameters --optimizer adamw"),
    ],
)
def test_functions_that_a_fork_adds_raise_no_false_alarm(tmp_path, name, flags):
    fork = copy_repository(tmp_path)
    with (fork / "model.py").open("a") as file:
        file.write(ADDED[name])
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS, *flags.split())
    assert ended.code == 0 and outcomes(ended.out) == dict.fromkeys(INVARIANTS, "ok"), ended.text


@pytest.mark.slow
def test_unused_parameters_are_named_before_ddp_waits_for_them(tmp_path):
    fork = copy_repository(tmp_path)
    head, path = "        self.head = nn.", fork / "model.py"
    path.write_text(path.read_text().replace(head, f"        self.spare = nn.Linear(2, 3)\n{head}"))
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS)
    assert ended.code == 1 and "does not use these parameters: spare.weight, spare.bias." in ended.out, ended.text
    assert "add --find_unused_parameters, or freeze them in create_model with requires_grad_(False)" in ended.out
    assert "This check was skipped, because parameters is broken. Fix that first." in ended.out
    assert "Expected to have finished reduction" not in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("cast", [".float()", ".float().double()"])
def test_a_loss_with_float32_in_it_is_no_fault(tmp_path, cast):
    """As transformers' causal language models do: in float64 its sums are rounded to float32."""
    fork = copy_repository(tmp_path)
    path = fork / "model.py"
    path.write_text(path.read_text().replace("logits = model(images)\n", f"logits = model(images){cast}\n"))
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS)
    assert ended.code == 0 and outcomes(ended.out) == dict.fromkeys(INVARIANTS, "ok"), ended.text
    (line,) = re.findall("^ok +loss .*", ended.out, re.MULTILINE)
    assert "in float64" in ended.out and "add up over samples, up to the rounding of float32. " in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing_behind_and_reports_no_broken_invariant(tmp_path, number):
    """The signal goes to the launcher while the first short run trains."""

    fork = copy_repository(tmp_path)
    program = WarmLaunch(2, ROOT / "tests" / "builtin" / "forks.py", [fork, "scripts/verify.py", *FLAGS])
    try:
        wait_until(lambda: list((fork / "runs").glob(".verify-*/gradient/status.json")))
        os.kill(program.pid, number)
        ended = finish(program, 40)
    finally:
        stop(program)
    assert ended.code != 0 and ended.left == 0
    assert not (fork / "verified.json").exists() and not list((fork / "runs").glob(".verify-*")), ended.text
    assert "BROKEN" not in ended.out

# extra: template
"""A start that fails before its first optimizer step shows its error, and nothing about steps or checkpoints."""

import re
from dataclasses import dataclass

import pytest

from ranks import PATH, ROOT, WarmLaunch, finish, launch, slow, torchrun

EXCEPTION = """
def fail(*args, **kwargs):
    raise RuntimeError("the cause of this start")
train.your_{function} = fail
"""
PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
sys.argv[0] = 'train.py'
import train
CODE
train.run_as_script()
"""


@dataclass(frozen=True)
class Start:
    """A start that fails. In its flags, HERE is the folder of the test.

    cause: what the only line of the error names, or "" for an exception, which has a traceback as well.
    code: is run before train.py.
    """

    flags: str
    cause: str = ""
    code: str = ""


STARTS = {
    "a mistyped folder": Start("--dataset imagefolder --data_dir HERE/typo", "HERE/typo"),
    "a missing list": Start("--dataset csv --data_dir HERE/typo", "HERE/typo"),
    "an unreadable list": Start("--dataset csv --data_dir HERE/lists", "HERE/lists/train.csv"),
    "missing weights": Start("--init_from HERE/typo.pt", "HERE/typo.pt"),
    "damaged weights": Start("--init_from HERE/damaged.pt", "HERE/damaged.pt"),
    "no published weights": Start("--init_from torchvision", "mini_resnet"),
    "an unknown model": Start("--model resnet19", "resnet19"),
    "a missing checkpoint": Start("--resume_from HERE/typo.pt", "HERE/typo.pt"),
    "a folder that cannot be written": Start("--run_dir /proc/typo", "/proc/typo"),
    "an error in create_model": Start("", code=EXCEPTION.format(function="model.create_model")),
    "an error in create_dataset": Start("", code=EXCEPTION.format(function="data.create_dataset")),
    "an error in compute_loss": Start("", code=EXCEPTION.format(function="model.compute_loss")),
}
QUICK = ("a mistyped folder", "an error in create_model")  # with two ranks, where a start takes seconds to end


def flags_of(start, runs, name="run"):
    """Write the files of the start. Returns its flags."""
    lists = runs.root / "lists"
    lists.mkdir(exist_ok=True)
    (lists / "train.csv").write_bytes(b"path,label\n\xff\xfe\n")
    (runs.root / "damaged.pt").write_bytes(bytes(range(256)))
    return runs.words(name, "--dataset_size", 40, *start.flags.replace("HERE", str(runs.root)).split())


def write_program(start, runs):
    """Write train.py with the code of the start. Returns its path."""
    program = runs.root / "program.py"
    program.write_text(PROGRAM.replace("CODE", start.code))
    return program


def check_errors(start, runs, lines):
    """Check the error lines of the ranks."""
    if start.cause:
        assert len(lines) == 1 and start.cause.replace("HERE", str(runs.root)) in lines[0], "\n".join(lines)
        return
    patterns = [
        r"(\[rank 1\] )?An exception ended rank \d on \S+\.",
        r"Traceback \(most recent call last\):",
        r"RuntimeError: the cause of this start",
        r"(\[rank 1\] )?Rank \d on \S+ failed: RuntimeError: the cause of this start",
    ]
    matched = set()
    for line in lines:
        if not line.startswith(" "):  # the stack of a traceback
            matching = [pattern for pattern in patterns if re.fullmatch(pattern, line)]
            assert matching, line
            matched.update(matching)
    assert matched == set(patterns), "\n".join(lines)


@pytest.mark.guarantee("one-sentence")
@pytest.mark.parametrize(
    ("ranks", "name"),
    [*((0, name) for name in STARTS), *((2, name) if name in QUICK else slow(2, name) for name in STARTS)],
)
def test_a_start_that_fails_shows_only_its_error(runs, ranks, name):
    start = STARTS[name]
    ended = finish(WarmLaunch(ranks, write_program(start, runs), flags_of(start, runs)))
    assert ended.code == (2 if start.cause and not ranks else 1), ended.text
    assert ended.out == ""
    check_errors(start, runs, ended.err.splitlines())


TORCHRUNS_FIRST_LINE = "torch/distributed/elastic/multiprocessing/api.py"
LAUNCHED = [name if name == "a mistyped folder" else slow(name) for name in STARTS]


def own_lines(text):
    """Return the lines before those of torchrun."""
    lines = []
    for line in text.splitlines():
        if TORCHRUNS_FIRST_LINE in line:
            break
        lines.append(line)
    return lines


@pytest.mark.guarantee("one-sentence")
@pytest.mark.parametrize("name", LAUNCHED)
def test_under_torchrun_a_start_that_fails_shows_only_its_error(runs, name):
    start = STARTS[name]
    ended = torchrun(2, *flags_of(start, runs), script=write_program(start, runs) if start.code else "train.py")
    first_line = "" if start.code else "Starting on 2 ranks.*\n"
    assert ended.code == 1 and re.fullmatch(first_line, ended.out), ended.text
    check_errors(start, runs, own_lines(ended.err))


@pytest.mark.guarantee("one-sentence")
@pytest.mark.parametrize("name", LAUNCHED[:-4])  # launch.sh refuses such a run folder, and starts train.py only
def test_under_launch_sh_a_start_that_fails_shows_only_its_error(runs, name):  # extra: launcher
    start = STARTS[name]
    command = [ROOT / "scripts" / "launch.sh", *flags_of(start, runs)]
    ended = launch(command, env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    assert ended.code == 2 and re.fullmatch(r"\[\S+ 0\] Starting on 2 ranks.*\n", ended.out), ended.text
    lines = [line for line in own_lines(ended.err) if not line.startswith("launch.sh: The ranks get these variables: ")]
    assert lines[0].startswith("["), ended.text  # node and rank
    check_errors(start, runs, lines)
    assert "launch.sh: " not in ended.err.partition(TORCHRUNS_FIRST_LINE)[2], ended.text

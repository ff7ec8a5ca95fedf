"""scripts/preflight.py in real ranks: healthy ones, and some that are not (nodes:
builtin/test_misconfigurations.py)."""

import contextlib
import io
import json
import os
import time
from functools import partial
from unittest import mock

import pytest

import preflight
from checks import rates
from drill import says
from ranks import ROOT, WarmLaunch, finish, run_ranks
from tasks import image_loss, using
from training import TINY
from utils.run import provenance

QUICK = [*TINY, "--dataset_size", "64"]


@contextlib.contextmanager
def on_images():
    with using("images"), mock.patch.object(rates, "compute_loss", image_loss):
        yield


def looked(words, *, of_last=(), code_of_last=None, is_alone=False):
    """In a rank: the exit code and what was printed. The last rank may have flags and code of its own."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    code = {**provenance.code_digests(), **((code_of_last or {}) if is_last else {})}
    printed = io.StringIO()
    with on_images(), contextlib.redirect_stdout(printed), mock.patch.object(provenance, "code_digests", lambda: code):
        return preflight.main([*words, *(of_last if is_last else ())]), printed.getvalue()


def test_healthy_ranks_get_a_go_and_the_run_folder_is_left_as_it_was(tmp_path):
    folder, file = tmp_path / "run", tmp_path / "found.json"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "claim.json", "checkpoints/step_00000001.pt"):
        (folder / name).write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    (code, out), (other, silence) = run_ranks(2, looked, [*QUICK, "--run_dir", str(folder), "--json", str(file)])
    assert (code, other, silence) == (0, 0, ""), out
    says(out, r"node +ranks +address(?s:.*) 0, 1 (?s:.*)\nall-reduce +all ranks\n8 B +[\d,]+ us, bus")
    for name in (
        "versions",
        "code",
        "config",
        "host names",
        "clocks",
        "run folder",
        "disk",
        "/dev/shm",
        "open files",
        "links",
        "loader",
    ):
        says(out, rf"\n(OK|warning) +{name} ")  # how fast storage and loader are depends on what else the machine does
    says(out, r"preflight: go: \d+ OK, \d warning\(s\), 0 failure\(s\) in \d+ s")
    found = json.loads(file.read_text())
    assert len(found["measured"]["facts"]) == 2 and {each["name"] for each in found["findings"]} >= {
        "speed",
        "communication",
    }
    file.unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_one_process_needs_no_launcher(tmp_path):
    ((code, out),) = run_ranks(1, partial(looked, is_alone=True), [*QUICK, "--run_dir", str(tmp_path / "run")])
    assert code == 0 and "\nall-reduce" not in out, out
    says(out, r"\n(OK|warning) +step ")
    assert not list(tmp_path.iterdir())


def test_bad_flags_are_refused(capsys):
    refused = finish(WarmLaunch(0, ROOT / "scripts" / "preflight.py", ["--eppochs", "1"]))
    assert refused.code == 2 and "did you mean --epochs?" in refused.err
    with pytest.raises(SystemExit, match="2"):
        preflight.split(["--json"])
    assert "write --json FILE" in capsys.readouterr().err


def test_other_flags_and_other_code_are_named(tmp_path):
    odd = partial(looked, of_last=("--lr", "0.2"), code_of_last={"model.py": "another"})
    found = run_ranks(3, odd, [*QUICK, "--run_dir", str(tmp_path / "run")])
    assert [code for code, _ in found] == [1] * 3, found[0][1]
    says(
        found[0][1],
        r"\nFAILURE +config +lr=0\.2 on \S+ \(rank 2\), lr=0\.1 on the others; start all with the same flags",
    )
    says(
        found[0][1],
        r"\nFAILURE +code +model\.py on \S+ \(rank 2\): not as on the others; bring the same code to all nodes",
    )
    says(
        found[0][1],
        r"preflight: do not start yet: .*2 failure\(s\).*; not measured until that is mended: data, model, step,"
        r" loader\n",
    )


def hangs(words):
    if os.environ["RANK"] == "1":
        preflight.gather = lambda *_: time.sleep(60)
    looked(words)


def test_a_rank_that_hangs_is_named_and_nobody_waits_for_it(tmp_path):
    with pytest.raises(AssertionError, match=r"FAILURE  rank 1 on \S+: did not come to 'facts.*' in 6 s; look there"):
        run_ranks(3, hangs, [*QUICK, "--run_dir", str(tmp_path / "run"), "--timeout", "6"])

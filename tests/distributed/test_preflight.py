# extra: preflight
"""scripts/preflight.py on real ranks."""

import contextlib
import io
import json
import os
import time
from functools import partial
from unittest import mock

import pytest

import preflight
from ranks import ROOT, WarmLaunch, finish, run_ranks
from scripts.lib.preflight import diagnosis, facts, storage
from tasks import using
from training import TINY, says
from utils.run import provenance
from utils.settings.errors import UserError

QUICK = [*TINY, "--dataset_size", "64"]
CHECKS = "same code,data,loader,host names,network,devices,/dev/shm,shared folder,disk,all-reduce,speed"


def run_preflight(flags, *, of_last=(), code_of_last=None, is_alone=False):
    """Run in a rank (two per node): the exit code and the output. The last rank may have its own flags and code."""
    rank, is_last = int(os.environ["RANK"]), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    code = {**provenance.compute_code_checksums(), **((code_of_last or {}) if is_last else {})}
    with (
        using("images"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(provenance, "compute_code_checksums", lambda: code),
        mock.patch.object(facts, "identify_machine", lambda host: str(rank // 2)),
    ):
        return preflight.main([*flags, *(of_last if is_last else ())]), printed.getvalue()


@pytest.mark.guarantee("preflight")
def test_healthy_ranks_pass_and_the_run_folder_is_left_unchanged(tmp_path):
    folder, file = tmp_path / "run", tmp_path / "found.json"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/step_00000001.pt"):
        (folder / name).write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    (code, out), (other, silence) = run_ranks(2, run_preflight, [*QUICK, "--run_dir", str(folder), "--json", str(file)])
    assert (code, other, silence) == (0, 0, ""), out
    all_reduce = r"OK +all-reduce +An all-reduce of [\d.]+ k?B over 2 ranks takes \d+\.\d\d ms\."
    says(out, rf"\nnode +ranks +address(?s:.*) 0, 1 (?s:.*)\n{all_reduce}\n")
    for name in CHECKS.split(","):
        says(out, rf"\n(OK|warning) +{name} ")  # speeds depend on the load of the machine
    says(out, r"preflight: The run can start: \d+ OK, \d warnings?, 0 failures in \d+ s\.\n")
    report = json.loads(file.read_text())
    assert len(report["measured"]["facts"]) == 2
    assert [finding["name"] for finding in report["findings"]] == CHECKS.split(",")
    file.unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_one_process_needs_no_launcher(tmp_path):
    url = f"file://{tmp_path}/bucket/a"
    flags = [*QUICK, "--run_dir", str(tmp_path / "run"), "--mirror", url]
    ((code, out),) = run_ranks(1, partial(run_preflight, is_alone=True), flags)
    assert code == 0 and "all-reduce" not in out, out
    says(out, r"\nOK +loader +The loader reads batches with 0 workers per rank\.\n(?s:.*)\nOK +speed ")
    says(out, rf"\nOK +mirror +{url} writes \S+ \wB/s and reads \S+ \wB/s\. A checkpoint takes 0\.\d s\.\n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and not (tmp_path / "run").exists()


def test_what_object_storage_cannot_do_is_a_finding(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket/a"
    assert storage.measure_mirror(url, 10**6)["is_exclusive"]
    unconditional = lambda self, *args: self.write_json(*map(str, args))  # noqa: E731
    monkeypatch.setattr(storage.Storage, "create_object", unconditional)
    (finding,) = diagnosis.diagnose_mirror(storage.measure_mirror(url, 10**6) | {"to": 1e6}, 10**6, 10.0, url)
    says(str(finding), rf"warning +mirror +{url} cannot create an object only if it is absent.*\. Start one job at a")
    measured = {"to": 1e6, "from": 1e6, "is_exclusive": True}
    (finding,) = diagnosis.diagnose_mirror(measured, 10**9, 10.0, url)
    says(str(finding), r"The upload of .* takes 1000 s \(1\.0 MB/s\), .*\. Raise --save_every_minutes")
    monkeypatch.setattr(storage.Storage, "list_objects", lambda self: {})  # it lists late
    with pytest.raises(UserError, match=r"What is read .* is not what was written\. Give another storage"):
        storage.measure_mirror(url, 10**6)


def preflight_without_facts(flags):
    """The last rank cannot read what the others report about their nodes."""
    if os.environ["RANK"] == "1":
        mock.patch.object(preflight, "collect_facts", mock.Mock(side_effect=OSError(5, "Input/output error"))).start()
    return run_preflight(flags)


def test_a_node_that_cannot_report_its_facts_is_a_finding(tmp_path):
    (code, out), _ = run_ranks(2, preflight_without_facts, [*QUICK, "--run_dir", str(tmp_path / "run")])
    assert code == 1, out
    says(out, r"\nFAILURE +facts +\S+ \(rank 1\): (?s:.*)Input/output error(?s:.*)\npreflight: ")


def test_invalid_flags_are_rejected(capsys):
    rejected = finish(WarmLaunch(0, ROOT / "scripts" / "preflight.py", ["--eppochs", "1"]))
    assert rejected.code == 2 and "Did you mean --epochs?" in rejected.err
    with pytest.raises(SystemExit, match="2"):
        preflight.parse_arguments(["--json"])
    assert "--json: expected one argument" in capsys.readouterr().err


@pytest.mark.guarantee("preflight")
def test_different_flags_and_code_are_listed_and_two_nodes_are_measured(tmp_path):
    odd = partial(run_preflight, of_last=("--lr", "0.2"), code_of_last={"model.py": "another"})
    results = run_ranks(3, odd, [*QUICK, "--run_dir", str(tmp_path / "run")])
    out = results[0][1]
    assert [code for code, _ in results] == [1] * 3, out
    says(out, r"\nFAILURE +same code +The ranks differ in code, settings or versions. Give all nodes the same ones")
    says(out, r"\nlr +0\.1 +0\.2\nmodel\.py +\w{8} +another\n")
    says(out, r"\nFAILURE +host names +2 nodes have the host name \S+, .*\. Rename these nodes")
    says(out, r"\nOK +all-reduce +An all-reduce of 16\.8 MB over 3 ranks takes ")
    says(out, r"\nOK +clocks +All clocks are within \d\.\d\d s of (?s:.*)\nOK +links +The slowest of 1 links is ")
    says(out, r": Do not start the run yet: .* 2 failures in .*\. .* not measured until .* data, loader, model\.\n")


def hangs(flags):
    if os.environ["RANK"] == "1":
        preflight.collect_facts = lambda *_: time.sleep(60)
    run_preflight(flags)


@pytest.mark.slow
def test_a_hanging_rank_is_named_without_waiting_for_it(tmp_path):
    pattern = r"FAILURE  \S+ \(rank 1\) did not reach 'end of facts' in 4 s\. Check this node"
    with pytest.raises(AssertionError, match=pattern):
        run_ranks(3, hangs, [*QUICK, "--run_dir", str(tmp_path / "run"), "--timeout", "4"])


class HangingLoader:
    def micro_batches(self, epoch):
        time.sleep(60)


def loads_nothing(flags):
    with (
        mock.patch.object(preflight, "create_distributed_dataloader", lambda *_: (HangingLoader(), None)),
        mock.patch.object(preflight, "MAX_SECONDS_OF_MODEL", 4.0),
    ):
        run_preflight(flags)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_storage_that_hangs_is_named_without_waiting_for_it(tmp_path, ranks):
    message = "FAILURE  No rank finished 'loader' in 4 s. Check the storage and the code of the data set."
    with pytest.raises(AssertionError, match=message):
        run_ranks(ranks, loads_nothing, [*QUICK, "--run_dir", str(tmp_path / "run")])

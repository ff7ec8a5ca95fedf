"""scripts/scaling.py on real ranks of this machine, without assertions on speed."""

import json
import sys

import pytest

from ranks import ROOT, launch, torchrun

SCRIPT = "scripts/scaling.py"


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [False, True], ids=["by-itself", "under-torchrun"])
def test_one_and_two_ranks_are_measured(tmp_path, is_launched):
    words = "--rounds 1 --steps 3 --batch_size 2 --image_size 8 --no_use_amp".split()
    words += ["--json", tmp_path / "s.json", "--run_dir", tmp_path / "run"]
    ended = (
        torchrun(2, *words, script=SCRIPT)
        if is_launched
        else launch([sys.executable, ROOT / SCRIPT, "--ranks", "2", *words])
    )
    assert (ended.code, ended.left) == (0, 0), ended.text
    report = json.loads((tmp_path / "s.json").read_text())
    assert [job["ranks"] for job in report["measured"]] == [1, 2]
    measured = [
        (each["mode"], each["ranks"], each["global_batch"]) for each in report["points"] if not each["is_predicted"]
    ]
    assert measured == [("weak", 1, 2), ("strong", 1, 4), ("weak", 2, 4), ("strong", 2, 4)]
    assert all(each["samples_per_s"] > 0 for each in report["points"])
    assert report["advice"] in ended.out and not (tmp_path / "s.json.scaling").exists()

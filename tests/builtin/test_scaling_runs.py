"""scripts/scaling.py measures ranks of this machine; speed itself gates nothing."""

import json
import sys
import xml.etree.ElementTree as ET

import pytest

from ranks import ROOT, launch, torchrun

SCRIPT = "scripts/scaling.py"


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [False, True], ids=["by-itself", "under-torchrun"])
def test_one_and_two_ranks_are_measured_and_the_rest_is_predicted(tmp_path, is_launched):
    words = "--rounds 1 --seconds 0.05 --batch_size 2 --image_size 8 --no_use_amp".split()
    words += ["--json", tmp_path / "s.json", "--plot", tmp_path / "s.svg", "--run_dir", tmp_path / "run"]
    ended = torchrun(2, *words, script=SCRIPT) if is_launched else launch([sys.executable, ROOT / SCRIPT, "--ranks", "2", *words])
    assert (ended.code, ended.left) == (0, 0), ended.text
    report = json.loads((tmp_path / "s.json").read_text())
    assert [job["ranks"] for job in report["measured"]] == [1, 2]
    assert {"flags", "global_batch", "host", "measured", "points", "link", "model_error", "sweep", "advice"} <= report.keys()
    assert report["measured"][0]["half"]["batch"] == 1
    profile = report["measured"][1]["profile"]
    assert sum(size for _, size in profile["ready"][1:]) == profile["gradient"] == 4 * 2_777_674
    times = [when for when, _ in profile["ready"]]
    assert times == sorted(times) and 0 < times[-1] <= profile["backward"]
    measured = [(each["mode"], each["ranks"], each["global_batch"]) for each in report["points"] if not each["is_predicted"]]
    assert measured == [("weak", 1, 2), ("strong", 1, 4), ("weak", 2, 4), ("strong", 2, 4)]
    assert all(each["samples_per_s"] > 0 for each in report["points"])
    assert [row["change"] for row in report["sweep"]][:1] == [{}] and all("ratios" in row for row in report["sweep"])
    ET.parse(tmp_path / "s.svg")
    assert report["advice"] in ended.out and not (tmp_path / "s.json.scaling").exists()

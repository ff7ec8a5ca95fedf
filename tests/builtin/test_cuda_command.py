"""scripts/test.sh --cuda, with every step on the CPU in tiny sizes."""

import json

import pytest
import torch

from ranks import ROOT, launch


@pytest.mark.slow
def test_every_step_runs_and_its_figures_are_written(tmp_path):
    file = tmp_path / "found.json"
    words = ["scripts/test.sh", "--cuda", "--json", file, "--data_dir", tmp_path]
    ended = launch(words, env={"CUDA_TEST_ON_CPU": "1"}, cwd=ROOT, deadline=540)
    found = json.loads(file.read_text())
    outcomes = {name: found[name]["outcome"] for name in "tests verify speed checkpoint accuracy compile".split()}
    skipped = "ok" if torch.cuda.is_available() else "skipped"  # the tests of CUDA
    assert outcomes == dict.fromkeys(outcomes, "ok") | {"tests": skipped}, ended.text
    assert ended.code == (0 if skipped == "ok" else 3), ended.text
    assert found["checkpoint"]["bytes"] > 4e7 and "\n| batch 8 | step |" in ended.out

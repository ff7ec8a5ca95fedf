# extra: template
"""The loop on a GPU that exists only in name (tests/fake_gpu.py): what it launches, copies and waits for.

Not rehearsed: results of kernels, and DDP. distributed/test_cuda.py checks these on a GPU.
"""

import json
import sys

import pytest

from ranks import ROOT, launch


@pytest.fixture(scope="module")
def fake_gpu():
    ended = launch([sys.executable, ROOT / "tests/fake_gpu.py"])
    assert ended.code == 0, ended.text
    return json.loads(ended.out)


@pytest.mark.guarantee("no-reads")
@pytest.mark.parametrize("flags", ["plain", "more", "graphs"])
def test_the_loop_waits_for_the_device_nowhere_between_two_log_points(fake_gpu, flags):
    """Data set, side stream, both passes, update, an evaluation and a checkpoint; only the latter reads."""
    trace = fake_gpu[flags]
    images_labels_indices = [["augmentation", "_to_copy", "to device", "async"]] * 3
    assert trace["step"]["copies"] == images_labels_indices
    assert trace["first step"]["copies"] and not [copy for copy in trace["first step"]["copies"] if copy[3] == "waits"]
    assert not [copy for copy in trace["evaluation"]["copies"] if copy[2] == "to host"]
    buffers_then_the_rest = [["checkpoint", "_foreach_copy_", "to host", "async"]] * 2
    assert trace["checkpoint"]["copies"] == buffers_then_the_rest
    assert not any(trace[part]["races"] for part in ("step", "evaluation", "checkpoint"))
    assert not any(trace[part]["unkept"] for part in ("step", "evaluation"))


def test_a_log_point_is_one_copy_that_does_not_wait(fake_gpu):
    for flags in ("plain", "more"):
        assert fake_gpu[flags]["log point"]["copies"] == [["log point", "copy_", "to host", "async"]]


def test_the_rehearsal_notices_a_read_a_copy_and_a_stream_that_does_not_wait(fake_gpu):
    assert fake_gpu["read"] == "read: aten._local_scalar_dense.default"
    assert fake_gpu["copy"]["step"]["copies"][-1] == ["update", "_to_copy", "to device", "waits"]
    assert ["forward", "_to_copy"] in fake_gpu["wait"]["step"]["races"] and fake_gpu["wait"]["checkpoint"]["races"]
    assert ["forward", "_to_copy"] in fake_gpu["keep"]["step"]["unkept"]


@pytest.mark.parametrize(
    ("flags", "part", "most"),
    [("plain", "augmentation", 7), ("plain", "update", 23), ("more", "augmentation", 7), ("more", "update", 39)],
)
def test_launches_of_a_step(fake_gpu, flags, part, most):
    """docs/benchmarks.md has these figures."""
    launches = fake_gpu[flags]["step"]["launches"][part]
    assert sum(launches.values()) == most, launches

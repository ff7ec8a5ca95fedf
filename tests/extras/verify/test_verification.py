"""When a run reports that scripts/verify.py passed with its code."""

import importlib
import json
import sys

import pytest

from config import TrainingConfig
from utils.extras import verify
from utils.run import provenance

TASK = "net on data"
CONFIG = TrainingConfig(schedule="linear")


NOT_VERIFIED = "This code is not verified. scripts/verify.py checks your model and data in a minute."


@pytest.fixture
def verified(tmp_path, monkeypatch):
    """A repository of one file with a result of verify.py; returns a function that changes the result."""
    (tmp_path / "model.py").write_text("x = 1\n")
    monkeypatch.setattr(provenance, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(verify, "VERIFICATION_FILE", tmp_path / "verified.json")
    report = {"passed": True, "time": "2026-11-21T15:20:05.754+00:00", "ranks": 4, "task": TASK}
    report |= {
        "versions": provenance.collect_package_versions(),
        "code": {"model.py": provenance.compute_file_checksum(tmp_path / "model.py")},
    }
    report |= {"settings": {"lr": 0.1, "schedule": "linear"}}
    report |= {"invariants": {"order": {"passed": True}, "content": {"passed": True}}}

    def write(**changes):
        verify.VERIFICATION_FILE.write_text(json.dumps(report | changes))

    write()
    return write


def changed(what):
    return False, f"This code has changed since scripts/verify.py was run: {what}."


def test_verification_holds_while_code_versions_and_task_are_the_same(verified):
    passed = "net on data, 4 ranks, 2026-11-21"
    assert verify.read_verification(TASK, CONFIG) == (
        True,
        f"The model and data are verified with this code: {passed}.",
    )
    (provenance.PROJECT_ROOT / "dataset.py").write_text("not imported then")
    assert verify.read_verification(TASK, CONFIG)[0]
    other = f"This code is not verified for other on data. scripts/verify.py passed for {passed}."
    assert verify.read_verification("other on data", CONFIG) == (False, other)


@pytest.mark.guarantee("verify")
def test_a_changed_file_or_version_is_named(verified, monkeypatch):
    (provenance.PROJECT_ROOT / "extra.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(provenance.PROJECT_ROOT)
    importlib.import_module("extra")  # after verify.py passed
    assert verify.read_verification(TASK, CONFIG) == changed("extra.py")
    monkeypatch.delitem(sys.modules, "extra")
    (provenance.PROJECT_ROOT / "model.py").write_text("x = 2\n")
    assert verify.read_verification(TASK, CONFIG) == changed("model.py")
    (provenance.PROJECT_ROOT / "model.py").write_text("x = 1\n")
    verified(versions=provenance.collect_package_versions() | {"torch": "1.0"})
    assert verify.read_verification(TASK, CONFIG) == changed(
        f"torch 1.0 -> {provenance.collect_package_versions()['torch']}"
    )


def test_broken_invariants_are_named(verified):
    verified(passed=False, invariants={"order": {"passed": False}, "content": {"passed": True}})
    assert verify.read_verification(TASK, CONFIG) == (False, "scripts/verify.py failed: order.")


@pytest.mark.parametrize("is_passed", [True, False])
def test_flags_that_differ_from_the_verified_ones_are_named_whether_it_passed_or_failed(verified, is_passed):
    verified(passed=is_passed, invariants={"order": {"passed": is_passed}}, settings={"lr": 0.5, "x": 1, "seed": 42})
    text = f"scripts/verify.py {'passed' if is_passed else 'failed'} with other flags: lr 0.5 -> 0.1, x 1 -> unset."
    assert verify.read_verification(TASK, TrainingConfig(epochs=3)) == (False, text)


@pytest.mark.parametrize("text", ["", "[]", '{"code": 3}'])
def test_an_unreadable_result_file_means_not_verified(verified, text):
    verify.VERIFICATION_FILE.write_text(text)
    assert verify.read_verification(TASK, CONFIG) == (False, NOT_VERIFIED)

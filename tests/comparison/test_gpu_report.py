"""scripts/test.sh --cuda: its steps run in processes, and its tables (builtin/test_cuda_command.py runs all of it)."""

import sys

import pytest

from comparison import gpu

ROW = {
    "step_s": 0.01,
    "wall_over_plain": 0.99,
    "control_wall": 1.0,
    "samples_per_s": 6400.0,
    "peak_memory_bytes": 2**30,
}


def test_the_loops_are_printed_as_markdown():
    found = {"speed": {"batches": {64: {"rows": {"plain loop": ROW}, "flops_per_sample": 1e9, "peak_flops": 64e12}}}}
    assert gpu.figure_tables(found)[2] == "| plain loop | 10.00 ms | 0.990 | 1.000 | 6,400 | 10% | 1,024 MiB |"
    assert gpu.figure_tables({"speed": {"text": "no time is left"}}) == []


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("...\n12 passed, 1 skipped in 9.1s\n", "12 passed, 1 skipped in 9.1s"),
        ("ok\n11 of 11 invariants hold; wrote verified.json\n", "11 of 11 invariants hold; wrote verified.json"),
    ],
)
def test_the_result_of_a_program_is_its_line_of_counts(out, expected):
    assert gpu.summary_of(out) == expected


@pytest.mark.parametrize(
    ("code", "limit", "outcome", "text"),
    [
        ("open(sys.argv[2] + '/found.json', 'w').write('{\"text\": \"fine\", \"x\": 1}')", 60, "ok", "fine"),
        ("open(sys.argv[2] + '/found.json', 'w').write('{\"text\": \"no\", \"skipped\": 1}')", 60, "skipped", "no"),
        ("sys.exit('out of memory')", 60, "FAILED", "exit code 1: out of memory"),
        ("", 10, "skipped", "no time is left"),
    ],
)
def test_a_step_is_ok_skipped_or_failed(monkeypatch, tmp_path, code, limit, outcome, text):
    program = tmp_path / "step.py"
    program.write_text(f"import sys\n{code}\n")
    monkeypatch.setattr(gpu, "__file__", str(program))
    assert gpu.run_step("speed", "data", limit)[:2] == (outcome, text)


def test_a_machine_without_a_gpu_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2 and "no visible CUDA device" in capsys.readouterr().out

# extra: launcher and template
"""scripts/launch.sh with real runs, and its exit codes (what it starts and rejects:
unit/test_launching.py)."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from nodes import Place
from ranks import PATH, ROOT, finish, launch, slow, start, stop
from training import Runs, wait_for_step, wait_until

SCRIPT = ROOT / "scripts" / "launch.sh"
TINY = "--image_size 8 --batch_size 4 --epochs 1 --backend gloo".split()
KILL_RANK_1 = """\
[ -e "$0.done" ] && exit
touch "$0.done"
rank0=$(cut -d' ' -f4 /proc/$PPID/stat)
agent=$(cut -d' ' -f4 "/proc/$rank0/stat")
for process in $(cat "/proc/$agent/task/$agent/children"); do [ "$process" = "$rank0" ] || kill -KILL "$process"; done
"""  # a command for --on_checkpoint, which a program beside rank 0 runs; it acts only the first time


@pytest.mark.parametrize("words", ["--help", "-h", "--hosts a --help all", "--help=all"])
def test_help_covers_the_script_and_train_py(words):
    ended = launch([SCRIPT, *words.split()], env={"PATH": PATH})
    assert (
        ended.code == 0
        and "NPROC_PER_NODE" in ended.out
        and "--grad_accum_steps" in ended.out
        and ("--beta2" in ended.out) == ("all" in words)
        and "set -euo" not in ended.out
    )


def test_a_bad_flag_is_rejected_once_before_any_process_starts():
    ended = launch([SCRIPT, "--epohs", "3"], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    assert (ended.code, ended.err) == (2, "--epohs is not a flag here. Did you mean --epochs?\n")


@pytest.mark.guarantee("launch")
@pytest.mark.parametrize("hosts", [slow("::1 localhost"), slow("127.0.0.1 localhost\n::1 localhost ip6-localhost")])
def test_one_node_with_ipv6_alone_trains_on_two_ranks(tmp_path, hosts):
    """Its loopback has only ::1, and no name leads to it but localhost."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    place = Place(["-m", "-n", "-u", *as_root])
    try:
        place.do("sh", "-c", "ip link set lo up && ip address delete 127.0.0.1/8 dev lo")
        (tmp_path / "hosts").write_text(f"{hosts}\n")
        place.bind(tmp_path / "hosts", Path("/etc/hosts"))
        flags = [*TINY, "--dataset_size", "32", "--num_workers", "0", "--run_dir", tmp_path / "run"]
        env = {"PATH": PATH, "NPROC_PER_NODE": "2"}
        trained = place.run(SCRIPT, *flags, env=env)
        checked = place.run(SCRIPT, "--preflight", *flags, env=env)  # extra: preflight
    finally:
        place.close()
    assert trained.code == 0, trained.text
    assert "completed: 1 epoch" in trained.text
    assert checked.code == 0 and "::1 (lo)" in checked.text, checked.text  # extra: preflight


@pytest.mark.guarantee("exit-codes", "launch")
def test_a_launch_resumes_after_a_killed_rank_and_at_sigterm_it_saves_and_exits_75(tmp_path):
    """The failed rank is named."""
    run, script = tmp_path / "run", tmp_path / "kill.sh"
    script.write_text(KILL_RANK_1)
    flags = [*TINY, "--dataset_size", "4000", "--epochs", "1000", "--save_every", "0", "--run_dir", run]
    more = ["--save_every_steps", "10", "--on_checkpoint", f"sh {script}", "--debug", "--retries", "2"]
    program = start([SCRIPT, *flags, *more], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    try:
        wait_until(lambda: b" resumed " in os.pread(program.files[0].fileno(), 2**20, 0), 120)
        wait_for_step(run, 1, json.loads((run / "status.json").read_text())["step"] + 3)
        os.kill(program.pid, signal.SIGTERM)
        ended = finish(program)
    finally:
        stop(program)
    assert ended.code == 75 and "--resume_from auto" in ended.out, ended.text
    assert re.search(r"exit code was 1\. Attempt 2 of 3 starts in 5 s\.", ended.err), ended.text
    failure = r"Rank 1 on \S+ failed: Rank 1 on \S+ was killed or cut off, last seen in .*auto\."  # extra: watch
    assert re.search(failure, ended.err), ended.text  # extra: watch
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "preempted" and (run / f"checkpoints/step_{status['step']:08d}.pt").exists()
    assert (run / "traces").is_dir()  # the flight recorder finds a folder to write into


@pytest.mark.slow
def test_a_detached_start_in_the_folder_of_a_run_is_rejected_in_its_log_and_not_retried(tmp_path):
    runs = Runs(tmp_path)
    runs.train(1, "run", *TINY, "--dataset_size", 8, task="")
    flags = [*TINY, "--run_dir", runs.folder("run"), "--retries", "2", "--detach"]
    program = start([SCRIPT, *flags], env={"PATH": PATH, "NPROC_PER_NODE": "1"})
    try:
        assert program.wait(60) == 0
        printed = os.pread(program.files[0].fileno(), 2**16, 0).decode()
        pid, log = re.search(r"Process (\d+) runs in the background\. .*: tail -f (\S+)\n", printed).groups()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60)
    finally:
        stop(program)
    text = Path(log).read_text()
    assert "holds a run already" in text and "starts in" not in text, text

"""scripts/preflight.py with real ranks: on healthy nodes, and on such as are not."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import preflight
import train
from config import TrainingConfig
from ddp_utils import setup_distributed
from drill import free_port, says
from ranks import ROOT, copy_repository, finish, lack, launch, need, run_ranks, start, stop, torchrun
from training import TINY

SCRIPT = ROOT / "scripts" / "preflight.py"
QUICK = [*TINY, "--dataset_size", "64"]
DEADLINE = 90


def by_hand(world, flags, of_rank=None):
    """Ranks that are started one by one. of_rank: what is a rank's own: {"flags", "env", "before", "script"}."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    programs = []
    for rank in range(world):
        own = (of_rank or {}).get(rank, {})
        words = [*own.get("before", ()), sys.executable, own.get("script", SCRIPT), *flags, *own.get("flags", ())]
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | own.get("env", {})
        programs.append(start(words, env=env))
    return programs


def all_end(programs):
    ended = [finish(program, DEADLINE) for program in programs]
    assert [each.left for each in ended] == [0] * len(ended)
    return ended


def as_node(name, *more):
    """Words before a command that give it a host name of its own, and further namespaces."""
    need("unshare")
    mine = ["unshare", "--uts", *more] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--uts", *more]
    if launch([*mine, "true"]).code:
        lack("this machine allows no namespaces")
    return [*mine, "sh", "-c", f'hostname {name} && exec "$@"', "sh"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_healthy_ranks_of_one_machine(ranks, tmp_path):
    folder = tmp_path / "run"
    if ranks == 2:  # a run is there, and stays as it is
        (folder / "checkpoints").mkdir(parents=True)
        for name in ("metrics.jsonl", "claim.json", "checkpoints/step_00000001.pt"):
            (folder / name).write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    file = tmp_path / "found.json"
    ended = torchrun(ranks, *QUICK, "--run_dir", folder, "--json", file, script=SCRIPT, deadline=DEADLINE)
    assert (ended.code, ended.left) == (0, 0), ended.text
    says(ended.out, rf"node +ranks +address(?s:.*) 0(-|, ){ranks - 1} (?s:.*)\nall-reduce +all ranks\n8 B +[\d,]+ us, bus")
    for name in ("versions", "code", "config", "host names", "clocks", "run folder", "disk", "/dev/shm", "open files", "links", "loader"):
        says(ended.out, rf"\nOK +{name} ")
    says(ended.out, r"preflight: go: \d+ OK, \d warning\(s\), 0 failure\(s\) in \d+ s\n")
    found = json.loads(file.read_text())
    assert len(found["measured"]["facts"]) == ranks and {each["name"] for each in found["findings"]} >= {"speed", "communication"}
    file.unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_one_process_without_a_launcher(tmp_path):
    ended = launch([sys.executable, SCRIPT, *QUICK, "--run_dir", tmp_path / "run"], deadline=DEADLINE)
    assert (ended.code, ended.left) == (0, 0), ended.text
    says(ended.out, r"\nOK +step ")
    assert not list(tmp_path.iterdir())
    refused = launch([sys.executable, SCRIPT, "--eppochs", "1"])
    assert refused.code == 2 and "did you mean --epochs?" in refused.err


def test_other_flags_and_other_code_are_named(tmp_path):
    other = copy_repository(tmp_path / "other")
    with (other / "model.py").open("a") as file:
        file.write("# mine\n")
    own = {1: {"flags": ["--lr", "0.2"]}, 2: {"script": other / "scripts" / "preflight.py"}}
    ended = all_end(by_hand(4, [*QUICK, "--run_dir", str(tmp_path / "run")], own))
    assert [each.code for each in ended] == [1] * 4, ended[0].text
    says(ended[0].out, r"\nFAILURE +config +lr=0\.2 on \S+ \(rank 1\), lr=0\.1 on the others; start all with the same flags")
    says(ended[0].out, r"\nFAILURE +code +model\.py on \S+ \(rank 2\): not as on the others; bring the same code to all nodes")
    says(ended[0].out, r"preflight: do not start yet: .*2 failure\(s\).*; not measured until that is mended: data, model, step, loader\n")


@pytest.mark.drill
def test_nodes_with_an_unshared_folder_and_a_clock_that_is_off(tmp_path):
    """Host names and mounts of their own; the clock of one is off as its ranks see it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text("import time\nplain = time.time\ntime.time = lambda: plain() + 7\n")
    run = tmp_path / "run"
    run.mkdir()
    first, second = as_node("alpha"), [*as_node("beta", "-m"), "sh", "-c", f'mount --bind {tmp_path}/own {run} && exec "$@"', "sh"]
    late = {"PYTHONPATH": f"{tmp_path}/clock:{os.environ['PYTHONPATH']}"}
    own = {0: {"before": first}, 1: {"before": first}, 2: {"before": second, "env": late}, 3: {"before": second, "env": late}}
    ended = all_end(by_hand(4, [*QUICK, "--run_dir", str(run)], own))
    assert [each.code for each in ended] == [1] * 4, ended[0].text
    says(
        ended[0].out,
        rf"\nFAILURE +run folder +{run} on beta is not the folder of this name on alpha; put it on storage that all nodes share",
    )
    says(ended[0].out, r"\nFAILURE +clocks +the clock of beta is 7\.0 s ahead of that of alpha, .*; let both follow NTP")
    says(ended[0].out, r"\nalpha +0, 1 .*\nbeta +2, 3 .* \+70\d\d\.\d ms ")
    says(ended[0].out, r"\nall-reduce +all ranks +within a node +between nodes\n8 B( +[\d,]+ us, bus [\d.]+ \w+/s){3}")
    says(ended[0].out, r"\nOK +links +the slowest of 1: alpha - beta, ")
    assert not list(run.iterdir()) and not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize(
    ("room", "said"),
    [
        ("64k", r"FAILURE +run folder +\S+/run on \S+: cannot write \(No space left on device\); make room"),
        ("40m", r"FAILURE +disk +\S+/run on \S+ has 41\.9 MB free, and 5 checkpoints of 22\.2 MB need 111 MB; make room"),
    ],
)
def test_a_full_disk(room, said, tmp_path):
    (tmp_path / "run").mkdir()
    fill = "head -c 60k /dev/zero > $0/x; head -c 9k /dev/zero > $0/y;" if room == "64k" else ""
    inside = f'mount -t tmpfs -o size={room} tmpfs {tmp_path}/run && {{ {fill.replace("$0", f"{tmp_path}/run")} exec "$@"; }}'
    before = [*as_node("alpha", "-m"), "sh", "-c", inside, "sh"]
    ended = all_end(by_hand(2, [*QUICK, "--run_dir", str(tmp_path / "run")], {rank: {"before": before} for rank in (0, 1)}))
    assert [each.code for each in ended] == [1] * 2, ended[0].text
    says(ended[0].out, said)


def test_few_open_files(tmp_path):
    limited = ["sh", "-c", 'ulimit -n 110 && exec "$@"', "sh"]
    flags = [*QUICK, "--run_dir", str(tmp_path / "run"), "--num_workers", "4"]
    ended = all_end(by_hand(2, flags, {1: {"before": [*as_node("beta"), *limited]}}))
    assert [each.code for each in ended] == [2] * 2, ended[0].text
    says(ended[0].text, r"open files: the limit is 110, and about \d+ are needed; raise it \(ulimit -n \d+.* \(rank 1 on beta\)")


@pytest.mark.drill
def test_a_slowed_rank_is_named(tmp_path):
    """It gets a fifth of the time, as on a node that something else keeps busy."""
    programs = by_hand(2, [*QUICK, "--run_dir", str(tmp_path / "run")])
    is_over = threading.Event()

    def slow_down():
        while not is_over.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.04), (signal.SIGCONT, 0.01)):
                if programs[1].poll() is None:
                    os.kill(programs[1].pid, number)
                time.sleep(seconds)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        ended = all_end(programs)
    finally:
        is_over.set()
        thread.join()
    assert [each.code for each in ended] == [0, 0], ended[0].text
    says(
        ended[0].out,
        r"\nwarning +speed +\S+ \(rank 1\) is [\d.]+ times slower than the median .* GFLOP/s\), and all wait for it; look there",
    )


@pytest.mark.drill
def test_a_rank_that_hangs_is_named_and_nobody_waits_for_it(tmp_path):
    programs = by_hand(3, [*QUICK, "--run_dir", str(tmp_path / "run"), "--timeout", "6"])
    try:
        ends = time.monotonic() + DEADLINE
        while time.monotonic() < ends and "  facts\n" not in read(programs[0]):
            time.sleep(0.02)
        os.kill(programs[1].pid, signal.SIGSTOP)
        ended = [finish(programs[rank], DEADLINE) for rank in (0, 2)]
    finally:
        stop(programs[1])
    assert [each.code for each in ended] == [1, 1], ended[0].text
    says(ended[0].err, r"FAILURE  rank 1 on \S+ did not come to '.*' in 6 s; look there")


def read(program):
    return os.pread(program.files[0].fileno(), 10**6, 0).decode()


def findings_of_slow_data(words):
    """A data set that takes 100 ms for a sample, with one worker."""
    plain = train.create_dataset

    def create(config, split):
        dataset = plain(config, split)
        if split == "train":
            fetch = dataset.__getitems__
            type(dataset).__getitems__ = lambda self, indices: (time.sleep(0.1 * len(indices)), fetch(indices))[1]
        return dataset

    train.create_dataset = create
    config = TrainingConfig.from_args(words)
    ctx = setup_distributed(config)
    found = preflight.judge(preflight.measure(config, ctx, preflight.Steps(config, ctx)), config)
    return {each.name: [each.level, each.text] for each in found}


@pytest.mark.drill
def test_a_loader_that_does_not_keep_up_says_how_many_workers_would(tmp_path):
    words = [*QUICK, "--num_workers", "1", "--run_dir", str(tmp_path / "run")]
    for found in run_ranks(2, findings_of_slow_data, words):
        level, text = found["loader"]
        assert level == "warning", found
        rate, step, share, workers = re.search(
            r": ([\d,]+) samples/s with 1 .* takes ([\d,]+): (\d+)% .* --num_workers (\d+)", text
        ).groups()
        assert 6 <= int(rate) <= 10 and 0 < int(share) < 100, text
        assert abs(int(workers) - 1.1 * int(step.replace(",", "")) / int(rate)) <= 3, text  # the rate is rounded in it


def test_the_flag_of_its_own_needs_a_file():
    ended = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "write --json FILE" in ended.stderr

"""scripts/preflight.py judges what was measured: each check, on both sides of its line, by facts made by hand."""

import pytest

import checks.facts
from checks import links, verdict
from checks.facts import Probe, addresses
from checks.verdict import FAILURE, OK, WARNING

GB = 10**9


def facts_of(*changes, nodes=2):
    """Two ranks on each node, all alike; changes: (rank, {name: value})."""
    ranks = []
    for rank in range(2 * nodes):
        node = rank // 2
        fact = {"rank": rank, "host": f"node{node}", "machine": f"m{node}", "address": f"10.0.0.{node + 1}/24", "interface": "eth0"}
        fact |= {"device": "H200", "memory": 100 * GB, "free": 99 * GB, "cpus": 8, "shm": GB}
        fact |= {"versions": {"python": "3.12.1", "torch": "2.15.0", "threads": "1"}, "code": {"train.py": "a", "model.py": "b"}}
        ranks.append(fact | {"config": {"lr": 0.1, "epochs": 3, "data_dir": "data"}})
    for rank, change in changes:
        for name, value in change.items():
            ranks[rank][name] = ranks[rank][name] | value if isinstance(value, dict) else value
    return ranks


def one(found, level, *parts):
    """The only finding, of this level, with these words."""
    assert len(found) == 1 and found[0].level == level, found
    for part in parts:
        assert part in found[0].text, found[0].text
    return found[0]


def test_versions_that_must_match_and_those_that_need_not():
    one(verdict.versions(facts_of()), OK, "python 3.12.1, torch 2.15.0 everywhere")
    facts = facts_of((2, {"versions": {"torch": "2.14.0"}}), (3, {"versions": {"torch": "2.14.0"}}))
    one(verdict.versions(facts), FAILURE, "torch is 2.14.0 on node1 (ranks 2, 3) and 2.15.0 on the others; install the same on all nodes")
    one(verdict.versions(facts_of((1, {"versions": {"threads": "4"}}))), WARNING, "threads is 4 on node0 (rank 1) and 1", "OMP_NUM_THREADS")
    one(verdict.versions(facts_of((3, {"versions": {"driver": "550.1"}}))), FAILURE, "driver is 550.1 on node1 (rank 3) and missing on")


def test_code_and_config_that_differ_are_named_with_the_rank():
    one(verdict.code(facts_of()), OK, "the same 2 files")
    one(
        verdict.code(facts_of((2, {"code": {"model.py": "x"}}))),
        FAILURE,
        "model.py on node1 (rank 2): not as on the others; bring the same",
    )
    one(verdict.config(facts_of()), OK)
    one(
        verdict.config(facts_of((1, {"config": {"lr": 0.2}}))),
        FAILURE,
        "lr=0.2 on node0 (rank 1), lr=0.1 on the others; start all with the same",
    )
    one(verdict.config(facts_of((1, {"config": {"data_dir": "/local"}}))), OK)


def test_as_many_of_one_as_of_the_other_rank_0_is_right():
    assert verdict.unlike(["a", "b"]) == ("a", {"b": [1]})
    assert verdict.unlike(["a", "b", "b"]) == ("b", {"a": [0]})


def test_host_names_and_networks():
    one(verdict.hosts(facts_of()), OK, "node0, node1")
    twins = facts_of((2, {"host": "node0"}), (3, {"host": "node0"}))
    one(verdict.hosts(twins), FAILURE, "2 nodes have the host name node0 (ranks 0, 2), by which", "; give each its own")
    one(verdict.network(facts_of()), OK, "node0 10.0.0.1/24 (eth0), node1 10.0.0.2/24 (eth0)")
    other = [(rank, {"address": "192.168.7.2/24", "interface": "docker0"}) for rank in (2, 3)]
    one(verdict.network(facts_of(*other)), WARNING, "node1 192.168.7.2/24 (docker0)", "NCCL_SOCKET_IFNAME")
    routed = [(rank, {"address": f"10.{rank}.0.1/32"}) for rank in range(4)]
    one(verdict.network(facts_of(*routed)), OK)
    one(verdict.network(facts_of(*[(rank, {"address": "", "interface": ""}) for rank in range(4)])), OK, "address unknown")


@pytest.mark.parametrize(
    ("seconds", "level", "said"),
    [
        (0.4, OK, "400.0 ms"),
        (0.6, WARNING, "0.6 s ahead of that of node0"),
        (-6.0, FAILURE, "6.0 s behind that of node0, and logs and ledger go by them; let both follow NTP"),
    ],
)
def test_clocks(seconds, level, said):
    one(verdict.clocks({0: 0.0, 2: seconds}, facts_of()), level, said)


def test_devices_and_their_speed():
    one(verdict.devices(facts_of()), OK, "4 x H200, 100 GB")
    one(verdict.devices(facts_of((3, {"device": "A100"}))), WARNING, "A100 on node1 (rank 3), H200 on the others")
    one(verdict.devices(facts_of((1, {"free": 40 * GB}))), WARNING, "node0 (rank 1): other programs hold 60.0 GB of the GPU's 100 GB")
    one(verdict.devices(facts_of((1, {"memory": 16 * GB, "free": 14.5 * GB}))), OK)  # what CUDA and NCCL take themselves
    one(verdict.devices(facts_of(*[(rank, {"device": "cpu", "free": GB}) for rank in range(4)])), OK)
    one(verdict.speed("speed", [100.0, 90.0, 110.0, 80.0], "GFLOP/s", facts_of()), OK, "80 GFLOP/s on the slowest rank")
    one(
        verdict.speed("speed", [100.0, 100.0, 100.0, 50.0], "GFLOP/s", facts_of()),
        WARNING,
        "node1 (rank 3) is 2.0 times slower than the median",
    )
    one(verdict.speed("step", [100.0, 50.0], "samples/s", facts_of(nodes=1)), WARNING, "node0 (rank 1)")


def test_a_folder_that_fails_and_one_that_is_not_shared():
    def probe(problem="", is_seen=True):
        return [{"folder": "/runs/a", "nodes": {0: {"problem": "", "is_seen": True}, 2: {"problem": problem, "is_seen": is_seen}}}]

    one(verdict.folders(probe(), facts_of()), OK, "/runs/a: seen and written by every node")
    full = verdict.folders(probe("cannot write (No space left on device)"), facts_of())
    one(full, FAILURE, "/runs/a on node1: cannot write (No space left on device); make room")
    one(
        verdict.folders(probe(is_seen=False), facts_of()),
        FAILURE,
        "/runs/a on node1 is not the folder of this name on node0; put it on storage",
    )


def test_a_folder_is_left_as_it_was(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "a"
    first, second = Probe(run, "t"), Probe(run, "t")
    fine = {"is_seen": True, "problem": ""}
    assert (first.leave_token(), first.use("node-0"), second.use("node-1")) == ("", fine, fine)
    assert first.space(10**6)["speed"] > 0
    second.clean_up()
    assert second.use("node-1") == fine  # only who made it deletes it
    first.clean_up()
    assert list(tmp_path.iterdir()) == []
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    first.leave_token()
    first.clean_up()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(checks.facts, "SECONDS_TO_SHOW", 0.2)
    assert Probe(tmp_path / "file" / "run", "t").use("node-0") == {"is_seen": False, "problem": "cannot create a folder (Not a directory)"}


def test_room_and_speed_for_checkpoints():
    def disk(free=10 * GB, speed=GB, held=0, minutes=10.0):
        return verdict.disk({"free": free, "speed": speed, "folder": "/runs/a"}, GB, held, 5, minutes, "node0")

    one(disk(), OK, "10.0 GB free of 5.0 GB needed")
    one(disk(free=4 * GB), FAILURE, "/runs/a on node0 has 4.0 GB free, and 5 checkpoints of 1.0 GB need 5.0 GB; make room")
    one(disk(free=4 * GB, held=2 * GB), OK)
    one(disk(speed=GB // 40), WARNING, "a checkpoint of 1.0 GB takes 40 s; take faster storage")
    one(disk(speed=GB // 10, minutes=0.1), WARNING)
    one(disk(speed=GB // 10, minutes=0.0), OK)


def test_shared_memory_and_open_files():
    one(verdict.shared_memory([""] * 4, facts_of()), OK, "1.0 GB free")
    refused = ["", "", "/dev/shm: has 1 MB free, ...; or --num_workers 0", "/dev/shm: has 1 MB free, ...; or --num_workers 0"]
    one(verdict.shared_memory(refused, facts_of()), FAILURE, "node1: /dev/shm: has 1 MB free")
    one(
        verdict.shared_memory([""] * 4, facts_of(*[(rank, {"shm": 64 * 2**20}) for rank in (2, 3)])),
        WARNING,
        "node1: 67.1 MB free, and NCCL",
    )
    one(verdict.shared_memory([""] * 4, facts_of(*[(rank, {"shm": None}) for rank in range(4)])), OK, "none on this system")
    one(verdict.open_files([{"open": 40, "limit": 1024}] * 4, 4, 16, facts_of()), OK, "40 open, 1024 allowed")
    one(verdict.open_files([{"open": 40, "limit": 0}] * 4, 4, 16, facts_of()), OK, "no allowed")
    low = [{"open": 40, "limit": 1024}] * 2 + [{"open": 40, "limit": 128}] * 2
    one(verdict.open_files(low, 4, 16, facts_of()), FAILURE, "node1: a rank may open 128 files and needs about 152; raise it (ulimit -n")


def test_a_bad_link_and_a_bad_node_are_told_apart():
    facts = facts_of(nodes=4)
    pairs = {pair: (1e-4, 10.0 * GB) for rounds in links.rounds_of(4) for pair in rounds}
    assert len(pairs) == 6

    def judge(**changes):
        changed = pairs | {tuple(map(int, name[1:])): value for name, value in changes.items()}
        return verdict.pairs([[*pair, *value] for pair, value in changed.items()], facts)

    one(judge(), OK, "the slowest of 6")
    one(
        judge(p12=(1e-4, 1.0 * GB)),
        WARNING,
        "the link node1 - node2 is bad: 1.0 GB/s, 100 us there and back, 10.0 GB/s and 100 us elsewhere",
    )
    one(judge(p12=(1e-2, 10.0 * GB)), WARNING, "the link node1 - node2 is bad", "10000 us there")
    one(judge(p03=(1e-4, GB), p13=(1e-4, GB), p23=(1e-4, GB)), WARNING, "all links of node3 are bad: 1.0 GB/s")
    three = {(0, 1): 10.0 * GB, (0, 2): 1.0 * GB, (1, 2): 1.0 * GB}  # most links are bad, and yet one node is to blame
    one(verdict.pairs([[*pair, 1e-4, rate] for pair, rate in three.items()], facts_of(nodes=3)), WARNING, "all links of node2 are bad")
    one(verdict.pairs([], facts_of(nodes=1)), OK, "one node")


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8])
def test_in_a_round_no_node_waits_for_another_pair_and_all_pairs_come(nodes):
    rounds = links.rounds_of(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)


def test_with_many_nodes_each_meets_so_many_of_the_others():
    rounds = links.rounds_of(100)
    assert len(rounds) <= links.MOST_ROUNDS
    assert set(range(100)) == {node for pair in rounds[0] for node in pair}


def test_gradients_that_hide_behind_the_backward_pass_and_those_that_do_not():
    table = [(8, 1e-5), (10**6, 1e-3), (10**7, 1e-2)]
    assert verdict.all_reduce_seconds(table, 8) == pytest.approx(1e-5)
    assert verdict.all_reduce_seconds(table, 55 * 10**5) == pytest.approx(5.5e-3)
    assert verdict.all_reduce_seconds(table, 2 * 10**7) == pytest.approx(2e-2)
    assert verdict.bus_bandwidth(10**6, 1e-3, 4) == pytest.approx(1.5e9)

    def judge(ddp_s, accumulation=1.0, batch_size=64):
        steps = [{"step_s": 0.1, "ddp_s": ddp_s, "samples": 64, "gradient": 10**9}] * 4
        return verdict.communication(steps, table, accumulation, batch_size, " (node0 - node1)")

    one(
        judge(0.1),
        OK,
        "0% of a step is spent waiting for gradients (node0 - node1): all-reduce gives 1.5 GB/s, 22.5 GB/s hides their 1.0 GB",
    )
    one(judge(0.2), WARNING, "50% of a step is spent waiting", "give --grad_accum_steps 9 or")
    one(judge(9.0, batch_size=1), WARNING, "behind a backward pass; mend the network")
    one(judge(0.2, accumulation=9.0), OK, "10% of a step")
    one(judge(0.2, batch_size=640), OK, "9% of a step")  # measured with a tenth of the batch
    one(judge(9.0), WARNING, "91% of a step")  # no longer than the all-reduce itself takes


def test_the_loader_keeps_up_or_how_many_workers_it_would_take():
    steps = [{"samples": 64, "step_s": 0.064}] * 4

    def judge(rate, workers, cpus=8):
        facts = facts_of(*[(rank, {"cpus": cpus}) for rank in range(4)])
        return verdict.loader([{"rate": 2000.0, "workers": workers}] * 3 + [{"rate": rate, "workers": workers}], steps, facts)

    one(judge(1100.0, 2), OK, "node1 (rank 3): 1,100 samples/s with 2 worker(s), the step takes 1,000")
    one(judge(500.0, 2), WARNING, "50% of the time is spent waiting for data; give --num_workers 5 (the node has 8 CPUs for 2 rank(s)")
    one(judge(500.0, 2, cpus=16), WARNING, "give --num_workers 5")
    one(judge(500.0, 0), WARNING, "67% of the time", "give --num_workers 3")


def test_a_step_that_was_refused_names_the_rank_where_it_is_one_ranks():
    one(verdict.problem("data", ["gone; mend it"] * 4, facts_of()), FAILURE, "gone; mend it")
    one(verdict.problem("loader", ["", "hangs; mend it", "", ""], facts_of()), FAILURE, "node0 (rank 1): hangs; mend it")


def test_sizes_as_people_say_them():
    assert [verdict.size(value) for value in (8, 65536, 22_200_000, 10**9, 5e12)] == ["8 B", "65.5 kB", "22.2 MB", "1.0 GB", "5.0 TB"]


def test_the_addresses_of_this_machine():
    found = addresses()
    assert not found or found.get("lo", "127.0.0.1/8").startswith("127.")

"""scripts/preflight.py judges what was measured: each check, on both sides of its line, by facts made by hand."""

import functools

import pytest

import checks.facts
from checks import links, verdict
from checks.facts import Probe
from checks.verdict import FAILURE, OK, WARNING

GB = 10**9


def facts_of(ranks=(), nodes=2, **changes):
    """Two ranks on each node, all alike but for the changes on these ranks."""
    found = []
    for rank in range(2 * nodes):
        node = rank // 2
        fact = {
            "rank": rank,
            "host": f"node{node}",
            "machine": f"m{node}",
            "address": f"10.0.0.{node + 1}/24",
            "interface": "eth0",
        }
        fact |= {"device": "H200", "memory": 100 * GB, "free": 99 * GB, "cpus": 8, "shm": GB}
        fact |= {
            "versions": {"python": "3.12.1", "torch": "2.15.0", "threads": "1"},
            "code": {"train.py": "a", "model.py": "b"},
        }
        found.append(fact | {"config": {"lr": 0.1, "epochs": 3, "data_dir": "data"}})
    for rank in ranks:
        for name, value in changes.items():
            found[rank][name] = found[rank][name] | value if isinstance(value, dict) else value
    return found


def one(level, found, *parts):
    """There is one finding, of this level, with these words."""
    assert [each.level for each in found] == [level], found
    assert all(part in found[0].text for part in parts), found[0].text


is_fine, warns, fails = (functools.partial(one, level) for level in (OK, WARNING, FAILURE))


def test_versions_that_must_match_and_those_that_need_not():
    is_fine(verdict.versions(facts_of()), "python 3.12.1, torch 2.15.0 everywhere")
    facts = facts_of([2, 3], versions={"torch": "2.14.0"})
    fails(
        verdict.versions(facts),
        "torch is 2.14.0 on node1 (ranks 2, 3) and 2.15.0 on the others; install the same on all nodes",
    )
    warns(
        verdict.versions(facts_of([1], versions={"threads": "4"})),
        "threads is 4 on node0 (rank 1) and 1",
        "OMP_NUM_THREADS",
    )
    fails(
        verdict.versions(facts_of([3], versions={"driver": "550.1"})),
        "driver is 550.1 on node1 (rank 3) and missing on",
    )


def test_code_and_config_that_differ_are_named_with_the_rank():
    is_fine(verdict.code(facts_of()), "the same 2 files")
    fails(
        verdict.code(facts_of([2], code={"model.py": "x"})),
        "model.py on node1 (rank 2): not as on the others; bring the same",
    )
    is_fine(verdict.config(facts_of()))
    fails(
        verdict.config(facts_of([1], config={"lr": 0.2})),
        "lr=0.2 on node0 (rank 1), lr=0.1 on the others; start all with the same",
    )
    is_fine(verdict.config(facts_of([1], config={"data_dir": "/local"})))


def test_host_names_and_networks():
    is_fine(verdict.hosts(facts_of()), "node0, node1")
    twins = facts_of([2, 3], host="node0")
    fails(verdict.hosts(twins), "2 nodes have the host name node0 (ranks 0, 2), by which", "; give each its own")
    is_fine(verdict.network(facts_of()), "node0 10.0.0.1/24 (eth0), node1 10.0.0.2/24 (eth0)")
    other = facts_of([2, 3], address="192.168.7.2/24", interface="docker0")
    warns(verdict.network(other), "node1 192.168.7.2/24 (docker0)", "NCCL_SOCKET_IFNAME")
    routed = [fact | {"address": f"10.{fact['rank']}.0.1/32"} for fact in facts_of()]
    is_fine(verdict.network(routed))
    is_fine(verdict.network(facts_of(range(4), address="", interface="")), "address unknown")


def test_clocks():
    for seconds, level, said in (
        (0.4, OK, "400.0 ms"),
        (0.6, WARNING, "0.6 s ahead of that of node0"),
        (-6.0, FAILURE, "6.0 s behind that of node0, and logs and ledger go by them; let both follow NTP"),
    ):
        one(level, verdict.clocks({0: 0.0, 2: seconds}, facts_of()), said)


def test_devices_and_their_speed():
    is_fine(verdict.devices(facts_of()), "4 x H200, 100 GB")
    warns(verdict.devices(facts_of([3], device="A100")), "A100 on node1 (rank 3), H200 on the others")
    warns(
        verdict.devices(facts_of([1], free=40 * GB)), "node0 (rank 1): other programs hold 60.0 GB of the GPU's 100 GB"
    )
    is_fine(verdict.devices(facts_of([1], memory=16 * GB, free=14.5 * GB)))  # what CUDA and NCCL take themselves
    is_fine(verdict.devices(facts_of(range(4), device="cpu", free=GB)))
    is_fine(verdict.speed("speed", [100.0, 90.0, 110.0, 80.0], "GFLOP/s", facts_of()), "80 GFLOP/s on the slowest rank")
    warns(
        verdict.speed("speed", [100.0, 100.0, 100.0, 50.0], "GFLOP/s", facts_of()),
        "node1 (rank 3) is 2.0 times slower than the median",
    )
    warns(verdict.speed("step", [100.0, 50.0], "samples/s", facts_of(nodes=1)), "node0 (rank 1)")


def test_a_folder_that_fails_and_one_that_is_not_shared():
    def probe(problem="", is_seen=True):
        return [
            {
                "folder": "/runs/a",
                "nodes": {0: {"problem": "", "is_seen": True}, 2: {"problem": problem, "is_seen": is_seen}},
            }
        ]

    is_fine(verdict.folders(probe(), facts_of()), "/runs/a: seen and written by every node")
    full = verdict.folders(probe("cannot write (No space left on device)"), facts_of())
    fails(full, "/runs/a on node1: cannot write (No space left on device); make room")
    fails(
        verdict.folders(probe(is_seen=False), facts_of()),
        "/runs/a on node1 is not the folder of this name on node0; put it on storage",
    )


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(checks.facts, "SECONDS_TO_SHOW", 0.2)
    assert Probe(tmp_path / "file" / "run", "t").use("node-0") == {
        "is_seen": False,
        "problem": "cannot create a folder (Not a directory)",
    }


def test_room_and_speed_for_checkpoints():
    def disk(free=10 * GB, speed=GB, held=0, minutes=10.0):
        return verdict.disk({"free": free, "speed": speed, "folder": "/runs/a"}, GB, held, 5, minutes, "node0")

    is_fine(disk(), "10.0 GB free of 5.0 GB needed")
    fails(disk(free=4 * GB), "/runs/a on node0 has 4.0 GB free, and 5 checkpoints of 1.0 GB need 5.0 GB; make room")
    is_fine(disk(free=4 * GB, held=2 * GB))
    warns(disk(speed=GB // 40), "a checkpoint of 1.0 GB takes 40 s; take faster storage")
    warns(disk(speed=GB // 10, minutes=0.1))
    is_fine(disk(speed=GB // 10, minutes=0.0))


def test_shared_memory_and_open_files():
    is_fine(verdict.shared_memory([""] * 4, facts_of()), "1.0 GB free")
    refused = [
        "",
        "",
        "/dev/shm: has 1 MB free, ...; or --num_workers 0",
        "/dev/shm: has 1 MB free, ...; or --num_workers 0",
    ]
    fails(verdict.shared_memory(refused, facts_of()), "node1: /dev/shm: has 1 MB free")
    warns(verdict.shared_memory([""] * 4, facts_of([2, 3], shm=64 * 2**20)), "node1: 67.1 MB free, and NCCL")
    is_fine(verdict.shared_memory([""] * 4, facts_of(range(4), shm=None)), "none on this system")
    is_fine(verdict.open_files([{"open": 40, "limit": 1024}] * 4, 4, 16, facts_of()), "40 open, 1024 allowed")
    is_fine(verdict.open_files([{"open": 40, "limit": 0}] * 4, 4, 16, facts_of()), "no allowed")
    low = [{"open": 40, "limit": 1024}] * 2 + [{"open": 40, "limit": 128}] * 2
    fails(
        verdict.open_files(low, 4, 16, facts_of()),
        "node1: a rank may open 128 files and needs about 152; raise it (ulimit -n",
    )


def test_a_bad_link_and_a_bad_node_are_told_apart():
    facts = facts_of(nodes=4)
    pairs = {pair: (1e-4, 10.0 * GB) for rounds in links.rounds_of(4) for pair in rounds}
    assert len(pairs) == 6

    def judge(**changes):
        changed = pairs | {tuple(map(int, name[1:])): value for name, value in changes.items()}
        return verdict.pairs([[*pair, *value] for pair, value in changed.items()], facts)

    is_fine(judge(), "the slowest of 6")
    warns(
        judge(p12=(1e-4, 1.0 * GB)),
        "the link node1 - node2 is bad: 1.0 GB/s, 100 us there and back, 10.0 GB/s and 100 us elsewhere",
    )
    warns(judge(p12=(1e-2, 10.0 * GB)), "the link node1 - node2 is bad", "10000 us there")
    warns(judge(p03=(1e-4, GB), p13=(1e-4, GB), p23=(1e-4, GB)), "all links of node3 are bad: 1.0 GB/s")
    three = {(0, 1): 10.0 * GB, (0, 2): 1.0 * GB, (1, 2): 1.0 * GB}  # most links are bad, and yet one node is to blame
    warns(
        verdict.pairs([[*pair, 1e-4, rate] for pair, rate in three.items()], facts_of(nodes=3)),
        "all links of node2 are bad",
    )
    is_fine(verdict.pairs([], facts_of(nodes=1)), "one node")


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8])
def test_in_a_round_no_node_waits_for_another_pair_and_all_pairs_come(nodes):
    rounds = links.rounds_of(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    with_many = links.rounds_of(100)
    assert len(with_many) <= links.MOST_ROUNDS
    assert set(range(100)) == {node for pair in with_many[0] for node in pair}


def test_gradients_that_hide_behind_the_backward_pass_and_those_that_do_not():
    table = [(8, 1e-5), (10**6, 1e-3), (10**7, 1e-2)]
    assert verdict.all_reduce_seconds(table, 8) == pytest.approx(1e-5)
    assert verdict.all_reduce_seconds(table, 55 * 10**5) == pytest.approx(5.5e-3)
    assert verdict.all_reduce_seconds(table, 2 * 10**7) == pytest.approx(2e-2)
    assert verdict.bus_bandwidth(10**6, 1e-3, 4) == pytest.approx(1.5e9)

    def judge(ddp_s, accumulation=1.0, batch_size=64):
        steps = [{"step_s": 0.1, "ddp_s": ddp_s, "samples": 64, "gradient": 10**9}] * 4
        return verdict.communication(steps, table, accumulation, batch_size, " (node0 - node1)")

    is_fine(
        judge(0.1),
        "0% of a step is spent waiting for gradients (node0 - node1): all-reduce gives 1.5 GB/s, 22.5 GB/s hides their"
        " 1.0 GB",
    )
    warns(judge(0.2), "50% of a step is spent waiting", "give --grad_accum_steps 9 or")
    warns(judge(9.0, batch_size=1), "behind a backward pass; mend the network")
    is_fine(judge(0.2, accumulation=9.0), "10% of a step")
    is_fine(judge(0.2, batch_size=640), "9% of a step")  # measured with a tenth of the batch
    warns(judge(9.0), "91% of a step")  # no longer than the all-reduce itself takes


def test_the_loader_keeps_up_or_how_many_workers_it_would_take():
    steps = [{"samples": 64, "step_s": 0.064}] * 4

    def judge(rate, workers, cpus=8):
        facts = facts_of(range(4), cpus=cpus)
        return verdict.loader(
            [{"rate": 2000.0, "workers": workers}] * 3 + [{"rate": rate, "workers": workers}], steps, facts
        )

    is_fine(judge(1100.0, 2), "node1 (rank 3): 1,100 samples/s with 2 worker(s), the step takes 1,000")
    warns(
        judge(500.0, 2),
        "50% of the time is spent waiting for data; give --num_workers 5 (the node has 8 CPUs for 2 rank(s)",
    )
    warns(judge(500.0, 2, cpus=16), "give --num_workers 5")
    warns(judge(500.0, 0), "67% of the time", "give --num_workers 3")


def test_a_step_that_was_refused_names_the_rank_where_it_is_one_ranks():
    fails(verdict.problem("data", ["gone; mend it"] * 4, facts_of()), "gone; mend it")
    fails(verdict.problem("loader", ["", "hangs; mend it", "", ""], facts_of()), "node0 (rank 1): hangs; mend it")

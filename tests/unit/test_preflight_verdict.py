# extra: preflight
"""The verdicts of scripts/preflight.py: each check on both sides of its limit."""

import functools

import pytest

from scripts.lib.preflight import diagnosis, links, storage
from scripts.lib.preflight.diagnosis import FAILURE, OK, WARNING
from utils.settings.errors import UserError

GB = 10**9


def facts_of(ranks=(), nodes=2, **changes):
    """Two ranks per node, identical except for `changes` on the given ranks."""
    facts = []
    for rank in range(2 * nodes):
        node = rank // 2
        fact = {"host": f"node{node}", "machine": f"m{node}", "address": f"10.0.0.{node + 1}/24", "interface": "eth0"}
        fact |= {"device": "H200", "driver": "550", "threads": 1, "memory": 100 * GB, "used": GB, "shm": GB}
        facts.append(fact | (changes if rank in ranks else {}))
    return facts


def one(level, findings, *parts):
    """There is one finding, with this level and these texts."""
    assert [entry.level for entry in findings] == [level], findings
    assert all(part in findings[0].text for part in parts), findings[0].text


is_ok, warns, fails = (functools.partial(one, level) for level in (OK, WARNING, FAILURE))


def test_host_names_and_networks():
    is_ok(diagnosis.diagnose_host_names(facts_of()), "node0, node1")
    fails(
        diagnosis.diagnose_host_names(facts_of([2, 3], host="node0")),
        "2 nodes have the host name node0, ",
        ". Rename these nodes",
    )
    is_ok(diagnosis.diagnose_network(facts_of()), "node0 10.0.0.1/24 (eth0), node1 10.0.0.2/24 (eth0)")
    other = facts_of([2, 3], address="192.168.7.2/24", interface="docker0")
    warns(diagnosis.diagnose_network(other), "node1 192.168.7.2/24 (docker0)", "NCCL_SOCKET_IFNAME")
    # routed
    is_ok(diagnosis.diagnose_network([fact | {"address": f"10.{k}.0.1/32"} for k, fact in enumerate(facts_of())]))
    is_ok(diagnosis.diagnose_network(facts_of(range(4), address="", interface="")), "node0 unknown (?)")


@pytest.mark.parametrize(
    ("seconds", "level", "text"),
    [
        (0.4, OK, "within 0.40 s"),
        (0.6, WARNING, "The clock of node1 is 0.6 s ahead of that of node0. "),
        (-6.0, FAILURE, "6.0 s behind that of node0. Logs and goodput need equal clocks. Synchronise"),
    ],
)
def test_clocks(seconds, level, text):
    one(level, diagnosis.diagnose_clocks({0: 0.0, 2: seconds}, facts_of()), text)


def test_devices_and_their_speed():
    is_ok(diagnosis.diagnose_devices(facts_of()), "4 x H200, with 100 GB")
    warns(
        diagnosis.diagnose_devices(facts_of([3], device="A100")),
        "device is A100 on node1 (rank 3) and H200 on the others. ",
    )
    warns(
        diagnosis.diagnose_devices(facts_of([2, 3], driver="535")),
        "driver is 535 on node1 (ranks 2, 3) and 550 on the others",
    )
    warns(
        diagnosis.diagnose_devices(facts_of([1], threads=4)), "threads is 4 on node0 (rank 1)", ". Set OMP_NUM_THREADS"
    )
    warns(
        diagnosis.diagnose_devices(facts_of([1], used=60 * GB)),
        "Other programs use 60.0 GB of 100 GB on the GPU of node0 (rank 1). End",
    )
    is_ok(diagnosis.diagnose_devices(facts_of([1], memory=16 * GB, used=1.9 * GB)))  # CUDA and NCCL themselves
    is_ok(
        diagnosis.diagnose_speed("speed", [100.0, 90.0, 110.0, 80.0], "GFLOP/s", facts_of()),
        "The slowest rank reaches 80 GFLOP/s.",
    )
    slow = diagnosis.diagnose_speed("speed", [100.0, 100.0, 100.0, 50.0], "GFLOP/s", facts_of())
    warns(slow, "node1 (rank 3) is 2.0 times slower than the median of 100 GFLOP/s. ")


def test_an_unusable_run_folder(tmp_path):
    probe = storage.create_probe(tmp_path / "not" / "there")
    storage.check_folder(tmp_path / probe, "rank0")
    assert not list((tmp_path / probe).iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be created \(Not a directory\)\. Change"):
        storage.create_probe(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"is not the folder that rank 0 sees under this name\. Put"):
        storage.check_folder(tmp_path / "elsewhere", "rank1", patience=0.1)
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)\. Free space"):
        storage.check_folder(tmp_path / "file", "rank1")


def test_space_and_speed_for_checkpoints():
    def disk(free=10 * GB, speed=GB, replaced=0, minutes=10.0):
        measured = {"free": free, "speed": speed, "replaced": replaced}
        return diagnosis.diagnose_disk(measured, GB, 5, minutes, "/runs/a on node0")

    is_ok(disk(), "10.0 GB are free and 5.0 GB are needed.")
    expected = "/runs/a on node0 has 4.0 GB of free space, but 5 checkpoints of 1.0 GB need 5.0 GB. Free space"
    fails(disk(free=4 * GB), expected)
    is_ok(disk(free=4 * GB, replaced=2 * GB))
    fails(disk(free=0, speed=0), "0 B of free space")
    warns(disk(speed=GB // 40), "A checkpoint of 1.0 GB takes 40 s in ", "(25.0 MB/s). Use faster storage")
    warns(disk(speed=GB // 10, minutes=0.1))
    is_ok(disk(speed=GB // 10, minutes=0.0))


def test_shared_memory_for_nccl():
    is_ok(diagnosis.diagnose_shared_memory(facts_of()), "1.0 GB of free shared memory.")
    small = facts_of([2, 3], shm=64 * 2**20)
    expected = "node1 has 67.1 MB of free shared memory, but NCCL needs 134 MB for 2 ranks. Raise the limit"
    warns(diagnosis.diagnose_shared_memory(small), expected)
    is_ok(diagnosis.diagnose_shared_memory([fact | {"device": "cpu"} for fact in small]))


@pytest.mark.guarantee("preflight")
def test_a_slow_link_and_a_slow_node_are_distinguished():
    pairs = {pair: (1e-4, 10.0 * GB) for pairs in links.schedule_pairs(4) for pair in pairs}

    def judge(**changes):
        changed = pairs | {tuple(map(int, name[1:])): value for name, value in changes.items()}
        return diagnosis.diagnose_links([[*pair, *value] for pair, value in changed.items()], facts_of(nodes=4))

    is_ok(judge(), "The slowest of 6 links is ")
    slow = "The link node1 - node2 is slow: 1.0 GB/s and 100 us round trip. Other nodes have 10.0 GB/s and 100 us"
    warns(judge(p12=(1e-4, 1.0 * GB)), slow)
    warns(judge(p12=(1e-2, 10.0 * GB)), "The link node1 - node2 is slow", "10000 us round trip")
    warns(judge(p03=(1e-4, GB), p13=(1e-4, GB), p23=(1e-4, GB)), "All links of node3 are slow: 1.0 GB/s")
    three = [[0, 1, 1e-4, 10.0 * GB], [0, 2, 1e-4, 1.0 * GB], [1, 2, 1e-4, 1.0 * GB]]  # one node slows most links
    warns(diagnosis.diagnose_links(three, facts_of(nodes=3)), "All links of node2 are slow")


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8])
def test_rounds_contain_every_pair_once_and_no_node_twice_in_a_round(nodes):
    rounds = links.schedule_pairs(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)


def test_with_many_nodes_each_is_measured_in_few_rounds():
    rounds = links.schedule_pairs(100)
    assert len(rounds) <= links.MAX_ROUNDS
    assert {node for pairs in rounds for pair in pairs for node in pair} == set(range(100))


def test_a_failed_step_names_the_ranks_unless_all_failed_alike():
    hosts = ["node0", "node0", "node1", "node1"]
    fails(diagnosis.create_failures("data", ["gone; fix it"] * 4, hosts), "gone; fix it")
    fails(
        diagnosis.create_failures("loader", ["", "hangs; fix it", "hangs; fix it", ""], hosts),
        "node0 (rank 1), node1 (rank 2): ",
    )

"""The rank that holds up the others, and the thread in which a rank reads the store."""

import os
import threading
import weakref
from unittest import mock

import pytest
import torch.distributed as dist

from training import wait_until
from utils.distributed import rendezvous
from utils.distributed.context import Launch
from utils.extras.watch.heartbeat import Heartbeats, RankStatus, describe_hang

HOSTS = ("a", "a", "b", "b")


def rank_status(step, phase, counter=1, heartbeat=1, pid=100):
    return RankStatus(heartbeat, counter, step, phase, pid)


WAITING = dict.fromkeys(range(4), rank_status(7, "backward"))
READING = dict.fromkeys(range(4), rank_status(7, "data"))


@pytest.mark.guarantee("hang")
@pytest.mark.parametrize(
    ("statuses", "silent", "text", "hanging"),
    [
        (WAITING, {2}, "rank 2 on b was stopped, killed or cut off, last seen in backward of step 7 (process 100)", 2),
        ({0: rank_status(7, "backward")}, {3}, "rank 3 on b was stopped, killed or cut off", 3),
        (WAITING | {3: rank_status(7, "data")}, set(), "rank 3 on b hangs in data of step 7 (process 100)", 3),
        (
            dict.fromkeys(range(4), rank_status(8, "data")) | {1: rank_status(7, "update")},
            set(),
            "rank 1 on a hangs in update of step",
            1,
        ),
        (WAITING, set(), "all ranks wait in backward of step 7 for the network", 0),
        (
            dict.fromkeys(range(4), rank_status(7, "data")),
            set(),
            "all ranks wait in data of step 7 for the storage, or for the",
            0,
        ),
        (
            # the others evaluate, or save the best checkpoint
            {
                0: rank_status(7, "evaluation")._replace(hook="log_images"),
                1: rank_status(7, "save"),
                2: rank_status(7, "evaluation"),
            },
            set(),
            "rank 0 on a hangs in evaluation of step 7, in log_images of model.py (process 100)",
            0,
        ),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(statuses, silent, text, hanging):
    message, rank = describe_hang(statuses, silent, HOSTS, 6.2)
    assert message.startswith(f"There was no progress for 6 s: {text}") and rank == hanging
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("statuses", "silent", "text"),
    [
        (WAITING | {3: rank_status(7, "data")}, set(), "rank 3 on b is slow in data of step 7 (process 100)"),
        (
            WAITING | {rank: rank_status(7, "data", pid=rank) for rank in (1, 3)},
            set(),
            "rank 1 on a is slow in data of step 7 (process 1), and rank 3 on b is slow in data of step 7 (process 3)",
        ),
        (WAITING, set(), "all ranks are slow in backward of step 7"),
        (WAITING, {2}, "rank 2 on b was stopped, killed or cut off, last seen in backward of step 7 (process 100)"),
    ],
)
def test_a_live_rank_that_may_only_be_slow_does_not_hang_yet(statuses, silent, text):
    assert describe_hang(statuses, silent, HOSTS, 6.2, "is slow")[0] == f"There was no progress for 6 s: {text}."


class Held:
    """Stands for the watchdog, and so for the process groups, to which a call refers."""

    def read(self):
        return 1


def test_the_thread_refers_to_nothing_that_a_call_needed_and_has_ended_after_close():
    """One that is left at the interpreter's exit frees process groups there, which aborts the process."""
    heartbeats, held = Heartbeats(dist.HashStore(), 0, os.getpid(), "", True), Held()
    alive, before = weakref.ref(held), set(threading.enumerate())
    assert heartbeats.submit(held.read).result(5) == 1
    del held
    wait_until(lambda: alive() is None, 5)
    (thread,) = set(threading.enumerate()) - before
    heartbeats.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("launch", "init_method", "address", "is_of_rank_0"),
    [
        (Launch(world_size=2, master_address="a:1"), "", "a:1", True),
        (Launch(world_size=2, master_address="a:1", agent_hosts_store=True), "env://", "a:1", False),
        (Launch(world_size=2, srun_address="tcp://b:2"), "", "b:2", True),  # srun
        (Launch(world_size=2, srun_address="tcp://b:2"), "tcp://c:3", "c:3", True),
        (Launch(world_size=2, master_address="a:1", agent_hosts_store=True), "tcp://c:3?rank=0", "c:3", True),
    ],
)
def test_the_address_of_the_heartbeats_is_that_of_the_store(monkeypatch, launch, init_method, address, is_of_rank_0):
    made = mock.Mock()
    monkeypatch.setattr("utils.extras.watch.heartbeat.Heartbeats", made)
    rendezvous.start_heartbeats(launch, dist.HashStore(), "nonce", init_method)
    assert made.call_args.args[3:] == (address, is_of_rank_0)

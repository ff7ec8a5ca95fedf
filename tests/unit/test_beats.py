"""The thread in which a rank reads the store."""

import os
import threading
import weakref

import torch.distributed as dist

from training import wait_until
from utils.distributed.beats import Beats


class Held:
    """Stands for the watchdog, and so for the process groups, to which a call refers."""

    def read(self):
        return 1


def test_the_thread_refers_to_nothing_that_a_call_needed_and_has_ended_after_close():
    """One that is left at the interpreter's exit frees process groups there, which aborts the process."""
    beats, held = Beats(dist.HashStore(), 0, os.getpid(), "", True), Held()
    alive, before = weakref.ref(held), set(threading.enumerate())
    assert beats.ask(held.read).result(5) == 1
    del held
    wait_until(lambda: alive() is None, 5)
    (thread,) = set(threading.enumerate()) - before
    beats.close()
    assert not thread.is_alive()

"""What may befall a run before its first step: addresses, peers, data, folders, checkpoints."""

import signal
import socket
import time
from pathlib import Path

from drill import Drill, Fault, Job, free_port, says, until
from ranks import need

RUN = ("--dataset_size", 100, "--epochs", 2, "--save_every_steps", 5, "--num_workers", 1)
SLOW_START = (
    "plain_state = train.create_state\ndef create(*args):\n    time.sleep(2)\n    return plain_state(*args)\ntrain.create_state = create\n"
)
NOTES_LOADS = (
    "from utils.train_state import TrainState\nplain_load = TrainState.load_state_dict\n"
    "def load(self, *args):\n    open(os.path.dirname(__file__) + '/loaded', 'w').close()\n    return plain_load(self, *args)\n"
    "TrainState.load_state_dict = load\n"
)


def by_hand(drill: Drill, ranks: list[int], world: int, port: int, *flags: object) -> list[Job]:
    """Ranks that a scheduler starts, without torchrun."""
    jobs = []
    for rank in ranks:
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        jobs.append(drill.start(0, *RUN, *flags, env={name: str(value) for name, value in env.items()}))
    return jobs


def files_of(folder: Path) -> dict[str, bytes]:
    """The run itself: all but who looked last, what was said then, and where its ranks were."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file() and path.name != "claim.json"}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(("logs/", "watch/"))}


def refused(drill: Drill, pattern: str, *flags: object, **options: object) -> float:
    """The launch is refused by this sentence, and leaves the run's folder as it was; in seconds."""
    before, begin = files_of(drill.folder / "run"), time.monotonic()
    ended = drill.run(2, *flags, **options)
    seconds = time.monotonic() - begin
    assert (ended.code, ended.left) == (1, 0)
    says(ended.text, pattern)
    after = files_of(drill.folder / "run")
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, changed
    return seconds


def port_taken(drill: Drill) -> float:
    """The other rank finds somebody at the address who does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        begin = time.monotonic()
        first, second = by_hand(drill, [0, 1], 2, port, "--timeout", 5)
        ended = first.end()
        seconds = time.monotonic() - begin
        assert (ended.code, ended.left) == (2, 0), ended.text
        says(
            ended.err,
            rf"rank 0 cannot meet the others at 127.0.0.1:{port} \(.*(EADDRINUSE|address already in use).*\); .*another MASTER_PORT",
        )
        ended = second.end()
        assert (ended.code, ended.left) == (2, 0), ended.text
        says(ended.err, rf"rank 1 cannot meet the others at 127.0.0.1:{port} \(.*\); check that rank 0 runs and its address is right")
    assert not (drill.folder / "run").exists()
    return seconds


def peer_missing(drill: Drill) -> float:
    """Two ranks of three come; under torchrun, which has a store of its own, one of two hangs before it says a word."""
    first, second = by_hand(drill, [0, 1], 3, free_port(), "--timeout", 10)
    ended = first.end()
    assert (ended.code, ended.left) == (2, 0), ended.text
    says(ended.err, r"rank 2 of 3: did not come within 10 s; look at what it said where it was started")
    ended = second.end()
    assert ended.code in (1, 2) and ended.left == 0  # it may hear of it as of the store's end, which rank 0 serves
    code = "import signal\nif RANK == 1:\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    time.sleep(600)\n"
    begin = time.monotonic()
    ended = drill.run(2, *RUN, "--timeout", 5, code=code)
    seconds = time.monotonic() - begin
    assert (ended.code, ended.left) == (1, 0), ended.text
    says(ended.text, r"rank 1 of 2: did not come within 5 s; ")
    assert not (drill.folder / "run").exists()
    return seconds


def folder_in_the_way(drill: Drill) -> float:
    (drill.folder / "file").write_text("precious")
    begin = time.monotonic()
    ended = drill.run(2, *RUN, name="file/run")
    assert (ended.code, ended.left) == (1, 0)
    says(ended.text, rf"run_dir={drill.folder}/file/run: cannot be written \(Not a directory\); give a folder that can")
    assert (drill.folder / "file").read_text() == "precious"
    return time.monotonic() - begin


def stopped_half_way(drill: Drill) -> list[Path]:
    """A run with some checkpoints, the newest last."""
    job = drill.start(2, *RUN, "--keep_last", 9)
    job.wait_for_step(13)
    job.signal_launcher(signal.SIGTERM)
    job.end()
    assert drill.json("status.json")["state"] == "preempted"
    found = drill.runs.checkpoints("run")
    assert len(found) >= 2
    return found


def other_config(drill: Drill) -> float:
    stopped_half_way(drill)
    said = r"seed=7: the checkpoint has seed=42\nbatch_size=2: the checkpoint has batch_size=4\n(?s:.*)resume_from: these must match; give them as they were"
    seconds = refused(drill, said, *RUN, "--resume_from", "auto", "--seed", 7, "--batch_size", 2, code=NOTES_LOADS)
    assert not (drill.folder / "loaded").exists()
    ended = drill.run(2, *RUN, "--resume_from", "auto", code=NOTES_LOADS)
    assert ended.code == 0 and (drill.folder / "loaded").exists(), ended.text
    drill.is_whole(2, *RUN)
    return seconds


def folder_not_shared(drill: Drill) -> float:
    """At the run's path, rank 1 sees a folder of its own, as on a node without the shared storage."""
    need("mount")
    stopped_half_way(drill)
    own = drill.folder / "own"
    own.mkdir()
    code = (
        "import ctypes, subprocess\nif RANK == 1 and ctypes.CDLL(None).unshare(0x20000) == 0:  # CLONE_NEWNS\n"
        "    subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        f"    subprocess.run(['mount', '--bind', {str(own)!r}, {str(drill.folder / 'run')!r}], check=True)\n"
    )
    said = rf"run_dir=\S+: \S+ does not see there what rank 0 on \S+ has written; put .* \(rank 1 on {socket.gethostname()}\)"
    return refused(drill, said, *RUN, "--resume_from", "auto", code=code)


def launcher_killed_at_the_start(drill: Drill) -> float:
    """The ranks import torch, and have not asked yet to die with it."""
    job = drill.start(2, *RUN)
    ranks = job.wait_for(lambda: len(found := job.children(job.program.pid)) == 2 and found)
    job.wait_for(lambda: all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in ranks))
    begin = time.monotonic()
    job.signal_launcher(signal.SIGKILL)
    job.program.wait()
    until(lambda: not job.members())
    seconds = time.monotonic() - begin
    assert not (drill.folder / "run").exists()
    drill.fork(2, *RUN)
    drill.is_whole(2, *RUN)
    return seconds


def killed_at_the_start(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=SLOW_START)
    job.wait_for_phase("start", rank=1)
    begin = time.monotonic()
    job.signal(1, signal.SIGKILL)
    ended = job.end()
    seconds = time.monotonic() - begin
    assert (ended.code, ended.left) == (1, 0)
    status = drill.json("status.json")
    assert (status["state"], status["rank"], status["step"]) == ("failed", 1, 0)
    says(status["error"], r"rank 1 on \S+ was killed or cut off in start of step 0; look for")
    says(ended.text, r"Root Cause \(first observed failure\):(?s:.*)rank      : 1 ")
    drill.fork(2, *RUN)  # the same command: there is no run yet that it could harm
    drill.is_whole(2, *RUN)
    return seconds


def row(kind: str, injection: str, end: str, figure: str, drill) -> Fault:
    return Fault(kind, "start-up", injection, end, figure, drill)


FAULTS = [
    row(
        "port taken",
        "another program listens on MASTER_PORT",
        "each rank is refused in a sentence with the address",
        "s until it had ended",
        port_taken,
    ),
    row(
        "a rank never comes",
        "one rank is not started; one hangs before it says a word",
        "named in a sentence after --timeout",
        "s until it had ended",
        peer_missing,
    ),
    row(
        "a file in the run folder's way",
        "run_dir lies below a regular file",
        "refused with path and cause, the file is as it was",
        "s until it had ended",
        folder_in_the_way,
    ),
    row(
        "other config than the checkpoint's",
        "another seed and micro-batch",
        "refused with both before a tensor is copied, the run is as it was",
        "s until it had ended",
        other_config,
    ),
    row(
        "rank killed at the start",
        "SIGKILL to rank 1 before the first step",
        "the launch ends and names it; the same command then runs",
        "s until it had ended",
        killed_at_the_start,
    ),
    row(
        "run folder not shared",
        "rank 1 sees a folder of its own at the run's path, by a mount namespace",
        "a resumed run is refused with rank and host, and is as it was",
        "s until it had ended",
        folder_not_shared,
    ),
    row(
        "launcher killed at the start",
        "SIGKILL to torchrun while its ranks import torch",
        "the ranks end by themselves and claim nothing; the same command then runs",
        "s until the last process is gone",
        launcher_killed_at_the_start,
    ),
]

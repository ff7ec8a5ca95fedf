"""Processes that die: ranks, the launcher, the writer; once, or at the same step each time."""

import os
import re
import signal
import socket
import time

from drill import AT_STEP, Drill, Fault, free_port, says, slow_writer, until

RUN = ("--dataset_size", 200, "--epochs", 2, "--save_every_steps", 5, "--num_workers", 1)
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torchrun's restarts meet the dead attempt's keys


def strikes_at(step: int, what: str) -> str:
    """Lines that let it befall rank 1 at this step each time, until it is mended."""
    return (
        f"{AT_STEP}\nplain_compute = train.compute_loss\ndef struck(net, batch):\n"
        f"    if STEP[0] == {step} and RANK == 1 and not (RUN.parent / 'mended').exists():\n        {what}\n"
        "    return plain_compute(net, batch)\ntrain.compute_loss = struck\n"
    )


def is_diagnosed(drill: Drill, text: str, step: int, epoch: int, cause: str, *flags: object) -> None:
    """The sentence names the step and its samples: those of a run that nothing befell."""
    drill.fork(2, *flags, name="undisturbed")
    says(
        text,
        rf"the last 3 attempts all ended at step {step} \(epoch {epoch}, samples \[.*\]\) without a new checkpoint; the last one said: {cause}",
    )
    indices = re.search(r"samples \[(.*?)\]", text)[1]
    assert sorted(map(int, indices.split(", "))) == drill.runs.samples("undisturbed")[step]
    assert drill.json("status.json")["state"] == "failed"


def rank_killed(drill: Drill) -> float:
    job = drill.start(2, *RUN)
    job.wait_for_step(12)
    job.signal(1, signal.SIGKILL)
    ended = job.end()
    assert (ended.code, ended.left) == (1, 0)
    status = drill.json("status.json")
    assert (status["state"], status["rank"]) == ("failed", 1)
    says(status["error"], r"rank 1 on \S+ was killed or cut off in \w+ of step \d+; look for .* --resume_from auto")
    says(ended.text, r"Root Cause \(first observed failure\):(?s:.*)rank      : 1 ")
    assert drill.run(2, *RUN, "--resume_from", "auto").code == 0
    drill.is_whole(2, *RUN)
    lost = drill.steps_lost(12)
    assert lost <= 12
    return lost


def rank_0_killed_in_a_save(drill: Drill) -> float:
    """Rank 0 writes status.json as a rule. What its writer has begun is finished without it."""
    job = drill.start(2, *RUN, code=slow_writer(2.0))
    job.wait_for_partial_file()
    step = job.wait_for_step(job.place(0).step + 2).step  # the ranks have agreed that it is a checkpoint
    assert not drill.runs.checkpoints("run")
    job.signal(0, signal.SIGKILL)
    until(lambda: drill.runs.checkpoints("run"))
    ended = job.end()
    assert (ended.code, ended.left) == (1, 0)
    status = drill.json("status.json")
    assert (status["state"], status["rank"]) == ("failed", 0)
    says(status["error"], r"rank 0 on \S+ was killed or cut off in \w+ of step \d+; look for .* --resume_from auto")
    says(ended.text, r"Root Cause \(first observed failure\):(?s:.*)rank      : 0 ")
    drill.fork(2, *RUN, "--resume_from", "auto")
    drill.no_partial_files()
    drill.is_whole(2, *RUN)
    return drill.steps_lost(step)


def launcher_killed(drill: Drill) -> float:
    """The writer hangs meanwhile: the last process that ends by itself."""
    port = free_port()
    how = ("--master-addr", "127.0.0.1", "--master-port", port)
    job = drill.start(2, *RUN, code=slow_writer(60.0), how=how)
    job.wait_for_step(8)
    job.wait_for_partial_file()
    assert len(job.members()) >= 6  # torchrun, two ranks, their loaders' workers, the writer
    begin = time.monotonic()
    job.signal_launcher(signal.SIGKILL)
    job.program.wait()
    until(lambda: not job.members(), 30)
    seconds = time.monotonic() - begin
    assert seconds < 10
    with socket.create_server(("127.0.0.1", port)):
        pass
    ended = drill.run(2, *RUN, "--resume_from", "auto", how=how)
    assert ended.code == 0, ended.text
    drill.no_partial_files()
    drill.is_whole(2, *RUN)
    return seconds


def writer_killed(drill: Drill) -> float:
    """Once while it waits for work, once while it writes."""
    job = drill.start(2, *RUN, code=slow_writer(0.5))
    job.wait_for(lambda: drill.runs.checkpoints("run"))
    first = job.writer()
    os.kill(first, signal.SIGKILL)
    second = job.wait_for(lambda: (pid := job.writer()) != first and pid)
    job.wait_for_partial_file()
    os.kill(second, signal.SIGKILL)
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    said = re.findall(r"\S+\.pt: the process that wrote it was killed; training goes on, and it is tried again in 0 s", ended.text)
    assert len(said) == 2
    drill.no_partial_files()
    drill.is_whole(2, *RUN)
    return len(said)


def restarted_by_torchrun(drill: Drill) -> float:
    how = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "drill", "--max-restarts", 3)
    job = drill.start(2, *RUN, how=how, env=NO_SHARED_STORE)
    job.wait_for_step(12)
    job.former = {place.pid for place in job.places(2)}
    begin = time.monotonic()
    os.kill(max(job.former), signal.SIGKILL)
    job.wait_for_step(1)
    seconds = time.monotonic() - begin
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert drill.json("status.json")["state"] == "completed" and drill.json("summary.json")["restarts"] == 1
    drill.is_whole(2, *RUN)
    return seconds


def restarts_in_vain(drill: Drill) -> float:
    """The rank kills itself at step 7; torchrun would restart it ten times."""
    how = ("--standalone", "--max-restarts", 10)
    options = {"how": how, "env": NO_SHARED_STORE, "code": strikes_at(7, "os.kill(os.getpid(), 9)")}
    ended = drill.run(2, *RUN, seconds=120, **options)
    assert (ended.code, ended.left) == (1, 0)
    is_diagnosed(drill, ended.text, 7, 0, r"rank 1 on \S+ was killed or cut off in \w+ of step 7;", *RUN)
    attempts = drill.json("claim.json")["attempt"]
    (drill.folder / "mended").touch()
    ended = drill.run(2, *RUN, "--resume_from", "auto", **options)
    assert ended.code == 0, ended.text
    drill.is_whole(2, *RUN)
    return attempts


def relaunches_in_vain(drill: Drill) -> float:
    """A script gives the same command again and again. Between checkpoint and step lies the end of an epoch, with a short window."""
    flags = ("--dataset_size", 198, "--epochs", 2, "--save_every", 0, "--save_every_steps", 20, "--num_workers", 1, "--resume_from", "auto")
    code, texts = strikes_at(27, "raise KeyError('a bug of the fork')"), []
    for _ in range(4):
        ended = drill.run(2, *flags, code=code)
        assert (ended.code, ended.left) == (1, 0)
        texts.append(ended.text)
    assert all("KeyError: 'a bug of the fork'" in text and "attempts all ended" not in text for text in texts[:3])
    is_diagnosed(drill, texts[3], 27, 1, "'a bug of the fork'", *flags)
    (drill.folder / "mended").touch()
    ended = drill.run(2, *flags, code=code)
    assert ended.code == 0, ended.text
    drill.is_whole(2, *flags)
    return len(texts)


def killed_under_defaults(drill: Drill) -> float:
    """Three times, at a random step after the first epoch: each time at most an epoch is made again, and what a write took."""
    run, most = ("--dataset_size", 200, "--epochs", 4, "--num_workers", 1), 0
    for _ in range(3):
        again = ("--resume_from", "auto") if most or (drill.folder / "run").exists() else ()
        job = drill.start(2, *run, *again)
        first = drill.events("resumed")[-1]["step"] if again else 0
        victim, wanted = drill.random.randrange(2), drill.random.randrange(max(first, 30) + 1, max(first, 30) + 20)
        job.wait_for_step(wanted)
        reached = max(place.step for place in job.places(2))
        job.signal(victim, signal.SIGKILL)
        says(job.end().text, r"a kill costs  at most the work of 10 min or 1 epoch\(s\), what comes first")
        assert drill.run(2, *run, "--resume_from", "auto", "--max_time", 0.001).code == 0  # says where it goes on, and stops
        most = max(most, drill.steps_lost(reached))
        assert most <= 25 + 10, most
    assert drill.run(2, *run, "--resume_from", "auto").code == 0
    drill.is_whole(2, *run)
    return most


FAULTS = [
    Fault(
        "rank killed under default settings",
        "processes",
        "SIGKILL to a random rank at three random steps, no flag on saves given",
        "the work that is made again stays within what the start of the run said; the same bits",
        "steps made again at most",
        killed_under_defaults,
    ),
    Fault(
        "rank killed",
        "processes",
        "SIGKILL to rank 1 at step 12",
        "the launch ends and names rank, host, phase and step; goes on to the same bits",
        "steps made again",
        rank_killed,
    ),
    Fault(
        "rank 0 killed in a save",
        "processes",
        "SIGKILL to rank 0 while its writer writes",
        "another rank writes status.json and names rank 0; the checkpoint appears, whole; goes on to the same bits",
        "steps made again",
        rank_0_killed_in_a_save,
    ),
    Fault(
        "launcher killed",
        "processes",
        "SIGKILL to torchrun while the writer hangs",
        "ranks, loader workers and writer end by themselves within 10 s, the port is free; goes on to the same bits",
        "s until the last process is gone",
        launcher_killed,
    ),
    Fault(
        "writer killed",
        "processes",
        "SIGKILL to the process that writes checkpoints, while it waits and while it writes",
        "it is replaced, the checkpoints appear, training does not end, no partial file stays",
        "writers replaced",
        writer_killed,
    ),
    Fault(
        "rank killed under torchrun's restarts",
        "processes",
        "SIGKILL to a rank at step 12, --max-restarts 3 --rdzv-id NAME",
        "goes on by itself to completion, to the same bits",
        "s until it trains again",
        restarted_by_torchrun,
    ),
    Fault(
        "killed at the same step under torchrun's restarts",
        "processes",
        "a rank kills itself at step 7 each time, --max-restarts 10",
        "three attempts, then a diagnosis with step and samples and no further restart; mended, it goes on",
        "attempts made",
        restarts_in_vain,
    ),
    Fault(
        "fails at the same step, relaunched by a script",
        "processes",
        "compute_loss raises at step 27 each time; the same command again and again",
        "three attempts, then a diagnosis with step and samples; mended, the same command goes on",
        "attempts made",
        relaunches_in_vain,
    ),
]

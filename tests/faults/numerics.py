"""Numbers that are not finite, and memory that flips a bit: no rank's weights take them in, and no checkpoint holds them."""

import json
import socket

from drill import AT_STEP, Drill, Fault, says

HOST = socket.gethostname()
RUN = ("--dataset_size", 120, "--epochs", 1, "--ema_decay", 0.9, "--num_workers", 1)  # 15 steps of two ranks
HALF = ("--use_amp", "--amp_dtype", "fp16", "--lr", 0.0001)

WATCHED = f"""{AT_STEP}
import hashlib, json
from utils.train_state import TrainState
STATES = []
plain_create, plain_update = train.create_state, TrainState.update_if_finite

def create_state(*args):
    STATES[:] = [plain_create(*args)]
    return STATES[0]

def say(when):
    state = STATES[0]
    momenta = [value for each in state.optimizer.state.values() for value in each.values()]
    tensors = [*state.model.state_dict().values(), *state.average.model.state_dict().values(), *momenta]
    digest = hashlib.sha256(b''.join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
    with open(RUN / f'digests{{RANK}}.jsonl', 'a') as file:
        file.write(json.dumps([STEP[0], when, digest]) + '\\n')

def begin_and_say(self, step):
    begin_step(self, step)
    say('before')

def update_and_say(self, window):
    plain_update(self, window)
    say('after')

train.create_state, Watch.begin_step, TrainState.update_if_finite = create_state, begin_and_say, update_and_say
"""  # a digest of weights, BatchNorm statistics, momenta and averages before and after each step, by each rank


def poison(steps: str, loss: str) -> str:
    """Lines after which rank 1's loss is another in these steps."""
    return f"""
def poisoned_loss(net, batch):
    loss, metrics = slow_loss(net, batch)
    return {loss} if RANK == 1 and net.training and STEP[0] in {steps} else loss, metrics
train.compute_loss = poisoned_loss
"""


def idle_steps(drill: Drill, ranks: int = 2) -> list[int]:
    """The steps that left the state as it was, to the bit, on all ranks; who also agree on the state before and after all others."""
    files = [drill.folder / f"run/digests{rank}.jsonl" for rank in range(ranks)]
    assert len({file.read_text() for file in files}) == 1
    digests = {}
    for step, when, digest in map(json.loads, files[0].read_text().splitlines()):
        digests.setdefault(step, {})[when] = digest
    return [step for step, found in digests.items() if found["before"] == found["after"]]


def skips(drill: Drill, code: str, steps: list[int], *flags: object) -> float:
    """These steps and no others are skipped on all ranks, and recorded with their samples."""
    ended = drill.run(2, *RUN, *flags, code=WATCHED + code)
    assert (ended.code, ended.left) == (0, 0), ended.text
    summary, samples = drill.json("summary.json"), drill.runs.samples("run")
    assert {event["step"]: sorted(event["indices"]) for event in drill.events("skipped_step")} == {step: samples[step] for step in steps}
    assert summary["skipped_steps"] == len(steps) and summary["steps"] == 15
    idle = idle_steps(drill)
    assert set(steps) <= set(idle) and len(idle) == len(steps) + summary["overflow_steps"], (idle, summary)
    for step in steps:
        says(ended.text, rf"skipped \d+ optimizer step\(s\) whose loss or gradient is not finite: .*\b{step}\b")
    return summary["skipped_steps"]


def nan_loss(drill: Drill) -> float:
    """At the first step too."""
    return skips(drill, poison("(1, 8)", "loss * float('nan')"), [1, 8])


def infinite_loss(drill: Drill) -> float:
    return skips(drill, poison("(8,)", "loss + float('inf')"), [8])


def infinite_gradient(drill: Drill) -> float:
    code = """
def create_and_hook(*args):
    state = create_state(*args)
    hook = lambda gradient: gradient * float('inf') if RANK == 1 and STEP[0] == 8 else None
    next(state.model.parameters()).register_hook(hook)
    return state
train.create_state = create_and_hook
"""
    taken = skips(drill, code, [8])
    assert all(record["loss"] is not None for record in drill.runs.records("run", "train"))
    return taken


def search_for_a_scale(drill: Drill) -> float:
    """A gradient that float16's first scales make overflow, while all losses are finite."""
    code = """
def steep_loss(net, batch):
    loss, metrics = slow_loss(net, batch)
    return loss * 64, metrics
train.compute_loss = steep_loss
"""
    assert skips(drill, code, [], *HALF) == 0
    searched = drill.json("summary.json")["overflow_steps"]
    assert 0 < searched < 15 and idle_steps(drill) == list(range(1, searched + 1))
    return searched


def nan_in_half(drill: Drill) -> float:
    return skips(drill, poison("(12,)", "loss * float('nan')"), [12], *HALF)


def nan_for_good(drill: Drill) -> float:
    ended = drill.run(2, *RUN, "--max_skipped_steps", 4, code=AT_STEP + poison("range(7, 99)", "loss * float('nan')"))
    assert (ended.code, ended.left) == (1, 0), ended.text
    status, last = drill.json("status.json"), max(drill.runs.samples("run"))
    sentence = (
        rf"the last {last - 6} optimizer steps, up to step {last}, had a loss or a gradient that is not finite; look at their samples"
    )
    assert status["state"] == "failed"
    says(status["error"], sentence)
    says(ended.text, sentence)
    late = last - 10
    assert 0 <= late < 5  # log_interval
    return late


# ---- a rank whose memory is not what it was ----

SAVING = ("--dataset_size", 240, "--epochs", 1, "--num_workers", 1, "--save_every_steps", 4)


def diverges(drill: Drill, ranks: int, change: str) -> float:
    """Rank 1 changes after step 10. It is named before a checkpoint holds that; the run goes on from the last good one to the same bits."""
    code = f"""{AT_STEP}
from utils.train_state import TrainState
plain_update = TrainState.update_if_finite
def update_and_change(self, window):
    plain_update(self, window)
    if RANK == 1 and STEP[0] == 10:
        weight = [*self.model.parameters()][-1].data
        {change}
TrainState.update_if_finite = update_and_change
"""
    job = drill.start(ranks, *SAVING, code=code)
    ended = job.end(120)
    assert (ended.code, ended.left) == (1, 0), ended.text
    status, reached = drill.json("status.json"), job.places(ranks)[0].step
    sentence = rf"rank 1 on {HOST}: has other weights than the other ranks, so nothing was saved; look for a fault of its memory"
    assert (status["state"], status["rank"], status["host"]) == ("failed", 1, HOST)
    says(status["error"], sentence)
    says(ended.text, sentence)
    assert 0 < int(drill.runs.checkpoints("run")[-1].stem.removeprefix("step_")) <= 10
    drill.no_partial_files()
    drill.fork(ranks, *SAVING, "--resume_from", "auto")
    drill.is_whole(ranks, *SAVING)
    return reached - 10


def flipped_bit(drill: Drill) -> float:
    return diverges(drill, 4, "weight.view(torch.int32)[0] ^= 1 << 20")


def other_momentum(drill: Drill) -> float:
    return diverges(drill, 3, "self.optimizer.state[[*self.model.parameters()][-1]]['momentum_buffer'][0] += 1")


FAULTS = [
    Fault(
        "NaN loss",
        "numbers",
        "rank 1's loss is NaN in steps 1 and 8",
        "skipped on both ranks, weights, momenta, EMA and statistics bit-identical before and after; samples recorded",
        "steps skipped",
        nan_loss,
    ),
    Fault(
        "infinite loss",
        "numbers",
        "rank 1's loss is infinite, its gradient is not",
        "as for NaN",
        "steps skipped",
        infinite_loss,
    ),
    Fault(
        "infinite gradient",
        "numbers",
        "one gradient of rank 1 is infinite, all losses are finite",
        "as for NaN; the interval's loss is a number",
        "steps skipped",
        infinite_gradient,
    ),
    Fault(
        "float16 searches its scale",
        "numbers",
        "gradients that overflow in float16 at its first scales",
        "counted as overflow_steps; no step counts as skipped, none is recorded as such",
        "steps of overflow",
        search_for_a_scale,
    ),
    Fault(
        "NaN loss in float16",
        "numbers",
        "rank 1's loss is NaN in step 12, in float16",
        "counted as skipped, not as a search for the scale",
        "steps skipped",
        nan_in_half,
    ),
    Fault(
        "NaN for good",
        "numbers",
        "rank 1's loss is NaN from step 7 on; --max_skipped_steps 4",
        "ends with the sentence within log_interval steps of the fourth",
        "steps late",
        nan_for_good,
    ),
    Fault(
        "bit of a weight flips",
        "numbers",
        "one bit of one weight of rank 1 of 4, after step 10",
        "rank and host named before a checkpoint is committed; goes on from the last good one to the same bits",
        "steps to the finding",
        flipped_bit,
    ),
    Fault(
        "momentum differs",
        "numbers",
        "one value of a momentum buffer of rank 1 of 3, after step 10",
        "found by the weights at the next save; the same",
        "steps to the finding",
        other_momentum,
    ),
]

# extra: template
"""Non-finite values and a flipped bit in memory: they do not reach the weights of the ranks or a checkpoint."""

import json
import re

from drill import HOST, Drill, fault
from training import says
from utils.report.reporter import STEPS_BEFORE_READ

RUN = "--dataset_size 120 --epochs 1 --num_workers 1".split()  # 15 steps of two ranks
RUN += ["--ema_decay", "0.9"]
HALF = "--use_amp --amp_dtype fp16 --lr 0.0001".split()

WATCHED = """
import hashlib, json
from utils.training.state import TrainState
STATES = []
plain_create, plain_update = assembly.create_train_state, TrainState.update_if_finite

def create_state(*args, **options):
    STATES[:] = [plain_create(*args, **options)]
    return STATES[0]

def say(when):
    state = STATES[0]
    momenta = [value for each in state.optimizer.state.values() for value in each.values()]
    tensors = [*state.state_dict()['model'].values(), *state.state_dict()['ema'].values(), *momenta]
    digest = hashlib.sha256(b''.join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
    with open(RUN / f'digests{RANK}.jsonl', 'a') as file:
        file.write(json.dumps([STEP, when, digest]) + '\\n')

def begin_and_say(self, step):
    begin_step(self, step)
    say('before')

def update_and_say(self, global_batch):
    plain_update(self, global_batch)
    say('after')

assembly.create_train_state = create_state
PhaseClock.begin_step = begin_and_say
TrainState.update_if_finite = update_and_say
"""  # each rank writes a digest of weights, BatchNorm statistics, momenta and averages before and after each step


def changed_loss(steps: str, change: str, ranks: str = "(1,)") -> str:
    """Lines that change the loss of these ranks in these steps."""
    return f"""
def other_loss(net, batch):
    metrics = compute_loss(net, batch)
    loss, count = metrics['loss']
    is_bad = RANK in {ranks} and net.training and STEP in {steps}
    return metrics | {{'loss': (loss {change} if is_bad else loss, count)}}
train.your_model.compute_loss = other_loss
"""


NAN = "* float('nan')"
INFINITE_GRADIENT = (  # for the last bias; adds 0 to the loss
    "+ 1e38 * sum(1e38 * (p - p.detach()).sum() for p in [*net.parameters()][-1:])"
)


def idle_steps(drill: Drill, ranks: int = 2) -> list[int]:
    """The steps that left the state bitwise unchanged on all ranks. Asserts that all ranks agree on the state before
    and after every step."""
    files = [drill.folder / f"run/digests{rank}.jsonl" for rank in range(ranks)]
    assert len({file.read_text() for file in files}) == 1
    digests = {}
    for step, when, digest in map(json.loads, files[0].read_text().splitlines()):
        digests.setdefault(step, {})[when] = digest
    return [step for step, pair in digests.items() if pair["before"] == pair["after"]]


@fault("NaN loss", changed_loss("(1, 8)", NAN), [1, 8], is_default=True, guarantees="batchnorm not-finite")
@fault("infinite gradient", changed_loss("(8,)", INFINITE_GRADIENT), [8], guarantees="not-finite")
@fault("NaN loss in float16", changed_loss("(12,)", NAN), [12], *HALF, guarantees="not-finite")
def skips(drill: Drill, code: str, steps: list[int], *flags: object) -> None:
    """These steps and no others are skipped on all ranks, and recorded with their samples."""
    ended = drill.completes(2, *RUN, *flags, code=WATCHED + code)
    summary, samples = drill.json("summary.json"), drill.runs.samples("run")
    assert {event["step"]: sorted(event["indices"]) for event in drill.events("skipped_step")} == {
        step: samples[step] for step in steps
    }
    assert summary["skipped_steps"] == len(steps) and summary["steps"] == 15
    idle = idle_steps(drill)
    assert set(steps) <= set(idle) and len(idle) == len(steps) + summary["overflow_steps"], (idle, summary)
    for step in steps:
        says(ended.text, rf"skipped \d+ optimizer steps? with a non-finite loss or gradient: .*\b{step}\b")
    if INFINITE_GRADIENT in code:
        assert all(record["loss"] is not None for record in drill.runs.records("run", "train"))


@fault("float16 searches its scale", guarantees="not-finite")
def search_for_a_scale(drill: Drill) -> None:
    skips(drill, changed_loss("range(16)", "* 64", "(0, 1)"), [], *HALF)
    searched = drill.json("summary.json")["overflow_steps"]
    assert 0 < searched < 15 and idle_steps(drill)[0] == 1, (searched, idle_steps(drill))


@fault("NaN for good", is_default=True, guarantees="not-finite")
def nan_for_good(drill: Drill) -> None:
    job = drill.start(2, *RUN, "--max_skipped_steps", 4, code=changed_loss("range(7, 99)", NAN))
    drill.fails(
        job, r"The last \d+ optimizer steps, up to step \d+, had a non-finite loss or gradient\. Look at their samples"
    )
    match = re.search(r"The last (\d+) optimizer steps, up to step (\d+),", drill.json("status.json")["error"])
    skipped, step = map(int, match.groups())
    assert skipped == step - 6 and 10 <= step < 15  # log_interval
    assert step <= max(drill.runs.samples("run")) <= step + STEPS_BEFORE_READ


# ---- a flipped bit in a rank's memory ----

SAVING = "--dataset_size 240 --epochs 1 --num_workers 1 --save_every_steps 4".split()


@fault("bit of a weight flips", is_default=True, guarantees="ranks-alike divergence")
def diverges(drill: Drill) -> None:
    code = """
from utils.training.state import TrainState
plain_update = TrainState.update_if_finite
def update_and_change(self, global_batch):
    plain_update(self, global_batch)
    if RANK == 1 and STEP == 10:
        [*self.model.parameters()][-1].data.view(torch.int32)[0] ^= 1 << 20
TrainState.update_if_finite = update_and_change
"""
    job = drill.start(3, *SAVING, code=code)
    pattern = rf"rank 1 on {HOST} differ from those of the other ranks, so nothing was saved."
    drill.fails(job, pattern, rank=1)
    assert 0 < int(drill.runs.checkpoints("run")[-1].stem.removeprefix("step_")) <= 10
    drill.resumes(3, *SAVING)

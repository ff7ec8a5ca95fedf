"""--sharding: weights as the plain loop's, bit for bit after a resume, on any number of ranks, and from or to DDP."""

import os
import socket
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import export
import plain_loop
import predict
import train
from ranks import run_ranks, slow
from tasks import TASKS, BlockModel, config_of, image_loss, train_task, training_under, using
from test_exact_resume import FLAGS as OF_RESUME
from test_oracle import check_against_the_oracle
from test_predict_and_export import run_main
from test_skipping import FLAGS as OF_SKIPPING
from test_skipping import train_with_nan
from training import relative, train_flags
from utils import assembly
from utils.checkpoint import format as checkpoint
from utils.distributed.dtensor import is_sharded
from utils.settings.errors import UserError
from utils.training.schedule import Progress

SGD, ADAMW = "--optimizer sgd --lr 0.05", "--optimizer adamw --lr 0.001"


@pytest.mark.guarantee("sharding")
@pytest.mark.parametrize(
    ("ranks", "accumulation", "task", "optimizer", "flags"),
    [
        (4, 1, "blocks", SGD, "zero3"),
        slow(2, 2, "blocks", ADAMW, "zero2 --activation_checkpointing"),  # extra: compile
        slow(1, 4, "blocks", SGD, "zero3 --cpu_offload"),
        slow(3, 2, "images", SGD, "zero3"),
    ],
)
def test_twenty_float64_steps_equal_the_plain_loop(runs, ranks, accumulation, task, optimizer, flags):
    """Short last global batches, padding on some ranks, clipping, the average, weights that are tied between blocks."""
    flags = (*optimizer.split(), "--max_steps", 20, "--sharding", *flags.split())
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, [*map(str, flags)], 1e-12, task)
    assert runs.checkpoints("ours")[-1].is_dir()


def train_on_two_nodes(words, task):
    host = f"node{int(os.environ['RANK']) // 2}"
    with mock.patch.object(socket, "gethostname", lambda: host):
        return train_flags(words, torch.float64, task)


@pytest.mark.guarantee("sharding")
def test_hybrid_is_sharded_on_a_node_and_replicated_on_two(runs):
    flags = [*"--no-use_amp --dataset_size 42 --epochs 2 --clip_grad_norm 1 --grad_accum_steps 2".split(), *SGD.split()]
    run_ranks(4, train_on_two_nodes, runs.words("run", *flags, "--sharding", "hybrid"), "blocks")
    with using("blocks"):
        *_, (model, *_) = plain_loop.plain_loop(config_of(runs.words("run", *flags), torch.float64), 8)
    assert relative(runs.last("run")["model"], model.state_dict()) < 1e-12


@pytest.mark.guarantee("sharded-resume")
@pytest.mark.parametrize(
    ("ranks", "task", "flags"),
    [
        slow(2, "images", f"{ADAMW} --sharding zero3 --amp_dtype bf16 --grad_accum_steps 2"),
        (2, "blocks", f"{ADAMW} --sharding zero3 --amp_dtype fp16_params --grad_accum_steps 2"),
        slow(
            2, "blocks", f"{ADAMW} --sharding zero2 --amp_dtype bf16_params --activation_checkpointing"
        ),  # extra: compile
        slow(4, "blocks", f"{SGD} --sharding zero2 --no-use_amp"),
    ],
)
def test_stops_and_resumes_within_an_epoch_change_nothing(runs, ranks, task, flags):
    flags = [*OF_RESUME, "--dataset_size", 30 * ranks, *flags.split()]
    runs.train(ranks, "whole", *flags, task=task)
    runs.train_with_stops(ranks, "parts", *flags, task=task, stops=(1, 3, 6))
    assert [record["step"] for record in runs.events("parts", "resumed")] == [2, 4, 7]
    runs.assert_same("whole", "parts")
    assert (runs.folder("parts") / "checkpoints" / "best.pt").is_symlink()


class Shared(TorchDispatchMode):
    """The bytes of floating-point tensors on the device's group: of what is gathered, and of gradients to be summed."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("c10d::_")
        if name in ("allgather_base_", "reduce_scatter_base_"):
            self.bytes[name] += args[name == "reduce_scatter_base_"].nbytes
        return function(*args, **(kwargs or {}))


def shared_by_step(words):
    """The bytes of the third step: gathered, and summed over the ranks."""
    mode, steps = Shared(), []

    def done(step):
        steps.append((mode.bytes["allgather_base_"], mode.bytes["reduce_scatter_base_"]))
        mode.bytes.clear()

    with training_under(mode, done):
        train_flags(words, task="blocks")
    return steps[2]


@pytest.mark.guarantee("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_are_gathered_in_16_bits_if_asked_and_the_shards_stay_in_32(runs, ranks):
    """Half the bytes, but for the norm of the shards; gradients are summed in float32. DDP evaluates it."""
    flags = [*ADAMW.split(), "--dataset_size", 24 * ranks, "--epochs", 2, "--sharding", "zero3"]
    flags += ["--ema_decay", 0.9]
    sums = {}
    for dtype in ("bf16", "bf16_params"):
        sums[dtype] = run_ranks(ranks, shared_by_step, runs.words(dtype, *flags, "--amp_dtype", dtype))[0]
    (whole, gradients), norm = sums["bf16"], 4 * ranks
    assert sums["bf16_params"] == ((whole - norm) / 2 + norm, gradients) and gradients > 0
    saved = runs.last("bf16_params")
    states = [saved["model"], saved["ema"], *saved["optimizer"]["state"].values()]
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}
    assert not torch.equal(saved["model"]["head.weight"], saved["model"]["head.weight"].bfloat16().float())
    assert relative(saved["model"], runs.last("bf16")["model"]) < 0.02
    losses = [record["loss"] for name in sums for record in runs.records(name, "eval")]
    half = len(losses) // 2
    assert half and losses[:half] == pytest.approx(losses[half:], rel=0.01)
    runs.train(1, "bf16_params", *flags, "--sharding", "none", "--amp_dtype", "bf16", "--eval_only", task="blocks")


def test_batchnorm_is_refused_with_parameters_in_16_bits(runs):
    flags = runs.words("run", "--dataset_size", 16, "--sharding", "zero3", "--amp_dtype", "bf16_params")
    with pytest.raises(
        UserError, match=r"--amp_dtype bf16_params does not work with BatchNorm\. Give --amp_dtype bf16\."
    ):
        train_flags(flags)


# 24 steps of 5 micro-batches, which do not divide evenly among 2 or 4 ranks; the last step has 2 samples
OF_CHAIN = "--dataset_size 462 --epochs 1 --global_batch_size 20 --lr 0.05 --clip_grad_norm 1".split()
OF_CHAIN += ["--ema_decay", "0.9"]
OF_CHAIN += "--no-use_amp --save_every 0 --num_workers 1 --record_samples --log_interval 3".split()
CHAIN = ((4, 3, "zero3"), (2, 8, "none"), (2, 11, "zero2"), (1, 0, "zero3"))  # ranks, and when a signal comes


@pytest.mark.guarantee("sharding", "elastic")
def test_other_numbers_of_ranks_and_ddp_in_one_epoch_equal_the_plain_loop(runs):
    for ranks, stop, sharding in CHAIN:
        flags = (*OF_CHAIN, "--sharding", sharding, "--resume_from", "auto")
        runs.train_with_stops(ranks, "run", *flags, stops=(stop,), dtype=torch.float64, task="blocks", goes_on=False)
    with using("blocks"):
        *_, (net, average, *_) = plain_loop.plain_loop(config_of(runs.words("run", *OF_CHAIN), torch.float64), 5)
    saved, events = runs.last("run"), runs.events("run", "resumed")
    assert [(record["step"], record["world_size"]) for record in events] == [(4, 2), (9, 2), (12, 1)]
    assert events[0]["changed"] == ["--sharding is none, but the checkpoint has --sharding zero3."]
    assert relative(saved["model"], net.state_dict()) < 1e-12 and saved["progress"]["step"] == 24
    assert relative(saved["ema"], average.state_dict()) < 1e-12
    order = torch.randperm(462, generator=torch.Generator().manual_seed(plain_loop.number("order", 42, 0)))
    expected = {step: sorted(global_batch.tolist()) for step, global_batch in enumerate(order.split(20), start=1)}
    assert runs.samples("run") == expected


@pytest.mark.guarantee("sharding")
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(runs):
    for name, flags in {"ddp": [], "run": ["--sharding", "zero3"]}.items():
        flags += ["--ema_decay", 0.9]
        run_ranks(2, train_with_nan, runs.words(name, *OF_SKIPPING, *flags), 3)
        assert [record["step"] for record in runs.events(name, "skipped_step")] == [3]
    assert runs.events("run", "started")[0]["weights"] == runs.events("ddp", "started")[0]["weights"]
    before, after = (checkpoint.read_checkpoint(path)[0] for path in runs.checkpoints("run")[1:3])
    for key in ("model", "ema"):
        assert all(torch.equal(value, after[key][name]) for name, value in before[key].items())
    assert relative(runs.last("run")["model"], runs.last("ddp")["model"]) < 1e-5
    losses, others = ([row["loss"] for row in runs.records(name, "eval")] for name in ("run", "ddp"))
    assert losses == pytest.approx(others, rel=1e-5)
    assert losses[0] != losses[1]


def train_steeply(flags):
    """Gradients are so large that float16 overflows at its first scales, in some shards only."""

    def loss(net, batch):
        metrics = image_loss(net, batch)
        return metrics | {"loss": (1000 * metrics["loss"][0], metrics["loss"][1])}

    with mock.patch.dict(TASKS["images"], {"compute_loss": loss}):
        train_flags(flags)


@pytest.mark.guarantee("sharding")
def test_float16_finds_its_scale_on_all_ranks_together(runs):
    """DDP's ranks scale their gradients by the number of ranks, for its average, so its scale is half as large."""
    flags = "--dataset_size 128 --epochs 1 --amp_dtype fp16 --lr 0.0000001".split()
    for name, sharding in (("run", "zero3"), ("ddp", "none")):
        run_ranks(2, train_steeply, runs.words(name, *flags, "--sharding", sharding))
    (sharded, counters), (ddp, other) = (
        (runs.last(name)["scaler"], runs.last(name)["progress"]) for name in ("run", "ddp")
    )
    assert counters["overflow_steps"] > 2 and counters["skipped_steps"] == 0 and counters["step"] == 16
    assert sharded["scale"] == 2.0 ** (16 - counters["overflow_steps"]) == 2 * ddp["scale"]
    assert other["overflow_steps"] == counters["overflow_steps"] + 1


def watch_the_memory(words):
    """The devices on which create_model was called, and the elements that this rank holds of each parameter."""
    devices, sizes, plain_model, plain_state = [], {}, TASKS["blocks"]["create_model"], assembly.create_train_state

    def create_model(config, device):
        devices.append(device.type)
        return plain_model(config, device)

    def create_state(*args, **options):
        state = plain_state(*args, **options)
        sizes.update({name: (p.to_local().numel(), p.numel()) for name, p in state.sharded_parameters().items()})
        return state

    watched = mock.patch.dict(TASKS["blocks"], {"create_model": create_model})
    with watched, mock.patch.object(assembly, "create_train_state", create_state):
        train_flags(words, task="blocks")
    return devices, sizes


@pytest.mark.guarantee("sharding")
def test_only_rank_0_builds_the_model_and_each_rank_holds_its_part(runs):
    flags = "--dataset_size 16 --epochs 1 --max_steps 1 --sharding zero3".split()
    (devices, held), (others, rest) = run_ranks(2, watch_the_memory, runs.words("run", *flags))
    assert devices == ["cpu"] and others == ["meta"]
    assert all(part + rest[name][0] == whole for name, (part, whole) in held.items())
    assert sum(part for part, _ in held.values()) < 0.56 * sum(whole for _, whole in held.values())  # 13 rows: 7 + 6
    parameters = sum(p.numel() for p in BlockModel().parameters())  # tied weights once
    assert f"BlockModel, {parameters:,} parameters, all trained, sharded (zero3)\n" in runs.log("run")


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a number and a tensor in the parameter group."""

    is_elementwise = True

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["sum"] = group.get("sum", torch.zeros(1)) + group["count"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["sum"].item())


def train_counting(words, stops):
    create = {"create_optimizer": lambda groups, config: Counting(groups, config.lr)}
    with mock.patch.dict(TASKS["blocks"], create):
        return train_task("blocks", words, stops=stops)


@pytest.mark.guarantee("sharded-resume")
@pytest.mark.parametrize(("ranks", "sharding"), [(2, "zero3"), slow(4, "zero2")])
def test_what_an_optimizer_keeps_in_its_groups_is_in_sharded_checkpoints(runs, ranks, sharding):
    flags = [*OF_RESUME, "--dataset_size", 30 * ranks, "--sharding", sharding, "--lr", 0.05]
    for name, stops in (("whole", ()), ("parts", (3,))):
        assert run_ranks(ranks, train_counting, runs.words(name, *flags), stops) == ["completed"] * ranks
    runs.assert_same("whole", "parts")
    [record, *_] = runs.last("parts")["optimizer"]["changed_in_groups"]
    assert record["entries"]["count"] > 6


class NormedSgd(torch.optim.SGD):
    """Divides by the norm of each whole gradient, which no shard has."""


def test_an_optimizer_that_needs_whole_tensors_is_refused(runs):
    def create_optimizer(groups, config):
        return NormedSgd(groups, lr=0.1)

    flags = runs.words("run", "--dataset_size", 16, "--sharding", "zero3")
    refusal = pytest.raises(
        UserError, match=r"NormedSgd gets shards of the parameters\. If it updates each element from the gradient"
    )
    with refusal, mock.patch.object(train.your_model, "create_optimizer", create_optimizer, create=True):
        train_flags(flags)


def train_with_the_first_as_best(words):
    plain = Progress.record_value
    with mock.patch.object(Progress, "record_value", lambda self, value, sign: plain(self, -self.step, 1)):
        train_flags(words, task="images")


def logits(net, batch):
    return {"logits": net(batch[0])}


def predict_images(words):
    run_main(predict, "images", logits, words)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_evaluated_used_and_exported(runs):
    """It is a link to a folder that keep_last would delete."""
    flags = "--dataset_size 40 --epochs 4 --keep_last 2 --no-use_amp".split()
    flags += ["--ema_decay", "0.5"]
    run_ranks(2, train_with_the_first_as_best, runs.words("run", *flags, "--sharding", "zero3"))
    best, steps = runs.folder("run") / "checkpoints/best.pt", [path.name for path in runs.checkpoints("run")]
    assert best.resolve().name == "step_00000005" and steps == ["step_00000005", "step_00000015", "step_00000020"]
    records = [{**record, "step": 5} for record in runs.records("run", "eval") if record["step"] == 5]
    for ranks, sharding in ((2, "zero3"), (1, "none")):
        runs.train(ranks, "run", *flags, "--sharding", sharding, "--eval_only")
        evaluated = runs.json("run", "eval-best.json")["records"]
        assert [row["loss"] for row in evaluated] == pytest.approx([row["loss"] for row in records], rel=1e-5)
    outputs = []
    for ranks, sharding in ((2, "zero3"), (1, "none")):
        run_ranks(ranks, predict_images, [best, "--out", runs.root / "out.pt", "--sharding", sharding, "--ema"])
        outputs.append(torch.load(runs.root / "out.pt", weights_only=True)["logits"])
    torch.testing.assert_close(*outputs)
    with pytest.raises(UserError, match="rest.pt is a part of a checkpoint. Give the folder of the checkpoint"):
        export.read_export(best / "rest.pt", use_ema=False)
    saved = export.read_export(best, use_ema=True)[0]["model"]
    assert relative(saved, checkpoint.read_checkpoint(best)[0]["ema"]) == 0 and not any(map(is_sharded, saved.values()))
    runs.train(2, "next", *flags, "--max_steps", 1, "--init_from", best, "--sharding", "zero2")
    assert "16 of 16 tensors were loaded" in runs.log("next")

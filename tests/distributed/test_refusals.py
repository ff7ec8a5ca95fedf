"""Bad input ends every rank with one sentence and a fix; saved files are unchanged. Data:
builtin/test_refused_data.py."""

import contextlib
import errno
import io
import os
import re
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import utils.distributed.device
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import WarmLaunch, finish, lack, launch, run_ranks
from tasks import TASKS
from training import says, train_flags
from utils.distributed.collectives import on_all_ranks, run_once_per_file_system
from utils.distributed.device import choose_device
from utils.settings.errors import UserError
from utils.training.precision import Precision


@contextlib.contextmanager
def group(init_method=""):
    ctx = setup_distributed(TrainingConfig(backend="gloo", init_method=init_method))
    yield ctx
    cleanup_distributed()


# ---- interfaces of the network ----


NO_LOOPBACK = "import ctypes\nctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET: a network whose loopback is down"

IPV6_ALONE = f"""{NO_LOOPBACK}
import subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "delete", "127.0.0.1/8", "dev", "lo"], check=True)
"""


@pytest.mark.parametrize(
    ("code", "name", "reason"),
    [
        (NO_LOOPBACK, "", r"interface for: \[127.0.0.1\]"),
        (NO_LOOPBACK, "lo", "address for: lo"),
        (IPV6_ALONE, "", r"127.0.0.1 to a \(local\) address"),
        ("", "nic7", "address for: nic7"),
    ],
)
def test_a_process_without_an_interface_for_gloo_says_so_and_has_lost_no_peers(runs, code, name, reason):
    if code and os.geteuid():
        lack("only root may create a network")
    env = {"GLOO_SOCKET_IFNAME": name} if name else {}
    ended = finish(WarmLaunch(0, runs.program(code), runs.words("run"), env))
    assert ended.code == 1 and "peers" not in ended.text, ended.text
    fix = r"Bring up .* \(ip link set lo up\), or .* GLOO_SOCKET_IFNAME \(lo if the loopback has only ::1\)\."
    problem = r"gloo finds no usable network interface \((Unable to find|Cannot resolve)"
    says(ended.text, rf"{problem} {reason}\W*\)\. {fix}")


# ---- before any process group ----


@pytest.mark.guarantee("one-sentence")
@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("RANK=0", r"has RANK, but not LOCAL_RANK and WORLD_SIZE\. Start with torchrun, or set all of RANK"),
        ("RANK=0 WORLD_SIZE=2", r"has RANK and WORLD_SIZE, but not LOCAL_RANK\. Start"),
        ("RANK=a WORLD_SIZE=2 LOCAL_RANK=0", r"must be integers, got RANK=a, .*\. Start"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", r"from 0 to WORLD_SIZE - 1, got RANK=2, LOCAL_RANK=0, WORLD_SIZE=2\."),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", r"RANK is set, but MASTER_ADDR or MASTER_PORT is not\. Start"),
    ],
)
def test_incomplete_torchrun_variables_are_rejected(monkeypatch, variables, problem):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(UserError, match=problem):
        setup_distributed(TrainingConfig(backend="gloo"))


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [
        ("auto", 0, ("gloo", torch.device("cpu"))),
        ("auto", 8, ("nccl", torch.device("cuda", 3))),
        ("gloo", 8, ("gloo", torch.device("cpu"))),
        ("auto", 2, r"LOCAL_RANK is 3, but this machine has 2 visible GPUs, and each rank needs one\. Start with"),
        ("mpi", 0, "--backend must be one of .*gloo, which this build of torch has, got mpi."),
    ],
)
def test_the_backend_and_device_follow_the_hardware(monkeypatch, backend, gpus, expected):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "mpi")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=expected) if isinstance(expected, str) else contextlib.nullcontext():
        assert choose_device(backend, local_rank=3) == expected


def test_an_init_method_without_rank_variables_is_rejected():
    problem = r"--init_method tcp://here:1 needs RANK, LOCAL_RANK and WORLD_SIZE, which are not set\. Start"
    with pytest.raises(UserError, match=problem):
        setup_distributed(TrainingConfig(backend="gloo", init_method="tcp://here:1"))


def backend_of_the_world(init_method):
    with group(init_method.format(**os.environ)) as ctx:
        return dist.get_backend(), ctx.world_size, ctx.local_world_size, ctx.host == ctx.hosts[0]


def meet_nobody():
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    setup_distributed(TrainingConfig(backend="gloo", init_method="tcp://127.0.0.1:1", timeout=2))


def test_init_methods_are_passed_through(tmp_path):
    for url in (f"file://{tmp_path}/rendezvous", "tcp://{MASTER_ADDR}:{MASTER_PORT}"):
        assert run_ranks(2, backend_of_the_world, url) == [("gloo", 2, 2, True)] * 2
    problem = r"rendezvous of rank 1 at tcp://127.0.0.1:1 failed .*\. Check that rank 0 is running and"
    with pytest.raises(AssertionError, match=problem):
        run_ranks(1, meet_nobody)


def without_cuda_on_one(rank):
    """What all ranks raise if only one of two has a GPU."""
    own = int(os.environ["RANK"])
    torch.cuda.device_count = lambda: int(own != rank) * 8
    torch.cuda.get_device_name = torch.accelerator.set_device_index = lambda device: "pretended"
    utils.distributed.device.has_fast_bf16 = lambda device: True
    with pytest.raises(UserError) as error:
        setup_distributed(TrainingConfig())
    return str(error.value), error.value.rank


def test_the_only_rank_without_cuda_is_named():
    for text, rank in run_ranks(2, without_cuda_on_one, 1):
        assert "have no CUDA device, but other ranks have one. Repair" in text and rank == 1


def precision_where_rank_0_alone_is_fast():
    utils.distributed.device.has_fast_bf16 = lambda device: os.environ["RANK"] == "0"
    with group() as ctx:
        cuda = torch.device("cuda")
        return Precision.choose(use_amp=True, amp_dtype="auto", device=cuda, fast_bf16=ctx.fast_bf16).dtype


@pytest.mark.guarantee("precision")
def test_bf16_needs_fast_hardware_on_every_rank():
    assert run_ranks(2, precision_where_rank_0_alone_is_fast) == [torch.float16] * 2


# ---- one rank's error reaches all ----


def storage_fails_on(rank, codes):
    exit_codes = []
    with group() as ctx:
        for code in codes:

            def action(code=code):
                if ctx.rank == rank:
                    raise OSError(code, os.strerror(code), "lock.json")

            with pytest.raises(UserError) as error:
                on_all_ranks(action, ctx)
            exit_codes.append(error.value.exit_code)
    return exit_codes


def test_after_an_error_of_the_storage_another_attempt_may_succeed():
    codes = {errno.ESTALE: 1, errno.EIO: 1, errno.EACCES: 2}
    assert run_ranks(2, storage_fails_on, 1, [*codes]) == [[*codes.values()]] * 2


def fail_on(rank):
    def action():
        if ctx.rank == rank:
            raise UserError("Class cat is empty. Fill it.")

    with group() as ctx:
        with pytest.raises(UserError) as error:
            on_all_ranks(action, ctx)
        assert on_all_ranks(lambda: 7, ctx) == 7  # the group still works
        return str(error.value), error.value.rank, error.value.host == ctx.host


@pytest.mark.guarantee("one-sentence")
def test_an_error_of_one_rank_is_raised_on_all_with_rank_and_host():
    for text, rank, has_host in run_ranks(4, fail_on, 2):
        assert re.fullmatch(r"Rank 2 on \S+ failed: Class cat is empty\. Fill it\.", text), text
        assert rank == 2
        assert has_host


def prepare(root, fails):
    """Ranks 0 and 2 see one data folder, ranks 1 and 3 another."""
    with group() as ctx:
        folder = Path(root) / str(ctx.rank % 2)

        def unpack():
            with (folder / "prepared-by").open("a") as file:
                file.write(f"{ctx.rank}\n")
            if fails and ctx.rank % 2:
                raise UserError("The archive has another checksum. Fetch it again.")
            (folder / "data").touch()

        try:
            run_once_per_file_system(folder, (folder / "data").exists, unpack, ctx)
            return sorted(path.name for path in folder.iterdir())
        except UserError as error:
            return str(error)


@pytest.mark.guarantee("data-once")
def test_data_is_prepared_once_per_file_system(tmp_path):
    for _ in range(2):  # the second time it is already prepared
        assert run_ranks(4, prepare, str(tmp_path), False) == [["data", "prepared-by"]] * 4
    by = [int((tmp_path / name / "prepared-by").read_text()) for name in "01"]  # one line each
    assert [rank % 2 for rank in by] == [0, 1]


def test_a_failing_preparation_ends_all_ranks_with_its_error(tmp_path):
    for text in run_ranks(4, prepare, str(tmp_path), True):
        assert re.fullmatch(r"Rank [13] on \S+ failed: The archive has another checksum\. Fetch it again\.", text), text


# ---- a whole start ----


def train_with_a_spare_layer(flags):
    """Train a model with an unused layer; returns the error."""
    plain = TASKS["images"]["create_model"]

    def create(config, device):
        net = plain(config, device)
        net.spare = torch.nn.Linear(2, 3)
        return net

    with mock.patch.dict(TASKS["images"], {"create_model": create}), pytest.raises(UserError) as error:
        train_flags(flags)
    return str(error.value)


@pytest.mark.guarantee("unused")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unused_parameter_is_named(runs, ranks):
    for text in run_ranks(ranks, train_with_a_spare_layer, runs.words("run", "--dataset_size", 16)):
        assert text.startswith("The loss does not depend on spare.weight, spare.bias of the model, and DDP would wait")
        assert text.endswith(
            "add --find_unused_parameters, or freeze the parameter in create_model with requires_grad_(False)."
        )


def train_without_ddp(flags, changes):
    """Train with a loss that calls the unwrapped model; returns the error for each change of the flags."""
    plain, errors = TASKS["images"]["compute_loss"], []
    without = {"compute_loss": lambda net, batch: plain(getattr(net, "module", net), batch)}
    for change in changes:
        with mock.patch.dict(TASKS["images"], without), pytest.raises(UserError) as error:
            train_flags([*flags, "--overwrite", *change])
        errors.append(str(error.value))
    return errors


@pytest.mark.guarantee("unwrapped")
def test_a_forward_pass_that_bypasses_ddp_is_an_error_before_the_first_step(runs):
    regex = (
        r"\S+ \(rank 1\) and \S+ \(rank 0\) have different gradients .*\. In compute_loss, call the model that compute"
    )
    changes = [], ["--reduction", "exact"], ["--comm_hook", "bf16"]
    for texts in run_ranks(2, train_without_ddp, runs.words("run", "--dataset_size", 16), changes):
        for text in texts:
            assert re.match(regex, text), text


def test_nccl_without_cuda_is_reported_once_by_two_ranks(runs):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    ended = finish(WarmLaunch(2, runs.program(), runs.words("run", "--backend", "nccl")))
    assert ended.code == 1 and not runs.folder("run").exists()
    problem = "--backend nccl needs a CUDA device, but this machine has no visible one. Use --backend gloo"
    assert ended.text.count(problem) == 1
    assert "Traceback" not in ended.text


BUG = """
plain, calls = train.your_model.compute_loss, []
def broken(net, batch):
    calls.append(1)
    if len(calls) == 8 and os.environ['RANK'] == '1':
        raise KeyError('a bug of the fork')
    return plain(net, batch)
train.your_model.compute_loss = broken
"""


@pytest.mark.guarantee("one-sentence", "clean-exit")
def test_a_failing_rank_ends_all_ranks_and_workers_and_is_named(runs):
    words = runs.words("run", "--dataset_size", 400, "--num_workers", 1)
    ended = finish(WarmLaunch(2, runs.program(BUG), words), 60)
    assert (ended.code, ended.left) == (1, 0) and "KeyError: 'a bug of the fork'" in ended.err
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1) and "a bug of the fork" in status["error"]


LIMITED = """
# each micro-batch takes 256 MiB; rank 1 may take 64 MiB more than it has
import resource, torch
from utils.memory import read_process_memory
from utils import assembly
plain, plain_loss = assembly.run_first_passes, train.your_model.compute_loss
def run_first_passes(*args, **options):
    if os.environ.get('RANK') == '1':
        most = read_process_memory('VmData') + 2**26
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return plain(*args, **options)
def large_loss(net, batch):
    torch.empty(2**26)
    return plain_loss(net, batch)
assembly.run_first_passes, train.your_model.compute_loss = run_first_passes, large_loss
"""


@pytest.mark.guarantee("memory")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits of a process")
def test_a_rank_out_of_memory_is_named_with_the_flags_that_help(runs):
    flags = "--batch_size 512 --dataset_size 1024 --epochs 2 --save_every 0 --no-use_amp".split()
    ended = finish(WarmLaunch(2, runs.program(LIMITED), runs.words("run", *flags)))
    assert (ended.code, ended.left) == (1, 0), ended.text
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1) and status["error"] in ended.text
    remedy = r"Use --batch_size 256 --global_batch_size 1024 \(the same global batch\) or "
    assert re.match(rf"Rank 1 on \S+ ran out of memory \(.*\)\. {remedy}", status["error"])


HOLDS_WORKERS = """
import sys
from torch.utils.data import DataLoader
from utils.signals import ignore_signals_in_worker
batches = iter(DataLoader(range(100), num_workers=2, worker_init_fn=ignore_signals_in_worker))
next(batches)
sys.kept = batches  # nothing shuts them down before the interpreter ends
print("done", flush=True)
"""


@pytest.mark.guarantee("clean-exit")
def test_workers_that_ignore_sigterm_do_not_keep_the_process_alive(tmp_path):
    """multiprocessing ends daemonic children with SIGTERM and joins them without a timeout."""
    file = tmp_path / "program.py"
    file.write_text(HOLDS_WORKERS)
    ended = finish(WarmLaunch(0, file, []))
    assert (ended.code, ended.out, ended.left) == (0, "done\n", 0), ended.text


STARTS_PROCESSES = f"""
import multiprocessing
def hold():
{textwrap.indent(HOLDS_WORKERS, "    ")}
if __name__ == "__main__":
    import utils.signals  # the forked process has inherited it
    processes = [multiprocessing.get_context(name).Process(target=hold) for name in ("fork", "spawn")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    print([process.exitcode for process in processes])
"""


@pytest.mark.guarantee("clean-exit")
def test_a_process_of_multiprocessing_ends_with_its_workers(tmp_path):
    """However it was started: Python 3.13 runs in it no handlers from before its fork, earlier ones run none at all."""
    file = tmp_path / "program.py"
    file.write_text(STARTS_PROCESSES)
    ended = launch([sys.executable, file])
    assert ended.out == "done\n" * 2 + "[0, 0]\n" and ended.left == 0, ended.text


def share_with_details():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), group():
        DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    return stderr.getvalue()


def test_a_debug_level_with_which_torch_crashes_is_lowered_and_said():
    """torch 2.15 takes the wrapper of this level for gloo itself: DDP ends with SIGSEGV."""
    texts = run_ranks(2, share_with_details)
    assert texts == ["DDP on gloo crashes with TORCH_DISTRIBUTED_DEBUG=DETAIL. INFO is used instead.\n", ""]


def leave_late(flag):
    """Whether the last, delayed rank had reached the clean-up when this rank finished it."""
    with group() as ctx:
        if ctx.rank == ctx.world_size - 1:
            time.sleep(0.5)
            Path(flag).touch()
    return Path(flag).exists()


@pytest.mark.guarantee("clean-exit")
def test_no_rank_leaves_the_group_before_all_have_finished(tmp_path):
    """gloo aborts a rank whose peer is gone."""
    assert run_ranks(4, leave_late, str(tmp_path / "flag")) == [True] * 4

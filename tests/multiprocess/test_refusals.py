"""Bad input ends in one sentence that says the fix, on every rank, within seconds; nothing that was saved is touched."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import ddp_utils
import train
from config import Refused, TrainingConfig
from ddp_utils import choose_device, cleanup_distributed, read_launch, setup_distributed
from images import folder_of_images, save_images
from ranks import ROOT, finish, launch, run_ranks, start, stop, torchrun
from training import TINY
from utils.together import once_per_file_system, together

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---- before any process group ----


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"RANK": "0"},
            "LOCAL_RANK and WORLD_SIZE: not set, while RANK is; start with torchrun, or set all of RANK, LOCAL_RANK, WORLD_SIZE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK: not set, while RANK and WORLD_SIZE is; start"),
        ({"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=a, .*: not whole numbers; start"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2, LOCAL_RANK=0: outside WORLD_SIZE=2; count"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT: not set, while RANK is; start"),
    ],
)
def test_half_of_torchruns_variables(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=said):
        setup_distributed(TrainingConfig(backend="gloo"))


def test_no_variables_are_a_world_of_one_and_all_are_a_rank(monkeypatch):
    assert not read_launch().is_launched
    for name, value in zip(VARIABLES, ("1", "1", "2", "here", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launched = read_launch()
    assert (launched.rank, launched.world_size, launched.is_under_torchrun, launched.id) == (1, 2, True, "")
    monkeypatch.setenv("LAUNCH_ID", "job-3")
    assert read_launch().id == "job-3"


@pytest.mark.parametrize(
    ("backend", "gpus", "local_rank", "said"),
    [
        ("nccl", 0, 0, "backend=nccl: this machine shows no CUDA device; use --backend gloo, or make"),
        ("auto", 2, 2, "LOCAL_RANK=2: this machine shows 2 GPU.s., one for each rank; start with --nproc-per-node=2"),
        ("mpi", 0, 0, "backend=mpi: this build of torch has no mpi; choose one of .*gloo"),
    ],
)
def test_devices_that_are_not_there(monkeypatch, backend, gpus, local_rank, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(ddp_utils.dist, "is_backend_available", lambda name: name != "mpi")
    with pytest.raises(Refused, match=said):
        choose_device(backend, local_rank)


def test_the_backend_and_device_follow_the_hardware(monkeypatch):
    monkeypatch.setattr(ddp_utils.dist, "is_backend_available", lambda name: name != "mpi")
    assert choose_device("auto", 3) == ("gloo", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_device("auto", 3) == ("nccl", torch.device("cuda", 3))
    assert choose_device("gloo", 3) == ("gloo", torch.device("cpu"))


def test_an_init_method_without_ranks_is_refused():
    with pytest.raises(Refused, match=r"init_method=tcp://here:1: needs RANK, LOCAL_RANK and WORLD_SIZE, which are not set; start"):
        setup_distributed(TrainingConfig(backend="gloo", init_method="tcp://here:1"))


def backend_of_the_world(init_method):
    init_method = init_method.format(**os.environ)
    ctx = setup_distributed(TrainingConfig(backend="gloo", init_method=init_method))
    found = (ddp_utils.dist.get_backend(), ctx.world_size, ctx.local_world_size, ctx.host == ctx.hosts[0])
    cleanup_distributed()
    return found


def test_init_methods_are_passed_through(tmp_path):
    for url in (f"file://{tmp_path}/meeting", "tcp://{MASTER_ADDR}:{MASTER_PORT}", "env://", ""):
        assert run_ranks(2, backend_of_the_world, url) == [("gloo", 2, 2, True)] * 2
    address = "tcp://127.0.0.1:1"
    with pytest.raises(AssertionError, match="cannot meet the others at tcp://127.0.0.1:1 .*; check that rank 0 runs"):
        run_ranks(1, unreachable, address)


def unreachable(address):
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    setup_distributed(TrainingConfig(backend="gloo", init_method=address, timeout=2))


def without_cuda_on_one(rank):
    """One rank of two shows a GPU: all refuse, by the name of the host that lacks one."""
    own = int(os.environ["RANK"])
    torch.cuda.device_count = lambda: int(own != rank) * 8
    torch.cuda.get_device_name = torch.cuda.set_device = lambda device: "pretended"
    ddp_utils.has_fast_bf16 = lambda device: True
    begin = time.monotonic()
    try:
        setup_distributed(TrainingConfig())
    except Refused as refused:
        return str(refused), refused.rank, time.monotonic() - begin


def test_a_rank_without_cuda_among_ranks_with_it_is_named():
    for text, rank, seconds in run_ranks(2, without_cuda_on_one, 1):
        assert "shows no CUDA device while other ranks have one; repair it" in text and rank == 1 and seconds < 10


# ---- one rank's trouble reaches all ----


def trouble(rank):
    ctx = setup_distributed(TrainingConfig(backend="gloo"))

    def action():
        if ctx.rank == rank:
            raise Refused("class cat: is empty; fill it")
        return ctx.rank

    try:
        together(action, ctx)
    except Refused as refused:
        assert together(lambda: 7, ctx) == 7  # the group still works
        return str(refused), refused.rank, refused.host == ctx.host
    finally:
        cleanup_distributed()


def test_a_refusal_of_one_rank_is_raised_on_all_with_its_name():
    for text, rank, has_host in run_ranks(4, trouble, 2):
        assert text.startswith("class cat: is empty; fill it (rank 2 on ") and rank == 2 and has_host


def prepare(root, fails):
    """Ranks 0 and 2 see one data folder, ranks 1 and 3 another."""
    ctx = setup_distributed(TrainingConfig(backend="gloo"))
    folder = Path(root) / str(ctx.rank % 2)
    final, partial = folder / "data", folder / "data.partial"

    def unpack():
        with (folder / "prepared-by").open("a") as file:
            file.write(f"{ctx.rank}\n")
        if fails and ctx.rank == 1:
            raise Refused("archive: has another checksum; fetch it again")
        for left_over in partial.glob("*"):
            left_over.unlink()
        partial.mkdir(exist_ok=True)
        (partial / "whole").touch()
        partial.rename(final)

    try:
        once_per_file_system(folder, final.exists, unpack, ctx)
        return sorted(path.name for path in final.iterdir()), sorted(path.name for path in folder.iterdir())
    except Refused as refused:
        return str(refused)
    finally:
        cleanup_distributed()


def test_data_is_prepared_once_on_each_file_system_and_a_half_made_folder_is_redone(tmp_path):
    (tmp_path / "1" / "data.partial").mkdir(parents=True)
    (tmp_path / "1" / "data.partial" / "half").touch()
    for _ in range(2):  # the second time nothing is left to do
        assert run_ranks(4, prepare, str(tmp_path), False) == [(["whole"], ["data", "prepared-by"])] * 4
    assert [(tmp_path / name / "prepared-by").read_text() for name in "01"] == ["0\n", "1\n"]


def test_a_failing_preparation_ends_all_ranks_with_its_sentence(tmp_path):
    begin = time.monotonic()
    results = run_ranks(4, prepare, str(tmp_path), True)
    assert all(text.startswith("archive: has another checksum; fetch it again (rank 1 on ") for text in results)
    assert time.monotonic() - begin < 10


# ---- data and folders, from the command line ----


def refusal_of(runs, *flags, ranks=2):
    """What both ranks say when the same flags are refused."""
    with pytest.raises(AssertionError) as error:
        runs.train(ranks, "run", *flags)
    return str(error.value)


@pytest.mark.parametrize(
    ("spoil", "flags", "said"),
    [
        (lambda root: None, ["--num_classes", "2"], "num_classes=2: the data has labels of 3 classes; give num_classes=3 or leave it auto"),
        (lambda root: None, ["--model", "resnet81"], "did you mean resnet18"),
        (lambda root: None, ["--sync_bn"], "sync_bn=True: SyncBatchNorm works on CUDA alone; leave out"),
        (lambda root: None, ["--best_metric", "f1"], "best_metric=f1: an evaluation reports loss, top1, top5; choose"),
        (lambda root: None, ["--init_from", "/nowhere"], "init_from=/nowhere: cannot be read"),
        (
            lambda root: save_images(root / "train", {"eel": 1}, size=9),
            ["--image_size", "auto"],
            "eel/000.png: has 9x9 pixels, others 8x8; give",
        ),
        (lambda root: (root / "train/dog/003.png").write_bytes(b"\x89PNG nothing"), [], "dog/003.png: cannot be read as an image"),
        (lambda root: [path.unlink() for path in (root / "train/dog").iterdir()], [], "train/dog: holds no image"),
    ],
)
def test_data_that_cannot_be_used(runs, spoil, flags, said):
    words = folder_of_images(runs.root / "images", ("cat", "dog", "eel"))
    spoil(runs.root / "images")
    text = refusal_of(runs, *words, *flags)
    assert re.search(said, text) and "Refused:" in text
    assert runs.json("run", "status.json")["state"] == "failed" and re.search(said, runs.json("run", "status.json")["error"])
    assert not runs.checkpoints("run")


def train_with_a_spare_layer(folder):
    """Returns what it was refused with."""
    plain = train.create_model

    def create(config, device):
        net = plain(config, device)
        net.spare = torch.nn.Linear(2, 3)
        return net

    train.create_model = create
    try:
        train.train(TrainingConfig.from_args([*TINY, "--dataset_size", "16", "--run_dir", folder]))
    except Refused as refused:
        return str(refused)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_not_used_is_named_where_ddp_would_only_speak_of_reductions(tmp_path, ranks):
    for said in run_ranks(ranks, train_with_a_spare_layer, str(tmp_path / "run")):
        assert said.startswith("model: the loss does not depend on spare.weight, spare.bias, and DDP would wait")
        assert said.endswith("freeze it in create_model with requires_grad_(False)")


def test_a_refused_start_leaves_the_command_usable_once_it_is_mended(runs):
    words = folder_of_images(runs.root / "images")
    refusal_of(runs, *words, "--best_metric", "f1")
    assert runs.train(2, "run", *words, "--epochs", 1)[0]["state"] == "completed"


def test_an_unreadable_image_ends_a_real_launch_with_one_sentence(runs):
    words = folder_of_images(runs.root / "images", count=40)
    (runs.root / "images/train/dog/039.png").write_bytes(b"nothing")
    begin = time.monotonic()
    ended = torchrun(2, *TINY, *words, "--run_dir", runs.folder("run"))
    assert ended.code != 0 and time.monotonic() - begin < 60
    sentences = [line for line in ended.text.splitlines() if "039.png: cannot be read as an image" in line and "Error" not in line]
    assert sentences and all(line.endswith("replace or delete it") for line in sentences)
    assert "039.png: cannot be read" in runs.json("run", "status.json")["error"] and runs.json("run", "status.json")["host"]
    assert "this rank failed" not in ended.text  # the traceback of a rank that only lost its peer is in its log alone


def test_exit_code_2_one_sentence_and_no_traceback(tmp_path):
    ended = launch([sys.executable, "train.py", *TINY, "--dataset", "imagefolder", "--data_dir", tmp_path, "--run_dir", tmp_path / "run"])
    assert ended.code == 2 and "Traceback" not in ended.text
    assert ended.err.strip().endswith("give the folder that holds train/, and val/ or test/") and len(ended.err.strip().splitlines()) == 1


def test_nccl_without_cuda_is_said_once_by_a_launch_of_two(tmp_path):
    ended = torchrun(2, *[flag for flag in TINY if flag not in ("--backend", "gloo")], "--backend", "nccl", "--run_dir", tmp_path / "run")
    assert ended.code == 1 and not (tmp_path / "run").exists()
    said = [
        line for line in ended.text.splitlines() if line.startswith("backend=nccl: this machine shows no CUDA device; use --backend gloo")
    ]
    assert len(said) == 1  # torchrun's summary has it again, as the error of rank 0


def program_with_a_bug(path, rank):
    """The program under torchrun is ours; the failure is a forker's: an exception on one rank in the middle of an epoch."""
    path.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'train.py'\n"
        "import train, model\n"
        "plain = train.compute_loss\n"
        "calls = []\n"
        "def broken(net, batch):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == 8 and os.environ.get('RANK', '0') == '{rank}':\n"
        "        raise KeyError('a bug of the fork')\n"
        "    return plain(net, batch)\n"
        "train.compute_loss = broken\n"
        "train.run_as_script()\n"
    )
    return str(path)


def test_a_failure_leaves_no_worker_behind(runs):
    program = program_with_a_bug(runs.root / "fork.py", rank=0)
    ended = launch([sys.executable, program, *TINY, "--dataset_size", "400", "--run_dir", runs.folder("run"), "--num_workers", "2"])
    assert (ended.code, ended.left) == (1, 0), ended.text


def test_a_rank_that_fails_ends_the_others_within_seconds(runs):
    program = program_with_a_bug(runs.root / "fork.py", rank=1)
    begin = time.monotonic()
    ended = torchrun(2, *TINY, "--dataset_size", 400, "--run_dir", runs.folder("run"), script=program)
    assert ended.code == 1 and time.monotonic() - begin < 40
    assert "KeyError: 'a bug of the fork'" in ended.err
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1) and "a bug of the fork" in status["error"]


def leave_late(seconds_late):
    """Seconds that this rank spent in the clean-up, where the last rank comes so late."""
    ctx = setup_distributed(TrainingConfig(backend="gloo"))
    if ctx.rank == ctx.world_size - 1:
        time.sleep(seconds_late)
    begin = time.monotonic()
    cleanup_distributed()
    return time.monotonic() - begin


def test_no_rank_leaves_the_group_before_all_have_finished():
    """gloo aborts in a rank whose peer is gone."""
    *early, _ = run_ranks(4, leave_late, 1.0)
    assert min(early) > 0.8


def test_two_runs_into_one_folder(runs):
    """The second is refused within seconds, by the owner's process and host, and the first goes on."""
    folder = runs.folder("run")
    flags = [*TINY, "--dataset_size", "4000", "--epochs", "50", "--run_dir", str(folder)]
    first = start([sys.executable, "train.py", *flags])
    try:
        ends = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < ends:
            time.sleep(0.1)
        second = launch([sys.executable, "train.py", *flags, "--overwrite"])
        assert second.code == 2 and f"in use by process {first.pid} on " in second.err and "give another --run_dir" in second.err
        assert first.poll() is None
        os.kill(first.pid, signal.SIGINT)
        ended = finish(first, 60)
        assert ended.code == 75, ended.text  # preempted, alone
    finally:
        stop(first)


def test_images_of_unequal_size_are_named_by_the_rank_that_read_them(runs):
    words = folder_of_images(runs.root / "images")
    save_images(runs.root / "images" / "val", {"cat": 1}, size=9)
    assert "val/cat/000.png: has 9x9 pixels, others 8x8; give --image_size N" in refusal_of(
        runs, *words, "--epochs", "1", "--image_size", "auto"
    )

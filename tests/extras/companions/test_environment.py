"""Commands and programs beside training are no ranks: nothing of a launcher makes them wait for other ranks."""

import os
import sys
from unittest import mock

import pytest
import torch
from plans import CTX, plan_for, save

from config import TrainingConfig
from ranks import torchrun
from training import SIZE, wait_until
from utils.distributed.context import Launch, read_launch
from utils.extras.companions.sidecar import Companions

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}
LAUNCH_SH = {
    "LAUNCH_ID": "a",
    "NNODES": "2",
    "NODE_RANK": "1",
    "NPROC_PER_NODE": "2",
    "PET_SHUTDOWN_TIMEOUT": "300",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]",
}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "worker-0"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "1",
    "SLURM_TASK_PID": "12",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NPROCS": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI2_FD": "5", "PMIX_RANK": "1", "MPI_LOCALRANKID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_SIZE": "2"} | PMI
KEPT = {
    "SLURM_JOB_ID": "1234",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_TMPDIR": "/scratch",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "AWS_SECRET_ACCESS_KEY": "a-secret",
    "WANDB_MODE": "offline",
    "LORA_RANK": "8",
    "RANKING": "a",
}


@pytest.mark.guarantee("command")
@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, LAUNCH_SH | TORCHRUN, KUBEFLOW | TORCHRUN, SRUN, SRUN | PMI, MPIRUN | TORCHRUN],
    ids=["torchrun", "launch.sh", "kubeflow", "srun", "srun-mpi", "mpirun"],
)
def test_a_command_has_no_variable_of_a_rank_and_all_others(tmp_path, monkeypatch, launcher):
    for name, value in (launcher | KEPT).items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "environment"
    plan = plan_for(tmp_path, on_checkpoint=f"sh -c 'env -0 > {out}.tmp; mv {out}.tmp {out}'")
    save(plan, 10)
    companions = Companions(TrainingConfig(**plan["config"]), plan, CTX)
    wait_until(out.exists)
    companions.stop()
    environment = dict(line.split("=", 1) for line in out.read_text().split("\0") if line)
    assert sorted(environment.keys() & launcher) == []
    assert {name: environment.get(name) for name in KEPT} == KEPT
    with mock.patch.dict(os.environ, environment, clear=True):
        assert read_launch() == Launch(omp_num_threads="1")


@pytest.mark.guarantee("command")
def test_predict_is_a_command_of_a_run_of_two_ranks(tmp_path):
    """It would wait for rank 1 to join its process group."""
    out, seen = tmp_path / "predictions.pt", tmp_path / "environment"
    predict = f"exec {sys.executable} scripts/predict.py $0 --out {out}"
    words = [*SIZE, *"--batch_size 4 --dataset_size 16 --epochs 1 --backend gloo --save_every 1".split()]
    words += ["--run_dir", tmp_path / "run", "--data_dir", tmp_path / "data", "--seed", "0"]
    ended = torchrun(2, *map(str, words), "--on_checkpoint", f"sh -c 'env > {seen}; {predict}'")
    assert ended.code == 0, ended.text
    assert torch.load(out, weights_only=True)
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    assert [name for name in names if name.startswith(launchers)] == []

# extra: template
"""Which environment variables define a rank: torchrun's, and srun's without torchrun."""

import os

import pytest

from utils.distributed.context import read_launch
from utils.settings.errors import UserError

STEP = {
    "PROCID": "5",
    "LOCALID": "1",
    "STEP_NUM_TASKS": "8",
    "NTASKS": "8",
    "JOB_ID": "1234",
    "STEP_ID": "0",
    "CLUSTER_NAME": "here",
    "STEP_NODELIST": "node[07-08,11]",
    "LAUNCH_NODE_IPADDR": "10.0.0.1",
    "GPUS_ON_NODE": "4",
}


@pytest.fixture(autouse=True)
def no_slurm_here(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")) or name in (
            "LAUNCH_ID",
            "CUDA_VISIBLE_DEVICES",
        ):
            monkeypatch.delenv(name)


def launched(monkeypatch, **changed):
    for name, value in (STEP | changed).items():
        if value is not None:
            monkeypatch.setenv(f"SLURM_{name}", value)
    return read_launch()


@pytest.mark.guarantee("slurm")  # extra: slurm and launcher
def test_a_task_of_a_slurm_step_is_a_rank(monkeypatch):
    launch = launched(monkeypatch)
    assert (launch.rank, launch.local_rank, launch.world_size) == (5, 1, 8)
    assert launch.is_launched and not launch.is_under_torchrun
    assert launch.launch_id == "slurm-here-1234.0"  # also after a requeue
    assert launched(monkeypatch, STEP_ID="1").launch_id == "slurm-here-1234.1"
    monkeypatch.setenv("LAUNCH_ID", "mine")
    assert read_launch().launch_id == "mine"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu3", "gpu3"),
        ("node[07-08,11]", "node07"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[07-12,15],other", "rack1n07"),
        ("n[4,9]-ib.cluster", "n4-ib.cluster"),
    ],
)
def test_the_rendezvous_is_on_the_first_node_of_the_step(monkeypatch, nodes, first):
    assert launched(monkeypatch, STEP_NODELIST=nodes).srun_address.rsplit(":", 1)[0] == f"tcp://{first}"


def test_each_step_of_each_job_has_its_own_port(monkeypatch):
    steps = [{"JOB_ID": str(job), "STEP_ID": str(step)} for job in range(995, 1005) for step in range(5)]
    ports = {int(launched(monkeypatch, **variables).srun_address.split(":")[-1]) for variables in steps}
    assert len(ports) == 50 and all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    "changed",
    [
        {"STEP_ID": None, "STEP_NUM_TASKS": None},  # a batch script: PROCID and LOCALID are 0, NTASKS is the job's
        {"STEP_ID": None, "PROCID": None, "LOCALID": None, "STEP_NUM_TASKS": None},  # the shell of salloc
        {"STEP_ID": "4294967290"},  # the same shell if it is a step (LaunchParameters=use_interactive_step)
        {"STEP_ID": "4294967291"},
        {"PROCID": "0", "LOCALID": "0", "STEP_NUM_TASKS": "1"},  # srun --ntasks=1 --pty bash in a job of eight
    ],
)
def test_a_process_that_is_not_one_of_several_tasks_runs_alone(monkeypatch, changed):
    launch = launched(monkeypatch, **changed)
    assert (launch.rank, launch.world_size, launch.is_launched, launch.srun_address) == (0, 1, False, "")


def test_a_task_that_sees_one_gpu_uses_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # --gpus-per-task=1
    assert launched(monkeypatch).local_rank == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert read_launch().local_rank == 1


def test_torchruns_variables_take_precedence_over_sruns(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    launch = launched(monkeypatch)
    assert (launch.rank, launch.world_size, launch.is_under_torchrun, launch.srun_address) == (0, 2, True, "")


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {f"SLURM_{name}": value for name, value in STEP.items()}
MPI = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"},
    "MPICH, Intel MPI": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "Open MPI in a Slurm job of eight tasks": {"OMPI_COMM_WORLD_SIZE": "2"} | SRUN,  # its daemon is a task
}


@pytest.mark.parametrize("name", MPI)
def test_a_process_of_mpirun_is_rejected_with_the_commands_to_use(monkeypatch, name):
    for variable, value in MPI[name].items():
        monkeypatch.setenv(variable, value)
    problem = r"^mpirun \(.*_SIZE=2\) would .*\. Start with torchrun .*node=2 train.py, .*or with srun\.$"
    with pytest.raises(UserError, match=problem):
        read_launch()
    for variable, value in TORCHRUN.items():  # below mpirun
        monkeypatch.setenv(variable, value)
    assert read_launch().world_size == 2


@pytest.mark.parametrize(
    ("variables", "world_size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, 1),
        ({"PMI_SIZE": ""}, 1),
        ({"PMI_RANK": "0", "PMIX_RANK": "0"}, 1),
        (SRUN | {"PMI_SIZE": "8", "PMI_RANK": "5", "PMIX_RANK": "5"}, 8),  # srun --mpi=pmi2 or pmix
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1"}, 1),
    ],
)
def test_variables_of_mpi_with_another_launcher_or_one_process_are_no_error(monkeypatch, variables, world_size):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert read_launch().world_size == world_size

# extra: slurm and launcher and template
"""scripts/slurm.sbatch, and train.py under srun, on a real Slurm with two virtual nodes (slurm_cluster.py)."""

import json
import math
import os
import re
import signal
import time

import pytest

from ranks import PATH, ROOT, copy_repository
from slurm_cluster import Cluster
from training import Runs, assert_same_state, wait_for_step, wait_until

pytestmark = pytest.mark.slow
TINY = "--image_size 8 --batch_size 4 --backend gloo --log_interval 1".split()
LONG = [*TINY, "--dataset_size", "800", "--epochs", "3"]  # 300 steps on two ranks
LINE = "    images, labels = batch\n"  # in compute_loss
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slow_repository(tmp_path_factory):
    """A fork whose steps take 0.15 s, so that the progress of a job hardly depends on the machine."""
    repository = copy_repository(tmp_path_factory.mktemp("repository"))
    text = (repository / "model.py").read_text()
    assert text.count(LINE) == 1
    (repository / "model.py").write_text(
        text.replace(LINE, LINE + "    __import__('time').sleep(0.15 * model.training)\n")
    )
    return repository


class Job:
    """A job of two nodes, submitted in a repository; its output and its run are in a separate folder."""

    def __init__(self, cluster, folder, repository, options=(), script=("scripts/slurm.sbatch",), flags=LONG):
        folder.mkdir(exist_ok=True)
        self.cluster, self.run, self.output, self.began = cluster, folder / "run", folder / "job.out", time.monotonic()
        flags = [*flags, "--run_dir", self.run] if script else []
        words = ["--nodes=2", "--time=5", f"--output={self.output}", *options, *script, *flags]
        self.number = cluster.submit(*words, env={"PATH": PATH}, cwd=repository)

    @property
    def said(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, deadline=60):
        """Wait for the end of the job; returns Slurm's state, exit code and number of restarts."""
        end = self.cluster.wait_for(self.number, *ENDED, deadline=deadline)
        return end["JobState"], end["ExitCode"], int(end["Restarts"])

    def wait_for_steps(self, rank=0):
        return wait_for_step(self.run, rank, 3)


@pytest.mark.guarantee("slurm")
def test_a_job_saves_before_its_time_limit_and_requeues_itself_until_completed(cluster, slow_repository, tmp_path):
    """Slurm checks limits every 30 s. The limit is set after the first steps, whatever the machine's speed."""
    job = Job(cluster, tmp_path, slow_repository, ["--signal=B:USR1@60"])
    job.wait_for_steps()
    seconds = time.monotonic() - job.began
    # at least 40 s from now: the signal is sent within 30 s
    cluster.limit(job.number, minutes=math.ceil((seconds + 40) / 60))
    cluster.wait_for(job.number, "PENDING", *ENDED, deadline=90)
    cluster.limit(job.number, minutes=10)
    runs = Runs(tmp_path)
    runs.train(2, "uninterrupted", *LONG, task="", deadline=200)
    assert job.wait(deadline=240) == ("COMPLETED", "0:0", 1), job.said
    (resumed,) = runs.events("run", "resumed")
    assert 0 < resumed["step"] < 300
    assert_same_state(runs.last("uninterrupted"), runs.last("run"))
    # none repeated, none missing
    assert [record["step"] for record in runs.records("run", "train")] == list(range(1, 301))
    assert [rank["host"] for rank in runs.json("run", "provenance.json")["ranks"]] == ["node0", "node1"]


@pytest.mark.guarantee("slurm")
def test_scancel_saves_and_ends_a_job_for_good(cluster, slow_repository, tmp_path):
    job = Job(cluster, tmp_path, slow_repository)
    job.wait_for_steps()
    cluster.run("scancel", str(job.number))
    assert job.wait() == ("CANCELLED", "75:0", 0)
    cluster.wait_until_idle()
    status = json.loads((job.run / "status.json").read_text())
    assert status["state"] == "preempted" and status["checkpoint"], job.said
    assert "train.py" not in cluster.run("ps", "-e", "-o", "args").out
    time.sleep(8)  # a requeued job would start again
    assert job.wait()[::2] == ("CANCELLED", 0) and job.said.count("Attempt") == 1


@pytest.mark.guarantee("slurm")
@pytest.mark.parametrize("partition", ["cancel", "grace", "requeue"])
def test_a_preempted_job_is_requeued_and_resumes(cluster, slow_repository, tmp_path, partition):
    """Slurm requeues one that has no grace time only under PreemptMode=REQUEUE. Then scancel ends it for good."""
    job = Job(cluster, tmp_path, slow_repository, [f"--partition={partition}"])
    job.wait_for_steps()
    cluster.submit("--nodes=2", "--exclusive", "--partition=urgent", "--output=/dev/null", "--wrap=sleep 5")
    cluster.wait_for(job.number, "PENDING", *ENDED, deadline=60)
    cluster.wait_for(job.number, "RUNNING", *ENDED, deadline=90)
    runs = Runs(tmp_path)
    wait_until(lambda: runs.events("run", "resumed"), 60)
    cluster.run("scancel", str(job.number))
    assert job.wait()[::2] == ("CANCELLED", 1), job.said
    assert runs.events("run", "resumed")[0]["step"] > 0 and job.said.count("job is preempted") == (
        partition == "cancel"
    )
    cluster.wait_until_idle()


@pytest.mark.guarantee("slurm")
def test_one_task_of_an_array_is_requeued(cluster, slow_repository, tmp_path):
    """The job id of the last task is that of the array, so `scontrol requeue` of it would end the others too."""
    flags = " ".join([*LONG, "--epochs", "100", "--run_dir", f"{tmp_path}/run-$SLURM_ARRAY_TASK_ID"])
    options = "--nodes=1 --array=0-1 --ntasks-per-node=1 --requeue --open-mode=append".split()
    job = Job(
        cluster,
        tmp_path,
        slow_repository,
        [*options, f"--output={tmp_path}/job-%a.out", f"--wrap=exec bash scripts/slurm.sbatch {flags}"],
        script=(),
    )
    tasks = [f"{job.number}_{k}" for k in (0, 1)]
    (last,) = (task for task in tasks if cluster.wait_for(task, "RUNNING", deadline=60)["JobId"] == str(job.number))
    (other,) = {*tasks} - {last}
    for k in (0, 1):
        wait_for_step(tmp_path / f"run-{k}", 0, 3)
    # an earlier signal means that the limit is too short
    wait_until(lambda: int(cluster.job(last)["RunTime"][-2:]) >= 16)
    cluster.run("scancel", "--batch", "--signal=USR1", last)
    cluster.wait_for(last, "PENDING", *ENDED, deadline=60)
    time.sleep(3)  # the other task would end
    assert [(job_info["JobState"], job_info["Restarts"]) for job_info in map(cluster.job, (last, other))] == [
        ("PENDING", "1"),
        ("RUNNING", "0"),
    ]
    cluster.run("scancel", str(job.number))
    cluster.wait_until_idle()


def test_a_rejected_job_is_not_requeued(cluster, tmp_path):
    """A bad config, and a job that was not submitted in the repository."""
    job = Job(cluster, tmp_path / "config", ROOT, flags=[*TINY, "--epochs", "0"])
    elsewhere = Job(cluster, tmp_path / "elsewhere", tmp_path, script=[ROOT / "scripts/slurm.sbatch"])
    assert job.wait() == elsewhere.wait() == ("FAILED", "2:0", 0)
    assert "--epochs must be at least " in job.said, job.said
    assert (
        f"slurm.sbatch: {tmp_path} has no scripts/launch.sh. Submit the job from the repository root" in elsewhere.said
    )


def test_a_failing_node_ends_the_others_and_the_job(cluster, slow_repository, tmp_path):
    """The rank of one node is killed while that of the other is stopped and cannot notice it."""
    job = Job(cluster, tmp_path, slow_repository)
    pids = [job.wait_for_steps(rank) for rank in (0, 1)]
    os.kill(pids[0], signal.SIGSTOP)  # process ids of this machine, which are others inside the cluster
    os.kill(pids[1], signal.SIGKILL)
    state, _, restarts = job.wait()
    assert (state, restarts) == ("FAILED", 0), job.said
    cluster.wait_until_idle()


def test_a_job_stopped_before_its_first_step_is_not_requeued_forever(cluster, tmp_path):
    """The signal arrives before there is a rank, and is not lost."""
    job = Job(cluster, tmp_path, ROOT, flags=[*TINY, "--epochs", "50"])
    wait_until(lambda: "Attempt 1" in job.said)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    assert job.wait() == ("FAILED", "75:0", 0), job.said
    assert re.search(r"not requeued, since the signal came \d+ s after the start\. Submit it again", job.said)


@pytest.mark.guarantee("slurm")
def test_srun_tasks_are_ranks_without_torchrun(cluster, slow_repository, tmp_path):
    """Two tasks on each of two nodes; in the batch script itself train.py is one process. Stopped, srun exits 75."""
    flags = " ".join([*TINY, "--dataset_size", "400", "--epochs", "2", "--run_dir", str(tmp_path)])
    srun = f"srun --kill-on-bad-exit=1 python train.py {flags}/four"
    wrap = f"python train.py {flags}/one --max_steps 2 && {{ {srun} || [ $? = 75 ]; }} && {srun} --resume_from auto"
    job = Job(cluster, tmp_path, slow_repository, ["--ntasks-per-node=2", f"--wrap={wrap}"], script=())
    job.run = tmp_path / "four"
    job.wait_for_steps()
    cluster.run("scancel", "--signal=USR1", str(job.number))  # sent to all tasks of the step
    assert job.wait(deadline=90) == ("COMPLETED", "0:0", 0), job.said
    runs = Runs(tmp_path)
    assert runs.json("one", "summary.json")["world_size"] == 1
    hosts = [rank["host"] for rank in runs.json("four", "provenance.json")["ranks"]]
    assert hosts == ["node0", "node0", "node1", "node1"] and len(runs.events("four", "resumed")) == 1
    assert [record["step"] for record in runs.records("four", "train")] == list(range(1, 51))

# extra: kubernetes and launcher
"""scripts/kubernetes: the manifests follow the published schemas, and the pods start launch.sh correctly."""

import json
import re
import shlex
from pathlib import Path

import pytest

from config import TrainingConfig
from dockerfile import instructions
from manifests import both, documents, publish, started, validate
from nodes import Nodes
from ranks import PATH, ROOT
from train import EXIT_PREEMPTED


@pytest.fixture(params=["Job", "TrainJob"])
def job(request):
    """The Job that a cluster would run, from each of the two manifests."""
    return both()[request.param == "TrainJob"]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes that can resolve the names of the pods of both jobs."""
    with Nodes(2) as nodes:
        publish(nodes, *both())
        yield nodes


def dry_run(cluster, job, index):
    """Run launch.sh --dry-run as in this pod; returns how it ended, and the pod's variables."""
    words, env = started(job, index)
    script = ROOT / Path(words[0]).relative_to("/app")
    pod_env = {"PATH": PATH, "CUDA_VISIBLE_DEVICES": "", **env}
    ended = cluster[index].run(script, *words[1:], "--wait", 1, "--dry-run", env=pod_env)
    assert ended.code == 0, ended.text
    return ended, env


def torchrun_line(cluster, job, index):
    ended, env = dry_run(cluster, job, index)
    return shlex.split(next(line for line in reversed(ended.out.splitlines()) if "train.py" in line)), env


def given(line, flag):
    """The value of a flag of torchrun."""
    values = [word.partition("=")[2] for word in line if word.startswith(f"{flag}=")]
    return values[-1] if values else line[line.index(flag) + 1]


@pytest.mark.guarantee("kubernetes")
def test_manifests_and_the_job_of_a_trainjob_follow_the_published_schemas():
    for document in [*documents().values(), *both()]:
        validate(document)


def test_names_in_the_manifests_are_consistent(cluster):
    by_kind = documents()
    service, spec = by_kind["Service"], by_kind["Job"]["spec"]
    name, pod = by_kind["Job"]["metadata"]["name"], spec["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    # the label that the Job controller sets
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    line, env = torchrun_line(cluster, by_kind["Job"], 0)
    assert env["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert given(line, "--master-port") == str(service["spec"]["ports"][0]["port"])
    assert env["NNODES"] == str(spec["completions"])
    assert by_kind["TrainJob"]["spec"]["runtimeRef"]["name"] == by_kind["TrainingRuntime"]["metadata"]["name"]
    assert by_kind["TrainJob"]["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    wishes = by_kind["TrainJob"]["spec"]["trainer"]
    assert str(wishes["numProcPerNode"]) == wishes["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    # each has a Service of its name
    assert by_kind["Job"]["metadata"]["name"] != by_kind["TrainJob"]["metadata"]["name"]
    runs = {TrainingConfig.from_args(flags_of(cluster, manifest)).run_dir for manifest in both()}
    assert len(runs) == 2


def flags_of(cluster, job):
    line, _ = torchrun_line(cluster, job, 0)
    return line[line.index("train.py") + 1 :]


@pytest.mark.guarantee("kubernetes")
def test_each_pod_starts_launch_sh_as_its_node(cluster, job):
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    nodes = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == nodes == 2
    for index in range(nodes):
        line, env = torchrun_line(cluster, job, index)
        assert (given(line, "--nnodes"), given(line, "--node-rank")) == (str(nodes), str(index))
        assert (given(line, "--master-addr"), given(line, "--master-port")) == (f"{name}-0.{subdomain}", "29500")
        assert env["LAUNCH_ID"] == "5fcf6d81"
        if "PET_NPROC_PER_NODE" in env:
            assert given(line, "--nproc-per-node") == env["PET_NPROC_PER_NODE"]
    assert "--retries" in started(job, 0)[0]


def test_the_flags_are_valid_and_run_and_data_are_on_the_shared_claim(cluster, job):
    config = TrainingConfig.from_args(flags_of(cluster, job))
    pod = job["spec"]["template"]["spec"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    claim = documents()["PersistentVolumeClaim"]
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert config.resume_from == "auto"
    assert config.run_folder.is_relative_to(mounts["shared"]) and Path(config.data_dir).is_relative_to(mounts["shared"])
    assert mounts["shm"] == Path("/dev/shm") and volumes["shm"]["emptyDir"]["medium"] == "Memory"
    size, memory = volumes["shm"]["emptyDir"]["sizeLimit"], pod["containers"][0]["resources"]["limits"]["memory"]
    assert int(size.removesuffix("Gi")) < int(memory.removesuffix("Gi"))  # files there count as memory


def test_the_grace_period_exceeds_the_shutdown_timeout(cluster, job):
    shutdown = float(re.search(r"PET_SHUTDOWN_TIMEOUT=(\d+)", dry_run(cluster, job, 0)[0].err)[1])
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= shutdown + 30


def outcome(rules, code, conditions=()):
    """What the Job controller does with a failed pod: the action of the first matching rule, else Count."""
    for rule in rules:
        is_code = code in rule.get("onExitCodes", {}).get("values", [])
        if is_code or any(condition["type"] in conditions for condition in rule.get("onPodConditions", [])):
            return rule["action"]
    return "Count"


def test_disruptions_and_saved_runs_use_no_retry_and_a_rejected_run_is_not_retried(job):
    spec = job["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["operator"] for rule in rules if "onExitCodes" in rule} == {"In"}
    assert {outcome(rules, EXIT_PREEMPTED), outcome(rules, 137, ["DisruptionTarget"])} == {"Ignore"}
    assert outcome(rules, 2) == "FailJob"
    assert outcome(rules, 1) == outcome(rules, 137) == "Count" and spec["backoffLimit"] > 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # otherwise the API server rejects the policy
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_pods_satisfy_the_restricted_profile_and_run_as_the_images_user(job):
    pod = job["spec"]["template"]["spec"]
    rights, container = pod["securityContext"], pod["containers"][0]
    assert rights["runAsNonRoot"] and rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    image = dict(instructions())
    assert image["USER"] == f"{rights['runAsUser']}:{rights['runAsGroup']}"
    assert rights["fsGroup"] == rights["runAsGroup"] > 0
    assert json.loads(image["ENTRYPOINT"]) == container["command"][:1]
    policy = documents()["NetworkPolicy"]["spec"]
    selector = policy["podSelector"]["matchLabels"]
    assert selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    # pods of one job may connect to each other
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": selector}}]}]
    assert pod["enableServiceLinks"] is False

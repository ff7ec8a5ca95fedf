# extra: kubernetes and launcher
"""scripts/kubernetes as a cluster reads it: schemas, the Job that Kubeflow Trainer creates, the kubelet's pods."""

import copy
import json
import re
from pathlib import Path

from nodes import Nodes
from ranks import ROOT, package

FOLDER = ROOT / "scripts" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
VERSIONS = ("1.31", "1.37")  # the oldest version with all fields, and the newest one with published schemas


def documents():
    """All manifests, by kind."""
    yaml = package("yaml")
    loaded = [document for file in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]
    assert len(loaded) == len({document["kind"] for document in loaded}) == 6
    return {document["kind"]: document for document in loaded}


def validate(document):
    """Raise if a document violates the published schemas, also for an unknown field."""
    if document["apiVersion"].startswith("trainer.kubeflow.org/"):
        models = package("kubeflow_trainer_api.models")
        model = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document)
        parsed = json.loads(json.dumps(model.to_dict(), default=str))  # a model drops unknown fields
        assert document["kind"] in ("TrainingRuntime", "TrainJob") and parsed == document, "has an unknown field"
    else:
        for version in VERSIONS:
            package("kubernetes_validate").validate(document, version, strict=True)


def job_of_the_trainer(runtime, train_job):
    """The Job that Kubeflow Trainer 2.3 and JobSet create from a runtime and a TrainJob (torch.go, jobset.go)."""
    name, wishes = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    replicated = copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"][0])
    spec = replicated["template"]["spec"] | {"completions": wishes["numNodes"], "parallelism": wishes["numNodes"]}
    container = spec["template"]["spec"]["containers"][0]
    assert replicated["name"] == container["name"] == "node"  # Kubeflow finds them by these names
    container |= {"image": wishes["image"], "args": wishes["args"], "resources": wishes["resourcesPerNode"]}
    values = {
        "NNODES": wishes["numNodes"],
        "NPROC_PER_NODE": wishes["numProcPerNode"],
        "MASTER_ADDR": f"{name}-node-0-0.{name}",
        "MASTER_PORT": 29500,
    }
    container["env"] += [{"name": f"PET_{key}", "value": str(value)} for key, value in values.items()]
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    spec["template"]["spec"]["subdomain"] = name
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-node-0"}, "spec": spec}


def both() -> list[dict]:
    """The Job that a cluster would run, from each of the two manifests."""
    by_kind = documents()
    return [by_kind["Job"], job_of_the_trainer(by_kind["TrainingRuntime"], by_kind["TrainJob"])]


def started(job, index):
    """The command and the variables of the pod with this index, expanded as by the kubelet."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    fields = {INDEX: str(index), "metadata.labels['batch.kubernetes.io/controller-uid']": "5fcf6d81"}
    env = {}
    for entry in container["env"]:  # in order: a later variable cannot be expanded
        if "value" in entry:
            env[entry["name"]] = filled(entry["value"], env)
        else:
            env[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return [filled(word, env) for word in container["command"] + container["args"]], env


def filled(text, env):
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


def publish(nodes: Nodes, *jobs: dict) -> None:
    """Make the pods' names in the cluster's DNS known to the nodes: <job>-<index>.<subdomain>."""
    lines = ["127.0.0.1 localhost"]
    for job in jobs:
        name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
        lines += [f"{node.address} {name}-{index}.{subdomain}" for index, node in enumerate(nodes)]
    for node in nodes:
        node.seen(Path("/etc/hosts")).write_text("\n".join(lines) + "\n")  # in place, so that running pods see it too

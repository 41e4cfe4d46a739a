"""The manifests of `launch --kubernetes`, read by the models of Kubernetes' own client."""

import json
import re

import pytest
import yaml
from kubernetes import client

from meshwright.cli.main import main
from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import UserError
from meshwright.launch.options import parse_launch

JOB_SET_FIELDS = {
    "apiVersion",
    "kind",
    "metadata.name",
    "metadata.namespace",
    "metadata.labels",
    "spec.network.enableDNSHostnames",
    "spec.network.subdomain",
    "spec.failurePolicy.maxRestarts",
    "spec.failurePolicy.rules.name",
    "spec.failurePolicy.rules.action",
    "spec.failurePolicy.rules.onJobFailureReasons",
    "spec.replicatedJobs.name",
    "spec.replicatedJobs.replicas",
    "spec.replicatedJobs.template",
}
"""Fields of JobSet v1alpha2 since its release 0.6, and those that are Kubernetes' own below."""
KUBERNETES_OWN = ("metadata.labels", "spec.replicatedJobs.template")

COMMAND = ["train", "model=gpt2", "run.name='$(HOME) $HOME'", "checkpoint.every=5"]


def written(capsys, *flags: str, program=COMMAND, kind="--kubernetes") -> list[dict]:
    words = ["launch", kind, "--image", "site/train:1", *flags, "--dry-run", "--", *program]
    assert main(words) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def read_back(model, manifest) -> dict:
    """Read a manifest by a model of Kubernetes' client, which knows all fields, and write it."""
    return json.loads(model.from_dict(manifest).to_json())


def fields(value, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(fields(each, prefix) for each in value)) if value else {prefix}
    if not isinstance(value, dict) or prefix in KUBERNETES_OWN:
        return {prefix}
    inner = (fields(each, f"{prefix}.{name}".lstrip(".")) for name, each in value.items())
    return set().union(*inner)


FLAGS = ["--nodes", "3", "--gpus-per-node", "8", "--claim", "disk", "--namespace", "lab"]


def test_a_job_set_has_only_known_fields_and_restarts_preempted_jobs_for_free(capsys):
    (made,) = written(capsys, *FLAGS, "--queue", "mine", "--restarts", "5")
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert fields(made) == JOB_SET_FIELDS
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "mine"}
    assert made["spec"]["failurePolicy"] == {
        "maxRestarts": 5,
        "rules": [
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    template = made["spec"]["replicatedJobs"][0]["template"]
    assert read_back(client.V1JobTemplateSpec, template) == template
    # Only a preempted Job fails by its policy; any other failure, by its backoffLimit.
    assert template["spec"]["backoffLimit"] == 0
    rules = template["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "FailJob"]
    assert rules[0]["onExitCodes"]["values"] == [75]


def test_a_plain_job_ignores_preemptions_and_ends_with_a_mistake(capsys):
    service, job = written(capsys, *FLAGS, kind="--kubernetes=job")
    assert read_back(client.V1Service, service) == service
    assert read_back(client.V1Job, job) == job
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["backoffLimit"] == 3 * 3
    rules = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {"Ignore": [75], "FailJob": [2, 3, 4]}


@pytest.mark.parametrize("kind", ["--kubernetes", "--kubernetes=job"])
def test_the_processes_find_each_other_by_what_the_pod_says(capsys, kind):
    made = written(capsys, *FLAGS, "--name", "big", kind=kind)[-1]
    is_set = kind == "--kubernetes"
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"] if is_set else made["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    job = "big-workers-0" if is_set else "big"
    pod = {"HOSTNAME": f"{job}-2", "JOB_COMPLETION_INDEX": "2"}
    config = DistributedConfig.from_environment(
        pod | {each["name"]: each["value"] for each in container["env"]}
    )
    assert (config.world_size, config.rank) == (3, 2) == (spec["completions"], 2)
    assert (config.master_addr, config.master_port) == (f"{job}-0.big", 29500)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    # Kubernetes reads $$ as a dollar, and $(HOME) as a variable.
    assert [word.replace("$$", "$") for word in container["command"]] == [
        *("python", "-P", "-m", "meshwright", *COMMAND),
        "hydra.run.dir=/checkpoints/big",
    ]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"checkpoints": "/checkpoints", "shared-memory": "/dev/shm"}


def test_several_processes_in_a_pod_are_a_launch_in_the_pod(capsys):
    (made,) = written(capsys, "--nodes", "2", "--nprocs", "4", program=["own.py", "x=1"])
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    launch = ["python", "-P", "-m", "meshwright", "launch", "--nodes", "2", "--nprocs", "4", "--"]
    assert command == [*launch, "own.py", "x=1"]
    assert "volumes" not in pod


def test_secrets_are_hidden_and_a_lost_run_folder_is_mentioned(capsys):
    words = [
        "--image",
        "a",
        "--dry-run",
        "--",
        "train",
        "tracking.mlflow_uri=http://me:hunter2@host",
    ]
    assert main(["launch", "--kubernetes", *words]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "without --claim, checkpoints are lost with their pod" in printed.err


def test_kubectl_gets_the_manifest_or_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = ["launch", "--kubernetes=job", "--image", "a", "--", "doctor"]
    stub = tmp_path / "kubectl"
    stub.write_text(f"#!/bin/bash\necho \"$*\"; cat > '{tmp_path}/got'\n")
    stub.chmod(0o755)
    assert main(words) == 0
    assert capsys.readouterr().out == "create -f -\n"
    kinds = [each["kind"] for each in yaml.safe_load_all((tmp_path / "got").read_text())]
    assert kinds == ["Service", "Job"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(words) == 1
    assert "run `kubectl create -f job.yaml`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kubernetes -- doctor", "needs a container image"),
        ("--kubernetes=pods --image a -- doctor", "--kubernetes=pods is not valid"),
        ("--kubernetes --image a;b -- doctor", "--image a;b is not valid"),
        ("--kubernetes --image a --name Big -- doctor", "--name Big is not valid"),
        ("--kubernetes --image a --name 1st -- doctor", "--name 1st is not valid"),
        (f"--kubernetes --image a --name {'x' * 64} -- doctor", "is not valid"),
        ("--kubernetes --image a --claim my_disk -- doctor", "--claim my_disk is not valid"),
        ("--kubernetes --image a --time 1:00 -- doctor", "--time needs --slurm"),
        (
            "--kubernetes --image a --coordinator n:7000 -- doctor",
            "cannot be used with",
        ),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_launch(words.split())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("train modle=mlp optimizer.lr=3", "did you mean `model`?"),
        ("train model=mlp mesh.fsdp=many", "`mesh.fsdp=many` is not valid"),
        ("train --jsn", "did you mean `--json`?"),
        ("train model=mlp mesh.fsdp=12", "the mesh does not match the 16 devices"),
        ("train model=mlp training.global_batch_size=9", "global_batch_size"),
        ("python foo.py", "there is no command `python`"),
        ("doctr", "did you mean `doctor`?"),
    ],
)
@pytest.mark.parametrize("place", ["--slurm", "--kubernetes --image a"])
def test_a_mistake_in_the_program_shows_before_the_job_is_made(capsys, place, program, message):
    devices = ["--nodes", "2", "--gpus-per-node", "8"]
    assert main(["launch", *place.split(), *devices, "--dry-run", "--", *program.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


@pytest.mark.parametrize(
    "program",
    [
        "train model=hf model.weights=/checkpoints/hf",
        "train model.kind=in_the_image:X",
        "train --config /checkpoints/old/config.yaml",
        "train plan=/checkpoints/plan.yaml",
        "in_the_image.py x",
        "-m in_the_image",
    ],
)
def test_files_and_modules_may_be_in_the_image_only(capsys, program):
    (made,) = written(capsys, program=program.split())
    assert made["kind"] == "JobSet"


def test_settings_are_checked_although_weights_are_in_the_image_only(capsys):
    words = ["train", "model=hf", "model.weights=/checkpoints/hf", "mesh.fsdq=2"]
    assert main(["launch", "--kubernetes", "--image", "a", "--", *words]) == 2
    assert "there is no `mesh.fsdq`" in capsys.readouterr().err


def test_a_name_that_makes_host_names_too_long_is_refused(capsys):
    words = ["--image", "a", "--nodes", "11", "--name", "x" * 52, "--", "doctor"]
    assert main(["launch", "--kubernetes", *words]) == 2
    assert "shorten it by 2 characters" in capsys.readouterr().err

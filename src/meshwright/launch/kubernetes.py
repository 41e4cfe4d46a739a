"""The manifests of a launch for Kubernetes: a JobSet, or an indexed Job with a headless service."""

from typing import Any

import yaml

from meshwright.config.launchers import DEFAULT_PORT
from meshwright.errors import ExitCode, UserError
from meshwright.launch.options import ClusterKind, LaunchOptions
from meshwright.processes import JOIN_TIMEOUT

MOUNT = "/checkpoints"
"""Where the volume claim is mounted."""

_CONTAINER = "train"
_WORKERS = "workers"
_JOIN_SECONDS = 1800.0
"""Pods start minutes apart, when some of their machines have to load the image first."""
_LONGEST_HOSTNAME = 63

Manifest = dict[str, Any]


def manifests(launch: LaunchOptions) -> list[Manifest]:
    """Return the objects to create, in this order; nodes of the launch are pods."""
    first_pod = f"{_job_name(launch)}-0"
    last_pod = f"{_job_name(launch)}-{(launch.nodes or 1) - 1}"
    if len(last_pod) > _LONGEST_HOSTNAME:
        raise UserError(
            f"--name {launch.name} is too long",
            why=f"the last pod would be called {last_pod}, which is {len(last_pod)} characters "
            f"long, and a host name has up to {_LONGEST_HOSTNAME}",
            fix=f"shorten it by {len(last_pod) - _LONGEST_HOSTNAME} characters",
        )
    pod = _pod(launch, coordinator=f"{first_pod}.{launch.name}:{DEFAULT_PORT}")
    if launch.cluster is ClusterKind.JOB_SET:
        return [_job_set(launch, pod)]
    return [_service(launch), _job(launch, pod)]


def manifest_text(objects: list[Manifest]) -> str:
    """Return the objects as YAML, for ``kubectl create -f``."""
    texts = (yaml.safe_dump(each, sort_keys=False, allow_unicode=True) for each in objects)
    return "---\n".join(texts)


def fixed_folder(launch: LaunchOptions) -> tuple[str, ...]:
    """Return the program with a run folder on the volume, unless it names its own folder."""
    program = launch.program
    named = any(word.startswith("hydra.run.dir=") for word in program)
    if program[0] != "train" or named or not launch.claim:
        return program
    return (*program, f"hydra.run.dir={MOUNT}/{launch.name}")


def _job_name(launch: LaunchOptions) -> str:
    """Return the name of the Job, which is that of its pods without their index."""
    return f"{launch.name}-{_WORKERS}-0" if launch.cluster is ClusterKind.JOB_SET else launch.name


def _metadata(launch: LaunchOptions, *, queued: bool = True) -> Manifest:
    metadata: Manifest = {"name": launch.name}
    if launch.namespace:
        metadata["namespace"] = launch.namespace
    if launch.queue and queued:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": launch.queue}
    return metadata


def _service(launch: LaunchOptions) -> Manifest:
    """Return the headless service that gives the pods their host names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launch, queued=False),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": launch.name},
            # Processes look each other up before their pods count as ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "coordinator", "port": DEFAULT_PORT}],
        },
    }


def _job(launch: LaunchOptions, pod: Manifest) -> Manifest:
    nodes = launch.nodes or 1
    rules = [
        _on_exit("FailJob", ExitCode.BAD_INPUT, ExitCode.NOTHING_FITS, ExitCode.NOT_FINITE),
        _on_exit("Ignore", ExitCode.PREEMPTED),
        _on_disruption("Ignore"),
    ]
    # When one process fails, those in the other pods fail too.
    spec = _indexed(nodes, launch.restarts * nodes, rules)
    template = {"spec": {"subdomain": launch.name, **pod}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(launch),
        "spec": {**spec, "template": template},
    }


def _job_set(launch: LaunchOptions, pod: Manifest) -> Manifest:
    """Return the JobSet, which recreates all pods when one of them fails.

    A Job that fails by its podFailurePolicy was preempted; the restart is free.
    """
    rules = [_on_exit("FailJob", ExitCode.PREEMPTED), _on_disruption("FailJob")]
    job = {**_indexed(launch.nodes or 1, 0, rules), "template": {"spec": pod}}
    free = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(launch),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": launch.name},
            "failurePolicy": {"maxRestarts": launch.restarts, "rules": [free]},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _indexed(nodes: int, backoff: int, rules: list[Manifest]) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": rules},
    }


def _on_exit(action: str, *exits: ExitCode) -> Manifest:
    codes = {"containerName": _CONTAINER, "operator": "In", "values": [int(e) for e in exits]}
    return {"action": action, "onExitCodes": codes}


def _on_disruption(action: str) -> Manifest:
    """Return the rule for pods that the cluster ended, also without time to save."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _pod(launch: LaunchOptions, coordinator: str) -> Manifest:
    container: Manifest = {
        "name": _CONTAINER,
        "image": launch.image,
        # A list of words: no shell reads them. Kubernetes itself would replace $(NAME).
        "command": [word.replace("$", "$$") for word in _command(launch)],
        "env": [
            {"name": name, "value": value}
            for name, value in _environment(launch, coordinator).items()
        ],
        "ports": [{"name": "coordinator", "containerPort": DEFAULT_PORT}],
    }
    if launch.gpus_per_node is not None:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(launch.gpus_per_node)}}
    volumes = _volumes(launch)
    if volumes:
        container["volumeMounts"] = [
            {"name": name, "mountPath": path} for name, (path, _) in volumes.items()
        ]
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": launch.save_seconds,
        "containers": [container],
    }
    if volumes:
        spec["volumes"] = [{"name": name, **source} for name, (_, source) in volumes.items()]
    return spec


def _volumes(launch: LaunchOptions) -> dict[str, tuple[str, Manifest]]:
    """Return, by name, where each volume is mounted and what it is."""
    volumes: dict[str, tuple[str, Manifest]] = {}
    if launch.claim:
        volumes["checkpoints"] = (MOUNT, {"persistentVolumeClaim": {"claimName": launch.claim}})
    if launch.gpus_per_node is not None:
        # NCCL needs more shared memory than the 64 MiB that containers get.
        volumes["shared-memory"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
    return volumes


def _environment(launch: LaunchOptions, coordinator: str) -> dict[str, str]:
    environ = {
        "MESHWRIGHT_NUM_PROCESSES": str(launch.nodes or 1),
        "MESHWRIGHT_COORDINATOR": coordinator,
        JOIN_TIMEOUT: f"{launch.join_timeout or _JOIN_SECONDS:g}",
        "PYTHONUNBUFFERED": "1",
    }
    devices = launch.devices_per_process
    if devices is not None and launch.gpus_per_node is None:
        environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    return environ


def _command(launch: LaunchOptions) -> list[str]:
    """Return the command of a pod: the program, or a launch of several processes of it."""
    if launch.nprocs == 1:
        return ["python", *launch.command[1:]]
    flags = ["--nodes", str(launch.nodes or 1), "--nprocs", str(launch.nprocs)]
    if launch.devices_per_process is not None:
        flags += ["--devices-per-process", str(launch.devices_per_process)]
    return ["python", "-P", "-m", "meshwright", "launch", *flags, "--", *launch.program]

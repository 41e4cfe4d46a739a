"""What starts processes (torchrun, SLURM, MPI, Kubernetes, …), and the variables that each sets.

Each launcher is a record of the variables that hold the rank, the number of processes and the
address of process 0. Supporting another one takes another record.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.config.base import shorten
from meshwright.errors import UserError

Environ = Mapping[str, str]
Variables = tuple[str, ...]
"""Names of variables with the same meaning, the most specific first."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where process 0 listens, and the variables that say so; a port of None is the default.

    An address that was given contradicts others; one derived from a list of machines does not.
    """

    host: str
    port: int | None
    variables: Variables
    is_given: bool = False


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables in which it describes its processes.

    Attributes:
        numbers: the variables that hold a number, by the setting they set; if that of the rank is
            not set, the launcher did not start this process.
        job: what the processes of one run share, and those of other runs do not.
        address: finds the address of process 0.
        started: whether the launcher started this process, or only an outer one, such as a script.
        whole_node: whether each process has a machine, or a container, of its own.
    """

    name: str
    numbers: Mapping[str, Variables]
    job: Variables = ()
    address: Callable[[Environ], CoordinatorAddress | None] = lambda _: None
    started: Callable[[Environ], bool] = lambda _: True
    whole_node: bool = False

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return "the environment" if self.name == "environment" else self.name


@dataclass(frozen=True)
class Found:
    """What a launcher says about this process, and the variable that each setting was read from."""

    launcher: Launcher
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    address: CoordinatorAddress | None = None
    job: str = ""
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_complete(self) -> bool:
        """Whether both the rank and the number of processes are known."""
        return {"rank", "world_size"} <= set(self.numbers)

    def shown(self, environ: Environ, *settings: str) -> str:
        """Return the variables of these settings as a shell would set them."""
        names = dict.fromkeys(self.variables[key] for key in settings if key in self.variables)
        return " ".join(f"{name}={shorten(environ[name].strip())}" for name in names)


def detect(environ: Environ) -> list[Found]:
    """Return what each launcher of this process says; later ones take precedence."""
    return [
        read_launcher(launcher, environ)
        for launcher in LAUNCHERS
        # Users export the variables of these two by hand: they count even if some are missing.
        if launcher in (JAX, ENVIRONMENT) or first(launcher.numbers["rank"], environ)[1]
        if launcher.started(environ)
    ]


def read_launcher(launcher: Launcher, environ: Environ) -> Found:
    """Return what the variables of one launcher say."""
    numbers, variables = dict[str, int](), dict[str, str]()
    for key, names in launcher.numbers.items():
        name, text = first(names, environ)
        if text:
            numbers[key], variables[key] = _integer(name, text), name
    address = launcher.address(environ)
    if address is not None:
        variables |= {"address": address.variables[0]}
    parts = [environ.get(name, "").strip() for name in launcher.job]
    job = f"{launcher.name} {'.'.join(parts)}" if parts and all(parts) else ""
    return Found(launcher, numbers, address, job, variables)


def first(names: Sequence[str], environ: Environ) -> tuple[str, str]:
    """Return the first variable that is set, and its value; two empty strings if none is."""
    texts = ((name, environ.get(name, "").strip()) for name in names)
    return next(((name, text) for name, text in texts if text), ("", ""))


def process_variables() -> set[str]:
    """Return all variables that describe a process, for launchers that replace them."""
    names = {
        name
        for launcher in LAUNCHERS
        for variables in launcher.numbers.values()
        for name in variables
    }
    return names | {"MASTER_ADDR", "MASTER_PORT", _JAX_ADDRESS, _TORCHRUN_LISTENS}


def is_slurm_task(environ: Environ) -> bool:
    """Whether this process is a task that srun started.

    A batch script has the variables of its job, and as its only process the rank 0, without being
    one of the job's tasks; what srun starts also has the variables of a step. Under mpirun, srun
    has started the daemons of Open MPI, and the ranks are those of the daemons.
    """
    rank = environ.get("SLURM_PROCID", "").strip()
    started = bool(rank) and (rank != "0" or bool(first(_SLURM_STEP, environ)[0]))
    return started and not environ.get("OMPI_COMM_WORLD_RANK", "").strip()


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list such as ``gpu[003-007,12],login``."""
    match = re.match(r"((?:[^\[\],\s]|\[\w+[^\[\]]*\])+)(?:,|$)", nodelist)
    if match is None:
        raise UserError(f"cannot read the SLURM node list `{nodelist}`", fix="set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def split_address(source: str, address: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; IPv6 addresses are in brackets.

    Without a ``default_port``, an address that has no port is refused. ``source`` is its flag or
    variable.
    """
    host, colon, port = address.rpartition(":")
    bare = re.fullmatch(r"[^:]+|\[[^\]]*\]", address)
    if bare and default_port is not None:
        return address, default_port
    valid = host and colon and re.fullmatch(r"[^:\s]+|\[[0-9a-fA-F:.]+\]", host)
    if not valid or not port.isdecimal() or not 1024 <= int(port[:6]) <= 65535:
        raise UserError(
            f"{source} is `{shorten(address)}`",
            why="it must be a host and a port from 1024 to 65535"
            + (", and has no port" if bare else ""),
            fix=f"write {source}={shorten(address) if bare else 'node0'}:{DEFAULT_PORT}"
            if source.startswith("--")
            else f"export {source}=node0:{DEFAULT_PORT}, or unset it",
        )
    return host, int(port)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name} is `{shorten(text)}`",
            why="it must be a whole number",
            fix=f"export {name}=… with a number, or unset it",
        ) from None


def _slurm_address(environ: Environ) -> CoordinatorAddress | None:
    name, nodes = first(_SLURM_NODES, environ)
    job = environ.get("SLURM_JOB_ID", "").strip()
    # Jobs that share a machine get different ports, the same ones that JAX would choose.
    port = int(job) % 2**12 + 61440 if job.isdecimal() else None
    return CoordinatorAddress(first_host(nodes), port, (name,)) if nodes else None


def _open_mpi_address(environ: Environ) -> CoordinatorAddress | None:
    # Open MPI 4 names the machine of mpirun: `1234.0;tcp://10.96.0.1,10.148.0.1:34911`.
    name = "OMPI_MCA_orte_hnp_uri"
    match = re.search(r"tcp://([^,:;\s]+)", environ.get(name, ""))
    return CoordinatorAddress(match[1], None, (name,)) if match else None


def _jax_address(environ: Environ) -> CoordinatorAddress | None:
    address = environ.get(_JAX_ADDRESS, "").strip()
    if not address:
        return None
    host, port = split_address(_JAX_ADDRESS, address)
    return CoordinatorAddress(host, port, (_JAX_ADDRESS,), is_given=True)


def _kubernetes_address(environ: Environ) -> CoordinatorAddress | None:
    """Return the first pod of an indexed Job: ``<job>-0.<service>``.

    A pod is called like its Job and its index; the headless service gives it that name.
    """
    given = environ.get(_COORDINATOR, "").strip()
    if given:
        host, port = split_address(_COORDINATOR, given, default_port=DEFAULT_PORT)
        return CoordinatorAddress(host, port, (_COORDINATOR,), is_given=True)
    pod, index = (environ.get(name, "").strip() for name in ("HOSTNAME", "JOB_COMPLETION_INDEX"))
    job = pod.removesuffix(f"-{index}")
    if job in ("", pod):
        return None
    service = environ.get("MESHWRIGHT_SERVICE", "").strip()
    return CoordinatorAddress(f"{job}-0.{service or job}", None, ("HOSTNAME", "MESHWRIGHT_SERVICE"))


def _skypilot_address(environ: Environ) -> CoordinatorAddress | None:
    lines = environ.get("SKYPILOT_NODE_IPS", "").split()
    return CoordinatorAddress(lines[0], None, ("SKYPILOT_NODE_IPS",)) if lines else None


def _plain_address(environ: Environ) -> CoordinatorAddress | None:
    host, text = (environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    port = _integer("MASTER_PORT", text) if text else None
    if port is not None and environ.get(_TORCHRUN_LISTENS) == "True":
        port = port + 1 if port < 65535 else port - 1
    if not host and port is None:
        return None
    return CoordinatorAddress(
        host, port, ("MASTER_ADDR" if host else "MASTER_PORT",), is_given=bool(host)
    )


DEFAULT_PORT = 29500
_COORDINATOR = "MESHWRIGHT_COORDINATOR"
_JAX_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_TORCHRUN_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun if it listens on MASTER_PORT itself, which is then not free for process 0."""

# A step may use fewer nodes than its job, so the step's variables come before the job's.
_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")

SLURM = Launcher(
    "SLURM",
    {
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        "node_rank": ("SLURM_NODEID",),
    },
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    address=_slurm_address,
    started=is_slurm_task,
)
OPEN_MPI = Launcher(
    "Open MPI",
    {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "num_processes_per_node": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    address=_open_mpi_address,
)
PMI = Launcher(
    "PMI",
    {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "num_processes_per_node": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    },
)
SKYPILOT = Launcher(
    "SkyPilot",
    {
        "rank": ("SKYPILOT_NODE_RANK",),
        "world_size": ("SKYPILOT_NUM_NODES",),
        "num_nodes": ("SKYPILOT_NUM_NODES",),
        "node_rank": ("SKYPILOT_NODE_RANK",),
    },
    job=("SKYPILOT_TASK_ID",),
    address=_skypilot_address,
    whole_node=True,
)
KUBERNETES = Launcher(
    "Kubernetes",
    {
        "rank": ("JOB_COMPLETION_INDEX",),
        "world_size": ("MESHWRIGHT_NUM_PROCESSES",),
        "num_nodes": ("MESHWRIGHT_NUM_PROCESSES",),
        "node_rank": ("JOB_COMPLETION_INDEX",),
    },
    address=_kubernetes_address,
    # An indexed Job may also be a list of separate runs.
    started=lambda environ: bool(environ.get("MESHWRIGHT_NUM_PROCESSES", "").strip()),
    whole_node=True,
)
JAX = Launcher(
    "JAX",
    {"rank": ("JAX_PROCESS_ID",), "world_size": ("JAX_NUM_PROCESSES",)},
    address=_jax_address,
    # As for JAX itself: a process uses all GPUs it sees.
    whole_node=True,
)
ENVIRONMENT = Launcher(
    "environment",
    {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "num_processes_per_node": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
    },
    job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    address=_plain_address,
)

LAUNCHERS = (SLURM, OPEN_MPI, PMI, SKYPILOT, KUBERNETES, JAX, ENVIRONMENT)
"""All launchers, outermost first where one of them runs inside another."""

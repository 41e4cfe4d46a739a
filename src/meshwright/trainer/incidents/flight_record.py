"""The flight record of a step that was not finite: what replaying it needs, written and read."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshwright.checkpoint import FOLDER, CheckpointMetadata, CheckpointStore
from meshwright.checkpoint.metadata import check_format
from meshwright.config.argument_checks import check_path
from meshwright.errors import UserError, first_line
from meshwright.plan import Plan
from meshwright.processes import broadcast, is_main
from meshwright.step.assemble import Assembled
from meshwright.step.canonical import Snapshot
from meshwright.trainer.incidents.not_finite import BadStep, StepValues, wrong_numbers

INCIDENTS = "incidents"
RECORD, BATCH = "record.json", "batch.npz"
FORMAT = 2
SHOWN_INDICES = 3
MAX_RECORDS = 3
"""Records of one run; each holds a whole training state."""


@dataclass(frozen=True)
class Incident:
    """A step that was not finite, its batch, the values of the steps up to it, and what is done.

    The samples are their numbers in the data, if those number them.
    """

    bad: BadStep
    number: int
    samples: Sequence[int] | None
    batch: Sequence[Any]
    history: Iterable[StepValues]
    action: str


@dataclass(frozen=True)
class FlightRecorder:
    """Writes records into a run folder, if there is one; every process must make the same calls."""

    run_dir: Path | None
    assembled: Assembled
    metadata: Callable[[int], CheckpointMetadata]

    def write(self, incident: Incident, snapshot: Snapshot) -> tuple[Path | None, str]:
        """Write a record; return its folder, or None and why there is none.

        The state before the step may be left out for not being finite itself.
        """
        if self.run_dir is None:
            return None, "a run without a folder keeps no record"
        path = self.run_dir / INCIDENTS / f"{incident.bad.values.step:06d}"
        refused = broadcast(_room(path) if is_main() else "")
        if refused:
            return None, refused
        leaves = self.fetch(incident.batch)
        beside = path.with_name(f".{path.name}.new")
        problem = broadcast(self._try_files(beside, incident, leaves) if is_main() else "")
        if not problem:
            problem = self._save_state(beside, incident, snapshot)
        problem = broadcast(_finish(beside, path, problem) if is_main() else "")
        return (None, f"no record: {problem}") if problem else (path, "")

    def fetch(self, batch: Sequence[Any]) -> list[NDArray[Any]]:
        """Return the whole batch in every process."""
        whole = NamedSharding(self.assembled.mesh, PartitionSpec())
        copied = jax.jit(lambda leaves: leaves, out_shardings=whole)(list(batch))
        return [np.asarray(leaf.addressable_data(0)) for leaf in copied]

    def wrong_values(self, batch: Sequence[Any], *, negative: bool) -> tuple[str, str]:
        """Say which arrays of a batch are not finite, and which indices are out of range."""
        leaves, traced = self.fetch(batch), self.assembled.traced
        indices = traced.wrong_indices(leaves, negative=negative)
        return wrong_numbers(traced.batch, leaves), "; ".join(indices[:SHOWN_INDICES])

    def _try_files(self, folder: Path, incident: Incident, leaves: Sequence[NDArray[Any]]) -> str:
        """Write everything but the state, in the main process; return what went wrong."""
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            described = describe_leaves(self.assembled.batch_tree, leaves)
            # Bytes, since NumPy's format does not know bfloat16.
            arrays = {str(n): np.frombuffer(x.tobytes(), np.uint8) for n, x in enumerate(leaves)}
            np.savez(folder / BATCH, allow_pickle=False, **arrays)
            text = json.dumps(self._content(incident, described), indent=1, default=str)
            (folder / RECORD).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return first_line(error)
        return ""

    def _content(self, incident: Incident, described: list[dict[str, Any]]) -> dict[str, Any]:
        values = incident.bad.values
        loss = np.asarray(incident.bad.loss)
        metadata = self.metadata(values.step - 1)
        device = self.assembled.mesh.devices.flat[0]
        return {
            "time": time.time(),
            "batch": incident.number,
            "samples": incident.samples,
            "action": incident.action,
            # As text: JSON has no NaN.
            "loss": str(values.loss),
            "loss_bytes": loss.tobytes().hex(),
            "grad_norm": str(values.grad_norm),
            "history": [
                {k: str(v) if k != "step" else v for k, v in asdict(each).items()}
                for each in incident.history
            ],
            "arrays": described,
            "state": f"{FOLDER}/{values.step - 1}",
            "random_streams": [
                leaf.path
                for leaf in self.assembled.traced.layout.leaves
                if leaf.variable in ("RngKey", "RngCount")
            ],
            "platform": device.platform,
            **asdict(metadata),
            "step": values.step,
            "format": FORMAT,
        }

    def _save_state(self, folder: Path, incident: Incident, snapshot: Snapshot) -> str:
        store = CheckpointStore(folder / FOLDER, keep_last=1)
        metadata = self.metadata(incident.bad.values.step - 1)
        store.save(snapshot.arrays, metadata, finite=snapshot.finite)
        saved = store.close()
        return saved.reason if saved is not None and saved.error is not None else ""


def describe_leaves(tree: Any, leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """Return where each array of a batch belongs, its shape and its dtype, as JSON."""
    placed = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(leaves)))[0]
    return [
        {
            "path": [getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path],
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
        }
        for path, leaf in placed
    ]


def _room(path: Path) -> str:
    """Return why no further record is written; empty if there is room."""
    folder = path.parent
    present = [each for each in folder.glob("[0-9]*") if each != path] if folder.is_dir() else []
    if len(present) < MAX_RECORDS:
        return ""
    return f"no further record: {folder} has {len(present)} already"


def _finish(beside: Path, path: Path, problem: str) -> str:
    """Give a complete record its name, and remove one that is not; return what went wrong."""
    if problem:
        shutil.rmtree(beside, ignore_errors=True)
        return problem
    try:
        shutil.rmtree(path, ignore_errors=True)
        beside.replace(path)
    except OSError as error:
        return first_line(error)
    return ""


@dataclass(frozen=True)
class FlightRecord:
    """A step that was not finite: the content of record.json, and the arrays of its batch."""

    folder: Path
    facts: Mapping[str, Any]
    leaves: Sequence[NDArray[Any]]

    @property
    def step(self) -> int:
        """The step, from 1; the state is the one after the step before it."""
        return self.facts["step"]

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return Plan.parse(dict(self.facts["plan"]))

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder that holds the state."""
        return self.folder / FOLDER

    @property
    def names(self) -> list[str]:
        """The name of each array of the batch."""
        paths = [each["path"] for each in self.facts["arrays"]]
        return [".".join(map(str, path)) or "batch" for path in paths]

    @property
    def batch(self) -> Any:
        """The global batch, nested as the loss gets it."""
        paths = ([*each["path"]] for each in self.facts["arrays"])
        return _nest(list(zip(paths, self.leaves, strict=True)))

    def rows(self, rows: Any) -> Any:
        """Return these rows of the batch, nested in the same way."""
        cut = [leaf[rows] for leaf in self.leaves]
        return FlightRecord(self.folder, self.facts, cut).batch

    def sample(self, row: int) -> int:
        """Return the number of a sample in the data, or its row if the data do not number them."""
        samples = self.facts["samples"]
        return row if samples is None else samples[row]


def read_record(path: Any) -> FlightRecord:
    """Read a record: its folder, or a run folder or its incidents with only one."""
    folder = _find(check_path("record", path).absolute())
    try:
        facts = json.loads((folder / RECORD).read_bytes())
        check_format(f"the record {folder}", facts["format"], FORMAT)
        with np.load(folder / BATCH, allow_pickle=False) as stored:
            leaves = [
                stored[str(n)].view(jnp.dtype(each["dtype"])).reshape(each["shape"])
                for n, each in enumerate(facts["arrays"])
            ]
    except (
        *(OSError, EOFError, BadZipFile, ValueError, KeyError, TypeError),
        *(AttributeError, OverflowError, RecursionError),
    ) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"the record {folder} cannot be read", why=first_line(error), fix="use another record"
        ) from error
    return FlightRecord(folder, facts, leaves)


def _find(folder: Path) -> Path:
    if (folder / RECORD).is_file():
        return folder
    incidents = folder if folder.name == INCIDENTS else folder / INCIDENTS
    inside = sorted(incidents.glob(f"[0-9]*/{RECORD}"))
    if len(inside) == 1:
        return inside[0].parent
    named = ", ".join(str(each.parent) for each in inside)
    raise UserError(
        f"{folder} is not the record of an incident",
        why=f"it has several: {named}" if inside else f"there is no {RECORD} in it",
        fix="name one of them" if inside else "give a folder such as RUN/incidents/000123",
    )


def _nest(values: Sequence[tuple[list[Any], Any]]) -> Any:
    """Return values by path as nested dicts and lists."""
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    groups: dict[Any, list[tuple[list[Any], Any]]] = {}
    for (first, *rest), value in values:
        groups.setdefault(first, []).append((rest, value))
    made = {key: _nest(group) for key, group in groups.items()}
    in_a_row = list(made) == list(range(len(made)))
    return list(made.values()) if in_a_row else made

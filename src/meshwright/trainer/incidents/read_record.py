"""Reading the flight record of an update that was not finite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint import FOLDER
from meshwright.config.argument_checks import check_path
from meshwright.errors import UserError, first_line
from meshwright.plan import Plan
from meshwright.trainer.incidents.flight_record import BATCH, FORMAT, INCIDENTS, RECORD


@dataclass(frozen=True)
class FlightRecord:
    """An update that was not finite, as it was recorded.

    Attributes:
        folder: the folder of the record.
        facts: the content of record.json.
        leaves: the arrays of the global batch.
    """

    folder: Path
    facts: Mapping[str, Any]
    leaves: Sequence[NDArray[Any]]

    @property
    def update(self) -> int:
        """The update, from 1; the state is the one after the update before it."""
        return self.facts["update"]

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
        return _nest(
            [([*each["path"]], leaf) for each, leaf in zip(self._arrays, self.leaves, strict=True)]
        )

    def rows(self, rows: Any) -> Any:
        """Return these rows of the batch, nested in the same way."""
        cut = [leaf[rows] for leaf in self.leaves]
        return FlightRecord(self.folder, self.facts, cut).batch

    def sample(self, row: int) -> int:
        """Return the number of a sample in the data, or its row if the data do not number them."""
        samples = self.facts["samples"]
        return row if samples is None else samples[row]

    @property
    def _arrays(self) -> list[dict[str, Any]]:
        return self.facts["arrays"]


def read_record(path: Any) -> FlightRecord:
    """Read a record: its folder, or a run folder or its incidents with only one."""
    folder = _find(check_path("record", path).absolute())
    try:
        facts = json.loads((folder / RECORD).read_bytes())
        if facts["format"] > FORMAT:
            raise UserError(
                f"{folder} was written by a newer version",
                why=f"its format is {facts['format']}, and this version reads {FORMAT}",
                fix="use the version that wrote it",
            )
        with np.load(folder / BATCH, allow_pickle=False) as stored:
            leaves = [
                stored[str(n)].view(jnp.dtype(each["dtype"])).reshape(each["shape"])
                for n, each in enumerate(facts["arrays"])
            ]
    except (OSError, EOFError, BadZipFile, ValueError, KeyError, TypeError) as error:
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

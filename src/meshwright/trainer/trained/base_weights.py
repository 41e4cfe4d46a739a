"""The base of a run: the weights that it does not train, which its checkpoints leave out.

A run folder remembers where they are (a Hugging Face folder, or its own folder ``base``) and their
digest, which is compared whenever they are read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint import CheckpointMetadata, CheckpointReader, CheckpointStore
from meshwright.errors import ANY, EnvironmentProblem, Setting, UserError, first_line
from meshwright.processes import broadcast, is_main
from meshwright.program.trace.adapters import PREFIX, Adapter, Split
from meshwright.step.assemble import Assembled
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.trainer.run_dir import write_files
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.load import load_array
from meshwright.weights.match import Weights, find_weights
from meshwright.weights.peft_folder import digest_of_base

RECORD = "base.json"
FOLDER = "base"


@dataclass(frozen=True)
class Base:
    """The weights that a run does not train, in a Hugging Face folder or the run's own.

    ``formats`` are those in which they are kept; ``shapes`` are of all weights of the model.
    """

    digest: str
    weights: str | None
    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    adapters: Sequence[Adapter]
    run: Path

    @property
    def identity(self) -> str:
        """The digest, and of how many weights in which formats it is."""
        formats = sorted(set(self.formats.values()))
        return " ".join([self.digest, str(len(self.formats)), *formats])

    def read(self, paths: Sequence[str] | None = None) -> dict[str, Any]:
        """Return weights by path as NumPy arrays; if all are read, their digest is compared."""
        wanted = list(self.formats) if paths is None else list(paths)
        if not wanted:
            return {}
        if self.weights is None:
            found = CheckpointReader(self.run / FOLDER).read(0, {"state": wanted})["state"]
        else:
            folder = self._folder(self.weights)
            found = {p: folder.read_whole(p, jnp.dtype(self.formats[p])) for p in wanted}
        if paths is None:
            self.check(found)
        return found

    def place(
        self, structs: Mapping[str, Any], weights: str | Path | None = None
    ) -> dict[str, Any]:
        """Return the weights with the shardings of ``structs``, also if their folder was moved."""
        source = self.weights if weights is None or self.weights is None else str(weights)
        if source is None:
            reader = CheckpointReader(self.run / FOLDER)
            found = reader.restore(0, {"state": dict(structs)})["state"]
        else:
            folder = self._folder(source)
            found = {path: load_array(folder, path, struct) for path, struct in structs.items()}
        self.check(found)
        return found

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raise unless these are the weights that the run began with."""
        if weights_digest(arrays) != self.digest:
            raise UserError(
                f"the base of {self.run} is not the one that it was trained on",
                why=f"the weights in {self.weights or self.run / FOLDER} have changed: their "
                f"digest was {self.digest} and is {weights_digest(arrays)}",
                fix="put the weights back that the training started from; adapters fit no others",
            )

    def _folder(self, path: str) -> Weights:
        try:
            folder = open_folder(path)
        except UserError as error:
            raise UserError(
                f"the base of {self.run} is not there",
                why=f"it was trained on the weights in {path}: {error.what}",
                fix="put the folder back, or write its new place as `weights` in "
                f"{self.run / RECORD} (and, to resume, as {Setting('model.weights', ANY)})",
            ) from error
        return find_weights(folder, {path: tuple(s) for path, s in self.shapes.items()})


def weights_digest(arrays: Mapping[str, Any]) -> str:
    """Return a digest of arrays by path, which does not depend on how they are sharded."""
    sums = jax.device_get(
        jax.jit(lambda arrays: {p: _sum(x) for p, x in arrays.items()})(
            {
                path: array if isinstance(array, jax.Array) else jnp.asarray(array)
                for path, array in arrays.items()
            }
        )
    )
    facts = [[path, list(arrays[path].shape), int(sums[path])] for path in sorted(arrays)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _sum(array: Any) -> Any:
    """Return a sum of an array's bits, each with a factor of its position, modulo 2**32."""
    bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    position, stride = jnp.zeros(array.shape, jnp.uint32), 1
    for dim in reversed(range(array.ndim)):
        steps = jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
        position, stride = position + steps * np.uint32(stride), stride * array.shape[dim] % 2**32
    return ((bits ^ (bits >> 15)) * (2 * position + 1)).sum(dtype=jnp.uint32)


def check_adapters(folder: Path, base: Base) -> None:
    """Raise if adapters were trained on another base, as far as that can be told."""
    was = broadcast(digest_of_base(folder) if is_main() else "")
    digest, _, compared = was.partition(" ")
    if digest == base.digest or compared != base.identity.partition(" ")[2]:
        return
    raise UserError(
        f"the adapters in {folder} are of another base",
        why=f"the digest of their base was {digest}, and that of the run's base is {base.digest}",
        fix="use the base that they were trained on, or export merged weights and train those",
    )


def keep_base(
    run_dir: Path,
    assembled: Assembled,
    form: CanonicalForm,
    state: TrainState,
    metadata: CheckpointMetadata,
    weights: str | Path | None,
    adapters: str | Path | None = None,
) -> None:
    """Remember the base of a run in its folder, with the weights if no other folder has them.

    The PEFT folder that its ``adapters`` come from must be of the same base.
    """
    if not form.base:
        return
    arrays = form.base_arrays(state)
    leaves = assembled.model_leaves.base.leaves
    record = Base(
        digest=weights_digest(arrays),
        weights=None if weights is None else str(Path(weights).absolute()),
        shapes={leaf.path: leaf.shape for leaf in leaves if leaf.is_weight},
        formats={path: str(array.dtype) for path, array in arrays.items()},
        adapters=list(assembled.model_leaves.adapters.values()),
        run=run_dir,
    )
    if adapters is not None:
        check_adapters(Path(adapters), record)
    known = find_base(run_dir) if is_main() else None
    if broadcast(known and (known.digest, known.weights)) == [record.digest, record.weights]:
        return
    if weights is None:
        store = CheckpointStore(run_dir / FOLDER, keep_last=1)
        if not CheckpointReader(run_dir / FOLDER).steps():
            store.save({"state": arrays}, replace(metadata, step=0, run=""))
        saved = store.close()
        if saved is not None and saved.error is not None:
            raise EnvironmentProblem(
                f"the base could not be saved in {run_dir / FOLDER}", why=first_line(saved.error)
            )
    values = asdict(record)
    values["adapters"] = [
        {**asdict(a), "split": [sorted(a.split.inputs), sorted(a.split.outputs)]}
        for a in record.adapters
    ]
    del values["run"]
    write_files(run_dir, {RECORD: json.dumps(values, indent=1) + "\n"})


def find_base(folder: Path) -> Base | None:
    """Return the base of a run from its folder, or a folder in it; None if it has none."""
    inside = (folder, *folder.absolute().parents[:3])
    run = next((each for each in inside if (each / RECORD).is_file()), None)
    if run is None:
        return None
    values: dict[str, Any] = json.loads((run / RECORD).read_text(encoding="utf-8"))
    adapters: list[Adapter] = []
    for each in values.pop("adapters"):
        each["split"], each["shape"] = Split(*map(frozenset, each["split"])), tuple(each["shape"])
        adapters.append(Adapter(**each))
    shapes = {path: tuple(shape) for path, shape in values.pop("shapes").items()}
    return Base(**values, shapes=shapes, adapters=adapters, run=run)


def without_factors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by path without those of adapters."""
    return {path: value for path, value in values.items() if not path.startswith(PREFIX)}

"""Which tensors of a folder hold which arrays of a model, checked before anything is read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import ANY, Setting, UserError
from meshwright.text.units import counted
from meshwright.weights.families import Architecture, read_architecture, text_model
from meshwright.weights.family import Family, TensorRow
from meshwright.weights.hf_folder import CONFIG, Folder, describe_differences, listed
from meshwright.weights.safetensors_format import DTYPES, Tensor
from meshwright.weights.views import Range

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by canonical path, or of tensors by name."""


HEAD = "lm_head.weight"
"""The output layer of language models."""


@dataclass(frozen=True)
class Weights:
    """The weights of a folder for a model, of which slices can be read.

    ``shapes`` are those of the model's arrays; ``skipped`` says in one line what is left out.
    """

    folder: Folder
    shapes: Shapes
    skipped: str
    _places: Mapping[str, TensorRow]
    _tensors: Mapping[str, Tensor]
    _sizes: Mapping[str, int]

    @property
    def summary(self) -> str:
        """What is read, in one line."""
        count, dtype = len(self._tensors), self.folder.dtype
        return f"{counted(count, 'tensor')} in {dtype} from {self.folder.path}"

    def read(self, path: str, ranges: Sequence[Range], dtype: Any) -> NDArray[Any]:
        """Read a slice of one of the model's arrays."""
        place = self._places[path]
        found = place.view.read(self._tensors[place.name], ranges, self.shapes[path], self._sizes)
        return np.ascontiguousarray(found, dtype)

    def read_whole(self, path: str, dtype: Any) -> NDArray[Any]:
        """Read one of the model's arrays."""
        return self.read(path, [(0, size) for size in self.shapes[path]], dtype)


def find_weights(folder: Folder, shapes: Shapes) -> Weights:
    """Find a model's arrays in a folder by canonical path; refuse a folder that does not fit."""
    architecture = read_architecture(folder.config, str(folder.path))
    family = architecture.family
    places = place_arrays(architecture, shapes)
    tensors = _spelled(folder, family)
    skipped = _matching(tensors, [family.skipped[0]] if family.skipped else [])
    have = {name: t for name, t in tensors.items() if name not in skipped}
    need = tensor_shapes(places, shapes, architecture.sizes)
    for name in _matching(have, family.ignored):
        del have[name]
    if HEAD in have and HEAD not in need and architecture.arguments.get("tied_embeddings"):
        _refuse_another_head(folder, have.pop(HEAD), have.get(family.embedding))
    unknown = {path: shape for path, shape in shapes.items() if path not in places}
    differences = describe_differences(
        {name: tensor.shape for name, tensor in have.items()}, {**need, **unknown}, "in the folder"
    )
    if differences:
        given = family.own_names(text_model(folder.config))
        left_out = [k for k, key in family.keys.items() if key.argument and k not in given]
        if left_out:
            differences.append(f"{CONFIG} leaves out {listed(left_out)}, so the defaults are taken")
        raise UserError(
            f"the weights in {folder.path} do not fit the model",
            why="; ".join(differences),
            fix="build the model of the folder: model=hf on the command line, mw.hf_model(folder) "
            "in Python, without other sizes. If it is, the files do not belong to this config.json",
        )
    _refuse_formats(folder, have.values())
    remark = ""
    if skipped and family.skipped:
        remark = (
            f"of {folder.path}, only the text model is used: {len(skipped)} tensors of the "
            f"{family.skipped[1]} model are skipped"
        )
    return Weights(folder, shapes, remark, places, have, architecture.sizes)


def place_arrays(architecture: Architecture, paths: Iterable[str]) -> dict[str, TensorRow]:
    """Return where arrays of a model are, by path; those that are in no tensor are left out."""
    rows = architecture.family.rows
    found = {path: next(filter(None, (row.match(path) for row in rows)), None) for path in paths}
    return {path: place for path, place in found.items() if place is not None}


def tensor_shapes(
    places: Mapping[str, TensorRow], shapes: Shapes, sizes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that hold a model's arrays, by name."""
    return {
        place.name: place.view.tensor_shape(shapes[path], sizes) for path, place in places.items()
    }


def _spelled(folder: Folder, family: Family) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names that the rows have."""
    found: dict[str, Tensor] = {}
    for name, tensor in folder.tensors.items():
        other = found.setdefault(family.spell(name), tensor)
        if other is not tensor:
            raise UserError(
                f"a tensor is in {folder.path} twice",
                why=f"`{other.name}` and `{name}` are the same array of the model",
                fix="remove one of them",
            )
    return found


def _refuse_another_head(folder: Folder, head: Tensor, table: Tensor | None) -> None:
    """Refuse an output layer that is not the embedding, although they are tied.

    Files may have both. Where they differ, transformers uses the output layer nevertheless.
    """
    if table is None or (head.shape == table.shape and head.equals(table)):
        return
    raise UserError(
        f"`{head.name}` in {folder.path} is not the embedding",
        why=f"{CONFIG} says tie_word_embeddings=true, but transformers uses the tensor",
        fix=f"write tie_word_embeddings=false in {CONFIG} to use it, or remove it from the file",
    )


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = list(patterns)
    return [name for name in names if any(re.fullmatch(p, name) for p in patterns)]


def _refuse_formats(folder: Folder, tensors: Iterable[Tensor]) -> None:
    others = {tensor.dtype: tensor.name for tensor in tensors if tensor.dtype not in DTYPES}
    if others:
        raise UserError(
            f"the weights in {folder.path} have number formats that are not supported",
            why=listed([f"{name} is {dtype}" for dtype, name in others.items()], quote=""),
            fix=f"write {Setting('model.weights', ANY)} with weights in "
            f"{', '.join(dtype.name for dtype in DTYPES.values())}",
        )

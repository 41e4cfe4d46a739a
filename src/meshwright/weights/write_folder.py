"""Writing a Hugging Face folder: tensor by tensor, and complete or not at all."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.weights.families import Architecture, find_family
from meshwright.weights.family import TensorRow
from meshwright.weights.hf_folder import CONFIG, INDEX, SINGLE, listed
from meshwright.weights.kept import KeptFiles, published_config, token_ids, with_defaults
from meshwright.weights.match import Shapes, place_arrays, tensor_shapes
from meshwright.weights.safetensors_format import DTYPE_NAMES, DTYPES, write_file

FILE_BYTES = 5 * 10**9
"""The largest file of weights; larger models are written to several."""

READ_BYTES = 256 * 2**20
"""How much of a model is read at a time."""

ReadArrays = Callable[[Sequence[str]], Mapping[str, NDArray[Any]]]
"""Reads some arrays of a model, by canonical path."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote: the shapes of the tensors by name, and the names of the files.

    ``rounded`` counts the numbers that the number format could not hold as they were.
    """

    folder: Path
    architecture: str
    dtype: str
    parameters: int
    rounded: int
    tensors: dict[str, tuple[int, ...]]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A model to export: its arrays by path, and what its run remembers of their origin."""

    kind: str
    arguments: Mapping[str, Any]
    shapes: Shapes
    read: ReadArrays
    kept: KeptFiles


def write_folder(source: Source, target: Path, dtype: str | None = None) -> Exported:
    """Write a model as a Hugging Face folder, which must not exist or be empty.

    The number format is by default that of the weights the model was trained from, or float32.
    """
    check_target(target)
    kept = json.loads(source.kept.get(CONFIG, "{}"))
    dtype = dtype or str(kept.get("torch_dtype", "float32"))
    if dtype not in DTYPE_NAMES:
        why = f"known: {', '.join(DTYPE_NAMES)}"
        raise UserError(f"{dtype} is not a number format for weights", why=why)
    config = published_config(source.kind, source.arguments, kept) | {"torch_dtype": dtype}
    config |= {} if kept else token_ids(source.kept)
    arguments = with_defaults(source.kind, source.arguments)
    architecture = Architecture(find_family(source.kind), arguments)
    places = _place_all(architecture, source)
    tensors = tensor_shapes(places, source.shapes, architecture.sizes)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for name, text in {**source.kept, CONFIG: json.dumps(config, indent=2) + "\n"}.items():
            (partial / name).write_text(text, encoding="utf-8")
        rounded = _write_tensors(partial, source, places, tensors, architecture, dtype)
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}", why=str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        folder=target,
        architecture=architecture.family.architecture,
        dtype=dtype,
        parameters=sum(math.prod(shape) for shape in tensors.values()),
        rounded=rounded,
        tensors=tensors,
        files=tuple(sorted(path.name for path in target.iterdir())),
    )


def reading_order(source: Source) -> list[str]:
    """Return the paths of all arrays in the order in which `write_folder` reads them."""
    places = _place_all(Architecture(find_family(source.kind), source.arguments), source)
    return [path for paths in _holders(places).values() for path in paths]


def check_target(target: Path) -> None:
    """Refuse a folder that exists already."""
    file = next((each for each in target.absolute().parents if each.is_file()), None)
    if file is not None:
        why, fix = f"{file} is a file", "name a folder elsewhere"
        raise UserError(f"cannot write {target}", why=why, fix=fix)
    if target.is_dir() and any(target.iterdir()):
        why = f"it holds {listed(sorted(path.name for path in target.iterdir()))}"
    elif target.exists() and not target.is_dir():
        why = "it is a file"
    else:
        return
    raise UserError(f"{target} exists already", why=why, fix="name a new folder")


def _place_all(architecture: Architecture, source: Source) -> dict[str, TensorRow]:
    places = place_arrays(architecture, source.shapes)
    others = [path for path in source.shapes if path not in places]
    if others:
        raise UserError(
            f"the model is not a {architecture.family.architecture}",
            why=f"it has {listed(others)}, for which there is no name",
        )
    return places


def _write_tensors(
    folder: Path,
    source: Source,
    places: Mapping[str, TensorRow],
    tensors: Shapes,
    architecture: Architecture,
    dtype: str,
) -> int:
    """Write all tensors, and return how many numbers were rounded."""
    rounded = 0
    itemsize = DTYPES[DTYPE_NAMES[dtype]].itemsize
    files = _split(tensors, FILE_BYTES // itemsize)
    holders = _holders(places)

    def arrays(names: Sequence[str]) -> Iterator[NDArray[Any]]:
        nonlocal rounded
        for group in _split({name: tensors[name] for name in names}, READ_BYTES // 4):
            read = source.read([path for name in group for path in holders[name]])
            for name in group:
                tensor = np.empty(tensors[name], DTYPES[DTYPE_NAMES[dtype]])
                for path in holders[name]:
                    held = read[path].astype(tensor.dtype).astype(read[path].dtype)
                    rounded += int(np.count_nonzero(held != read[path]))
                    places[path].view.put(read[path], tensor, architecture.sizes)
                yield tensor

    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = SINGLE
        if len(files) > 1:
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(folder / file, {n: tensors[n] for n in names}, dtype, arrays(names))
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in tensors.values()) * itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return rounded


def _holders(places: Mapping[str, TensorRow]) -> dict[str, list[str]]:
    """Return the paths of the arrays in each tensor, by its name."""
    holders: dict[str, list[str]] = {}
    for path, place in places.items():
        holders.setdefault(place.name, []).append(path)
    return holders


def _split(tensors: Shapes, most: int) -> list[list[str]]:
    """Split tensors into groups of at most this many numbers, or of one tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in tensors.items():
        size += math.prod(shape)
        if size > most and groups[-1]:
            groups.append([])
            size = math.prod(shape)
        groups[-1].append(name)
    return groups

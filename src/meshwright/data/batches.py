"""Reading batches from the user: arrays of numbers, and every batch like the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.data.protocols import refuse_none
from meshwright.data.samples import path_name, to_numpy
from meshwright.errors import UserError, first_line
from meshwright.text.units import a_type
from meshwright.trees import check_num_samples


@dataclass(frozen=True)
class BatchForm:
    """How arrays are nested, and shape and dtype of each, in all batches of a compiled step."""

    tree: Any
    arrays: dict[str, tuple[tuple[int, ...], Any]]

    @property
    def num_samples(self) -> int:
        """Samples in the batch: the size of dim 0 of every array."""
        return next(iter(self.arrays.values()))[0][0]

    def with_samples(self, number: int) -> BatchForm:
        """Return the form of this many samples of the batch."""
        arrays = {
            path: ((number, *shape[1:]), dtype) for path, (shape, dtype) in self.arrays.items()
        }
        return replace(self, arrays=arrays)


def read_batches(
    batches: Iterable[Any],
    expected: BatchForm | None = None,
    name: Callable[[int], str] = "batch {}".format,
) -> Iterator[Any]:
    """Yield batches as arrays JAX accepts; all must have the same structure and shapes.

    By default those of the first. Messages name a batch by its number from 0.
    """
    for number, given in enumerate(batches):
        batch = read_batch(given, name(number))
        form = form_of(batch)
        if expected is not None and form != expected:
            raise _other_form(name(number), form, expected)
        expected = form
        yield batch


def read_batch(batch: Any, name: str = "the batch") -> Any:
    """Return a batch whose leaves are arrays (or their shapes) with the sample as dim 0.

    64-bit numbers become 32-bit ones, unless JAX's 64-bit mode is on. Messages use the name.
    """
    refuse_none(batch, name)
    if callable(batch) or isinstance(batch, Iterator):
        what = f"{name} is {a_type(batch)}"
        raise UserError(what, fix="pass one batch: what the function returns, or `next(batches)`")
    batch = jax.tree_util.tree_map_with_path(
        lambda path, x: _read_leaf(f"`{path_name(path)}` of {name}", x), batch
    )
    sizes = {path: shape[0] for path, (shape, _) in form_of(batch).arrays.items()}
    if not sizes:
        raise UserError(f"{name} has no arrays", fix='write a dict such as {"x": …, "y": …}')
    check_num_samples(sizes, name)
    return batch


def form_of(batch: Any) -> BatchForm:
    """Return the structure, shapes and dtypes of a batch from `read_batch`."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    return BatchForm(tree, {path_name(path): (tuple(x.shape), x.dtype) for path, x in leaves})


def _read_leaf(name: str, leaf: Any) -> Any:
    array = leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else _to_numpy(name, leaf)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != bool:
        is_text = isinstance(array, np.ndarray) and array.dtype.kind in "SUT"
        raise UserError(
            f"{name} holds {'text' if is_text else 'no numbers'}",
            why=f"its dtype is {array.dtype}, and devices compute with numbers",
            fix="turn it into integers or floats, or leave the field out of the batch",
        )
    if not array.shape:
        raise UserError(
            f"{name} is a single number",
            why="dim 0 of every array is the sample, and it has no dims",
            fix="give one value per sample, or put a constant into the loss instead",
        )
    return _narrow(name, array) if isinstance(array, np.ndarray) else array


def _to_numpy(name: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    # Tensors of other libraries convert themselves to NumPy arrays.
    if hasattr(leaf, "__array__"):
        try:
            return to_numpy(leaf)
        except Exception as error:
            # Each library fails in its own way, for example for a tensor on a GPU.
            raise UserError(
                f"{name} cannot become an array",
                why=first_line(error),
                fix="write tensor.detach().cpu()" if hasattr(leaf, "detach") else "",
            ) from error
    raise UserError(
        f"{name} is of type {type(leaf).__name__}, not an array",
        fix="write np.asarray(…) around lists, and leave text out",
    )


def _narrow(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    target = jax.dtypes.canonicalize_dtype(array.dtype)
    if target == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(target)
        if array.min() < limits.min or array.max() > limits.max:
            raise UserError(
                f"{name} has integers of more than 32 bits",
                why=f"from {array.min()} to {array.max()}, and JAX uses 32-bit integers by default",
                fix=f"keep them from {limits.min} to {limits.max}",
            )
    return array.astype(target)


def _other_form(name: str, form: BatchForm, expected: BatchForm) -> UserError:
    if form.tree != expected.tree:
        before, now = (", ".join(f.arrays) for f in (expected, form))
        why = f"before: {before}; now: {now}"
        fix = "give every batch the same arrays"
    elif form.num_samples != expected.num_samples:
        why = f"it has {form.num_samples} samples, and the first batch had {expected.num_samples}"
        fix = (
            "drop a short last batch, or pad it and return mw.Weighted from the loss with a mask "
            "that excludes the padding"
        )
    else:
        path = next(p for p, array in form.arrays.items() if array != expected.arrays[p])
        (old_shape, old_type), (shape, dtype) = expected.arrays[path], form.arrays[path]
        why = f"`{path}` was {old_type}{list(old_shape)} and is now {dtype}{list(shape)}"
        fix = "pad or convert every batch to them"
    return UserError(
        f"{name} differs from the batches before it",
        why=why,
        fix=f"the step is compiled for one structure and shape; {fix}",
    )

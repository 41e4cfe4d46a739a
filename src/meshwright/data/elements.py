"""What users pass as data: samples and batches told apart by their shapes, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.batches import form_of
from meshwright.data.samples import leaf_shapes, stack_samples
from meshwright.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """What is known about the elements of some data.

    Batches are ``like`` another one, except for their size. ``batch_size`` is given for data that
    comes as samples, and ``planned`` is that of a plan. Shapes of ``training`` data are not known
    in advance.
    """

    batch_size: int | None = None
    planned: int | None = None
    like: Any = None
    training: bool = True

    def are_samples(self, element: Any, name: str) -> bool:
        """Whether the first element is a sample and not a batch; raise if it could be either."""
        shapes = leaf_shapes(element)
        if self.like is not None:
            known = _compare(shapes, form_of(self.like).arrays, name)
            if known is not None:
                return known
        sizes = {shape[0] if shape else None for shape in shapes.values()}
        like_batch = len(sizes) == 1 and None not in sizes
        if self.batch_size is None:
            if self.training and self.planned is None and shapes and not like_batch:
                stack_samples([element], [0])
                raise _no_batch(shapes, name)
            return not like_batch
        if like_batch and sizes == {self.batch_size}:
            raise _either(shapes, self.batch_size, name)
        return True


def _compare(
    shapes: dict[str, Shape], expected: dict[str, tuple[Shape, Any]], name: str
) -> bool | None:
    """Return whether shapes are those of one sample of a batch; None if they fit neither."""
    each = [shape[1:] for shape, _ in expected.values()]
    pairs = [
        (shape, [expected[path][0][1:]] if path in expected else each)
        for path, shape in shapes.items()
    ]
    sample = all(shape in known for shape, known in pairs)
    batch = all(shape and shape[1:] in known for shape, known in pairs)
    if sample and batch:
        raise UserError(
            f"the elements of {name} could be samples or batches",
            why=f"the shapes are {_listing(shapes)}",
            fix="give dicts with the names of the training data's arrays",
        )
    return sample if sample != batch else None


def _no_batch(shapes: dict[str, Shape], name: str) -> UserError:
    numbers = [path for path, shape in shapes.items() if not shape]
    if not numbers:
        return UserError(
            f"the arrays of the first element of {name} have different numbers of samples",
            why=", ".join(f"{path}: {shape[0]}" for path, shape in shapes.items()),
            fix="make dim 0 of every array the sample, or write batch_size=… if each element is "
            "one sample",
        )
    return UserError(
        f"the first element of {name} is a single sample, not a batch",
        why=f"it has {_listing(shapes)}, and every array of a batch has the sample as its dim 0",
        fix=f"write batch_size=… to have samples stacked, or give `{numbers[0]}` one value per "
        "sample",
    )


def _either(shapes: dict[str, Shape], size: int, name: str) -> UserError:
    return UserError(
        f"the elements of {name} could be samples or batches of {size}",
        why=f"the first has {_listing(shapes)}, and batch_size={size}",
        fix=f"leave out batch_size if they are batches, or write mw.Samples(data) with "
        f"batch_size={size} if each is one sample",
    )


def _listing(shapes: dict[str, Shape]) -> str:
    return ", ".join(f"{path} {list(shape)}" if shape else path for path, shape in shapes.items())


_FORMS = "write a dict of arrays such as {'x': x, 'y': y}, or a list of batches"


def refuse_class(given: object) -> None:
    """Raise for a class, which has the methods of data but no samples."""
    if isinstance(given, type):
        raise UserError(
            f"the data are the class {given.__name__}",
            why="only an instance of it has samples",
            fix=f"write {given.__name__}(…)",
        )


def refuse_wrong_data(given: Any) -> None:
    """Raise for values that hold no samples, or in a form that says too little about them."""
    kind = type(given).__name__
    if given is None:
        raise UserError("the data are None", why="there is nothing to read from", fix=_FORMS)
    if isinstance(given, str | bytes | Path):
        raise UserError(
            f"the data are a single {kind}",
            why="a path does not say how its files are read",
            fix="read the file first: dict(np.load(path)) for .npz; "
            "meshwright train data.path=… reads other formats",
        )
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        raise UserError(
            f"the data are a {kind}",
            why="each step takes a batch of arrays",
            fix="write {name: data[name].to_numpy() for name in data.columns}",
        )
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        raise UserError(
            f"the data are a single {kind}", why="each step takes a batch of samples", fix=_FORMS
        )
    if isinstance(given, tuple) and given and all(hasattr(part, "shape") for part in given):
        raise UserError(
            f"the data are a tuple of {len(given)} arrays",
            why="these could be separate batches, or the fields of one dataset",
            fix=_FORMS,
        )
    if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
        odd = next(name for name in given if not isinstance(name, str))
        raise UserError(
            "the arrays of the dataset have no names",
            why=f"a key is {odd!r}, of type {type(odd).__name__}",
            fix="write a dict of arrays such as {'x': x, 'y': y}",
        )
    if isinstance(given, set | frozenset):
        raise UserError(f"the data are a {kind}", why="its order is not fixed", fix=_FORMS)


def no_batches(given: Any) -> UserError:
    """Return the error about a value that is not data of any kind."""
    return UserError(
        f"the data are of type {type(given).__name__}, which provides no batches",
        fix="write a dict of arrays, a function of (step, batch_size), or a list of batches",
    )

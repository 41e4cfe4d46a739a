"""Whether the elements of some data are samples or batches, decided by their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.data.batches import form_of
from meshwright.data.stack import leaf_shapes, stack_samples
from meshwright.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """What is known about the elements of some data.

    Attributes:
        batch_size: samples per batch; given for data that comes as samples.
        planned: samples per batch of a given plan, which also batches may have.
        like: a batch, as arrays or shapes, that batches are like except for their size.
        training: whether it is to train on: then the shapes of batches are not known before.
    """

    batch_size: int | None = None
    planned: int | None = None
    like: Any = None
    training: bool = True

    def are_samples(self, element: Any, name: str) -> bool:
        """Whether an element is a sample and not a batch; raise if it could be either.

        Args:
            element: the first element of the data.
            name: what the data is, for messages.
        """
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
    """Return whether shapes are those of one sample of a batch; None if they tell nothing."""
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

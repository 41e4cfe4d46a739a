"""Views: how an array of a model is found in a tensor of a file, slice by slice, and put back.

A view is written as the dims of the tensor, an arrow, and the dims of the array, such as
``(h c) d -> d h c`` for the kernel [D, H, C] of attention heads stored as [H·C, D]. A number on
the left is a dim of this size of which the view is one part: the second of three in
``View("d (3 e) -> d e", part=1)``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.weights.safetensors_format import Tensor

Range = tuple[int, int]
"""From start to stop, exclusive."""


@dataclass(frozen=True)
class View:
    """How an array of the model is found in a tensor: a pattern, and the part of a numbered dim."""

    pattern: str
    part: int = 0

    def tensor_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an array's tensor; ``sizes`` are those its shape does not tell."""
        known = self._sizes(shape, sizes)
        return tuple(math.prod(known[name] for name in dim) for dim in self.dims[0])

    def read(
        self,
        tensor: Tensor,
        ranges: Sequence[Range],
        shape: Sequence[int],
        sizes: Mapping[str, int],
    ) -> NDArray[Any]:
        """Read a slice of an array of this shape, and no more of the tensor than it takes."""
        known = self._sizes(shape, sizes)
        stored, wanted = self.dims
        names = [name for dim in stored for name in dim]
        chosen = {name: (0, known[name]) for name in names}
        chosen |= {name: (self.part, self.part + 1) for name in chosen if name.isdecimal()}
        chosen |= {dim[0]: each for dim, each in zip(wanted, ranges, strict=True) if len(dim) == 1}
        read = dict(chosen)
        region = [self._region(dim, read, known) for dim in stored]
        block = tensor.read(region).reshape([_length(read[name]) for name in names])
        inner = [slice(*(n - read[name][0] for n in chosen[name])) for name in names]
        numbered = tuple(n for n, name in enumerate(names) if name.isdecimal())
        block = np.squeeze(block[tuple(inner)], numbered).transpose(self._order)
        whole = [math.prod(_length(chosen[name]) for name in dim) for dim in wanted]
        cut = [
            slice(*each) if len(dim) > 1 else slice(None)
            for dim, each in zip(wanted, ranges, strict=True)
        ]
        return block.reshape(whole)[tuple(cut)]

    def put(self, array: NDArray[Any], tensor: NDArray[Any], sizes: Mapping[str, int]) -> None:
        """Write the array into its part of a whole tensor, the inverse of `read`."""
        known = self._sizes(array.shape, sizes)
        names = [name for dim in self.dims[0] for name in dim]
        named = tensor.reshape([known[name] for name in names], copy=False)
        index = [self.part if name.isdecimal() else slice(None) for name in names]
        part = named[tuple(index)].transpose(self._order)
        part[...] = array.reshape(part.shape)

    @cached_property
    def dims(self) -> tuple[list[list[str]], list[list[str]]]:
        """The named dims that each dim of the tensor and of the array is made of."""
        stored, wanted = self.pattern.split("->")
        return _parse(stored), _parse(wanted)

    @cached_property
    def _order(self) -> list[int]:
        """Where the named dims of the array are among the tensor's, without the numbered ones."""
        stored = [name for dim in self.dims[0] for name in dim if not name.isdecimal()]
        return [stored.index(name) for dim in self.dims[1] for name in dim]

    def _region(self, dim: list[str], read: dict[str, Range], known: Mapping[str, int]) -> Range:
        """Return the range of a tensor's dim; named dims it cannot slice are read whole."""
        start, length, stride = 0, 1, 1
        for name in reversed(dim):
            inner_whole = length == stride
            if not inner_whole and _length(read[name]) > 1:
                read.update({each: (0, known[each]) for each in dim})
                return 0, math.prod(known[each] for each in dim)
            start += read[name][0] * stride
            length *= _length(read[name])
            stride *= known[name]
        return start, start + length

    def _sizes(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        known = {**sizes, **{n: int(n) for dim in self.dims[0] for n in dim if n.isdecimal()}}
        for dim, size in zip(self.dims[1], shape, strict=True):
            unknown = [name for name in dim if name not in known or len(dim) == 1]
            for name in unknown[:1]:
                known[name] = size // math.prod(known[other] for other in dim if other != name)
        return known


@dataclass(frozen=True)
class StackedView(View):
    """A kernel [in, out] that is one of several on top of each other in a tensor [outs, in].

    ``heights`` are the names of their sizes; ``part`` is the index of this one.
    """

    heights: tuple[str, ...] = ()

    def tensor_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return sum(sizes[name] for name in self.heights), shape[0]

    def read(
        self,
        tensor: Tensor,
        ranges: Sequence[Range],
        shape: Sequence[int],
        sizes: Mapping[str, int],
    ) -> NDArray[Any]:
        """Read a slice of the kernel."""
        above = self._above(sizes)
        return tensor.read([(above + ranges[1][0], above + ranges[1][1]), ranges[0]]).T

    def put(self, array: NDArray[Any], tensor: NDArray[Any], sizes: Mapping[str, int]) -> None:
        """Write the kernel into its part of a whole tensor."""
        above = self._above(sizes)
        tensor[above : above + array.shape[1]] = array.T

    def _above(self, sizes: Mapping[str, int]) -> int:
        return sum(sizes[name] for name in self.heights[: self.part])


VECTOR = View("d -> d")
MATRIX = View("i o -> i o")
TRANSPOSED = View("o i -> i o")
"""Most tensors: as they are, or a kernel [out, in] that is [in, out] in the model."""


def _parse(dims: str) -> list[list[str]]:
    return [found.strip("()").split() for found in re.findall(r"\([^)]*\)|\w+", dims)]


def _length(each: Range) -> int:
    return each[1] - each[0]

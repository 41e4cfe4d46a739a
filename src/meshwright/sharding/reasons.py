"""Reasons for a placement, as records that render themselves as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from meshwright.text.units import counted

Rule = str | Sequence[Any]
"""``column``, ``row``, ``replicate``, or a partition spec such as ``["fsdp", "tensor"]``."""


@dataclass(frozen=True)
class Reason(ABC):
    """One reason for the placement of a leaf; its ``str`` is a phrase."""

    @abstractmethod
    def __str__(self) -> str: ...

    def in_one_block(self) -> Self:
        """Return the same reason for one block of a stack, without the leading dim of the stack."""
        return self


def render(reasons: Iterable[Reason]) -> str:
    """Return the reasons as one line of text."""
    return "; ".join(map(str, reasons)) or "the same on every device"


@dataclass(frozen=True)
class Divided(Reason):
    """An axis divides a dim.

    Attributes:
        axis: the mesh axis.
        dim: the dim.
        size: the size of the dim.
        parts: number of parts.
    """

    axis: str
    dim: int
    size: int
    parts: int

    def __str__(self) -> str:
        return f"{self.axis} on dim {self.dim}: {self.size} / {self.parts}"

    def in_one_block(self) -> Self:
        """Number the dims as in one block."""
        return replace(self, dim=self.dim - 1)


@dataclass(frozen=True)
class TooSmall(Reason):
    """Too few elements to be worth dividing over an axis."""

    axis: str
    elements: int

    def __str__(self) -> str:
        return f"not divided over {self.axis}: only {counted(self.elements, 'element')}"


@dataclass(frozen=True)
class NoDivisibleDim(Reason):
    """No undivided dim is divisible by the size of an axis.

    Attributes:
        axis: the mesh axis.
        shape: the shape of the leaf.
        parts: the size of the axis.
    """

    axis: str
    shape: tuple[int, ...]
    parts: int

    def __str__(self) -> str:
        if not self.shape:
            return f"not divided over {self.axis}: a scalar"
        shape = "×".join(map(str, self.shape))
        return f"not divided over {self.axis}: no free dim of {shape} is divisible by {self.parts}"

    def in_one_block(self) -> Self:
        """Drop the leading dim of the stack."""
        return replace(self, shape=self.shape[1:])


@dataclass(frozen=True)
class ByRule(Reason):
    """A sharding rule of the user."""

    pattern: str
    rule: Rule

    def __str__(self) -> str:
        rule = self.rule if isinstance(self.rule, str) else list(self.rule)
        return f"rule `{self.pattern}`: {rule}"


@dataclass(frozen=True)
class ByAnnotation(Reason):
    """The model's author annotated the parameter with mesh axes."""

    def __str__(self) -> str:
        return "annotated in the model"


@dataclass(frozen=True)
class UnknownAnnotation(Reason):
    """The model's author annotated the parameter with names that are not mesh axes."""

    names: tuple[Any, ...]

    def __str__(self) -> str:
        return f"annotated ({', '.join(map(str, self.names))}), no mesh axis"


@dataclass(frozen=True)
class OnEachStage(Reason):
    """A stack of blocks is divided over pipeline stages.

    Attributes:
        blocks: blocks of the largest stage.
        even: whether all stages have the same number of blocks.
    """

    blocks: int
    even: bool

    def __str__(self) -> str:
        return f"{'' if self.even else 'up to '}{counted(self.blocks, 'block')} on each stage"


@dataclass(frozen=True)
class WholeOnStage(Reason):
    """Only the pipeline stages divide the blocks; each block is whole."""

    def __str__(self) -> str:
        return "the same on all its devices"


@dataclass(frozen=True)
class LikeParameter(Reason):
    """Optimizer state is divided like the parameter it belongs to."""

    path: str

    def __str__(self) -> str:
        return f"like {self.path}"

"""Reasons for the choices of tensor parallelism, as records that render themselves as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshwright.sharding.reasons import Reason

TensorRole = Literal["column", "row", "vocabulary", "expert", "follows", "replicated"]
"""The role of the dim that the tensor axis divides."""

FactorName = Literal["", "heads", "channels", "vocabulary"]
Joined = Literal["contracted", "reduced", "gathered", ""]


@dataclass(frozen=True)
class Factor:
    """One factor of a dim: its size and, if known, what it counts."""

    size: int
    name: FactorName = ""

    def __str__(self) -> str:
        match self.name:
            case "":
                return str(self.size)
            case "vocabulary":
                return f"vocabulary {self.size}"
            case name:
                return f"{self.size} {name}"


Factors = tuple[Factor, ...]
"""A dim as the product of its factors, major first."""


def product(factors: Iterable[Factor]) -> str:
    """Return a dim as the product of its factors: ``8 heads × 16``."""
    return " × ".join(map(str, factors))


@dataclass(frozen=True)
class Column(Reason):
    """A kernel whose output dim is divided.

    Attributes:
        dim: the divided dim.
        joined: how its parts are joined: contracted, reduced or gathered; empty if never.
        path: the module where they are joined; empty for the loss.
    """

    dim: Factors
    joined: Joined
    path: str

    def __str__(self) -> str:
        where = f"{self.joined} in {self.path or 'the loss'}" if self.joined else "never summed"
        return f"column: feeds {product(self.dim)}, {where}"


@dataclass(frozen=True)
class Row(Reason):
    """A kernel whose contracted dim is divided.

    Attributes:
        dim: the divided dim.
        fed_by: path of the kernel that produces the dim; None if this is the first.
    """

    dim: Factors
    fed_by: str | None

    def __str__(self) -> str:
        source = f"fed by {self.fed_by}" if self.fed_by else "summed over the devices"
        return f"row: contracts {product(self.dim)}, {source}"


@dataclass(frozen=True)
class Vocabulary(Reason):
    """A table whose rows are looked up."""

    dim: Factors

    def __str__(self) -> str:
        return f"vocabulary: each device looks up its part of {product(self.dim)}"


@dataclass(frozen=True)
class Experts(Reason):
    """Several kernels in one array, each applied to its own part of the data."""

    dim: Factors

    def __str__(self) -> str:
        return f"expert: {product(self.dim)} kernels side by side"


@dataclass(frozen=True)
class Follows(Reason):
    """A bias or state that shares a kernel's divided dim."""

    kernel: str
    dim: Factors

    def __str__(self) -> str:
        return f"follows {self.kernel}, whose {product(self.dim)} it shares"


@dataclass(frozen=True)
class Replicated(Reason):
    """Every device of the tensor axis holds the whole leaf, because of an obstacle."""

    because: Obstacle

    def __str__(self) -> str:
        return f"not divided over tensor: {self.because}"


class Obstacle(Reason):
    """Why a leaf cannot, or should not, be divided over the tensor axis."""


@dataclass(frozen=True)
class NoDims(Obstacle):
    """The leaf has no dim."""

    def __str__(self) -> str:
        return "nothing to divide"


@dataclass(frozen=True)
class NoProduct(Obstacle):
    """None of its dims takes part in a matrix product or a lookup."""

    def __str__(self) -> str:
        return "no matrix product or lookup of data to divide"


@dataclass(frozen=True)
class NotDivisible(Obstacle):
    """The size of a dim is not a multiple of the axis."""

    dim: Factors
    tensor: int

    def __str__(self) -> str:
        plural = bool(self.dim) and self.dim[-1].name in ("heads", "channels")
        verb = "are" if plural else "is"
        return f"{product(self.dim)} {verb} not divisible by tensor={self.tensor}"


@dataclass(frozen=True)
class Recurrent(Obstacle):
    """Two dims of one parameter are the same dim of the program.

    Attributes:
        owner: path of that parameter; None if it is the leaf itself.
    """

    owner: str | None

    def __str__(self) -> str:
        whose = f" of {self.owner}" if self.owner else ""
        return f"both dims{whose} are the same class (recurrent)"


@dataclass(frozen=True)
class Fused(Obstacle):
    """The factor to divide is not the first of its dim.

    Attributes:
        factor: the factor to divide.
        dim: the dim that contains it.
        owner: path of the parameter with that dim; None if it is the leaf itself.
    """

    factor: Factors
    dim: Factors
    owner: str | None

    def __str__(self) -> str:
        whose = f"a dim of {self.owner}" if self.owner else "its dim"
        return (
            f"fused: the factor {product(self.factor)} is inside {whose} ({product(self.dim)}), "
            "which no PartitionSpec can express"
        )


@dataclass(frozen=True)
class InsideHeads(Obstacle):
    """Attention contracts the dim per head."""

    dim: Factors

    def __str__(self) -> str:
        return f"attention contracts {product(self.dim)} within each head"


@dataclass(frozen=True)
class NeededWhole(Obstacle):
    """An operation needs the dim whole.

    Attributes:
        dim: the dim.
        primitive: the operation.
        path: its module; empty for the loss.
    """

    dim: Factors
    primitive: str
    path: str

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"{self.primitive}{where} needs all of {product(self.dim)}"


@dataclass(frozen=True)
class OtherBlock(Obstacle):
    """Repeated blocks are divided alike, and another one cannot be divided this way."""

    dim: Factors

    def __str__(self) -> str:
        return f"another block cannot be divided along {product(self.dim)}"


@dataclass(frozen=True)
class DividedAnotherWay(Obstacle):
    """The kernels with this dim are divided along another one.

    Attributes:
        dim: the dim.
        kernel: path of such a kernel.
    """

    dim: Factors
    kernel: str

    def __str__(self) -> str:
        return (
            f"kernels with this dim ({product(self.dim)}) are divided another way, "
            f"such as {self.kernel}"
        )


@dataclass(frozen=True)
class PoorSubstitute(Obstacle):
    """A better dim cannot be divided, and dividing this one would send too much.

    Attributes:
        better: why the better dim cannot be divided.
        dim: the substitute.
        ratio: bytes it would send, relative to the better one.
    """

    better: Obstacle
    dim: Factors
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.better}, and {product(self.dim)} instead would send "
            f"{self.ratio:.1f} times the bytes"
        )

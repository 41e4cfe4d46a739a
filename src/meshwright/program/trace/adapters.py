"""Low-rank adapters: factors added to a weight, how they are merged, and models without them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.equations import ClosedJaxpr, Equation
from meshwright.program.jaxpr.walks import all_equations

PREFIX = "lora."
"""How the paths of adapters start: ``lora.blocks.0.attn.q.kernel.a``."""


@dataclass(frozen=True)
class Split:
    """How the uses of a weight divide its dims: those summed over or looked up, and the others."""

    inputs: frozenset[int]
    outputs: frozenset[int]

    def fits(self, other: Split) -> bool:
        """Whether another use divides the dims alike; it may be of the transposed weight."""
        return {self.inputs, self.outputs} == {other.inputs, other.outputs}


@dataclass(frozen=True)
class Adapter:
    """What is added to a weight: ``scale`` times the product of its factors ``a`` and ``b``.

    Attributes:
        split: its inputs and outputs; all other dims are batch dims, which both factors have.
        rank: the size of the last dim of both factors.
        scale: alpha / rank.
        lookup: whether it is looked up: a table of embeddings.
        tied: whether such a table is also multiplied: it is the head, too.
        dropout: the share of its inputs that training drops.
    """

    path: str
    shape: tuple[int, ...]
    split: Split
    rank: int
    scale: float
    lookup: bool = False
    tied: bool = False
    dropout: float = 0.0

    def kind(self, dims: Collection[int]) -> Literal["input", "output", "batch"]:
        """Return what a dim is that is made of these dims of the weight."""
        if dims and self.split.inputs.issuperset(dims):
            return "input"
        return "output" if self.split.outputs.issuperset(dims) else "batch"

    @property
    def paths(self) -> tuple[str, str]:
        """The paths of the two factors."""
        return f"{PREFIX}{self.path}.a", f"{PREFIX}{self.path}.b"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two factors."""
        a, b = ([self.shape[d] for d in dims] for dims in self._dims())
        return (*a, self.rank), (*b, self.rank)

    @property
    def stream(self) -> tuple[str, ...]:
        """The paths of the random stream of its dropout: a key, and how often it was used."""
        return (f"{PREFIX}{self.path}.key", f"{PREFIX}{self.path}.count") if self.dropout else ()

    def initial(self, key: Any) -> list[Any]:
        """Return initial factors, whose product is zero, and the random stream of its dropout."""
        a, b = self.shapes
        own = jax.random.fold_in(key, zlib.crc32(self.path.encode()))
        bound = 1 / math.sqrt(math.prod(self.shape[d] for d in self.split.inputs))
        first = jax.random.uniform(own, a, jnp.float32, -bound, bound)
        stream = [jax.random.fold_in(own, 1), jnp.zeros((), jnp.uint32)] if self.dropout else []
        return [first, jnp.zeros(b, jnp.float32), *stream]

    def merged(self, weight: Any, a: Any, b: Any) -> Any:
        """Return the weight with its adapter, in float32 or the weight's wider format."""
        return _merged(weight, a, b, *map(tuple, self._dims()), self.scale)

    def _dims(self) -> tuple[list[int], list[int]]:
        kinds = [self.kind({d}) for d in range(len(self.shape))]
        a = [d for d, kind in enumerate(kinds) if kind in ("input", "batch")]
        b = [d for d, kind in enumerate(kinds) if kind in ("output", "batch")]
        return a, b


@partial(jax.jit, static_argnums=(3, 4, 5))
def _merged(
    weight: Any, a: Any, b: Any, dims_a: tuple[int, ...], dims_b: tuple[int, ...], scale: float
) -> Any:
    batch = [d for d in dims_a if d in dims_b]
    batch_a, batch_b = ([dims.index(d) for d in batch] for dims in (dims_a, dims_b))
    numbers = (([len(dims_a)], [len(dims_b)]), (batch_a, batch_b))
    product = jax.lax.dot_general(a, b, numbers, precision="highest")
    order = [*batch, *(d for d in (*dims_a, *dims_b) if d not in batch)]
    product = jnp.transpose(product, [order.index(d) for d in range(len(order))])
    return weight.astype(product.dtype) + scale * product


def merge_adapters(
    adapters: Sequence[Adapter], values: Mapping[str, Any], dtypes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values by path in which weights have their adapters, which are left out."""
    factors = {path for adapter in adapters for path in (*adapter.paths, *adapter.stream)}
    merged = {path: value for path, value in values.items() if path not in factors}
    for adapter in adapters:
        a, b = (values[path] for path in adapter.paths)
        weight = adapter.merged(values[adapter.path], a, b)
        merged[adapter.path] = weight.astype(dtypes[adapter.path])
    return merged


_MARK = "meshwright.reference"


def reference(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the model with the adapters switched off, without gradients.

    ``mw.reference(model, tokens)`` is what ``model(tokens)`` returned before training, and
    ``mw.reference(log_probabilities, model, batch)`` calls any function that gets the model. Only a
    training with adapters (``lora=``) has such a reference.

    Args:
        function: the model, or a function that is called with it.
        args: its arguments.
        kwargs: its named arguments.
    """
    variables = [
        variable
        for part in jax.tree.leaves((function, args, kwargs), is_leaf=_is_module)
        if _is_module(part)
        for _, variable in nnx.iter_graph(part)
        if isinstance(variable, nnx.Param)
    ]
    if not variables:
        raise UserError(
            "mw.reference was not given a model",
            fix="write mw.reference(model, x), or mw.reference(function, model, x) for a function "
            "of the model",
        )
    before = [variable.get_raw_value() for variable in variables]
    marked = [checkpoint_name(value, _MARK) for value in before]
    for variable, value in zip(variables, marked, strict=True):
        variable.set_raw_value(value)
    try:
        return jax.lax.stop_gradient(function(*args, **kwargs))
    finally:
        for variable, value, own in zip(variables, before, marked, strict=True):
            if variable.get_raw_value() is own:
                variable.set_raw_value(value)


def is_reference(eqn: Equation) -> bool:
    """Whether an equation takes a weight for the reference."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _MARK


def refuse_reference(closed: ClosedJaxpr) -> None:
    """Raise if a program without adapters computes a reference: it would be the model itself."""
    if has_reference(closed):
        raise UserError(
            "the loss uses mw.reference, and the model has no adapters",
            why="the reference is the model with its adapters switched off; without any it would "
            "be the trained model itself",
            fix=f"train adapters ({Setting('lora.rank', 16)}), or give the loss a frozen copy of "
            "the model",
        )


def has_reference(closed: ClosedJaxpr) -> bool:
    """Whether a program computes a reference."""
    return any(is_reference(eqn) for eqn, _ in all_equations(closed.jaxpr))


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)

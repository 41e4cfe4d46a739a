"""What attention computes from the products of queries and keys, read for blocks of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.dims.op import primitives
from meshwright.program.evaluate.dependencies import dependent_variables, variables
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of, bind
from meshwright.program.kernels.masks import (
    HIDDEN,
    Allowed,
    MaskKind,
    before_broadcast,
    merge,
    moved_dims,
    read_mask,
)
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.surroundings import Scope

_COMPUTED = primitives(
    """
    abs add add_any and ceil clamp convert_element_type copy div eq exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rsqrt select_n sign
    sqrt square stop_gradient sub tanh xor
    """
)
"""Operations that a score function may have."""
_FAR_BELOW = -1e28
"""Scores below this are hidden whatever is added to them, or to others."""

Dims = tuple[int | None, ...]
"""For each dim of a value, the dim of the scores that it is; None if it has size 1."""


@dataclass(frozen=True)
class Block:
    """Some of the products of queries and keys.

    Attributes:
        products: the products, whose dtype is that of all real numbers.
        leaves: the arrays that scores depend on, which broadcast with the products.
        positions: those of queries and of keys, which broadcast too.
        edge: whether keys may be hidden by their distance.
        known: what has been computed.
    """

    products: Any
    leaves: Sequence[Any]
    positions: Sequence[Any]
    edge: bool = True
    known: dict[Any, Any] = field(default_factory=dict[Any, Any])


_Compute = Callable[[Block], Any]


@dataclass(frozen=True)
class ScoreFunction:
    """What is computed from the products of queries and keys, element by element.

    Attributes:
        compute: its formula.
        normalized: whether a softmax follows; otherwise the results are the weights.
        why: what makes it more than a scale and a mask; empty if nothing does.
        learned: whether it reads what has a gradient.
    """

    compute: _Compute
    normalized: bool
    why: str
    learned: bool = False

    def __call__(self, block: Block) -> Any:
        """Return the scores of a block, or the weights."""
        return jnp.broadcast_to(self.compute(block), block.products.shape)


@dataclass
class ScoreReader:
    """Reads the function from a product to scores, or to weights.

    Attributes:
        scope: where they are.
        product: the product of queries and keys.
        out: the scores that a softmax reads, or the weights.
        normalized: whether a softmax follows.
        eqns: the equations between them.
        sides: what these read besides the product, with their dims.
        leaves: the variables that the function reads, with their dims.
        masks: those of them that say which documents are attended to, before they are broadcast.
        scale: the product of all factors.
        why: what makes it more than a scale and masks; empty if nothing does.
    """

    scope: Scope
    product: Equation
    out: Var
    normalized: bool
    eqns: list[Equation] = field(default_factory=list[Equation])
    sides: list[tuple[Var, Dims]] = field(default_factory=list[tuple[Var, Dims]])
    leaves: list[tuple[Var, Dims]] = field(default_factory=list[tuple[Var, Dims]])
    masks: list[tuple[Var, Dims]] = field(default_factory=list[tuple[Var, Dims]])
    scale: float = 1.0
    why: str = ""

    def __post_init__(self) -> None:
        self._dependent = dependent_variables(self.scope.program.jaxpr.eqns, self.product.outvars)
        self._known: dict[tuple[Var, Dims], _Compute] = {}
        self._allowed, self._axes = Allowed(), (0, 1)
        # A row of which every key is hidden has the same weight for all keys, later ones too.
        self._hides_rows, self._adds_data, self._fill = False, False, -np.inf
        self._learned = False
        self._whole: Dims = tuple(range(len(aval_of(self.out).shape)))
        self.why = "" if self.normalized else "its weights are sigmoids"

    def product_dims(self) -> Dims:
        """Return which dims of the scores those of the product are; collect what is between.

        Raises:
            NotReplaced: if they are not computed from it element by element.
        """
        pending, found = [(self.out, self._whole)], {self.out: self._whole}
        while pending:
            variable, dims = pending.pop()
            eqn = self.scope.graph.made_by(variable)
            if eqn is self.product or eqn is None:
                continue
            self.eqns.append(eqn)
            before, name = moved_dims(eqn, dims), eqn.primitive.name
            if before is None and name not in _COMPUTED:
                raise NotReplaced(f"its scores are changed by {name}")
            for atom in variables(eqn.invars if before is None else eqn.invars[:1]):
                own = _own_dims(atom, eqn, dims) if before is None else tuple(before)
                if atom not in self._dependent:
                    self.sides.append((atom, own))
                elif found.setdefault(atom, own) is own:
                    pending.append((atom, own))
                elif found[atom] != own:
                    raise NotReplaced("its scores are combined with those of other pairs")
        return found[self.product.outvars[0]]

    def read(self, query: int, key: int) -> tuple[ScoreFunction, Allowed]:
        """Return the function, and which keys it leaves.

        Args:
            query: the dim of the scores that counts queries.
            key: the dim that counts keys.
        """
        self._axes = query, key
        compute = self._value(self.out, self._whole, HIDDEN if self.normalized else 0.0)
        if len(self.masks) > 1:
            self.why = self.why or "several masks depend on data"
        hides = self._hides_rows or (self._adds_data and self._fill > _FAR_BELOW)
        allowed = Allowed() if self.why and hides and self.normalized else self._allowed
        return ScoreFunction(compute, self.normalized, self.why, self._learned), allowed

    def _value(self, atom: Atom, dims: Dims, hidden: float | None = None) -> _Compute:
        """Return what computes an atom; values up to ``hidden`` have no weight, if given."""
        if (number := self.scope.number(atom)) is not None:
            return lambda block: _stored(np.asarray(number), aval_of(atom).dtype, block)
        if isinstance(atom, Literal):
            raise NotReplaced("its scores depend on a constant array")
        if (atom, dims) not in self._known:
            compute = self._made(atom, dims, hidden)

            def once(block: Block) -> Any:
                if (atom, dims) not in block.known:
                    block.known[atom, dims] = compute(block)
                return block.known[atom, dims]

            self._known[atom, dims] = once
        return self._known[atom, dims]

    def _made(self, atom: Var, dims: Dims, hidden: float | None) -> _Compute:
        eqn, dtype = self.scope.graph.made_by(atom), aval_of(atom).dtype
        if eqn is None:
            return self._leaf(atom, dims)
        if eqn is self.product:
            return lambda block: block.products
        if (before := moved_dims(eqn, dims)) is not None:
            return self._value(eqn.invars[0], tuple(before), hidden)
        if self._depends(atom):
            return self._computed(eqn, dims, hidden)
        name = eqn.primitive.name
        if name == "iota" and (along := dims[eqn.params["dimension"]]) in self._axes:
            return lambda block: _stored(block.positions[self._axes.index(along)], dtype, block)
        if name in _COMPUTED and set(self._axes) <= set(dims) and _is_plain(dtype):
            own = ((operand, _own_dims(operand, eqn, dims)) for operand in eqn.invars)
            return _applied(eqn, [self._value(*operand) for operand in own])
        return self._leaf(atom, dims)

    def _leaf(self, atom: Var, dims: Dims) -> _Compute:
        value, dtype = self.scope.program.values.get(atom), aval_of(atom).dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            self._learned |= value is not None and value.has_grad
        if not _is_plain(dtype):
            raise NotReplaced(f"its scores depend on {dtype}")
        number = len(self.leaves)
        self.leaves.append((atom, dims))
        return lambda block: _stored(block.leaves[number], dtype, block)

    def _computed(self, eqn: Equation, dims: Dims, hidden: float | None) -> _Compute:
        """Return what computes a function of the product; note what it does besides."""
        name, result = eqn.primitive.name, eqn.outvars[0]
        added = eqn.invars[1:] if name == "select_n" else eqn.invars
        self._adds_data |= any(self._is_data(atom) for atom in added)
        if result is not self.out and len(self.scope.graph.read_by(result)) > 1:
            hidden = None
        shown, inner = None, hidden
        if (scale := self._factor(eqn)) is not None:
            self.scale *= scale
            inner = hidden / scale if hidden is not None and scale > 0 else None
        elif name in ("add", "select_n"):
            shown, inner = self._hide(eqn, dims, hidden)
        elif name not in ("convert_element_type", "copy"):
            inner = HIDDEN if name == "logistic" and hidden == 0 else None
            self.why = self.why or f"its scores are changed by {name}"
        operands = [self._value(atom, _own_dims(atom, eqn, dims), inner) for atom in eqn.invars]
        compute = _applied(eqn, operands)
        left = compute if shown is None else operands[shown]
        return lambda block: (compute if block.edge else left)(block)

    def _factor(self, eqn: Equation) -> float | None:
        """Return the number that an equation multiplies scores with; None for any other."""
        name, numbers = eqn.primitive.name, [self.scope.number(atom) for atom in eqn.invars]
        if name == "mul":
            return next((number for number in numbers if number is not None), None)
        return 1 / numbers[1] if name == "div" and numbers[1] else None

    def _hide(self, eqn: Equation, dims: Dims, hidden: float | None) -> tuple[Any, Any]:
        """Note which keys an equation hides.

        Returns:
            Which operand it leaves if distances alone count, and up to what value that is hidden.
        """
        name, atoms, count = eqn.primitive.name, eqn.invars, len(eqn.invars)
        why, by_sum = f"its scores are changed by {name}", name == "add"
        for at in (count - 2, count - 1):
            kind: MaskKind = "added" if by_sum else "hidden" if at == 1 else "allowed"
            other = atoms[2 * count - 3 - at]
            mask, fill = (other, None) if by_sum else (atoms[0], self.scope.number(other))
            if count > 3 or hidden is None or not self._depends(atoms[at]) or self._depends(mask):
                continue
            hides = fill is not None and (fill <= hidden if hidden else fill == 0)
            if not (hidden and self.scope.constant(other) is not None if by_sum else hides):
                continue
            try:
                found = read_mask(self.scope, mask, dims, *self._axes, kind)
                self._allowed = merge([self._allowed, *found])
            except NotReplaced as refusal:
                if by_sum:
                    break
                self.why, self._hides_rows = self.why or str(refusal), True
                return None, hidden
            self._fill = max(self._fill, fill or HIDDEN)
            if not any(one.documents for one in found):
                return at, hidden
            _, small, own = before_broadcast(self.scope, mask, dims, outside=False)
            if isinstance(small, Var):
                self.masks.append((small, tuple(own)))
            if kind != "allowed":
                self.why = self.why or "its mask depends on data"
            return None, hidden
        self.why, self._hides_rows = self.why or why, self._hides_rows or not by_sum
        return None, min(hidden, _FAR_BELOW) if hidden and by_sum else None

    def _is_data(self, atom: Atom) -> bool:
        """Whether an atom is neither computed from the product, nor from weights or constants."""
        if isinstance(atom, Literal) or atom in self._dependent or self.scope.constant(atom):
            return False
        value = self.scope.program.values.get(atom)
        return value is None or value.has_data or not value.has_grad

    def _depends(self, atom: Atom) -> bool:
        """Whether an atom is computed from the product."""
        return not isinstance(atom, Literal) and atom in self._dependent


def _own_dims(atom: Atom, eqn: Equation, dims: Dims) -> Dims:
    """Return the dims of an operand of an equation, which repeats those of size 1."""
    own, whole = aval_of(atom).shape, aval_of(eqn.outvars[0]).shape
    if own == whole:
        return dims
    both = zip(dims, own, whole, strict=False)
    return tuple(None if size != of_result else dim for dim, size, of_result in both)


def _is_plain(dtype: Any) -> bool:
    """Whether values of a dtype can be computed in a block."""
    return jnp.issubdtype(dtype, jnp.floating) or dtype in (jnp.int32, jnp.int8, jnp.bool_)


def _applied(eqn: Equation, operands: Sequence[_Compute]) -> _Compute:
    """Return what computes an equation on a block."""
    name, dtype = eqn.primitive.name, aval_of(eqn.outvars[0]).dtype

    def compute(block: Block) -> Any:
        given = [operand(block) for operand in operands]
        if name in ("convert_element_type", "copy"):
            return _stored(given[0], dtype, block)
        if name == "tanh":
            # GPUs have an instruction for exponentials.
            return 2 * jax.nn.sigmoid(2 * given[0]) - 1
        shape = np.broadcast_shapes(*(np.shape(v) for v in given))
        (value,) = bind(eqn, [jnp.broadcast_to(v, shape) for v in given])
        return value

    return compute


def _stored(value: Any, dtype: Any, block: Block) -> Any:
    """Return a value in the dtype that stands for one of the program."""
    if jnp.issubdtype(dtype, jnp.floating):
        return value.astype(block.products.dtype)
    return value != 0 if dtype == jnp.bool_ else value.astype(jnp.int32)

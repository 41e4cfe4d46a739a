"""Masks of attention: which of them depend on no data, and what they allow."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    CALLS,
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    aval_of,
    called_jaxpr,
)
from meshwright.program.jaxpr.equations import Literal as Constant
from meshwright.program.jaxpr.walks import program_key, propagate
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.surroundings import Scope

_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})


class _Form(NamedTuple):
    """A value that depends on a weighted sum of its indices alone.

    Attributes:
        weights: by dim; none for a number.
        linear: whether it is that sum, plus a number.
    """

    weights: Mapping[int, int]
    linear: bool = True


def is_by_distance(program: ClosedJaxpr, row: int, column: int) -> bool:
    """Whether the value of a program is the same wherever the difference of two indices is."""
    (form,) = _results(program, ())
    if form is None or not form.weights.keys() <= {row, column}:
        return False
    return sum(form.weights.values()) == 0


def _results(program: ClosedJaxpr, operands: Sequence[_Form | None]) -> Sequence[_Form | None]:
    if any(jnp.ndim(constant) for constant in program.consts):
        return [None] * len(program.jaxpr.outvars)
    return propagate(program.jaxpr, operands, _Form({}), _forms)


def _forms(eqn: Equation, operands: Sequence[_Form | None]) -> Sequence[_Form | None]:
    name, result, known = eqn.primitive.name, aval_of(eqn.outvars[0]), [f for f in operands if f]
    # Smaller integers overflow.
    is_index = jnp.issubdtype(result.dtype, jnp.signedinteger) and result.dtype.itemsize >= 4
    if name in CALLS:
        return _results(called_jaxpr(eqn), operands)
    if name == "iota" and is_index:
        return [_Form({eqn.params["dimension"]: 1})]
    if name == "broadcast_in_dim" and known:
        to, source = eqn.params["broadcast_dimensions"], aval_of(eqn.invars[0]).shape
        weights = {to[d]: w for d, w in known[0].weights.items() if source[d] > 1}
        return [known[0]._replace(weights=weights)]
    if name in ELEMENTWISE and len(known) == len(operands) and len(eqn.outvars) == 1:
        return [_joined(name, known, is_index=is_index)]
    return [None] * len(eqn.outvars)


def _joined(name: str, forms: Sequence[_Form], *, is_index: bool) -> _Form | None:
    """Return the form of an elementwise function of values."""
    first, *others = forms
    if name in {"add", "sub", *_COMPARISONS} and all(form.linear for form in forms):
        sign, (other,) = 1 if name == "add" else -1, others
        dims = {**first.weights, **other.weights}
        sums = {d: first.weights.get(d, 0) + sign * other.weights.get(d, 0) for d in dims}
        weights = {d: weight for d, weight in sums.items() if weight}
        return _Form(weights, is_index and name not in _COMPARISONS)
    found = [form.weights for form in forms if form.weights]
    if any(each != found[0] for each in found):
        return None
    same = name == "convert_element_type" and is_index and first.linear
    return _Form(found[0] if found else {}, same)


HIDDEN = -1e4
"""Scores below this count as hidden: their exponential is zero."""
FAR = 2**31 - 1


@dataclass(frozen=True)
class Allowed:
    """Which keys a query may attend to, by how many positions they are before it.

    Attributes:
        least: keys at least this many positions before the query; None for any.
        window: keys fewer than this many positions before the query; None for any.
        documents: only keys of its own document, of several packed into a row.
    """

    least: int | None = None
    window: int | None = None
    documents: bool = False

    @property
    def causal(self) -> bool:
        """Whether a query attends to itself and what is before it, not to what follows."""
        return self.least == 0

    def part(self, queries: int, keys: int) -> float:
        """Return the fraction of all pairs of queries and keys that is allowed, documents aside."""
        before = min(keys, self.window or keys)
        if not self.causal:
            return before / keys
        # The first queries of a row have fewer keys before them than the window holds.
        return (before * queries - before * (before - 1) / 2) / (queries * keys)

    def __str__(self) -> str:
        parts = ["causal" if self.causal else "full"]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += ["packed documents"] if self.documents else []
        return ", ".join(parts)


class Span(NamedTuple):
    """How many positions before their queries keys are, at least and at most."""

    least: int
    most: int

    def excludes(self, window: int) -> bool:
        """Whether it has no later keys; with a window, none that are so much earlier."""
        return self.most < window if window else self.least >= 0


MaskKind = Literal["allowed", "hidden", "added"]
"""What a mask is: true where a query may attend, true where it may not, or added to the scores."""

_known: dict[Hashable, Allowed | None] = {}
_spans: dict[Hashable, list[Span]] = {}

_Dim = TypeVar("_Dim")


def read_mask(
    scope: Scope, atom: Atom, dims: Sequence[int | None], query: int, key: int, kind: MaskKind
) -> list[Allowed]:
    """Return what a mask allows, one entry per condition that all have to hold.

    Args:
        scope: where the mask is a variable.
        atom: the mask.
        dims: for each dim of the mask, the dim of the scores that it is.
        query: the scores' dim of queries.
        key: the scores' dim of keys.
        kind: what the mask is.

    Raises:
        NotReplaced: if it cannot be expressed.
    """
    scope, atom, mapped = before_broadcast(scope, atom, dims)
    eqn = scope.graph.made_by(atom)
    name = "" if eqn is None else eqn.primitive.name
    if eqn is not None and name == "not" and kind != "added":
        opposite: MaskKind = "hidden" if kind == "allowed" else "allowed"
        return read_mask(scope, eqn.invars[0], mapped, query, key, opposite)
    if eqn is not None and (name, kind) in (("and", "allowed"), ("or", "hidden")):
        parts = [read_mask(scope, part, mapped, query, key, kind) for part in eqn.invars]
        return [allowed for part in parts for allowed in part]
    if isinstance(atom, Constant):
        if bool(atom.val) == (kind == "allowed"):
            return []
        raise NotReplaced("its mask hides everything")
    varies = {d for d, size in zip(mapped, aval_of(atom).shape, strict=True) if size > 1}
    of_data = scope.constant(atom) is None
    if of_data and eqn is not None and name == "eq" and kind == "allowed":
        _check_documents(scope, eqn, mapped, query, key)
        return [Allowed(documents=True)]
    if varies <= {query, key} or not of_data:
        return [_classify(scope, atom, mapped, query, key, kind)]
    raise NotReplaced("its mask depends on data")


def before_broadcast(
    scope: Scope, atom: Atom, dims: Sequence[_Dim | None], *, outside: bool = True
) -> tuple[Scope, Atom, list[_Dim | None]]:
    """Return a value before it is broadcast: its scope, it, and which of ``dims`` its dims are.

    Unless ``outside``, it is followed only as far as this scope has it.
    """
    mapped = list(dims)
    scope, atom = scope.origin(atom) if outside else (scope, atom)
    while (eqn := scope.graph.made_by(atom)) is not None:
        if (moved := moved_dims(eqn, mapped)) is None:
            break
        mapped, source = moved, eqn.invars[0]
        scope, atom = scope.origin(source) if outside else (scope, source)
    return scope, atom, mapped


def moved_dims(eqn: Equation, dims: Sequence[_Dim | None]) -> list[_Dim | None] | None:
    """Return the dims of what an equation only moves or repeats; None if it does more.

    Dims of size 1 are None.
    """
    name = eqn.primitive.name
    if name not in ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
        return None
    sizes, after = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    if name == "transpose":
        order = list(eqn.params["permutation"])
        return [dims[order.index(n)] for n in range(len(order))]
    if name == "broadcast_in_dim":
        to = zip(eqn.params["broadcast_dimensions"], sizes, strict=True)
        return [dims[dim] if size > 1 else None for dim, size in to]
    if [size for size in after if size > 1] != [size for size in sizes if size > 1]:
        return None
    left = iter([dim for dim, size in zip(dims, after, strict=True) if size > 1])
    return [next(left) if size > 1 else None for size in sizes]


def _classify(
    scope: Scope, atom: Var, dims: Sequence[int | None], query: int, key: int, kind: MaskKind
) -> Allowed:
    program = scope.constant(atom)
    if program is None:
        raise NotReplaced("its mask depends on data")
    text = (program_key(program), tuple(dims), query, key, kind)
    if text not in _known:
        _known[text] = _evaluate(program, dims, query, key, kind)
    allowed = _known[text]
    if allowed is None:
        raise NotReplaced("its mask is neither causal, nor a sliding window, nor full")
    return allowed


def mask_spans(program: ClosedJaxpr, query: int, key: int) -> list[Span]:
    """Return where the value of a program is not zero, where it is zero, and where not hidden."""

    def facts() -> list[tuple[Any, Any]]:
        (value,) = Evaluator().run(program, [])
        at, of = (jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) for dim in (query, key))
        kinds = value != 0, value == 0, value == value if value.dtype == bool else value > HIDDEN
        return [
            (jnp.where(kind, at - of, FAR).min(), jnp.where(kind, at - of, -FAR).max())
            for kind in kinds
        ]

    name = program_key(program), query, key
    if name not in _spans:
        with jax.ensure_compile_time_eval():
            _spans[name] = [Span(int(a), int(b)) for a, b in jax.jit(facts)()]
    return _spans[name]


def _evaluate(
    program: ClosedJaxpr, dims: Sequence[int | None], query: int, key: int, kind: MaskKind
) -> Allowed | None:
    """Evaluate a mask without storing it: compilers fuse it into what it is compared with."""
    shape = aval_of(program.jaxpr.outvars[0]).shape
    of = {dim: d for d, dim in enumerate(dims) if dim in (query, key) and shape[d] > 1}

    def facts() -> tuple[Any, Any, Any, Any]:
        (mask,) = Evaluator().run(program, [])
        known = jnp.ones((), bool)
        if kind == "added":
            known = ((mask == 0) | (mask <= HIDDEN)).all()
        mask = mask.astype(bool) if kind == "allowed" else mask == 0
        kept = [d for d, dim in enumerate(dims) if dim in (query, key) and mask.shape[d] > 1]
        first = mask[tuple(slice(None) if d in kept else slice(1) for d in range(mask.ndim))]
        known &= (mask == first).all()
        mask = first.reshape([mask.shape[d] for d in kept])
        if [dims[d] for d in kept] == [key, query]:
            mask = mask.T
        if mask.ndim < 2:
            return known, jnp.zeros((), bool), mask.all(), mask.all()
        before = jnp.arange(mask.shape[0])[:, None] - jnp.arange(mask.shape[1])[None, :]
        ahead, behind = mask[0].sum(), mask[-1, ::-1].sum()
        banded = (before > -ahead) & (before < behind)
        return known, (mask == banded).all(), ahead, behind

    if len(of) == 2 and is_by_distance(program, of[query], of[key]):
        # Of 131,072 positions, the edges of a mask are 1 part in 65,536.
        known, banded, ahead, behind = _read_edges(program, of[query], of[key], kind)
    else:
        known, banded, ahead, behind = jax.jit(facts)()
    if not bool(known):
        return None
    varies = [d for d, size in zip(dims, shape, strict=True) if d is not None and size > 1]
    if not {query, key} <= set(varies):
        return Allowed() if bool(ahead) else None
    length, keys = (shape[list(dims).index(d)] for d in (query, key))
    if not bool(banded):
        return None
    every = int(ahead) >= keys, int(behind) >= keys
    if length != keys and not all(every):
        return None
    return Allowed(None if every[0] else 1 - int(ahead), None if every[1] else int(behind))


def _read_edges(
    program: ClosedJaxpr, query: int, key: int, kind: MaskKind
) -> tuple[bool, bool, int, int]:
    """Return the same facts of a mask by distance, which its first query and first key show."""

    def edge(along: int) -> Any:
        (mask,) = Evaluator().run(program, [])
        return mask[tuple(slice(None) if d == along else 0 for d in range(mask.ndim))]

    edges = [np.asarray(jax.jit(edge, static_argnums=0)(dim)) for dim in (key, query)]
    known = kind != "added" or all(((e == 0) | (e <= HIDDEN)).all() for e in edges)
    of_query, of_key = (e.astype(bool) if kind == "allowed" else e == 0 for e in edges)
    ahead, behind = int(of_query.sum()), int(of_key.sum())
    return known, bool(of_query[:ahead].all() and of_key[:behind].all()), ahead, behind


def _check_documents(
    scope: Scope, eqn: Equation, dims: Sequence[int | None], query: int, key: int
) -> None:
    """Raise unless an equation compares the documents of queries and keys."""
    (left_scope, left, of_left), (right_scope, right, of_right) = (
        before_broadcast(scope, atom, dims) for atom in eqn.invars
    )
    same = left is right and left_scope is right_scope and not isinstance(left, Constant)
    ends = {of_left[-1] if of_left else None, of_right[-1] if of_right else None}
    rows = of_left[:-1] == of_right[:-1]
    if not same or not rows or ends != {query, key} or len(aval_of(left).shape) != 2:
        raise NotReplaced("its mask compares other values than the documents of a row")


def merge(conditions: Sequence[Allowed]) -> Allowed:
    """Return the condition that holds where all of several hold."""
    least = [c.least for c in conditions if c.least is not None]
    windows = [c.window for c in conditions if c.window is not None]
    merged = Allowed(
        least=max(least) if least else None,
        window=min(windows) if windows else None,
        documents=any(c.documents for c in conditions),
    )
    if merged.least not in (None, 0) or (merged.window is not None and not merged.causal):
        raise NotReplaced("its mask is neither causal, nor a sliding window, nor full")
    return merged


def band(allowed: Allowed, shape: tuple[int, ...], first: Any = 0) -> Any:
    """Return which keys [S] queries [T], from position `first`, may attend to, by distance."""
    distance = first + jnp.arange(shape[0])[:, None] - jnp.arange(shape[1])[None, :]
    visible = distance >= 0 if allowed.causal else jnp.ones(shape, bool)
    return visible if allowed.window is None else visible & (distance < allowed.window)

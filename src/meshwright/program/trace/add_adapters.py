"""The pass that adds adapters to a traced program: x·W becomes x·W + s·(x·A)·B.

A weight is followed through casts, reshapes and slices, into loops, branches and checkpoints. It is
adapted wherever it is multiplied, convolved with or looked up. In parts that compute the reference
(`reference`), it is the weight alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.dims.op import free_dims
from meshwright.program.evaluate.evaluator import Environment, Evaluator, enter, run_scan
from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    scan_counts,
    structs_of,
)
from meshwright.program.jaxpr.walks import called_programs, operand_of, quoted
from meshwright.program.trace.adapters import Adapter, Split, is_reference
from meshwright.program.trace.weight_views import View, moved, pieces


@dataclass
class Uses:
    """What a program does with one weight.

    Attributes:
        splits: how each product, convolution or look-up divides its dims.
        lookup: whether one of them is a look-up.
        product: whether one of them is none.
        others: what else is computed from it, and where.
    """

    splits: list[Split] = field(default_factory=list[Split])
    lookup: bool = False
    product: bool = False
    others: list[str] = field(default_factory=list[str])

    @property
    def split(self) -> Split | None:
        """How all uses divide its dims; None if they do not agree, or an adapter fits none."""
        if not self.splits or self.others:
            return None
        first = self.splits[0]
        return first if all(first.fits(split) for split in self.splits) else None


def find_uses(closed: ClosedJaxpr, leaves: Sequence[int]) -> dict[int, Uses]:
    """Return what a program does with these of its inputs."""
    finder = _Adding({}, {n: closed.jaxpr.invars[n] for n in leaves})
    jax.make_jaxpr(lambda *args: finder.run(closed, args))(*structs_of(closed.jaxpr.invars))
    return finder.uses


def add_adapters(
    closed: ClosedJaxpr,
    count: int,
    adapters: Mapping[int, Adapter],
    compute_dtype: Any,
    *,
    new_state_at: int,
    drops: bool,
) -> ClosedJaxpr:
    """Return a program that has the leaves of the adapters after its own.

    The first ``count`` inputs are the model's leaves. Factors are cast to ``compute_dtype``, and
    the new state of adapters comes before the result ``new_state_at``.
    """
    structs = structs_of(closed.jaxpr.invars)
    added = [jax.eval_shape(adapter.initial, jax.random.key(0)) for adapter in adapters.values()]

    def run(leaves: list[Any], own: list[list[Any]], batch: list[Any]) -> list[Any]:
        views: dict[Var, View] = {}
        streams: dict[int, list[Any]] = {}
        for (number, adapter), (*factors, a, b) in zip(
            adapters.items(), ([*x[2:], *x[:2]] for x in own), strict=True
        ):
            pair = [x if compute_dtype is None else x.astype(compute_dtype) for x in (a, b)]
            views[closed.jaxpr.invars[number]] = _whole(number, adapter.shape, adapter, *pair)
            streams[number] = factors
        adding = _Adding(views, {}, {n: s for n, s in streams.items() if s} if drops else {})
        out = adding.run(closed, [*leaves, *batch])
        state = [x for n, stream in streams.items() if stream for x in adding.after(n, stream)]
        return [*out[:new_state_at], *state, *out[new_state_at:]]

    return jax.make_jaxpr(run)(structs[:count], added, structs[count:])


def _whole(
    leaf: int, shape: Sequence[int], adapter: Adapter | None = None, a: Any = None, b: Any = None
) -> View:
    dims = tuple(frozenset({d}) for d in range(len(shape)))
    return View(leaf, tuple(shape), dims, adapter, a, b)


class _Adding(Evaluator):
    """Evaluates a program with the adapters of ``views``, or finds the uses of ``leaves``.

    ``streams`` are the key and the number of draws of an adapter's dropout, by weight.
    """

    def __init__(
        self,
        views: Mapping[Var, View],
        leaves: Mapping[int, Var],
        streams: Mapping[int, list[Any]] | None = None,
    ) -> None:
        super().__init__((self._follow,))
        self._views = dict(views)
        self._views |= {v: _whole(n, aval_of(v).shape) for n, v in leaves.items()}
        self.uses = {n: Uses() for n in leaves}
        self._streams, self._draws = dict(streams or {}), Counter[int]()
        self._depth = 0

    def after(self, leaf: int, stream: list[Any]) -> list[Any]:
        """Return the random stream of an adapter after the program has drawn from it."""
        return self._streams.get(leaf, stream)

    def equation(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate one equation, and count what adapters have drawn in it, or in loops inside."""
        self._depth += 1
        results = super().equation(eqn, env)
        self._depth -= 1
        if not self._depth:
            for leaf, count in self._draws.items():
                key, before = self._streams[leaf]
                self._streams[leaf] = [key, before + np.uint32(count)]
            self._draws.clear()
        return results

    def _dropped(self, view: View, x: Any) -> Any:
        """Return the input of an adapter with some of it dropped, while training."""
        if view.adapter is None or view.leaf not in self._streams:
            return x
        key, count = self._streams[view.leaf]
        drawn = jax.random.fold_in(key, count + np.uint32(self._draws[view.leaf]))
        self._draws[view.leaf] += 1
        keep = 1 - view.adapter.dropout
        return jnp.where(jax.random.bernoulli(drawn, keep, x.shape), x / keep, jnp.zeros_like(x))

    def _view(self, atom: Atom) -> View | None:
        return None if isinstance(atom, Literal) else self._views.get(atom)

    def _follow(self, eqn: Equation, env: Environment) -> list[Value] | None:
        if is_reference(eqn):
            # The same value, which is not adapted from here on.
            return env.operands(eqn)
        viewed = [n for n, atom in enumerate(eqn.invars) if self._view(atom) is not None]
        if not viewed:
            return None
        name = eqn.primitive.name
        if name == "scan" or name == "while" or name == "cond" or name in CALLS or name in REMATS:
            return self._enter(eqn, env)
        view = self._view(eqn.invars[viewed[0]])
        assert view is not None
        if name == "split":
            self._views |= zip(eqn.outvars, pieces(view, eqn), strict=True)
            return None
        if viewed == [0] and (after := moved(view, eqn, env.operands(eqn)[1:])) is not None:
            self._views[eqn.outvars[0]] = after
            return bind(eqn, env.operands(eqn))
        use = USES.get(name)
        split = use and use.split(eqn, viewed[0], view) if len(viewed) == 1 else None
        if not use or split is None:
            self._other(eqn, viewed)
            return None
        if view.adapter is None:
            found = self.uses[view.leaf]
            found.splits.append(split)
            found.lookup |= name == "gather"
            found.product |= name != "gather"
            return None
        operands = env.operands(eqn)
        (out,) = bind(eqn, operands)
        if name != "gather":
            other = 1 - viewed[0]
            operands[other] = self._dropped(view, operands[other])
        return [out + use.added(eqn, viewed[0], view, operands).astype(out.dtype)]

    def _other(self, eqn: Equation, viewed: Sequence[int]) -> None:
        for number in viewed:
            view = self._view(eqn.invars[number])
            assert view is not None
            if view.adapter is None:
                self.uses[view.leaf].others.append(quoted(eqn))

    def _enter(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate nested programs, whose inputs are the same weights."""
        for program, atoms in called_programs(eqn):
            self._pass_on(program.jaxpr.invars, atoms)
        results = self._scan(eqn, env) if eqn.primitive.name == "scan" else enter(eqn, env)
        # What a loop or a checkpoint returns as it was is still the weight.
        for number, variable in enumerate(eqn.outvars):
            atom = operand_of(eqn, number, ())
            if atom is not None and (view := self._view(atom)) is not None:
                self._views[variable] = view
        return results

    def _pass_on(self, variables: Sequence[Var], atoms: Sequence[Atom]) -> None:
        for variable, atom in zip(variables, atoms, strict=False):
            view = self._view(atom)
            if view is None:
                self._views.pop(variable, None)
            else:
                self._views[variable] = view

    def _scan(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate a scan, which also slices the factors of the stacks that it slices."""
        closed, (consts, carries) = eqn.params["jaxpr"], scan_counts(eqn)
        inner, operands = closed.jaxpr.invars, env.operands(eqn)
        for number in range(carries):
            atom = eqn.invars[consts + number]
            if (view := self._view(atom)) is not None:
                if operand_of(eqn, number, ()) is atom:
                    self._views[inner[consts + number]] = view
                else:
                    self._other(eqn, [consts + number])
        start = consts + carries
        stacks = [(n, self._view(a)) for n, a in enumerate(eqn.invars) if n >= start]
        stacks = [(n, view) for n, view in stacks if view is not None]
        factors = [(view.a, view.b) for _, view in stacks if view.adapter is not None]

        def body(carry: list[Value], xs: Any) -> tuple[list[Value], list[Value]]:
            *rows, sliced = xs
            for (n, view), (a, b) in zip(
                stacks, sliced or [(None, None)] * len(stacks), strict=True
            ):
                self._views[inner[n]] = view.row(a, b)
            out = env.run(closed, [*operands[:consts], *carry, *rows])
            return out[:carries], out[carries:]

        return run_scan(eqn, [*operands, factors], body)


def _union(view: View, dims: Sequence[int]) -> frozenset[int]:
    return frozenset[int]().union(*(view.dims[d] for d in dims))


def _split(view: View, inputs: Sequence[int], outputs: Sequence[int]) -> Split | None:
    split = Split(_union(view, inputs), _union(view, outputs))
    known = split.inputs and split.outputs and not split.inputs & split.outputs
    return split if known else None


def _factors(view: View, dims: Sequence[int]) -> tuple[Any, Any, list[int], list[int]]:
    """Return the factor that has these dims and the other one, each with the dims it has."""
    assert view.adapter is not None
    (_, a, dims_a), (_, b, dims_b) = view.sides()
    first = view.adapter.kind(_union(view, dims)) == "input"
    return (a, b, dims_a, dims_b) if first else (b, a, dims_b, dims_a)


def _multiply(x: Any, y: Any, numbers: Any, like: Equation) -> Any:
    params = {name: like.params.get(name) for name in ("precision", "preferred_element_type")}
    return jax.lax.dot_general(x, y.astype(x.dtype), numbers, **params)


class _Product:
    """A weight that is multiplied."""

    @staticmethod
    def split(eqn: Equation, side: int, view: View) -> Split | None:
        contracting, batch = eqn.params["dimension_numbers"]
        free = free_dims(eqn, side)
        apart = _union(view, batch[side]) & (_union(view, contracting[side]) | _union(view, free))
        return None if apart else _split(view, contracting[side], free)

    @staticmethod
    def added(eqn: Equation, side: int, view: View, operands: Sequence[Any]) -> Any:
        assert view.adapter is not None
        contracting, batch = eqn.params["dimension_numbers"]
        x, own, others = operands[1 - side], contracting[side], batch[side]
        first, second, dims, dims_after = _factors(view, own)
        numbers = (
            (contracting[1 - side], [dims.index(d) for d in own]),
            (batch[1 - side], [dims.index(d) for d in others]),
        )
        low = _multiply(x, first, numbers, eqn).astype(x.dtype) * view.adapter.scale
        after = [dims_after.index(d) for d in others]
        last = (([low.ndim - 1], [len(dims_after)]), (list(range(len(others))), after))
        out = _multiply(low.astype(x.dtype), second, last, eqn)
        if side == 1:
            return out
        # The dims of the first operand come first: those of the weight.
        count, free = len(others), len(view.shape) - len(own) - len(others)
        order = [*range(count), *range(out.ndim - free, out.ndim), *range(count, out.ndim - free)]
        return jnp.transpose(out, order)


class _Lookup:
    """A weight whose rows are looked up."""

    @staticmethod
    def split(eqn: Equation, side: int, view: View) -> Split | None:
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        rows = list(numbers.collapsed_slice_dims)
        others = [d for d in range(len(view.shape)) if d not in rows]
        whole = all(sizes[d] == view.shape[d] for d in others)
        plain = (
            sorted(numbers.start_index_map) == sorted(rows) and not numbers.operand_batching_dims
        )
        return _split(view, rows, others) if side == 0 and whole and plain else None

    @staticmethod
    def added(eqn: Equation, side: int, view: View, operands: Sequence[Any]) -> Any:
        assert view.adapter is not None
        numbers, rank = eqn.params["dimension_numbers"], view.adapter.rank
        rows = list(numbers.collapsed_slice_dims)
        first, second, dims, dims_after = _factors(view, rows)
        indices, shape = operands[1], aval_of(eqn.outvars[0]).shape
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        low = jax.lax.gather(
            first,
            indices,
            jax.lax.GatherDimensionNumbers(
                offset_dims=(len(batch),),
                collapsed_slice_dims=tuple(dims.index(d) for d in rows),
                start_index_map=tuple(dims.index(d) for d in numbers.start_index_map),
            ),
            (*(1 for _ in rows), rank),
            mode=eqn.params["mode"],
            fill_value=eqn.params["fill_value"],
        )
        last = (([len(batch)], [len(dims_after)]), ([], []))
        out = jax.lax.dot_general(low * view.adapter.scale, second, last)
        order = [*batch, *numbers.offset_dims]
        return jnp.transpose(out, [order.index(d) for d in range(len(order))])


class _Convolution:
    """A weight that is the kernel of a convolution."""

    @staticmethod
    def split(eqn: Equation, side: int, view: View) -> Split | None:
        params = eqn.params
        grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
        out = params["dimension_numbers"].rhs_spec[0]
        rest = [d for d in range(len(view.shape)) if d != out]
        return None if side == 0 or grouped else _split(view, rest, [out])

    @staticmethod
    def added(eqn: Equation, side: int, view: View, operands: Sequence[Any]) -> Any:
        assert view.adapter is not None
        numbers = eqn.params["dimension_numbers"]
        out = numbers.rhs_spec[0]
        rest = [d for d in range(len(view.shape)) if d != out]
        first, second, *_ = _factors(view, rest)
        x = operands[0]
        (low,) = bind(eqn, [x, jnp.moveaxis(first, -1, out).astype(x.dtype)])
        features = numbers.out_spec[1]
        last = (([features], [1]), ([], []))
        added = _multiply(low * view.adapter.scale, second, last, eqn)
        return jnp.moveaxis(added, -1, features)


USES: dict[str, Any] = {
    "dot_general": _Product,
    "gather": _Lookup,
    "conv_general_dilated": _Convolution,
}

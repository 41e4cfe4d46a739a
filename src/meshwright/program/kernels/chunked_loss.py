"""The last projection and its loss, a part of the rows at a time, so that logits are never whole.

If gradients only come from one total, they are computed together with it: its gradient is known up
to a factor. Otherwise the backward pass recomputes the logits of each part.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView, axes_of, run_locally
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var, aval_of, name_stack
from meshwright.program.kernels.match_loss import LossMatch
from meshwright.program.kernels.regions import Region

ENTRIES = 2**29
"""Logits held at a time, at most, where few rows suffice, or where memory is scarce."""

MOST_ENTRIES = 2**30
"""Logits held at a time, at most, to go through the sums of gradients less often."""

ROWS_OF_WIDTH = 4
"""Rows that suffice, for each entry of a row: every part reads and writes the gradients' sums."""

FEWEST_ROWS = 1024
"""Rows of a part, at least, if there are that many."""

MOST_ROWS = 16384
"""Rows of a part, at most: more would not make its products faster."""

UNROLLED = 8
"""Parts that are unrolled; more run in a loop."""


@dataclass(frozen=True)
class LossKernel:
    """Evaluates a last projection and its loss in parts.

    Attributes:
        match: the equations.
        trained: the inputs other than rows and weight that gradients flow to.
        graded: which outputs gradients come from.
        fused: whether gradients are computed together with the loss.
        layout: how the rows are sharded over the mesh; None if they are not.
        in_parts: whether rows are split into parts at all; a plan works the parts out itself.
        sparing: whether parts hold less than would be fastest.
    """

    match: LossMatch
    trained: frozenset[Var]
    graded: tuple[bool, ...]
    fused: bool
    layout: PartitionSpec | None
    in_parts: bool = True
    sparing: bool = False

    @property
    def most_rows(self) -> int:
        """Rows of a part, at most."""
        width = 0 if self.sparing else aval_of(self.match.hidden).shape[-1]
        return most_rows(aval_of(self.match.product.outvars[0]).shape[-1], width)

    @property
    def name(self) -> str:
        """How gradients are computed."""
        return "with its gradients" if self.fused else "recomputed"

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the outputs."""
        match = self.match
        weight = env.in_param_dtype(match.kernel)
        work = _Work(self, env, mesh)
        others = [env.read(v) for v in match.others]
        return list(work.function()(env.read(match.hidden), weight, *others))


class _Work:
    """The computation on one device's rows, and its gradients."""

    def __init__(self, kernel: LossKernel, env: Environment, mesh: MeshView) -> None:
        self.kernel, self.match, self.mesh = kernel, kernel.match, mesh
        self._numerics = env.evaluator.numerics
        self._casts = env.evaluator.weights.casts
        self._axes = tuple(
            a for a in mesh.mesh.axis_names if a in axes_of([kernel.layout]) - mesh.manual_axes
        )

    def function(self) -> Callable[..., Any]:
        """Return the outputs as a function of rows, weight and the other inputs."""
        run = jax.custom_vjp(lambda *operands: self._mapped(self._values, operands)[0])
        if self.kernel.fused:
            both = self._values_and_gradients
            run.defvjp(lambda *operands: self._mapped(both, operands), self._scaled)
        else:
            run.defvjp(lambda *operands: (run(*operands), operands), self._recomputed)
        return run

    @property
    def _share(self) -> float:
        """What each row adds to a mean: gradients are computed for it, and then scaled."""
        return 1 / math.prod(aval_of(self.match.product.outvars[0]).shape[:-1])

    def _scaled(self, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
        (factor,) = (c for c, graded in zip(cotangents, self.kernel.graded, strict=True) if graded)
        # Where the loss is the mean of all rows, this is 1, and the compiler knows.
        factor = factor / jnp.asarray(self._share, factor.dtype)
        return self._arranged([g * factor.astype(g.dtype) for g in gradients])

    def _recomputed(self, operands: Any, cotangents: Any) -> tuple[Any, ...]:
        # Without a barrier the compiler would save the logits instead of recomputing them.
        operands = list(lax.optimization_barrier(tuple(operands)))
        wanted = [c for c, graded in zip(cotangents, self.kernel.graded, strict=True) if graded]
        _, gradients = self._mapped(self._gradients, [*operands, *wanted])
        return self._arranged(gradients)

    def _arranged(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of all operands; None for those that have none."""
        if self._axes:
            # Only now: the compiler adds them to other gradients of the same weight, such as that
            # of a lookup in the same table, before it reduces them.
            own = self._own_rows()
            with self._scope():
                gradients = [g if o else g.sum(0) for g, o in zip(gradients, own, strict=True)]
        others = iter(gradients[2:])
        trained = self.kernel.trained
        rest = [next(others) if v in trained else None for v in self.match.others]
        return (*gradients[:2], *rest)

    def _mapped(self, run: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Run a function of this class on each device's rows."""
        match = self.match
        whole = PartitionSpec()
        rows = PartitionSpec(*(self.kernel.layout or ())[: match.rows]) if self._axes else whole
        by_row = [False, *(False for _ in match.whole), *(True for _ in match.by_row)]
        graded = [v for v, g in zip(match.outputs, self.kernel.graded, strict=True) if g]
        extra = [bool(aval_of(v).shape) for v in graded][: len(operands) - len(by_row) - 1]
        specs = [rows if has_rows else whole for has_rows in (True, *by_row, *extra)]
        outputs = tuple(rows if aval_of(v).shape else whole for v in match.outputs)
        stacked = PartitionSpec(self._axes)
        gradients = tuple(rows if own else stacked for own in self._own_rows())
        out = outputs if run != self._gradients else (), gradients if run != self._values else ()
        return run_locally(run, operands, specs, out, self.mesh)

    # What one device computes.

    def _values(self, *operands: Any) -> tuple[tuple[Any, ...], tuple[()]]:
        def part(hidden: Any, weight: Any, others: list[Any], _: list[Any]) -> Any:
            return self._outputs(self._logits(hidden, weight), others), []

        outputs, _ = self._loop(part, operands, [])
        return self._summed(outputs), ()

    def _values_and_gradients(self, *operands: Any) -> Any:
        shares = [
            jnp.full((), self._share, aval_of(v).dtype if self._casts else jnp.float64)
            for v, graded in zip(self.match.outputs, self.kernel.graded, strict=True)
            if graded
        ]
        outputs, gradients = self._loop(self._differentiated, operands, shares)
        return self._summed(outputs), self._stacked(gradients)

    def _gradients(self, *operands: Any) -> Any:
        count = 2 + len(self.match.others)
        _, gradients = self._loop(self._differentiated, operands[:count], list(operands[count:]))
        return (), self._stacked(gradients)

    def _differentiated(
        self, hidden: Any, weight: Any, others: list[Any], cotangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        trained = [n for n, v in enumerate(self.match.others) if v in self.kernel.trained]

        def outputs(logits: Any, chosen: list[Any]) -> Any:
            given = dict(zip(trained, chosen, strict=True))
            return self._outputs(logits, [given.get(n, x) for n, x in enumerate(others)])

        results, pullback = jax.vjp(
            outputs, self._logits(hidden, weight), [others[n] for n in trained]
        )
        following = iter(cotangents)
        of_results = [
            next(following).astype(r.dtype)
            if graded
            else jnp.zeros(
                r.shape, r.dtype if jnp.issubdtype(r.dtype, jnp.inexact) else jax.dtypes.float0
            )
            for r, graded in zip(results, self.kernel.graded, strict=True)
        ]
        of_logits, of_others = pullback(of_results)
        with self._scope():
            of_product = self._product_gradients(hidden, weight, of_logits)
        return results, [*of_product, *of_others]

    def _logits(self, hidden: Any, weight: Any) -> Any:
        used = weight.astype(aval_of(self.match.kernel).dtype) if self._casts else weight
        with self._scope():
            return self._numerics.bind(self.match.product, [hidden, used])[0]

    def _scope(self) -> AbstractContextManager[Any]:
        """Return the scope of the last projection: what is sent belongs to its module."""
        return jax.named_scope(name_stack(self.match.product) or "loss")

    def _product_gradients(self, hidden: Any, weight: Any, of_logits: Any) -> list[Any]:
        """Return the gradients of rows and weight; that of the weight is summed in float32."""
        (_, (row_dim,)), _ = self.match.product.params["dimension_numbers"]
        used = weight.astype(of_logits.dtype)
        of_hidden = lax.dot_general(
            of_logits, used, (((of_logits.ndim - 1,), (1 - row_dim,)), ((), ()))
        )
        left, right = (hidden, of_logits) if row_dim == 0 else (of_logits, hidden)
        if self.mesh.platform == "cpu":
            # The CPU runtime has no products of half-precision numbers with float32 results.
            left, right = left.astype(weight.dtype), right.astype(weight.dtype)
        summed = tuple(range(hidden.ndim - 1))
        of_weight = lax.dot_general(
            left, right, ((summed, summed), ((), ())), preferred_element_type=weight.dtype
        )
        return [of_hidden.astype(hidden.dtype), of_weight]

    def _outputs(self, logits: Any, others: Sequence[Any]) -> list[Any]:
        """Evaluate what follows the logits, for a part of the rows."""
        match = self.match
        rows = logits.shape[:-1]
        values: dict[Var, Any] = {match.product.outvars[0]: logits}
        values.update(zip(match.others, others, strict=True))
        for eqn in match.eqns:
            if eqn is match.product:
                continue
            operands = [
                self._numerics.convert(a.val if isinstance(a, Literal) else values[a])
                for a in eqn.invars
            ]
            with jax.named_scope(name_stack(eqn) or "loss"):
                results = self._numerics.bind(_resized(eqn, match.rows, rows), operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [values[v] for v in match.outputs]

    # Parts of the rows.

    def _loop(
        self, part: Callable[..., Any], operands: Sequence[Any], cotangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run a function on parts of the rows; sum what is a sum, join what has rows."""
        match = self.match
        hidden, weight, *others = operands
        num_whole = len(match.whole)
        dim, count = division(hidden.shape[:-1], self.kernel.most_rows)
        if count == 1 or not self.kernel.in_parts:
            outputs, gradients = part(hidden, weight, others, cotangents)
            return list(outputs), list(gradients)
        size = hidden.shape[dim] // count

        def take(array: Any, index: Any) -> Any:
            return lax.dynamic_slice_in_dim(array, index * size, size, dim)

        def one(index: Any) -> Any:
            outputs, gradients = part(
                take(hidden, index),
                weight,
                [x if n < num_whole else take(x, index) for n, x in enumerate(others)],
                [take(c, index) if c.ndim else c for c in cotangents],
            )
            return [*outputs, *gradients]

        shapes = jax.eval_shape(one, jnp.zeros((), jnp.int32))
        num_outputs = len(match.outputs)
        joined = [*(bool(aval_of(v).shape) for v in match.outputs), *self._own_rows()]
        joined = joined[: len(shapes)]
        sums = [jnp.zeros(s.shape, s.dtype) for s, j in zip(shapes, joined, strict=True) if not j]

        def step(carry: Any, index: Any) -> Any:
            # One part after the other, all of its products: the compiler would otherwise hold the
            # logits of all parts. The first one finds sums that are known to be zero.
            sums, before = carry
            results = one(index + before)
            added = [r for r, j in zip(results, joined, strict=True) if not j]
            sums = [c + a for c, a in zip(sums, added, strict=True)]
            own = [r for r, j in zip(results, joined, strict=True) if j]
            return lax.optimization_barrier(((sums, before), own))

        unroll = count if count <= UNROLLED else 1
        start = (sums, jnp.zeros((), jnp.int32))
        (sums, _), parts = lax.scan(step, start, jnp.arange(count, dtype=jnp.int32), unroll=unroll)
        summed = iter(sums)
        # Parts [n, …] are joined along the dim that was divided.
        stacked = (lax.collapse(jnp.moveaxis(x, 0, dim), dim, dim + 2) for x in parts)
        results = [next(stacked) if j else next(summed) for j in joined]
        return results[:num_outputs], results[num_outputs:]

    def _summed(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Add up totals over the devices."""
        if not self._axes:
            return tuple(outputs)
        return tuple(x if x.ndim else lax.psum(x, self._axes) for x in outputs)

    def _stacked(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Give this device's part of the gradients of what all devices share a dim of devices."""
        if not self._axes:
            return tuple(gradients)
        return tuple(g if o else g[None] for g, o in zip(gradients, self._own_rows(), strict=True))

    def _own_rows(self) -> list[bool]:
        """Return for each gradient whether each device has its own rows of it."""
        trained = [v for v in self.match.others if v in self.kernel.trained]
        return [True, False, *(v in self.match.by_row for v in trained)]


def most_rows(classes: int, width: int) -> int:
    """Return the rows of a part, at most, for rows of this width and logits of these classes."""
    wanted = max(ENTRIES // classes, min(ROWS_OF_WIDTH * width, MOST_ENTRIES // classes), 1)
    return max(FEWEST_ROWS, min(MOST_ROWS, 2 ** int(math.log2(wanted))))


def division(rows: Sequence[int], most: int) -> tuple[int, int]:
    """Return which dim of the rows is split, and into how many parts of so many rows at most."""
    needed = -(-math.prod(rows) // most)
    best = (0, 1)
    for dim, size in enumerate(rows):
        count = next((n for n in range(needed, size + 1) if size % n == 0), None)
        if count is not None and count <= 4 * needed:
            return dim, count
        if count is not None and best == (0, 1):
            best = (dim, count)
    return best


def _resized(eqn: Equation, count: int, rows: Sequence[int]) -> Equation:
    """Return an equation for other numbers of rows."""
    key = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "gather": "slice_sizes"}.get(
        eqn.primitive.name
    )
    if key is None:
        return eqn
    before = eqn.params[key]
    if key == "slice_sizes" and len(aval_of(eqn.invars[1]).shape) > 1:
        return eqn
    if tuple(aval_of(eqn.outvars[0]).shape[:count]) != tuple(before[:count]):
        return eqn
    return eqn.replace(params={**eqn.params, key: (*rows, *before[count:])})


def is_fused(match: LossMatch, graded: Sequence[bool]) -> bool:
    """Whether gradients come from a single total, and can be computed before they are scaled."""
    totals = [v for v, g in zip(match.outputs, graded, strict=True) if g]
    # The scale of the loss keeps gradients in fp16 from vanishing.
    dtypes = [aval_of(v).dtype for v in (match.hidden, match.product.outvars[0])]
    if jnp.dtype(jnp.float16) in dtypes:
        return False
    return len(totals) == 1 and aval_of(totals[0]).shape == ()

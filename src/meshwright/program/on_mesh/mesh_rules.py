"""The rules of a program on a mesh: weights gathered where they are read, gradients in float32."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.evaluator import (
    Environment,
    Evaluator,
    constrain,
    constrained,
    scan_body,
)
from meshwright.program.evaluate.mesh_view import MeshView, axes_of, run_locally
from meshwright.program.evaluate.repeated_vector import repeats_on
from meshwright.program.evaluate.weight_uses import HALF, WeightUse
from meshwright.program.evaluate.widen import WIDE_RULES
from meshwright.program.jaxpr.equations import (
    PRODUCTS,
    REARRANGES,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    scan_parts,
)
from meshwright.program.kernels.context_attention import Exchange
from meshwright.program.kernels.find_kernels import Kernels
from meshwright.program.kernels.passed_states import PassedStates
from meshwright.program.on_mesh.grouped_convolutions import grouped_layout, is_grouped
from meshwright.program.on_mesh.lookup_sums import LookupSums, lookup_rows
from meshwright.program.on_mesh.products import use_weight, use_weight_by_rows

EXCHANGED = "exchanged"
"""The name by which remat policies recognize what devices exchanged for attention."""

_ADDS = frozenset({"add", "sub"})
"""Primitives that broadcast dims of size 1, and whose gradients need no operand."""


def cast_leaf(eqn: Equation, env: Environment) -> list[Value] | None:
    """Cast a stored parameter; readers of the cast get it prepared, see `Environment`."""
    if not eqn.outvars or not env.evaluator.weights.is_cast(eqn.outvars[0]):
        return None
    if eqn.outvars[0] in env.prepared:
        return [env.read(eqn.outvars[0])]
    return env.evaluator.numerics.bind(eqn, [env.value(atom) for atom in eqn.invars])


def rearrange_weight(eqn: Equation, env: Environment) -> list[Value] | None:
    """Rearrange or widen a half-precision weight; it stays prepared.

    The gradient of a bias is a sum over samples on all devices: it must not be rounded before.
    """
    if not rearranges_weight(eqn, env):
        return None
    widens = eqn.primitive.name == "convert_element_type"
    operands = env.operands(eqn, in_param_dtype={0})
    return record_prepared(eqn, operands if widens else bind(eqn, operands), env)


def rearranges_weight(eqn: Equation, env: Environment) -> bool:
    """Whether an equation only rearranges a half-precision weight, or widens it."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return eqn.params["new_dtype"] == jnp.float32 and env.is_half_weight(eqn.invars[0])
    return name in REARRANGES and env.is_half_weight(eqn.invars[0])


@dataclass(frozen=True)
class AddWeights:
    """Adds half-precision weights, repeated before they are rounded.

    Their gradients are then widened before they are summed, ``in_parts`` in two steps: see
    `repeat_vector`. All dims of a weight are joined if ``rows`` are: a compiler adds a vector while
    it multiplies, but writes the bias of heads [H, D] out for every row.
    """

    mesh: MeshView
    in_parts: bool = False
    rows: bool = False

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a sum or difference with a weight."""
        if eqn.primitive.name not in _ADDS or not any(map(env.is_half_weight, eqn.invars)):
            return None
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        whole: Any = jnp.broadcast_shapes(*(x.shape for x in operands))
        shape = whole
        if self.rows:
            operands, shape = _join_features(operands, whole)
        repeat = repeats_on(self.mesh) if self.in_parts else jnp.broadcast_to
        added = [
            repeat(x, shape).astype(aval_of(atom).dtype) if env.is_half_weight(atom) else x
            for x, atom in zip(operands, eqn.invars, strict=True)
        ]
        return [result.reshape(whole) for result in bind(eqn, added)]


def _join_features(operands: list[Value], shape: tuple[int, ...]) -> tuple[list[Value], Any]:
    """Return operands, of which one is repeated for rows, with its dims joined, and their shape."""
    smallest = min((x.shape for x in operands), key=math.prod)
    features = smallest[next((n for n, size in enumerate(smallest) if size > 1), 0) :]
    lead = len(shape) - len(features)
    if len(features) < 2 or not lead or shape[lead:] != features:
        return operands, shape
    shapes = {smallest: (-1,), shape: (*shape[:lead], -1)}
    if any(x.shape not in shapes for x in operands):
        return operands, shape
    return [x.reshape(shapes[x.shape]) for x in operands], (*shape[:lead], math.prod(features))


@dataclass(frozen=True)
class GroupedConvolutions:
    """Shards grouped convolutions over every mesh axis; see `grouped_convolutions`.

    The results that are ``local`` are those that devices run on their own samples instead.
    """

    mesh: MeshView
    local: Collection[Var] = ()

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a grouped convolution, its operands and results constrained."""
        layout = grouped_layout(eqn, self.mesh) if is_grouped(eqn) else None
        if layout is None or eqn.outvars[0] in self.local:
            return None
        numbers = eqn.params["dimension_numbers"]
        lhs, rhs = env.operands(eqn, operands_in_param_dtype(eqn, env))
        operands = [
            self._constrain(lhs, dict(zip(numbers.lhs_spec, layout, strict=False))),
            self._constrain(rhs, {numbers.rhs_spec[0]: layout.channels}),
        ]
        results = env.evaluator.continue_after(self, eqn, env.with_operands(eqn, operands))
        axes = dict(zip(numbers.out_spec, layout, strict=False))
        return [self._constrain(result, axes) for result in results]

    def _constrain(self, array: Value, axes: Mapping[int, tuple[str, ...]]) -> Value:
        spec = PartitionSpec(*(axes.get(dim) or None for dim in range(array.ndim)))
        return lax.with_sharding_constraint(array, self.mesh.sharding(spec))


@dataclass(frozen=True)
class WeightGradients:
    """Sums the gradients of weights in float32 where they are used in half precision.

    The gradients of a weight that several products read are computed in its own order of dims, so
    that they can be added before they are reduced.

    Attributes:
        lookups: whether lookups need a layout for their gradient.
        rows: whether products join all dims of activations but their features.
    """

    mesh: MeshView
    lookups: bool = True
    rows: bool = False
    layouts: Mapping[Var, PartitionSpec] = field(default_factory=dict[Var, PartitionSpec])

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a product, factor or lookup of a weight."""
        number = weight_operand(eqn, env)
        is_lookup = eqn.primitive.name == "gather"
        if number is None or (is_lookup and not self.lookups):
            return None
        atom, weights = eqn.invars[number], env.evaluator.weights
        use = None if isinstance(atom, Literal) else weights.uses.get(atom)
        # Rows that do not depend on data, such as those of positions, are still weights.
        is_weight = is_lookup and eqn.outvars[0] in weights.weight_only
        use_weights = use_weight_by_rows if self.rows else use_weight
        results = use_weights(
            eqn,
            env.operands(eqn, in_param_dtype={number}),
            number,
            platform=self.mesh.platform,
            casts=not is_weight,
            sums=self._sums(eqn, use) if is_lookup else None,
        )
        return record_prepared(eqn, results, env) if is_weight else results

    def _sums(self, eqn: Equation, use: WeightUse | None) -> LookupSums | None:
        if use is None:
            return None
        rows = None if use.specs is None else lookup_rows(eqn, self.layouts.get(eqn.outvars[0]))
        layout = use.whole if rows is None or use.specs is None else use.specs.sharded
        return LookupSums(rows, layout, self.mesh)


def operands_in_param_dtype(eqn: Equation, env: Environment) -> set[int]:
    """Return which operands the rules for weights read before they are rounded."""
    if rearranges_weight(eqn, env):
        return {0}
    if eqn.primitive.name in _ADDS:
        return {number for number, atom in enumerate(eqn.invars) if env.is_half_weight(atom)}
    number = weight_operand(eqn, env)
    return set() if number is None else {number}


def weight_operand(eqn: Equation, env: Environment) -> int | None:
    """Return which operand of a lookup or product is the weight, if its gradient needs care."""
    weights = env.evaluator.weights
    if not weights.casts:
        return None
    name = eqn.primitive.name
    if name == "mul":
        shape = aval_of(eqn.outvars[0]).shape
        scales = [n for n, atom in enumerate(eqn.invars) if env.is_half_weight(atom)]
        repeated = [n for n in scales if aval_of(eqn.invars[n]).shape != shape]
        return repeated[0] if len(scales) == len(repeated) == 1 else None
    in_half = name in PRODUCTS and aval_of(eqn.outvars[0]).dtype in HALF
    if name != "gather" and not in_half and not _reads_shared_weight(eqn, env):
        return None
    numbers = [
        number
        for number, atom in enumerate(eqn.invars)
        if not isinstance(atom, Literal) and (atom in weights.weight_only or env.is_weight(atom))
    ]
    return numbers[0] if len(numbers) == 1 else None


def _reads_shared_weight(eqn: Equation, env: Environment) -> bool:
    """Whether a product in float32 reads a weight that other products read as well."""
    if eqn.primitive.name != "dot_general":
        return False
    uses = env.evaluator.weights.uses
    shared = [not isinstance(a, Literal) and a in uses and uses[a].shared for a in eqn.invars]
    return any(shared) and all(aval_of(atom).dtype == jnp.float32 for atom in eqn.invars)


def record_prepared(eqn: Equation, results: Sequence[Value], env: Environment) -> list[Value]:
    """Store the result of rearranging a weight as prepared, and return it rounded as traced."""
    env.prepared[eqn.outvars[0]] = results[0]
    return [results[0].astype(aval_of(eqn.outvars[0]).dtype)]


@dataclass(frozen=True, eq=False)
class ExchangePositions:
    """Exchanges positions for heads, or gathers them, where equations mix positions."""

    mesh: MeshView
    exchanges: Mapping[Var, Exchange]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate an equation with its operands and result laid out; None for others."""
        exchange = self.exchanges.get(eqn.outvars[0]) if eqn.outvars else None
        if exchange is None:
            return None
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        for number, specs in exchange.operands.items():
            gradient = exchange.gradients.get(number)
            if gradient is None:
                operands[number] = self._constrain(operands[number], specs)
            else:
                operands[number] = self._with_gradient(operands[number], specs, gradient)
        results = env.evaluator.continue_after(self, eqn, env.with_operands(eqn, operands))
        return [self._constrain(results[0], exchange.result), *results[1:]]

    def _with_gradient(
        self, value: Value, specs: Sequence[PartitionSpec], gradient: Sequence[PartitionSpec]
    ) -> Value:
        run = jax.custom_vjp(lambda value: self._constrain(value, specs))
        run.defvjp(
            lambda value: (self._constrain(value, specs), None),
            lambda _, cotangent: (self._constrain(cotangent, gradient),),
        )
        return run(value)

    def _constrain(self, value: Value, specs: Sequence[PartitionSpec]) -> Value:
        for spec in specs:
            value = constrain(value, self.mesh.sharding(spec))
        # Blocks save what they exchange, unless it is gathered: then they gather it again.
        is_part = specs and CONTEXT in axes_of(specs[-1:])
        return checkpoint_name(value, EXCHANGED) if is_part else value


@dataclass(frozen=True, eq=False)
class StateScans:
    """Runs scans along positions whose state is scaled and added to, by first result.

    Each device goes through its positions twice: from zero, which tells how they scale a state and
    what they add to it, and from the state that the positions before them leave.
    """

    mesh: MeshView
    scans: Mapping[Var, PassedStates]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate one of the scans; None for other equations."""
        scan = self.scans.get(eqn.outvars[0]) if eqn.outvars else None
        if scan is None:
            return None
        consts, states, xs = scan_parts(eqn, env.operands(eqn))
        others = [*consts, *xs]
        # Constraints inside of the loop are those of whole arrays.
        rules = () if env.evaluator.weights.casts else WIDE_RULES
        inside = Environment(Evaluator(rules, numerics=env.evaluator.numerics), {})

        def run(state: list[Value], others: Sequence[Value]) -> Any:
            body = scan_body(eqn, list(others[: len(consts)]), inside)
            return lax.scan(body, state, list(others[len(consts) :]))

        def effects(*others: Value) -> Any:
            zeros, ones = ([make(x) for x in states] for make in (jnp.zeros_like, jnp.ones_like))
            found = jax.jvp(lambda state: run(state, others)[0], (zeros,), (ones,))
            return jax.tree.map(lambda x: x[None], found)

        def results(*operands: Value) -> list[Value]:
            return run([x[0] for x in operands[: len(states)]], operands[len(states) :])[1]

        own = PartitionSpec(CONTEXT)
        specs = [*[PartitionSpec()] * len(consts), *[own] * len(xs)]
        added, kept = run_locally(effects, others, specs, own, self.mesh)
        firsts: list[Value] = []
        for n, spec in enumerate(scan.states):
            whole = self.mesh.sharding(PartitionSpec(None, *spec))
            before = [states[n]]
            for scale, more in zip(*(constrain(x[n], whole) for x in (kept, added)), strict=True):
                before.append(scale * before[-1] + more)
            states[n] = before.pop()
            firsts.append(constrain(jnp.stack(before), whole))
        ys = run_locally(results, [*firsts, *others], [own] * len(states) + specs, own, self.mesh)
        return [*states, *ys]


@dataclass(frozen=True, eq=False)
class KernelRule:
    """Evaluates each region at the place of one of its equations, and skips the others.

    The constraints are layouts of their results.
    """

    mesh: MeshView
    kernels: Kernels
    constraints: Mapping[Var, NamedSharding]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a region, or skip one of its equations; None for others."""
        first = eqn.outvars[0] if eqn.outvars else None
        region = self.kernels.regions.get(first) if first is not None else None
        if region is None:
            # Nothing reads what is not computed: regions with readers outside are not replaced.
            skipped = first in self.kernels.skipped
            return [env.values.get(v) for v in eqn.outvars] if skipped else None
        env.evaluator.equations(region.place.ahead, env)
        results = dict(zip(region.outputs, region.kernel(region, env, self.mesh), strict=True))
        for variable, value in results.items():
            if variable not in eqn.outvars:
                # The equation that makes it, where it would be constrained, is skipped.
                env.values[variable] = constrained(variable, value, self.constraints)
        return [results.get(variable) for variable in eqn.outvars]

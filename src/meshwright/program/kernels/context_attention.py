"""Attention whose positions are sharded over the context axis: what is exchanged, and where.

Two products mix positions: that of queries and keys, and that of weights and values. For them,
devices exchange positions for heads (each has all positions of some heads), or each gathers the
keys and values of all positions for its own queries. What else a model does with positions, the
compiler divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from meshwright.mesh.axes import CONTEXT, TENSOR, entry_names
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.op import nbytes_of, result_dims
from meshwright.program.dims.walk import ProgramDims, all_programs
from meshwright.program.jaxpr.equations import Equation, Var, aval_of, equation_module, scan_parts
from meshwright.program.kernels.attention_operands import AttentionOperands
from meshwright.program.kernels.attention_products import (
    REPEATS,
    AttentionProducts,
    follow_scores,
    score_products,
)
from meshwright.program.kernels.context_refusals import (
    by_blocks,
    no_positions,
    one_by_one,
    too_short,
    uneven,
    unknown_attention,
)
from meshwright.program.kernels.joined_attention import SharedRows
from meshwright.program.kernels.passed_states import PassedStates, scales_and_adds
from meshwright.program.kernels.regions import Substitution, describe

LayoutOf = Callable[[ProgramDims, Var], PartitionSpec | None]
"""Returns how a variable is sharded over the mesh; None if it is not."""


@dataclass(frozen=True)
class AttentionLayouts:
    """How an attention is sharded while it is computed.

    Attributes:
        module: where it is.
        length: the positions of a row.
        by_heads: whether positions are exchanged for heads; else keys and values are gathered.
        why: how much less it sends than the other way, or why there is none.
        inside: the layouts of its queries, keys, values and result.
        rows: that of its result once positions are sharded again.
        sent: kinds of collectives, the bytes of the array that each exchanges of a microbatch, and
            whether it belongs to the forward pass.
        times: how often loops run it.
        own_keys: the layouts of keys and values before they are exchanged.
        repeated: for keys and values, along which dim each entry is repeated, how often, and the
            first result of the equation that reads them before.
        moved: the bytes of queries and results on the devices of a row.
        shared: how a kernel divides the work on rows; None if all scores are computed.
    """

    module: str
    length: int
    by_heads: bool
    why: str
    inside: tuple[PartitionSpec, ...]
    rows: PartitionSpec
    sent: tuple[tuple[str, float, bool], ...]
    times: int
    own_keys: tuple[PartitionSpec, ...]
    repeated: tuple[tuple[int, int, Var], ...]
    moved: tuple[float, ...]
    shared: SharedRows | None = None

    @property
    def use(self) -> Substitution:
        """How it is evaluated, in words."""
        how = "exchanges positions for heads" if self.by_heads else "gathers keys and values"
        how = f"{how}, {self.why}"
        if self.shared is not None and self.shared.window is None:
            how += "; exchanges half of its queries, so that all devices have equal work"
        elif self.shared is not None:
            how = f"fetches {self.shared.halo:,} keys before its own, because of its window"
        return Substitution("attention", self.module, how)

    def with_kernel(self, operands: AttentionOperands, size: int) -> AttentionLayouts:
        """Return the layouts for a kernel, which computes no scores that its mask hides."""
        allowed, head = operands.allowed, operands.num_batch - 1
        shared = SharedRows(size, -(-self.length // size), allowed.window)
        of_keys = zip(self.repeated, (operands.key_dims, operands.value_dims), strict=True)
        of_heads = all(dim in (-1, dims[head] if head else -1) for (dim, *_), dims in of_keys)
        counts = {count for _, count, _ in self.repeated}
        fits = of_heads and len(counts) == 1 and 0 not in counts and shared.own % 4 == 0
        if self.by_heads or not fits or not allowed.causal or not operands.for_chunks:
            return self
        if CONTEXT not in self.rows:
            return self
        if shared.halo >= self.length - shared.own:
            return self
        moved = [(n / 2 / size, ahead) for n in self.moved for ahead in (True, False)]
        if shared.window is not None:
            moved = [(n * shared.halo / self.length, ahead) for _, n, ahead in self.sent]
        kept = self.sent if shared.window is None else ()
        sent = (*kept, *(("collective-permute", *one) for one in moved))
        return replace(self, shared=shared, sent=sent)


Layouts = tuple[PartitionSpec, ...]
"""Layouts that a value gets one after the other."""


@dataclass
class Exchange:
    """The layouts of an equation's operands and result.

    Attributes:
        operands: by number.
        gradients: those of an operand's gradient, where they are not the same ones, backwards.
        result: those of its result.
    """

    operands: dict[int, Layouts] = field(default_factory=dict[int, Layouts])
    gradients: dict[int, Layouts] = field(default_factory=dict[int, Layouts])
    result: Layouts = ()


@dataclass(frozen=True)
class ContextExchanges:
    """What is exchanged over the context axis.

    Attributes:
        equations: by first result.
        attention: by result of the product with values.
        size: the size of the axis.
        scans: loops through positions, by first result.
    """

    equations: Mapping[Var, Exchange] = field(default_factory=dict[Var, Exchange])
    attention: Mapping[Var, AttentionLayouts] = field(default_factory=dict[Var, AttentionLayouts])
    size: int = 1
    scans: Mapping[Var, PassedStates] = field(default_factory=dict[Var, PassedStates])

    @property
    def senders(self) -> list[AttentionLayouts | PassedStates]:
        """All that sends something over the axis."""
        return [*self.attention.values(), *self.scans.values()]

    def with_kernels(self, attention: Mapping[Var, AttentionLayouts]) -> ContextExchanges:
        """Return what is exchanged if kernels compute some of the attention."""
        read = {v for one in attention.values() if one.shared for *_, v in one.repeated}
        equations = {v: exchange for v, exchange in self.equations.items() if v not in read}
        return replace(self, equations=equations, attention={**self.attention, **attention})

    def describe(self) -> list[str]:
        """Return how rows are divided, and how attention works, a sentence each."""
        lengths = sorted({placed.length for placed in self.attention.values()}, reverse=True)
        own = [-(-length // self.size) for length in lengths]
        rows = [
            f"rows of {length:,} positions: {part:,} on each device"
            + (f" ({part * self.size:,} with padding)" if length % self.size else "")
            for length, part in zip(lengths, own, strict=True)
        ]
        return [*rows, *describe([sender.use for sender in self.senders])]


NO_EXCHANGES = ContextExchanges()


def find_exchanges(
    classes: DimClasses, layout: LayoutOf, sizes: Mapping[str, int]
) -> ContextExchanges:
    """Return what attention exchanges over the context axis.

    Args:
        classes: the dims of the program's variables.
        layout: how activations are sharded over the mesh.
        sizes: axis sizes of the mesh.
    """
    size = sizes.get(CONTEXT, 1)
    found = ContextExchanges(size=size)
    if size == 1:
        return found
    if not classes.sequence:
        raise no_positions(classes, size)
    for program in all_programs(classes.root):
        at = _Placing(classes, program, layout, sizes)
        _find_scans(at, found)
        for product in score_products(classes, program):
            attention = follow_scores(classes, program, product)
            if attention is None:
                raise unknown_attention(product, size)
            _place(at, attention, found)
    shortest = min((placed.length for placed in found.attention.values()), default=size)
    if shortest < size:
        raise too_short(shortest, size)
    return found


class _Placing(NamedTuple):
    """The layouts of a program's variables around attention."""

    classes: DimClasses
    program: ProgramDims
    layout: LayoutOf
    sizes: Mapping[str, int]

    def rows(self, variable: Var) -> list[Any]:
        """Return the axes of a variable's dims, its positions sharded."""
        entries = [*(self.layout(self.program, variable) or ())]
        return [*entries, *[None] * (len(aval_of(variable).shape) - len(entries))]

    def gathered(self, variable: Var) -> list[Any]:
        """Return the axes of a variable's dims, all positions on every device."""
        return [None if entry == CONTEXT else entry for entry in self.rows(variable)]

    def by_head(self, variable: Var, dim: int) -> list[Any]:
        """Return the axes of a variable's dims, one of them sharded instead of positions."""
        entries = self.gathered(variable)
        entries[dim] = (*entry_names(entries[dim]), CONTEXT)
        return entries

    def nbytes(self, variable: Var) -> float:
        """Return the bytes of a variable for all samples, on the devices that share its heads."""
        shards = self.sizes.get(TENSOR, 1) if TENSOR in self.rows(variable) else 1
        return nbytes_of(aval_of(variable)) / shards

    def divides(self, variable: Var, dim: int) -> bool:
        """Whether a dim can be sharded over context, besides what it is sharded over."""
        factors = self.program.dims(variable)[dim]
        if not factors or factors[0].id in self.classes.batch:
            return False
        axes = (*entry_names(self.gathered(variable)[dim]), CONTEXT)
        return factors[0].size % math.prod(self.sizes[axis] for axis in axes) == 0


class _Source(NamedTuple):
    """The array that an operand of a product is, or that it only repeats.

    Attributes:
        product: the product, and which operand it is.
        operand: the operand.
        variable: the array, as large or smaller.
        reader: the equation that repeats it, or the product, and which operand of that it is.
    """

    product: tuple[Equation, int]
    operand: Var
    variable: Var
    reader: tuple[Equation, int]

    @property
    def is_repeated(self) -> bool:
        """Whether the product reads something larger."""
        return self.variable is not self.operand


def _source(program: ProgramDims, eqn: Equation, side: int, *, follow: bool = True) -> _Source:
    """Return the smallest array that an operand only repeats, as heads that share keys do."""
    makers = {v: e for e in program.jaxpr.eqns for v in e.outvars}
    variable = eqn.invars[side]
    assert isinstance(variable, Var)
    best = _Source((eqn, side), variable, variable, (eqn, side))
    while (maker := makers.get(variable)) and maker.primitive.name in REPEATS:
        if not follow or not isinstance(maker.invars[0], Var):
            break
        variable = maker.invars[0]
        if aval_of(variable).size < aval_of(best.variable).size:
            best = best._replace(variable=variable, reader=(maker, 0))
    return best


def _place(at: _Placing, attention: AttentionProducts, found: ContextExchanges) -> None:
    """Add what an attention exchanges."""
    scores, values = attention.scores, attention.values
    query = _source(at.program, scores, 1 - attention.key_side, follow=False)
    key = _source(at.program, scores, attention.key_side)
    value = _source(at.program, values, 1 - attention.weights_side)
    output, size = values.outvars[0], at.sizes[CONTEXT]
    own = sum(aval_of(source.variable).size for source in (key, value))
    # Forward as they are, backward with one for each query head.
    gathered = (own + sum(aval_of(source.operand).size for source in (key, value))) / 2
    exchanged = (own + aval_of(query.operand).size + aval_of(output).size) / size
    heads = _heads(at, attention, (query, key, value))
    by_heads = heads is not None and exchanged <= gathered
    inside: list[list[Any]] = []
    for number, source in enumerate((query, key, value)):
        head = heads[number] if by_heads and heads else None
        inside.append(_exchange(at, source, head, found, gather=number > 0))
    sides = (inside[0], inside[1]) if attention.key_side else (inside[1], inside[0])
    of_scores = _product(scores, *sides)
    of_weights: list[Any] = [None] * len(aval_of(values.invars[attention.weights_side]).shape)
    for dim, entry in zip(attention.dims, of_scores, strict=True):
        if dim is not None:
            of_weights[dim] = entry
    sides = (inside[2], of_weights) if attention.weights_side else (of_weights, inside[2])
    inside.append(_product(values, *sides))
    positions = at.classes.positions(at.program, query.operand)
    if by_heads or all(aval_of(query.operand).shape[d] % size == 0 for d in positions):
        _of(found, scores).result = (PartitionSpec(*of_scores),)
        weights = {attention.weights_side: (PartitionSpec(*of_weights),)}
        _of(found, values).operands.update(weights)
    layouts = tuple(PartitionSpec(*entries) for entries in inside)
    rows = PartitionSpec(*at.rows(output))
    _of(found, values).result = (layouts[-1], rows)
    assert isinstance(found.attention, dict)
    length = max(aval_of(query.operand).shape[d] for d in positions)
    arrays = [key.variable, value.variable, *([query.operand, output] if by_heads else ())]
    kinds = ("all-to-all", "all-to-all") if by_heads else ("all-gather", "reduce-scatter")
    parts = size if by_heads else 1
    sent = tuple((k, at.nbytes(v) / parts, not n) for v in arrays for n, k in enumerate(kinds))
    found.attention[output] = AttentionLayouts(
        module=equation_module(scores) or at.program.path,
        length=length,
        by_heads=by_heads,
        why=_why(exchanged / gathered, possible=heads is not None, sizes=at.sizes),
        inside=layouts,
        rows=rows,
        sent=sent,
        times=at.program.times,
        own_keys=tuple(PartitionSpec(*at.rows(x.operand)) for x in (key, value)),
        repeated=tuple(_repeated(at, source) for source in (key, value)),
        moved=(at.nbytes(query.operand), at.nbytes(output)),
    )


def _why(ratio: float, *, possible: bool, sizes: Mapping[str, int]) -> str:
    if not possible:
        axes = " × ".join(f"{a}={sizes[a]}" for a in (CONTEXT, TENSOR) if sizes.get(a, 1) > 1)
        return f"because {axes} does not divide its heads of keys"
    other = "gathering keys and values" if ratio <= 1 else "exchanging positions for heads"
    share = min(ratio, 1 / ratio)
    return f"which sends {'as much as' if share == 1 else f'{share:.2f}× of what'} {other} would"


def _exchange(
    at: _Placing,
    source: _Source,
    head: tuple[int, int] | None,
    found: ContextExchanges,
    *,
    gather: bool,
) -> list[Any]:
    """Add the exchange of one operand; return the axes of its dims in the product.

    Args:
        at: the layouts around it.
        source: the operand.
        head: the dims of heads of the operand and of what it repeats, if those are sharded.
        found: where it is added.
        gather: whether all positions are gathered if heads are not sharded.
    """
    variable, whole = source.variable, at.gathered if gather else at.rows
    inside = at.by_head(source.operand, head[0]) if head else whole(source.operand)
    ahead = at.by_head(variable, head[1]) if head else whole(variable)
    steps = (PartitionSpec(*at.rows(variable)), PartitionSpec(*ahead))
    reader, place = source.reader
    _of(found, reader).operands[place] = steps
    if head is None and source.is_repeated:
        # Gradients of keys are sums over queries: reduced once, before those of heads are added.
        _of(found, reader).gradients[place] = steps[:1]
        product, side = source.product
        whole_then_rows = PartitionSpec(*inside), PartitionSpec(*at.rows(source.operand))
        _of(found, product).operands[side] = whole_then_rows[:1]
        _of(found, product).gradients[side] = whole_then_rows
    return inside


def _heads(
    at: _Placing, attention: AttentionProducts, sources: Sequence[_Source]
) -> tuple[tuple[int, int], ...] | None:
    """Return the dim of heads in queries, keys and values and in what they repeat.

    None if there is no such dim, or if it cannot be divided.
    """
    query_side, side = 1 - attention.key_side, attention.weights_side
    of_scores = attention.scores.params["dimension_numbers"][1]
    of_values = attention.values.params["dimension_numbers"][1]
    for number, position in enumerate(attention.dims[: len(of_scores[0])]):
        if position not in of_values[side]:
            continue
        of_value = of_values[1 - side][list(of_values[side]).index(position)]
        own = (of_scores[query_side][number], of_scores[attention.key_side][number], of_value)
        dims = [(d, _same_class(at, s, d)) for d, s in zip(own, sources, strict=True)]
        both = zip(sources, dims, strict=True)
        if all(at.divides(s.operand, d) and o is not None for s, (d, o) in both):
            return tuple((d, o) for d, o in dims if o is not None)
    return None


def _same_class(at: _Placing, source: _Source, dim: int) -> int | None:
    """Return the dim of what an operand repeats that is a dim of the operand."""
    if not source.is_repeated:
        return dim
    first = at.program.dims(source.operand)[dim][:1]
    dims = enumerate(at.program.dims(source.variable))
    return next((n for n, factors in dims if first and factors[:1] == first), None)


def _repeated(at: _Placing, source: _Source) -> tuple[int, int, Var]:
    """Return along which dim an operand repeats entries, how often (0 if otherwise), and where."""
    count = aval_of(source.operand).size // aval_of(source.variable).size
    known = {factor.id for dim in at.program.dims(source.variable) for factor in dim}
    dims = [[f.id in known for f in dim] for dim in at.program.dims(source.operand)]
    more = [n for n, dim in enumerate(dims) if not all(dim)]
    is_last = count > 1 and len(more) == 1 and all(dims[more[0]][:-1])
    dim, times = (more[0], count) if is_last else (-1, int(count == 1))
    return dim, times, source.reader[0].outvars[0]


def _product(eqn: Equation, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Return the axes of the dims of a product's result."""
    each = (zip((left, right), dims, strict=True) for dims in result_dims(eqn))
    return [next(axes[d] for axes, d in pair if d is not None) for pair in each]


def _of(found: ContextExchanges, eqn: Equation) -> Exchange:
    assert isinstance(found.equations, dict)
    return found.equations.setdefault(eqn.outvars[0], Exchange())


def _find_scans(at: _Placing, found: ContextExchanges) -> None:
    """Add loops through positions; raise if the devices cannot each go through their own."""
    for eqn in at.program.jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        _, carries, stacks = scan_parts(eqn, eqn.invars)
        rows = [0 in at.classes.positions(at.program, x) for x in stacks]
        if not any(rows):
            continue
        states = eqn.outvars[: len(carries)]
        if any(at.classes.positions(at.program, state) for state in states):
            raise by_blocks(eqn, found.size)
        if not all(rows) or eqn.params["reverse"] or not scales_and_adds(eqn):
            raise one_by_one(eqn, found.size)
        if eqn.params["length"] % found.size:
            raise uneven(eqn, found.size)
        # What each device adds to a state and how it scales it, and the gradients of its first.
        nbytes = found.size * sum(map(at.nbytes, states))
        sent = ("all-gather", 2 * nbytes, True), ("all-gather", nbytes, False)
        module = equation_module(eqn) or at.program.path
        assert isinstance(found.scans, dict)
        layouts = tuple(PartitionSpec(*at.gathered(state)) for state in states)
        found.scans[eqn.outvars[0]] = PassedStates(module, sent, at.program.times, layouts)

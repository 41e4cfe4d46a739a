"""Recognizes norms and activations: elementwise operations around sums over features.

A norm starts at the inverse root of a sum over the last dim. It goes back to the one activation
that the sums are computed from, and forward as long as only this activation, scales and biases are
read. An activation function starts at a transcendental function of a layer's output.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import variables_read
from meshwright.program.jaxpr.equations import PRODUCTS, Atom, Equation, Literal, Var, aval_of
from meshwright.program.kernels.regions import Graph, NotReplaced

ROOTS = ("rsqrt", "sqrt")
TRANSCENDENTAL = ("tanh", "erf", "erfc", "logistic", "exp", "log1p", "expm1")
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze")
_PIECES = ("slice", "split", "transpose", "reduce_sum")


@dataclass(frozen=True)
class RowwiseMatch:
    """Equations that are recomputed for the gradient.

    Attributes:
        eqns: all equations, in program order.
        skipped: those that nothing outside reads.
        activations: the inputs as large as the result.
        vectors: the inputs that all rows share, such as scales.
        output: the result.
    """

    eqns: tuple[Equation, ...]
    skipped: tuple[Equation, ...]
    activations: tuple[Var, ...]
    vectors: tuple[Var, ...]
    output: Var


def norms(graph: Graph) -> Iterator[Equation]:
    """Yield the roots of sums over the last dim."""
    for eqn in graph.live:
        if eqn.primitive.name in ROOTS and _sums_below(graph, eqn):
            yield eqn


def activations(graph: Graph, program: ProgramDims) -> Iterator[Equation]:
    """Yield transcendental functions of what a layer returns."""
    for eqn in graph.live:
        shape = aval_of(eqn.outvars[0]).shape if eqn.outvars else ()
        if eqn.primitive.name not in TRANSCENDENTAL or len(shape) < 2 or shape[-1] == 1:
            continue
        summed = any(r.primitive.name == "reduce_sum" for r in graph.read_by(eqn.outvars[0]))
        if not summed and _is_from_layer(graph, program, eqn.outvars[0]):
            yield eqn


def _is_from_layer(graph: Graph, program: ProgramDims, variable: Var) -> bool:
    """Whether a value is an elementwise function of a product with a weight.

    Functions of other values, such as the scores of attention or the decay of a recurrence, are
    fused by the compiler with the products around them, and recomputing them takes longer.
    """
    pending, seen = [variable], {variable}
    while pending:
        eqn = graph.made_by(pending.pop())
        name = "" if eqn is None else eqn.primitive.name
        if eqn is None:
            continue
        read = [a for a in eqn.invars if not isinstance(a, Literal)]
        if name in PRODUCTS:
            values = [program.values[v] for v in read]
            if any(value.params and not value.has_data for value in values):
                return True
        elif name in ELEMENTWISE or name in _SHAPES or name in _PIECES:
            pending += [v for v in read if v not in seen]
            seen.update(read)
    return False


def match_norm(graph: Graph, root: Equation) -> RowwiseMatch:
    """Return the norm around a root."""
    eqns = [root, *_narrow_above(graph, root)]
    sums = [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]
    wide_shape = aval_of(sums[0].invars[0]).shape
    sources: set[Var] = set()
    for total in sums:
        below, source = _simple_chain(graph, total.invars[0], wide_shape)
        eqns += below
        sources.add(source)
    if len(sources) != 1:
        raise NotReplaced("its sums are of several activations")
    (source,) = sources
    return _extend(graph, eqns, source, root.outvars[0], wide_shape)


def match_activation(graph: Graph, anchor: Equation, program: ProgramDims) -> RowwiseMatch | None:
    """Return the activation function around a transcendental function."""
    shape = aval_of(anchor.outvars[0]).shape
    eqns: list[Equation] = []
    source = _leaf(graph, anchor.outvars[0], shape, eqns)
    if source is None:
        return None
    match = _extend(graph, eqns, source, anchor.outvars[0], shape)
    if not all(_is_from_layer(graph, program, v) for v in match.activations[1:]):
        raise NotReplaced("it multiplies something other than what a layer returns")
    if any(eqn.primitive.name == "conv_general_dilated" for eqn in graph.read_by(match.output)):
        raise NotReplaced("a convolution reads its result from memory")
    return _with_bias(graph, match, source, shape)


def _with_bias(
    graph: Graph, match: RowwiseMatch, source: Var, shape: tuple[int, ...]
) -> RowwiseMatch:
    """Add the addition of a bias before an activation function, so that the sum is not saved."""
    eqn = graph.made_by(source, "add")
    numbers = {graph.number(e) for e in match.eqns}
    if eqn is None or any(n not in numbers for n in graph.readers[source]):
        return match
    wide = [a for a in eqn.invars if not isinstance(a, Literal) and aval_of(a).shape == shape]
    same_block = graph.segments[graph.number(eqn)] == graph.segments[min(numbers)]
    if len(wide) != 1 or graph.is_returned(source) or not same_block:
        return match
    others = [v for v in match.activations if v is not source]
    return _finish(graph, numbers | {graph.number(eqn)}, match.output, (wide[0], *others))


def _sums_below(graph: Graph, root: Equation) -> bool:
    shape = aval_of(root.outvars[0]).shape
    sums = [e for e in _narrow_above(graph, root) if e.primitive.name == "reduce_sum"]
    rank = {len(aval_of(e.invars[0]).shape) for e in sums}
    return (
        len(rank) == 1
        and all(tuple(e.params["axes"]) == (max(rank) - 1,) for e in sums)
        and len({aval_of(e.invars[0]).shape for e in sums}) == 1
        and len(shape) > 0
    )


def _narrow_above(graph: Graph, root: Equation) -> list[Equation]:
    """Return the equations from sums over features to a root."""
    found: dict[int, Equation] = {}
    pending = list(root.invars)
    while pending:
        eqn = graph.made_by(pending.pop())
        if eqn is None or graph.number(eqn) in found:
            continue
        if eqn.primitive.name == "reduce_sum":
            found[graph.number(eqn)] = eqn
        elif eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in _SHAPES:
            shape = aval_of(eqn.outvars[0]).shape
            if shape and all(s == 1 for s in shape[:-1]) and shape[-1] > 1:
                continue
            found[graph.number(eqn)] = eqn
            pending += eqn.invars
    return list(found.values())


def _simple_chain(
    graph: Graph, atom: Atom, shape: tuple[int, ...], source: Var | None = None
) -> tuple[list[Equation], Var]:
    """Return the simple equations that a value is computed with, and the activation they read.

    They end at ``source`` if they come to it.
    """
    eqns: list[Equation] = []
    while atom is not source:
        eqn = graph.made_by(atom)
        if eqn is None or not _is_simple(eqn, shape):
            break
        eqns.append(eqn)
        if eqn.primitive.name == "sub":
            eqns += _narrow_chain(graph, eqn.invars[1], shape)
        atom = eqn.invars[0]
    if isinstance(atom, Literal):
        raise NotReplaced("it sums a constant")
    return eqns, atom


def _is_simple(eqn: Equation, shape: tuple[int, ...]) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        before, after = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
        floats = jnp.issubdtype(before.dtype, jnp.floating)
        return floats and before.dtype.itemsize <= after.dtype.itemsize
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    if name == "sub":
        other = aval_of(eqn.invars[1]).shape
        return aval_of(eqn.invars[0]).shape == shape and (not other or other[-1] == 1)
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def _narrow_chain(graph: Graph, atom: Atom, shape: tuple[int, ...]) -> list[Equation]:
    """Return the equations from a sum, or a constant, to what is subtracted; and those below it."""
    eqns: list[Equation] = []
    while (eqn := graph.made_by(atom)) is not None:
        name = eqn.primitive.name
        if name == "reduce_sum":
            below, _ = _simple_chain(graph, eqn.invars[0], shape)
            return [*eqns, eqn, *below]
        if name not in ELEMENTWISE and name not in _SHAPES:
            break
        eqns.append(eqn)
        atom = eqn.invars[0]
    if isinstance(atom, Literal):
        # A norm without a mean may subtract zeros.
        return eqns
    raise NotReplaced("it subtracts something other than a mean")


def _leaf(graph: Graph, atom: Atom, shape: tuple[int, ...], eqns: list[Equation]) -> Var | None:
    """Return the one activation that a value is an elementwise function of."""
    if isinstance(atom, Literal) or aval_of(atom).shape != shape:
        return None
    eqn = graph.made_by(atom)
    name = "" if eqn is None else eqn.primitive.name
    if eqn is None or name not in ELEMENTWISE or name in ("stop_gradient", "name"):
        return atom
    if any(not isinstance(a, Literal) and aval_of(a).shape != shape for a in eqn.invars):
        return atom
    inner: list[Equation] = []
    leaves = {_leaf(graph, a, shape, inner) for a in eqn.invars if not isinstance(a, Literal)}
    if len(leaves) != 1:
        return atom
    eqns += [*inner, eqn]
    return leaves.pop()


def _extend(
    graph: Graph, eqns: list[Equation], source: Var, start: Var, shape: tuple[int, ...]
) -> RowwiseMatch:
    """Follow the readers of a value while they read nothing but the activation and vectors."""
    numbers = {graph.number(eqn) for eqn in eqns}
    segment = graph.segments[graph.number(eqns[0])]
    second: list[Var] = []
    pending, output = [start], None
    while pending:
        variable = pending.pop()
        readers = graph.readers.get(variable, [])
        outside = [n for n in readers if n not in numbers]
        if graph.is_returned(variable) or not readers:
            outside = [-1]
        grown = [n for n in outside if n >= 0 and graph.segments[n] == segment]
        extras = {n: _extra(graph, n, numbers, source, shape, second) for n in grown}
        if outside and all(extras.get(n) is not None for n in outside):
            for n in outside:
                found = extras[n]
                assert found is not None
                numbers |= {n, *found[0]}
                second += found[1]
            pending += [v for n in outside for v in graph.jaxpr.eqns[n].outvars]
        elif outside and aval_of(variable).shape == shape:
            if output is not None:
                raise NotReplaced("it has several results")
            output = variable
        elif outside:
            raise NotReplaced("a statistic is read elsewhere")
    if output is None:
        raise NotReplaced("nothing reads its result")
    return _finish(graph, numbers, output, (source, *dict.fromkeys(second)))


def _extra(
    graph: Graph,
    number: int,
    numbers: set[int],
    source: Var,
    shape: tuple[int, ...],
    second: list[Var],
) -> tuple[set[int], list[Var]] | None:
    """Return the equations and inputs that a reader needs besides; None if it does not belong."""
    eqn = graph.jaxpr.eqns[number]
    name, out = eqn.primitive.name, aval_of(eqn.outvars[0]).shape
    rows = out[: len(shape) - 1] == shape[:-1]
    if eqn.effects or (name not in ELEMENTWISE and name not in _SHAPES) or not rows:
        return None
    if name in ("stop_gradient", "name") or not jnp.issubdtype(
        aval_of(eqn.outvars[0]).dtype, jnp.floating
    ):
        return None
    more: list[Equation] = []
    others: list[Var] = []
    for atom in eqn.invars:
        if isinstance(atom, Literal) or atom is source or graph.maker.get(atom) in numbers:
            continue
        operand = aval_of(atom).shape
        if not operand or all(s == 1 for s in operand[:-1]):
            continue
        if operand != shape:
            return None
        leaf = _leaf_of_source(graph, atom, source, shape, more)
        if leaf:
            continue
        if second or others or name != "mul" or len(graph.readers.get(atom, ())) != 1:
            return None
        others.append(atom)
    return {graph.number(e) for e in more}, others


def _leaf_of_source(
    graph: Graph, atom: Var, source: Var, shape: tuple[int, ...], more: list[Equation]
) -> bool:
    """Whether a value is a function of the activation alone, or its deviation from a mean."""
    try:
        chain, start = _simple_chain(graph, atom, shape, source)
    except NotReplaced:
        return False
    if start is not source:
        chain = list[Equation]()
        if _leaf(graph, atom, shape, chain) is not source:
            return False
    more += chain
    return True


def _finish(graph: Graph, numbers: set[int], output: Var, sources: tuple[Var, ...]) -> RowwiseMatch:
    eqns = tuple(graph.jaxpr.eqns[n] for n in sorted(numbers))
    skipped = set(numbers)
    # What others read too is computed twice.
    changed = True
    while changed:
        kept = {
            n
            for n in skipped
            if all(
                v is output
                or (not graph.is_returned(v) and skipped.issuperset(graph.readers.get(v, ())))
                for v in graph.jaxpr.eqns[n].outvars
            )
        }
        changed, skipped = kept != skipped, kept
    made = {v for eqn in eqns for v in eqn.outvars}
    vectors = tuple(v for v in variables_read(eqns) if v not in made and v not in sources)
    return RowwiseMatch(
        eqns, tuple(graph.jaxpr.eqns[n] for n in sorted(skipped)), sources, vectors, output
    )

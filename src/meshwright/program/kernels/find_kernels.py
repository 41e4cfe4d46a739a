"""Finds the regions of a traced loss that kernels replace, and says why others stay as written."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.config.schema import KernelChoice
from meshwright.mesh.axes import CONTEXT
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import variables
from meshwright.program.jaxpr.equations import Equation, Var, aval_of
from meshwright.program.jaxpr.walks import all_equations
from meshwright.program.kernels.attention_operands import AttentionOperands
from meshwright.program.kernels.batch_norm import batch_norms, match_batch_norm
from meshwright.program.kernels.chunked_loss import LossKernel, is_fused
from meshwright.program.kernels.context_attention import (
    NO_EXCHANGES,
    AttentionLayouts,
    ContextExchanges,
    LayoutOf,
)
from meshwright.program.kernels.fused_attention import AttentionKernel, check_kernel
from meshwright.program.kernels.match_attention import makes_weights, match_attention
from meshwright.program.kernels.match_loss import is_differentiable, match_loss, projections
from meshwright.program.kernels.match_recurrence import match_recurrence
from meshwright.program.kernels.match_rowwise import (
    RowwiseMatch,
    activations,
    match_activation,
    match_norm,
    norms,
)
from meshwright.program.kernels.recurrence import RecurrenceKernel
from meshwright.program.kernels.regions import (
    EvaluationPoint,
    Graph,
    NotReplaced,
    Region,
    Substitution,
    module_name,
)
from meshwright.program.kernels.relu import match_relu, relus
from meshwright.program.kernels.rowwise import RowwiseKernel
from meshwright.program.kernels.surroundings import Scope, scopes
from meshwright.program.trace.traced_loss import TracedLoss


@dataclass(frozen=True)
class Kernels:
    """The regions of a program that kernels evaluate.

    Attributes:
        regions: by first result of the equation at whose place a region is evaluated.
        skipped: variables whose equations are skipped: those that are not computed any more, and
            results that are computed at another equation than their own.
        uses: all regions that look like known ones, replaced or not.
        rows: whether products join all dims of activations but their features.
        sums_in_parts: whether the gradients of vectors are summed in two steps.
    """

    regions: Mapping[Var, Region] = field(default_factory=dict[Var, Region])
    skipped: frozenset[Var] = frozenset()
    uses: tuple[Substitution, ...] = ()
    rows: bool = False
    sums_in_parts: bool = False

    @property
    def attention(self) -> dict[Var, AttentionLayouts]:
        """How kernels exchange positions over the context axis, by their result."""
        found = ((region.outputs[0], region.kernel) for region in self.regions.values())
        kernels = ((v, kernel) for v, kernel in found if isinstance(kernel, AttentionKernel))
        return {v: kernel.exchange for v, kernel in kernels if kernel.exchange is not None}


NO_KERNELS = Kernels()


@dataclass(frozen=True)
class KernelSearch:
    """Which kernels a step may use.

    Attributes:
        choice: kernels of the platform, their forms for any device, or none.
        platform: the platform it runs on.
        rows: whether products may join all dims of activations but their features.
        planned: whether the program is only traced, for a plan on devices that are not present.
        sparing: whether memory is scarcer than time, as where activations are recomputed.
    """

    choice: KernelChoice
    platform: str
    rows: bool = True
    planned: bool = False
    sparing: bool = False


def unsharded(program: ProgramDims, variable: Var) -> None:
    """Return the layout of a variable on one device, or of one device's own samples."""


def find_kernels(
    traced: TracedLoss,
    classes: DimClasses,
    layout: LayoutOf,
    search: KernelSearch,
    exchanges: ContextExchanges = NO_EXCHANGES,
) -> Kernels:
    """Find the regions of a loss that kernels replace.

    Args:
        traced: the loss.
        classes: the dims of its variables.
        layout: how activations are sharded over the mesh.
        search: which kernels.
        exchanges: what attention exchanges over the context axis.
    """
    if search.choice == "none" or (search.choice == "auto" and search.platform == "cpu"):
        return NO_KERNELS
    finder = _Finder(layout, search, exchanges)
    consts = dict(zip(traced.closed.jaxpr.constvars, traced.closed.consts, strict=True))
    for scope in scopes(classes.root, consts):
        finder.search(scope)
    skipped = set(finder.dead)
    for region in finder.regions:
        made = {v for eqn in region.eqns for v in eqn.outvars}.union(region.outputs)
        skipped |= made - set(region.outputs).intersection(region.place.eqn.outvars)
    return Kernels(
        {region.place.eqn.outvars[0]: region for region in finder.regions},
        frozenset(skipped),
        tuple(finder.uses),
        rows=search.rows,
        sums_in_parts=True,
    )


class _Finder:
    def __init__(self, layout: LayoutOf, search: KernelSearch, exchanges: ContextExchanges) -> None:
        self.layout, self.kernels, self.exchanges = layout, search, exchanges
        self.regions: list[Region] = []
        self.uses: list[Substitution] = []
        self.dead: set[Var] = set()
        self._taken: set[Var] = set()

    def search(self, scope: Scope) -> None:
        """Add the regions of one program."""
        graph, program = scope.graph, scope.program
        self.dead |= graph.dead
        for eqn in graph.live:
            if eqn.primitive.name == "scan":
                self._try("recurrence", program, eqn, self._recurrence, program, eqn)
        for end in makes_weights(graph):
            self._try("attention", program, end, self._attention, scope, end)
        for product in projections(graph, program):
            self._try("loss", program, product, self._loss, graph, program, product)
        for root in norms(graph):
            self._try("norm", program, root, _rowwise, graph, match_norm, root)
        for anchor in activations(graph, program):
            match = functools.partial(match_activation, program=program)
            self._try("activation", program, anchor, _rowwise, graph, match, anchor)
        for subtraction in batch_norms(graph):
            self._try("norm", program, subtraction, match_batch_norm, graph, subtraction)
        for eqn in relus(scope):
            self._try("activation", program, eqn, match_relu, graph, eqn)

    def _try(
        self,
        kind: str,
        program: ProgramDims,
        anchor: Equation,
        make: Callable[..., Region | None],
        *arguments: Any,
    ) -> None:
        if self._taken.issuperset(anchor.outvars):
            return
        try:
            region = make(*arguments)
        except NotReplaced as refusal:
            module = module_name([anchor]) or program.path
            self.uses.append(Substitution(kind, module, "", reason=str(refusal)))
            return
        if region is None:
            return
        made = {v for eqn in region.eqns for v in eqn.outvars}
        if made & self._taken:
            return
        self._taken |= made
        if kind == "recurrence":
            # What it computes is computed by its kernel.
            body = region.eqns[0].params["jaxpr"].jaxpr
            self._taken.update(v for inner, _ in all_equations(body) for v in inner.outvars)
        self.regions.append(region)
        module = region.module or program.path
        self.uses.append(Substitution(kind, module, region.kernel.name, region.detail))

    def _recurrence(self, program: ProgramDims, eqn: Equation) -> Region | None:
        match = match_recurrence(eqn)
        if match is None:
            return None
        if any(self.layout(program, v) is not None for v in eqn.outvars):
            raise NotReplaced("the mesh shards its state")
        inputs, outputs = tuple(variables(eqn.invars)), tuple(eqn.outvars)
        place, module = EvaluationPoint(eqn), module_name([eqn])
        return Region(module, (eqn,), inputs, outputs, place, RecurrenceKernel(match))

    def _attention(self, scope: Scope, end: Equation) -> Region | None:
        match, name = match_attention(scope, end), "xla"
        if match is None:
            return None
        operands, placed = match.operands, self.exchanges.attention.get(match.output)
        placed = placed and placed.with_kernel(operands, self.exchanges.size)
        shared, function = placed is not None and placed.shared is not None, operands.function
        if self.kernels.choice == "auto" and not (shared and function):
            name = check_kernel(operands, self.kernels.platform, planned=self.kernels.planned)
        if placed is not None and operands.formula is not None and operands.formula.learned:
            raise NotReplaced("the context axis shards its positions, and its scores are learned")
        if placed is None:
            ends = (operands.query, operands.key, operands.value, match.output)
            layouts = [self.layout(scope.program, v) for v in ends]
        else:
            if not shared:
                self._check_rows(operands.query, placed.inside[0])
            layouts = list(placed.inside)
            if function is not None and not placed.by_heads and not shared:
                raise NotReplaced(f"{function.why}, and the context axis gathers keys")
        if any(spec is not None for spec in layouts):
            _check_layouts(operands, layouts)
        if shared and operands.leaves:
            operands = operands.by_formula
        layouts, inputs = _with_leaves(operands, layouts, whole=shared), operands.inputs
        kernel = AttentionKernel(name, operands, layouts, placed, self.kernels.planned)
        return scope.graph.region(match.eqns, inputs, (match.output,), kernel, str(match.operands))

    def _check_rows(self, hidden: Var, layout: PartitionSpec | None) -> None:
        """Raise if devices have different numbers of positions."""
        size = self.exchanges.size
        for length, entry in zip(aval_of(hidden).shape, layout or (), strict=False):
            if entry == CONTEXT and length % size:
                own = -(-length // size)
                why = f"rows of {length} positions are not divisible by context={size}"
                even = f", and the {own} of a device are no multiple of 4" if own % 4 else ""
                raise NotReplaced(why + even)

    def _loss(self, graph: Graph, program: ProgramDims, product: Equation) -> Region:
        match = match_loss(graph, product)
        graded = tuple(is_differentiable(program, v) for v in match.outputs)
        inputs = (match.hidden, match.kernel, *match.others)
        trained = frozenset(v for v in match.others if is_differentiable(program, v))
        layout = self.layout(program, match.hidden)
        self._check_rows(match.hidden, layout)
        in_parts, sparing = not self.kernels.planned, self.kernels.sparing
        fused = is_fused(match, graded)
        kernel = LossKernel(match, trained, graded, fused, layout, in_parts, sparing)
        region = graph.region(match.eqns, inputs, match.outputs, kernel)
        return replace(region, module=module_name([product]))


def _rowwise(
    graph: Graph, find: Callable[[Graph, Equation], RowwiseMatch | None], anchor: Equation
) -> Region | None:
    match = find(graph, anchor)
    if match is None:
        return None
    inputs = (*match.activations, *match.vectors)
    region = graph.region(match.skipped, inputs, (match.output,), RowwiseKernel(match))
    return replace(region, module=module_name(match.eqns))


def _with_leaves(
    operands: AttentionOperands, layouts: Sequence[PartitionSpec | None], *, whole: bool
) -> tuple[PartitionSpec | None, ...]:
    """Return layouts with those of what scores depend on, which are sharded as the queries are.

    If ``whole``, every device has all of their positions.
    """
    axes = [*_entries(layouts[0], operands.query_dims)[:-1], None]
    axes = [None if whole and entry == CONTEXT else entry for entry in axes]
    specs: list[PartitionSpec] = []
    for variable, dims in operands.leaves:
        sizes = zip(aval_of(variable).shape, dims, strict=True)
        specs.append(PartitionSpec(*(None if d is None or n == 1 else axes[d] for n, d in sizes)))
    return (*layouts[:3], *specs, layouts[3])


def _check_layouts(operands: AttentionOperands, specs: Sequence[PartitionSpec | None]) -> None:
    """Raise unless samples and heads are sharded alike, and besides them the queries' positions."""
    inverse = [operands.output_dims.index(n) for n in range(len(operands.output_dims))]
    orders = {
        "query": operands.query_dims,
        "key": operands.key_dims,
        "value": operands.value_dims,
        "output": inverse,
    }
    count = operands.num_batch
    first = _entries(specs[0], operands.query_dims)
    for (name, order), spec in zip(orders.items(), specs, strict=True):
        entries = _entries(spec, order)
        rows = CONTEXT if name in ("query", "output") and first[count] == CONTEXT else None
        if entries[:count] != first[:count] or entries[count] != rows or any(entries[count + 1 :]):
            raise NotReplaced(f"the mesh shards its {name} along other dims than samples and heads")


def _entries(spec: PartitionSpec | None, dims: Sequence[int]) -> list[object]:
    padded = [*(spec or ()), *[None] * len(dims)]
    return [padded[d] for d in dims]

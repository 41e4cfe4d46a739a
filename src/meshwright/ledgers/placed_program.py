"""Weights and events of a program as a plan places them, from which follows what it sends."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import BlockCut, Region
from meshwright.plan import Plan
from meshwright.program.blocks.block_lists import Outside, cut_segments
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.op import is_inexact
from meshwright.program.dims.walk import ProgramDims, all_programs
from meshwright.program.evaluate.dependencies import variables, variables_read
from meshwright.program.jaxpr.equations import REARRANGES, Var, aval_of, scan_counts
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.traced_loss import TracedLoss
from meshwright.program.weight_reads import weight_reads, weights_in_backward
from meshwright.sharding.placement import Placement
from meshwright.sharding.tensor import TensorChoice

Part = Literal["blocks", "embedding", "head"]
"""Parts of a model that pipeline stages run: each some blocks, the first one the embedding, the
last one the head."""


_KEEPS_SUMS = frozenset({"add", "add_any", "sub", "neg"}) | REARRANGES
"""Operations whose result for partial sums is a partial sum of their result."""
_PASSES = _KEEPS_SUMS | {"convert_element_type", "div", "select_n"}
"""Operations whose gradient does not need the value that they pass on, as those of dropout."""


class PlacedWeight(NamedTuple):
    """A weight, and how a plan places it.

    ``nbytes`` are those on a device once it is gathered: sharded over the tensor axis alone.
    ``parts`` of the model read it; empty if that is not known. The fsdp axis shards it, or its
    optimizer state; stages shard it that do not own it. Blocks may gather it again for their
    backward pass, if only they read it. ``reduced`` is the share of its gradient that is reduced
    over samples, less than 1 if the gradient of a smaller value is: of the product of several
    weights.
    """

    nbytes: float
    parts: tuple[Part, ...]
    trained: bool
    on_fsdp: bool
    on_pipe: bool
    regathered: bool
    in_backward: bool
    module: str = ""
    reduced: float = 1.0


class PlacedEvent(NamedTuple):
    """What an operation sends over the tensor axis.

    ``nbytes`` are those of the array, each time, for all samples that were traced; ``weight`` those
    of the weight that can be gathered instead, 0 if none can. The part of the model is None if no
    stage runs it, or without stages. Blocks that save nothing reduce it ``again``.
    """

    kind: str
    nbytes: int
    times: int
    weight: int
    part: Part | None
    module: str
    again: bool = False


class WeightReads(NamedTuple):
    """How a program reads its weights, by number of the step leaf.

    What is read ``outside`` of blocks stays gathered; ``unread`` weights are not gathered, and have
    no gradient. Of those read together, ``reduced`` is the share of their gradients that is
    reduced.
    """

    outside: frozenset[int]
    in_backward: frozenset[int]
    reduced: Mapping[int, float]
    unread: frozenset[int] = frozenset()


def read_weights(traced: TracedLoss) -> WeightReads:
    """Find out how a program without stages reads its weights."""
    jaxpr = traced.closed.jaxpr
    number = {v: n for n, v in enumerate(jaxpr.invars[: len(traced.layout.step_leaves)])}
    unread = frozenset(number[v] for v in number.keys() - variables_read(jaxpr.eqns))
    casts = casts_of(jaxpr.eqns, set(number))
    number |= {cast: number[leaf] for cast, leaf in casts.items()}
    outside: set[int] = set()
    for segment in cut_segments(jaxpr):
        if isinstance(segment, Outside):
            eqns = [eqn for eqn in segment.eqns if not casts.keys() & set(eqn.outvars)]
            read = {variable for variable in variables_read(eqns) if variable in number}
            outside |= {number[variable] for variable in read - _scanned(segment)}
    in_backward, reduced = weights_in_backward(traced), _read_together(traced)
    return WeightReads(frozenset(outside), in_backward, reduced, unread)


def _read_together(traced: TracedLoss) -> dict[int, float]:
    """Return how much smaller a value is than the weights that only it is computed from."""
    reads, steps = weight_reads(traced), traced.layout.step_leaves
    times = Counter(read.leaf for read in reads)
    return {
        read.leaf: min(1.0, read.size / sum(steps[n].leaf.size for n in read.together))
        for read in reads
        if len(read.together) > 1 == read.iterations
        and all(times[n] == 1 and not steps[n].stacked for n in read.together)
    }


def _scanned(segment: Outside) -> set[Var]:
    """Return the variables over whose rows a scan runs, such as the weights of rolled blocks."""
    scans = [eqn for eqn in segment.eqns if eqn.primitive.name == "scan"]
    return set(variables(atom for eqn in scans for atom in eqn.invars[sum(scan_counts(eqn)) :]))


def place_weights(
    steps: Sequence[StepLeaf],
    placements: Sequence[Placement],
    plan: Plan,
    reads: WeightReads,
    cut: BlockCut | None = None,
) -> Iterator[PlacedWeight]:
    """Yield the weights of a step; ``cut`` is the program cut at its blocks, for stages."""
    of_part = {} if cut is None else _parts(cut)
    for number, (step, placement) in enumerate(zip(steps, placements, strict=True)):
        leaf, in_backward = step.leaf, number in reads.in_backward
        if not leaf.is_weight or (cut is None and number in reads.unread):
            continue
        parts: tuple[Part, ...] = of_part.get(number, ())
        regathered = in_backward
        if cut is None:
            regathered = number not in reads.outside
            parts = ("blocks",) if regathered else ()
        nbytes = leaf.nbytes / (plan.size("tensor") if "tensor" in placement.axes() else 1)
        if cut is not None and parts == ("blocks",):
            # Stages are padded to the same number of rows.
            nbytes *= cut.num_blocks / leaf.shape[0]
        # What is not trained is not updated in shards.
        trained = leaf.role == "param"
        axes = placement.axes() if trained or plan.sharding.zero == 3 else ()
        yield PlacedWeight(
            nbytes=nbytes,
            parts=parts,
            trained=trained,
            on_fsdp="fsdp" in axes,
            on_pipe=PIPE in axes,
            regathered=regathered,
            in_backward=in_backward,
            module=leaf.path.rpartition(".")[0],
            reduced=reads.reduced.get(number, 1.0),
        )


def _parts(cut: BlockCut) -> dict[int, tuple[Part, ...]]:
    """Return the parts of the model that read its trained weights, and all stacks of blocks."""
    parts: dict[int, tuple[Part, ...]] = {stack.number: ("blocks",) for stack in cut.stacks}
    regions: dict[Part, Region] = {"embedding": cut.embedding, "head": cut.head}
    for part, region in regions.items():
        for leaf in region.weights:
            parts[leaf.number] = (*parts.get(leaf.number, ()), part)
    return parts


def place_events(
    classes: DimClasses, tensor: TensorChoice, cut: BlockCut | None = None
) -> list[PlacedEvent]:
    """Return what operations send over the tensor axis: once per half block and direction."""
    if tensor.size == 1:
        return []
    part_of = {} if cut is None else _events_by_part(classes, cut)
    number_of = {id(event): number for number, event in enumerate(classes.events)}
    without_gradient = _without_gradient(classes.root)
    again = _recomputed(classes) if cut is None else set[int]()
    unneeded = _reads_of_data(classes, tensor) | _added_first(classes, tensor)
    found, seen = list[PlacedEvent](), set[tuple[str, int]]()
    for event in classes.events_of(tensor.splits):
        key = (event.kind, event.source)
        if event.kind == "spread" and number_of[id(event)] in without_gradient:
            continue
        if (event.source >= 0 and key in seen) or number_of[id(event)] in unneeded:
            continue
        seen.add(key)
        kept = bool(event.kept & tensor.splits.keys())
        kind = "all-gather" if event.blocking else "reduce-scatter" if kept else "all-reduce"
        part = part_of.get(number_of[id(event)])
        recomputed = number_of[id(event)] in again
        placed = kind, event.nbytes, event.times, event.weight, part, event.path, recomputed
        found.append(PlacedEvent(*placed))
    return found


def _recomputed(classes: DimClasses) -> set[int]:
    """Return the numbers of sums within blocks that their backward pass needs once more.

    The last sum of a block is mostly only added to its input, and is not.
    """
    found, root = set[int](), classes.root
    segments = cut_segments(root.jaxpr)
    blocks = [s.eqns for s in segments if not isinstance(s, Outside)]
    outside = [id(e) for s in segments if isinstance(s, Outside) for e in s.eqns]
    programs = [(root, eqns) for eqns in blocks]
    for position, called in root.calls.items():
        eqn = root.jaxpr.eqns[position]
        if eqn.primitive.name == "scan" and id(eqn) in outside:
            programs += [(program, tuple(program.jaxpr.eqns)) for program in called]
    for program, eqns in programs:
        inside, sums = {id(eqn) for eqn in eqns}, dict[Var, set[int]]()
        for position, eqn in enumerate(program.jaxpr.eqns):
            if id(eqn) not in inside:
                continue
            read = {n for v in variables(eqn.invars) for n in sums.get(v, ())}
            noted = program.noted.get(position, ())
            own = {n for n in noted if classes.events[n].kind in ("contract", "reduce")}
            if eqn.primitive.name not in _PASSES:
                found |= read
                read = set()
            sums.update(dict.fromkeys(eqn.outvars, own | read))
    return found


def _without_gradient(root: ProgramDims) -> set[int]:
    """Return the numbers of events through which no gradient of the loss flows.

    Double Q-learning evaluates a network only for its argmax.
    """
    eqns, loss = root.jaxpr.eqns, root.jaxpr.outvars[:2]
    live, found = set(variables(loss)), set[int]()
    for position, eqn in reversed(list(enumerate(eqns))):
        reached = any(v in live and is_inexact(aval_of(v)) for v in eqn.outvars)
        if reached and eqn.primitive.name != "stop_gradient":
            live |= set(variables(eqn.invars))
        else:
            found |= set(root.noted.get(position, ()))
    return found


def _reads_of_data(classes: DimClasses, tensor: TensorChoice) -> set[int]:
    """Return the numbers of contractions of data by a kernel both of whose dims are one class.

    Every device has the data, of which no gradient is needed, and computes its part of the result.
    """
    found, splits = set[int](), tensor.splits.keys()
    for program in all_programs(classes.root):
        for numbers in program.noted.values():
            events = {number: classes.events[number] for number in numbers}
            if not any(e.kind == "spread" and e.classes & splits for e in events.values()):
                found |= {n for n, e in events.items() if e.kind == "contract" and e.kept & splits}
    return found


def _added_first(classes: DimClasses, tensor: TensorChoice) -> set[int]:
    """Return the numbers of contractions whose partial sums are added to those of another.

    One reduction is enough for ``x @ a + y @ b``.
    """
    found, splits = set[int](), tensor.splits.keys()
    for program in all_programs(classes.root):
        uses = Counter(v for eqn in program.jaxpr.eqns for v in variables(eqn.invars))
        uses.update(variables(program.jaxpr.outvars))
        partial: dict[Var, int] = {}
        for position, eqn in enumerate(program.jaxpr.eqns):
            events = {n: classes.events[n] for n in program.noted.get(position, ())}
            own = [n for n, e in events.items() if e.kind == "contract" and e.classes & splits]
            sums = [partial[v] for v in variables(eqn.invars) if v in partial and uses[v] == 1]
            if own and not any(events[n].kept & splits for n in own):
                partial[eqn.outvars[0]] = own[0]
            elif sums and len(sums) == len(eqn.invars) and eqn.primitive.name in _KEEPS_SUMS:
                found.update(sums[1:])
                partial[eqn.outvars[0]] = sums[0]
    return found


def _events_by_part(classes: DimClasses, cut: BlockCut) -> dict[int, Part]:
    """Return the part of the model that each event belongs to, by its number."""
    of_eqn: dict[int, Part] = {
        **{id(eqn): "head" for eqn in cut.head.eqns},
        **{id(eqn): "embedding" for eqn in cut.embedding.eqns},
        id(cut.scan.eqn): "blocks",
    }
    root, parts = classes.root, dict[int, Part]()
    for position, events in root.noted.items():
        if part := of_eqn.get(id(root.jaxpr.eqns[position])):
            parts |= dict.fromkeys(events, part)
    return parts

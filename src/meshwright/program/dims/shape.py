"""Rules for operations that move, group, repeat or join dims without computing."""

from collections.abc import Iterator, Mapping

from meshwright.program.dims.factors import Dim, Dims
from meshwright.program.dims.op import Op, Rule, Shape, pick, without


def transpose(op: Op) -> list[Dims]:
    """Reorder the dims."""
    return [pick(op.dims(), op.params["permutation"])]


def squeeze(op: Op) -> list[Dims]:
    """Drop dims of size 1."""
    return [without(op.dims(), (d % len(op.dims()) for d in op.params["dimensions"]))]


def broadcast(op: Op) -> list[Dims]:
    """Keep the dims that keep their size; the operand is repeated along the others."""
    dims, kept = list(op.fresh()), set[int]()
    for position, target in enumerate(op.params["broadcast_dimensions"]):
        if op.shape()[position] == op.out_shape()[target]:
            dims[target] = op.dims()[position]
            kept.add(target)
    op.spread(0, without(tuple(dims), kept))
    return [tuple(dims)]


def reshape(op: Op) -> list[Dims]:
    """Match the factors of the old and new dims; what does not match has to be gathered."""
    old, new = op.dims(), list(op.fresh())
    for sources, targets in paired_dims(op.shape(), op.out_shape()):
        if len(sources) == len(targets) == 1:
            new[targets[0]] = old[sources[0]]
            continue
        flat = [factor for d in sources for factor in old[d]]
        wanted = tuple(factor for d in targets for factor in new[d])
        if unmatched := op.unify(tuple(flat), wanted):
            op.gather([unmatched])
            op.make([wanted])
    return [tuple(new)]


def paired_dims(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the shortest runs of old and new dims with equal products, in order."""
    if 0 in old:
        return
    i = j = 0
    while i < len(old) or j < len(new):
        sources, targets, a, b = list[int](), list[int](), 1, 1
        while not (sources or targets) or a != b:
            if j >= len(new) or (i < len(old) and a <= b):
                a *= old[i]
                sources.append(i)
                i += 1
            else:
                b *= new[j]
                targets.append(j)
                j += 1
        yield sources, targets


def tile(op: Op) -> list[Dims]:
    """Repeat the whole operand: the copies are the major factor."""
    copies = tuple(op.factors.dim(reps) for reps in op.params["reps"])
    op.spread(0, copies)
    padded = ((),) * (len(copies) - len(op.dims())) + op.dims()
    return [tuple(outer + dim for outer, dim in zip(copies, padded, strict=True))]


def concatenate(op: Op) -> list[Dims]:
    """Join operands along a dim; equal parts become the minor factor of the result."""
    axis = op.params["dimension"]
    op.gather([op.dims(i)[axis] for i in range(len(op.operands))])
    joined = _join(op, axis)
    first = op.dims()
    for value in op.operands[1:]:
        op.unify_all(without(first, [axis]), without(value.dims, [axis]))
    return [(*first[:axis], joined, *first[axis + 1 :])]


def _join(op: Op, axis: int) -> Dim:
    parts = [op.shape(i)[axis] for i in range(len(op.operands))]
    if len(set(parts)) > 1:
        joined = op.factors.dim(op.out_shape()[axis])
        op.make([joined])
        return joined
    count = op.factors.dim(len(parts))
    op.distinguish([count])
    for value in op.operands[1:]:
        op.unify(op.dims()[axis], value.dims[axis])
    return count + op.dims()[axis]


def stack(op: Op) -> list[Dims]:
    """Join operands along a new dim."""
    axis = op.params["axis"] % len(op.out_shape())
    for value in op.operands[1:]:
        op.unify_all(op.dims(), value.dims)
    count = op.factors.dim(len(op.operands))
    op.distinguish([count])
    return [(*op.dims()[:axis], count, *op.dims()[axis:])]


def unstack(op: Op) -> list[Dims]:
    """Split an array into its slices along a dim."""
    axis = op.params["axis"] % len(op.dims())
    op.distinguish([op.dims()[axis]])
    return [without(op.dims(), [axis])] * len(op.out_avals)


def reverse(op: Op) -> list[Dims]:
    """Reverse dims: they stay the same, but every index moves."""
    op.gather(pick(op.dims(), op.params["dimensions"]))
    return [op.dims()]


RULES: Mapping[str, Rule] = {
    "transpose": transpose,
    "squeeze": squeeze,
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "tile": tile,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "rev": reverse,
}

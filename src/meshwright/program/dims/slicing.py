"""Rules for operations that read or write parts of an array: slices, padding, gather, scatter."""

from collections.abc import Mapping, Sequence

from meshwright.program.dims.factors import Dim, Dims
from meshwright.program.dims.op import Op, Rule, pick, positions_without, without


def part_of(op: Op, dim: Dim, size: int, start: int, stride: int, length: int) -> Dim:
    """Return the dim of a slice of a dim.

    One of ``n`` equal blocks is the minor factor of ``n × length``; every ``n``-th index is the
    major factor of ``length × n``. Any other slice is unrelated to the whole.
    """
    if length == size:
        return dim
    part = op.factors.dim(length)
    others = op.factors.dim(size // length) if length and size % length == 0 else ()
    if others and stride == 1 and start % length == 0:
        nested = not op.unify(dim, others + part)
    elif others and stride == size // length and start < stride:
        nested = not op.unify(dim, part + others)
    else:
        nested = False
    if nested:
        op.distinguish([others])
        return part
    return _cut(op, dim, length)


def _cut(op: Op, dim: Dim, length: int) -> Dim:
    """Return the dim of an irregular slice."""
    part = op.factors.dim(length)
    op.gather([dim])
    op.make([part])
    return part


def static_slice(op: Op) -> list[Dims]:
    """Slice at known positions."""
    starts = op.params["start_indices"]
    strides = op.params["strides"] or (1,) * len(starts)
    parts = zip(op.dims(), op.shape(), starts, strides, op.out_shape(), strict=True)
    return [tuple(part_of(op, *part) for part in parts)]


def split(op: Op) -> list[Dims]:
    """Cut a dim into parts."""
    axis, start, results = op.params["axis"], 0, list[Dims]()
    for length in map(int, op.params["sizes"]):
        part = part_of(op, op.dims()[axis], op.shape()[axis], start, 1, length)
        results.append((*op.dims()[:axis], part, *op.dims()[axis + 1 :]))
        start += length
    return results


def same_size_only(op: Op) -> list[Dims]:
    """Pass on the dims that keep their size."""
    cut = [i for i, size in enumerate(op.out_shape()) if op.shape()[i] != size]
    return [_cut_at(op, cut)]


def pad(op: Op) -> list[Dims]:
    """Grow or trim dims; shifting one at equal size also moves every index."""
    shifted = [i for i, config in enumerate(op.params["padding_config"]) if any(config)]
    return [_cut_at(op, shifted)]


def _cut_at(op: Op, positions: Sequence[int]) -> Dims:
    """Return the operand's dims with those at some positions replaced by parts."""
    shape = op.out_shape()
    return tuple(
        _cut(op, dim, shape[i]) if i in positions else dim for i, dim in enumerate(op.dims())
    )


def dynamic_update_slice(op: Op) -> list[Dims]:
    """Overwrite a part: only dims the update covers in full stay independent."""
    for i, (whole, part) in enumerate(zip(op.shape(), op.shape(1), strict=True)):
        if whole == part:
            op.unify(op.dims()[i], op.dims(1)[i])
        else:
            op.gather([op.dims()[i]])
            op.gather([op.dims(1)[i]], 1)
    return [op.dims()]


def gather(op: Op) -> list[Dims]:
    """Look up by index: whole slices and the dims of the indices are dims of the result."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    table, indices = op.dims(0), op.dims(1)
    paired = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_paired = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    op.unify_all(pick(table, paired), pick(indices, index_paired))

    dims, passed = list(op.fresh()), list[Dim]()
    sliced = positions_without(len(table), numbers.collapsed_slice_dims, paired)
    for target, d in zip(numbers.offset_dims, sliced, strict=True):
        if sizes[d] == op.shape()[d]:
            dims[target] = table[d]
            passed.append(table[d])
        else:
            op.gather([table[d]])
            op.make([dims[target]])
    positions = positions_without(len(dims), numbers.offset_dims)
    for target, dim in zip(positions, indices[:-1], strict=True):
        dims[target] = dim

    picked = pick(table, (d for d in numbers.collapsed_slice_dims if op.shape()[d] > 1))
    op.reduce(picked)
    if op.operands[1].has_data:
        op.use(0, "lookup", picked)
        op.use(0, "entry", passed)
    op.spread(0, without(indices[:-1], index_paired))
    return [tuple(dims)]


def scatter(op: Op) -> list[Dims]:
    """Write updates at indices: each device has its part of the target, updates are summed."""
    numbers = op.params["dimension_numbers"]
    target, indices, updates = op.dims(0), op.dims(1), op.dims(2)
    paired = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_paired = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    op.unify_all(pick(target, paired), pick(indices, index_paired))

    windows = positions_without(len(target), numbers.inserted_window_dims, paired)
    for update_dim, d in zip(numbers.update_window_dims, windows, strict=True):
        if op.shape(2)[update_dim] == op.shape()[d]:
            op.unify(target[d], updates[update_dim])
        else:
            op.gather([target[d]])
            op.gather([updates[update_dim]], 2)
    positions = positions_without(len(updates), numbers.update_window_dims)
    for update_dim, dim in zip(positions, indices[:-1], strict=True):
        op.unify(updates[update_dim], dim)

    written = pick(target, (d for d in numbers.inserted_window_dims if op.shape()[d] > 1))
    op.spread(2, written)
    op.reduce(without(indices[:-1], index_paired))
    return [target]


RULES: Mapping[str, Rule] = {
    "slice": static_slice,
    "split": split,
    "dynamic_slice": same_size_only,
    "pad": pad,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **{
        f"scatter{mark}{kind}": scatter
        for mark in ("-", "_")
        for kind in ("add", "sub", "mul", "min", "max", "apply")
    },
    "scatter": scatter,
}

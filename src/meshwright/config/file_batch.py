"""The batch of a plan in a file, whose numbers a person may have edited one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.config.batch import describe_replicas
from meshwright.errors import UserError
from meshwright.mesh.axes import AXES, is_whole, resolve_alias

_SIZES = ("global_batch_size", "micro_batch_size", "replicas", "gradient_accumulation_steps")


def check_file_batch(values: Mapping[str, Any], is_plan: Callable[[dict[str, Any]], bool]) -> None:
    """Refuse a batch that contradicts itself or the mesh, and say which numbers would work.

    Keys that are missing or unknown, and values that are no sizes, are left to others.

    Args:
        values: the plan as it is in the file.
        is_plan: whether the values of a plan are valid.
    """
    mesh, batch = values.get("mesh"), values.get("batch")
    if not isinstance(mesh, Mapping) or not isinstance(batch, Mapping):
        return
    axes = {resolve_alias(str(axis)): size for axis, size in mesh.items()}
    if not axes.keys() <= set(AXES):
        return
    data, fsdp = axes.get("data", 1), axes.get("fsdp", 1)
    sizes: dict[str, Any] = {name: batch.get(name) for name in _SIZES}
    if not all(is_whole(size) and size > 0 for size in (data, fsdp, *sizes.values())):
        return
    total, micro, written, steps = sizes.values()
    replicas, product = data * fsdp, micro * written * steps
    if written == replicas and total == product:
        return
    choices = [
        changed
        for changed in _choices(sizes, replicas)
        if is_plan({**values, "batch": {**batch, **changed}})
    ]
    choices = choices or [{"replicas": replicas, "global_batch_size": micro * replicas * steps}]
    fix = "; or ".join(_written(sizes, changed) for changed in _ends(choices))
    if written != replicas:
        raise UserError(
            "the plan's batch does not fit its mesh",
            why=f"data={data} × fsdp={fsdp} = {replicas}, but batch.replicas is {written}",
            fix=f"write {fix}",
        )
    raise UserError(
        "the batch sizes contradict each other",
        why=f"micro_batch_size {micro} × {describe_replicas(replicas)} × "
        f"gradient_accumulation_steps {steps} = {product}, but global_batch_size is {total}",
        fix=f"write {fix}",
    )


def _choices(sizes: Mapping[str, int], replicas: int) -> Iterator[dict[str, int]]:
    """Yield sizes that satisfy the equation; those with the same global batch first."""
    total, micro, _, steps = sizes.values()
    if total % (micro * replicas) == 0:
        yield {"replicas": replicas, "gradient_accumulation_steps": total // (micro * replicas)}
    if total % (steps * replicas) == 0:
        yield {"replicas": replicas, "micro_batch_size": total // (steps * replicas)}
    yield {"replicas": replicas, "global_batch_size": micro * replicas * steps}


def _ends(choices: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the first and the last choice: the same global batch, and the same microbatches."""
    return [choices[0], *choices[1:][-1:]]


def _written(sizes: Mapping[str, int], changed: Mapping[str, int]) -> str:
    """Return changes as they are written in the file, and the equation that they make true."""
    keys = [f"batch.{name}: {size}" for name, size in changed.items() if sizes[name] != size]
    total, *factors = ({**sizes, **changed}).values()
    return f"{' and '.join(keys)} ({total} = {' × '.join(map(str, factors))})"

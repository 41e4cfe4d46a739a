"""A check of the compiled pipeline: no exchange may involve stages that do not take part."""

from __future__ import annotations

from jax.sharding import Mesh

from meshwright.compiled.divergence import divergent_permutes
from meshwright.errors import Setting, UserError
from meshwright.mesh.axes import PIPE


def check_exchanges(program: str, mesh: Mesh) -> None:
    """Refuse a compiled program whose stages would wait for each other forever.

    Args:
        program: its text, ``compiled.as_text()``.
        mesh: the mesh it is for.
    """
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    permutes = divergent_permutes(program, sizes, PIPE)
    if not permutes:
        return
    first = permutes[0]
    where = f" in `{first.module}`" if first.module else ""
    others = {a: n for a, n in sizes.items() if a != PIPE and n > 1}
    divided = " and ".join(f"{axis}={size}" for axis, size in others.items())
    raise UserError(
        f"the model cannot be divided into pipeline stages on this mesh: the compiler moves "
        f"pieces of an array for `{first.operation}`{where} between the devices of a stage",
        why=f"the array is divided over {divided}, and stages, which work at different times, "
        "would wait for each other forever",
        fix=f"leave out one of these axes, keep the array whole ({Setting('sharding.rules')}), or "
        f"leave out {Setting('mesh.pipe')}",
    )

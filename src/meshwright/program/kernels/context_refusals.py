"""Why rows of a model cannot be divided over the context axis, and what to write instead."""

from meshwright.config.microbatches import multiples_around
from meshwright.errors import Setting, UserError
from meshwright.program.dims.classes import DimClasses
from meshwright.program.jaxpr.equations import Equation
from meshwright.program.jaxpr.walks import where
from meshwright.text.units import counted, either


def one_by_one(eqn: Equation, size: int) -> UserError:
    """Return the error for a loop whose steps wait for each other."""
    return _undivided(
        size,
        f"it goes through positions one after the other ({where(eqn)})",
        why="each position waits for the one before it, and devices would for each other",
    )


def by_blocks(eqn: Equation, size: int) -> UserError:
    """Return the error for attention that is written as a loop over keys."""
    return _undivided(
        size,
        f"it reads their keys one block after the other ({where(eqn)})",
        why="devices hold different keys, and such a loop would wait for each of them",
        fix="write attention as softmax(scores) · values or call jax.nn.dot_product_attention, of "
        "which kernels never store the scores; or ",
    )


def uneven(eqn: Equation, size: int) -> UserError:
    """Return the error for a loop whose steps devices cannot share equally."""
    steps = eqn.params["length"]
    return _undivided(
        size,
        f"it goes through them in {counted(steps, 'step')} ({where(eqn)})",
        why=f"devices take equal numbers of steps, and {steps} is not divisible by {size}",
        fix=f"divide the rows into {either(multiples_around(steps, size))} steps, or ",
    )


def _undivided(size: int, what: str, *, why: str, fix: str = "") -> UserError:
    return UserError(
        f"{Setting('mesh.context', size)} cannot divide the rows of this model: {what}",
        why=why,
        fix=f"{fix}use {Setting('mesh.fsdp', size)} for these devices",
    )


def no_positions(classes: DimClasses, size: int) -> UserError:
    """Return why a program has no positions that could be divided."""
    for program, eqn in classes.equations():
        if eqn.primitive.name in ("scan", "while") and program.values[eqn.outvars[-1]].has_data:
            return one_by_one(eqn, size)
    return UserError(
        f"{Setting('mesh.context', size)} finds no positions to divide",
        why="it divides the dim that attention sums over, and this loss has no attention",
        fix=f"use {Setting('mesh.fsdp', size)} or {Setting('mesh.data', size)} for these devices",
    )


def too_short(length: int, size: int) -> UserError:
    """Return the error for rows with fewer positions than devices."""
    return UserError(
        f"{Setting('mesh.context', size)} has more parts than a row has positions",
        why=f"attention reads {counted(length, 'position')}, and each device needs one at least",
        fix=f"write {Setting('mesh.context')} up to {length}, or use longer rows",
    )


def unknown_attention(eqn: Equation, size: int) -> UserError:
    """Return the error for a product of positions with positions that is no known attention."""
    return UserError(
        f"{Setting('mesh.context', size)} does not know this attention: what a product of "
        f"positions with positions becomes is not multiplied by values ({where(eqn)})",
        why="devices hold different positions, and must know which of the two are the keys",
        fix=f"use {Setting('mesh.fsdp', size)} or {Setting('mesh.tensor', size)} for these "
        "devices, or write attention as softmax(scores) · values",
    )

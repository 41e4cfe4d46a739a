"""Optimizers that cannot be used, refused with the reason before anything is compiled."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
import optax

from meshwright.errors import MeshwrightError, UserError, first_line
from meshwright.runtime.user_code import add_note, users_frames


@contextmanager
def refusing(call: str) -> Generator[None]:
    """Report what an optimizer raises in its ``init`` or ``update``.

    An exception from the user's own code propagates; one from optax itself says what the
    optimizer needs and does not get.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        if users_frames(error):
            add_note(error, f"while calling the optimizer's {call}")
            raise
        raise UserError(
            f"the optimizer's {call} failed: {first_line(error)}",
            why="an optimizer gets gradients, its state and params, and what it takes of value, "
            "grad, value_fn and grad_fn; masks and labels get params as nested dicts",
            fix="choose an optimizer that needs no more than these, and masks and labels that fit",
        ) from error


def check_optimizer_state(state: Any) -> None:
    """Refuse optimizers whose state shows that they need another kind of parameters."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.LookaheadState))
    if any(isinstance(node, optax.LookaheadState) for node in nodes):
        raise UserError(
            "optax.lookahead cannot be used",
            why="it updates pairs of fast and slow parameters, and a model has one of each",
            fix="use optax.contrib.schedule_free_adamw, which averages inside its own state",
        )

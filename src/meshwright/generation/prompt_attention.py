"""Attention over whole prompts, by the kernels that training uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import ClosedJaxpr, Value, Var
from meshwright.program.kernels.fused_attention import check_cudnn, make_attend, run_attention
from meshwright.program.kernels.match_attention import makes_weights, match_attention
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.surroundings import Scope


class PromptAttention(NamedTuple):
    """An attention of a program.

    Attributes:
        operands: its queries, keys and values.
        output: what it computes.
        run: computes it for all rows.
    """

    operands: tuple[Var, Var, Var]
    output: Var
    run: Callable[[Value, Value, Value], Value]


def find_attention(closed: ClosedJaxpr, kernel: str) -> list[PromptAttention]:
    """Return the attentions of a program that a kernel computes.

    Args:
        closed: the program.
        kernel: ``cudnn``, ``xla``, or empty for none.
    """
    found: list[PromptAttention] = []
    if not kernel:
        return found
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    scope = Scope(ProgramDims(closed.jaxpr, "", 1), consts)
    for end in makes_weights(scope.graph):
        try:
            # Masks are evaluated, also while a function that reads prompts is traced.
            with jax.ensure_compile_time_eval():
                match = match_attention(scope, end)
            if match is None or match.operands.leaves or match.operands.function:
                continue
            if kernel == "cudnn":
                check_cudnn(match.operands, "gpu")
        except NotReplaced:
            continue
        own = match.operands
        run = partial(run_attention, own, make_attend(own, kernel))
        found.append(PromptAttention((own.query, own.key, own.value), match.output, run))
    return found

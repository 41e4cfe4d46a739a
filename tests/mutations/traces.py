"""Tracing and initial values: the program that both sides run is not the user's loss."""

import dataclasses

from mutations.mutation import Mutation
from mutations.proofs_of import DATA, FSDP_PLAIN
from mutations.sabotage import replace

from meshwright.program.trace import traced_loss as trace
from meshwright.step import assemble


def _larger(right):
    def read(out):
        objective, metrics = right(out)
        return dataclasses.replace(objective, total=1.01 * objective.total), metrics

    return read


def _without_statistics(right):
    def normalize(traced, paths, classes):
        closed = right(traced, paths, classes)
        given = [closed.jaxpr.invars[paths.index(path)] for path in ("norm.mean", "norm.var")]
        outputs = [*closed.jaxpr.outvars[:-2], *given]
        return closed.replace(jaxpr=closed.jaxpr.replace(outvars=outputs))

    return normalize


def _in_eval_mode(right):
    def trace_loss(loss, *rest):
        def evaluated(model, batch):
            model.dropout.deterministic = True
            return loss(model, batch)

        return right(evaluated, *rest)

    return trace_loss


def _in_eval_mode_everywhere(patch):
    from meshwright.proof import run
    from meshwright.step import step_program

    for owner in (run, step_program):
        replace(owner, "trace_loss", _in_eval_mode)(patch)


def _other_seed(right):
    return lambda self, seed, **options: right(self, seed + 1, **options)


MUTATIONS = (
    Mutation(
        "the traced loss is not the loss as written",
        replace(trace, "read_loss", _larger),
        FSDP_PLAIN,
        ("as_written loss", "as_written gradients"),
        names="step 1",
        everywhere=True,
        only=True,
    ),
    Mutation(
        "the trace drops the new statistics",
        replace(trace, "normalize", _without_statistics),
        DATA,
        ("as_written state",),
        names="norm.mean",
        everywhere=True,
        only=True,
    ),
    Mutation(
        "the loss is traced without dropout",
        _in_eval_mode_everywhere,
        DATA,
        ("as_written loss", "as_written gradients"),
        names="step 1",
        everywhere=True,
    ),
    Mutation(
        "the mesh starts from another seed",
        replace(assemble.Assembled, "init", _other_seed),
        FSDP_PLAIN,
        ("own_precision initial values",),
        names="down.kernel",
        seen="ranks that initialize with different seeds",
    ),
)

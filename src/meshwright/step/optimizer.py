"""The optimizer on flat leaves: any optax transformation, its state sharded like the params."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from meshwright.errors import MeshwrightError, UserError, first_line
from meshwright.program.evaluate.widen import widened
from meshwright.program.jaxpr.names import nest
from meshwright.program.trace.layout import Layout, StepLeaf
from meshwright.program.trace.model_leaves import Leaf
from meshwright.runtime.user_code import add_note, users_frames
from meshwright.sharding.placement import Placement, Reason, add_fsdp, add_pipe
from meshwright.step.average import EMA
from meshwright.step.objective import Objective, runs_without_loss
from meshwright.step.stackable import Name, owners, treats_stacks_alike
from meshwright.text.json_text import flatten


@dataclass(frozen=True)
class OptimizerLeaf:
    """One leaf of the optimizer's state, by its path there: ``0.mu.blocks.0.mlp.up.kernel``.

    ``param`` is the number of the parameter it belongs to; None for counters and the like.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement
    param: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


SMALL = 1024
"""A leaf shaped unlike its parameter stays replicated if it has fewer elements than this."""


class FlatOptimizer:
    """An optax transformation as a function of flat leaves.

    Elementwise optimizers run on stacked leaves directly; others (muon, adafactor, lamb) get the
    matrix of each block, so that rolling blocks changes nothing. Which of them it is, if it is not
    given, is found by comparing all blocks of a stack, or the first and the last.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        layout: Layout,
        placements: Sequence[Placement],
        sizes: Mapping[str, int],
        *,
        stacks_alike: bool | None = None,
        compared: Literal["all", "ends"] = "all",
    ) -> None:
        self._transformation = transformation
        self._params = layout.select("param")
        self._leaves = layout.leaves
        structs = [step.leaf.struct for step in self._params]
        stacked = any(step.stacked for step in self._params)
        if stacked and stacks_alike is None:
            stacks_alike = self._treats_stacks_alike(structs, compared)
        self.stacks_alike = bool(stacks_alike)
        self._unstack = stacked and not self.stacks_alike
        with refusing("init"):
            abstract = jax.eval_shape(self._initial, structs)
        check_optimizer_state(abstract)
        state, self._treedef = jax.tree_util.tree_flatten_with_path(abstract)
        names = jax.tree_util.keystr
        self._state = [(names(path, simple=True, separator="."), leaf) for path, leaf in state]
        numbers = self._tree([Name(n) for n in range(len(self._params))])
        # For each leaf of the state, the number of its parameter.
        self._owned_by = owners(transformation, abstract, numbers)
        self.leaves = self.placed(placements, sizes)

    def placed(
        self, placements: Sequence[Placement], sizes: Mapping[str, int]
    ) -> tuple[OptimizerLeaf, ...]:
        """Return the leaves of the state as they would be placed on another mesh."""
        return tuple(
            self._describe(path, leaf, owner, placements, sizes)
            for (path, leaf), owner in zip(self._state, self._owned_by, strict=True)
        )

    def init(self, params: Sequence[Any]) -> list[Any]:
        """Return the initial optimizer leaves."""
        return jax.tree.leaves(self._initial(params))

    def update(
        self,
        gradients: Sequence[Any],
        leaves: Sequence[Any],
        params: Sequence[Any],
        objective: Objective | None = None,
        *,
        wide: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Return the new parameters and optimizer leaves.

        Line searches and the like use the objective. ``wide`` computes in float64 what the
        optimizer computes in float32, such as a schedule.
        """
        state = jax.tree.unflatten(self._treedef, leaves)
        arguments = (self._tree(gradients), state, self._tree(params))
        own = (self._transformation, self._tree, self._flat)
        extra = objective.arguments(*own) if objective else {}

        def update(gradients: Any, state: Any, tree: Any, **extra: Any) -> tuple[Any, Any]:
            updates, state = self._transformation.update(gradients, state, tree, **extra)
            return optax.apply_updates(tree, updates), state

        with refusing("update"):
            if wide and runs_without_loss(update, arguments):
                changed, state = widened(update)(*arguments)
            else:
                changed, state = update(*arguments, **extra)
        return self._flat(changed), jax.tree.leaves(state)

    @property
    def averages(self) -> bool:
        """Whether the state has a moving average of the parameters."""
        return any(path.startswith(f"{EMA}.") for path, _ in self._state)

    def average(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the averages in the optimizer's leaves, as parameters."""
        averages = self._flat(jax.tree.unflatten(self._treedef, leaves).ema)
        return [a.astype(p.leaf.dtype) for a, p in zip(averages, self._params, strict=True)]

    def _initial(self, params: Sequence[Any]) -> Any:
        return self._transformation.init(self._tree(params))

    def _tree(self, values: Sequence[Any]) -> dict[Any, Any]:
        """Return leaves as optax gets them: nested dicts by path."""
        pairs = (self._pieces(step, v) for step, v in zip(self._params, values, strict=True))
        return nest(dict(pair for pieces in pairs for pair in pieces), escaped=True)

    def _pieces(self, step: StepLeaf, value: Any) -> list[tuple[str, Any]]:
        if not (self._unstack and step.stacked):
            return [(step.leaf.path, value)]
        return [
            (self._leaves[source].path, _slice(value, row))
            for row, source in zip(step.source_rows, step.sources, strict=True)
        ]

    def _flat(self, tree: Mapping[Any, Any]) -> list[Any]:
        by_path = dict(flatten(tree))
        return [
            step.join([by_path[self._leaves[source].path] for source in step.sources])
            if self._unstack and step.stacked
            else by_path[step.leaf.path]
            for step in self._params
        ]

    def _treats_stacks_alike(
        self, structs: Sequence[Any], compared: Literal["all", "ends"]
    ) -> bool:
        stacked = {s.leaf.path: x for s, x in zip(self._params, structs, strict=True)}
        single: dict[str, Any] = {}
        stack_of: dict[str, str] = {}
        for step in self._params:
            ends = (step.sources[0], step.sources[-1])
            for leaf in (self._leaves[n] for n in (step.sources if compared == "all" else ends)):
                single[leaf.path], stack_of[leaf.path] = leaf.struct, step.leaf.path
        return treats_stacks_alike(
            self._transformation,
            stacked=nest(stacked, escaped=True),
            single=nest(single, escaped=True),
            stack_of=stack_of,
        )

    def _describe(
        self,
        text: str,
        leaf: Any,
        owner: int | None,
        placements: Sequence[Placement],
        sizes: Mapping[str, int],
    ) -> OptimizerLeaf:
        placement = Placement(text, ((),) * len(leaf.shape))
        if owner is not None:
            like = placements[owner]
            unstacked = self._unstack and self._params[owner].stacked
            dims = like.dims[1:] if unstacked else like.dims
            own = Leaf(text, tuple(leaf.shape), leaf.dtype, "param", "optimizer")
            if _fits(dims, leaf.shape, sizes):
                placement = Placement(text, dims, (Reason(f"like {like.path}"),))
            elif sizes.get("fsdp", 1) > 1:
                placement = add_fsdp(own, placement, size=sizes["fsdp"], smallest=SMALL)
            if "pipe" in like.axes() - placement.axes():
                # A single block belongs to no stage, so all stages share its state.
                placement = add_pipe(own, placement, sizes=sizes, smallest=SMALL)
        return OptimizerLeaf(text, tuple(leaf.shape), leaf.dtype, placement, owner)


def _slice(value: Any, number: int) -> Any:
    if isinstance(value, Name):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
    return value[number]


def _fits(dims: Sequence[Sequence[str]], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    if len(dims) != len(shape):
        return False
    parts = (math.prod(sizes.get(axis, 1) for axis in axes) for axes in dims)
    return not any(size % count for size, count in zip(shape, parts, strict=True))


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
            why="it updates pairs of fast and slow parameters, and a model has only one set",
            fix="use optax.contrib.schedule_free_adamw, which averages inside its own state",
        )

"""A function of a model and a batch as a program of their leaves, with what it changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import UserError
from meshwright.program.jaxpr.equations import ClosedJaxpr, Jaxpr
from meshwright.program.jaxpr.walks import origin
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.precision_policy import cast_floats, follow_policy
from meshwright.program.trace.python_state import (
    AttributeChange,
    PythonState,
    apply_changes,
    describe_changes,
    refuse_effect,
    refuse_kept_arrays,
)
from meshwright.program.trace.replaced_jax import brief_about_sharding
from meshwright.program.trace.requested_layouts import recorded_layouts
from meshwright.program.trace.scopes import module_scopes
from meshwright.runtime.user_code import doing, explaining_axis_names


@dataclass(eq=False)
class ModelProgram:
    """Traces ``function(model, batch)``, whose list of arrays becomes the program's results.

    The new values of all state follow, and those of the parameters that the model writes to.

    Attributes:
        function: from a model and a batch to a list of arrays.
        batch_tree: the tree structure of the batch.
        compute_dtype: what weights are cast to; None for no cast.
        remarks: what the function did while it was traced that the program does not repeat.
        paths_by_class: by name of a class, the paths of the model's modules.
    """

    function: Callable[[Any, Any], list[Any]]
    leaves: ModelLeaves
    batch_tree: Any
    compute_dtype: Any
    remarks: list[str] = field(default_factory=list[str])
    paths_by_class: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    _changed: set[int] = field(default_factory=set[int])
    _same: set[int] = field(default_factory=set[int])
    _python_changes: list[AttributeChange] = field(default_factory=list[AttributeChange])

    def __post_init__(self) -> None:
        self._weights = {i for i, leaf in enumerate(self.leaves.leaves) if leaf.is_weight}

    @property
    def written(self) -> tuple[int, ...]:
        """The numbers of the parameters that the model writes to."""
        return tuple(sorted(self._changed & set(self.leaves.indices("param"))))

    def trace(self, structs: Sequence[Any]) -> ClosedJaxpr:
        """Trace the program for leaves of the model and the batch of these shapes."""
        traced = self._trace(structs)
        if changed := self._changed & self._weights:
            self._same = self._same_weights(traced.jaxpr, changed)
            self._changed -= self._same
            if self._same or self.compute_dtype is not None:
                # Weights that the loss changes (a moving average) must not be rounded.
                self._python_changes.clear()
                traced = self._trace(structs)
        if self._python_changes:
            first = list(self._python_changes)
            if str(self._trace(structs)) != str(traced):
                refuse_effect(first)
            self.remarks = describe_changes(self._python_changes)
        return traced

    def _trace(self, structs: Sequence[Any]) -> ClosedJaxpr:
        # A new function each time: JAX would return what it has traced before.
        return jax.make_jaxpr(lambda *inputs: self._run(inputs))(*structs)

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        count = len(self.leaves.leaves)
        cast = self._weights - self._changed
        values = [
            self._in_compute_dtype(leaf, value) if i in cast else value
            for i, (leaf, value) in enumerate(zip(self.leaves.leaves, inputs, strict=False))
        ]
        model = self.leaves.merge(values)
        follow_policy(model, self.compute_dtype)
        apply_changes(model, self._python_changes)
        before = PythonState(model)
        with module_scopes(model, self.compute_dtype) as paths, brief_about_sharding():
            self.paths_by_class.update(paths)
            with doing("tracing the loss"), explaining_axis_names(), recorded_layouts():
                results = self.function(model, jax.tree.unflatten(self.batch_tree, inputs[count:]))
        self._python_changes[:] = before.changes()
        refuse_kept_arrays(self._python_changes)
        after = self.leaves.values(model)
        new = {i for i in range(count) if after[i] is not values[i]}
        self._changed |= new - self._same
        kept = [
            _kept_value(self.leaves.leaves[i], after[i]) if i in self._changed else inputs[i]
            for i in self._kept()
        ]
        return [*results, *kept]

    def _in_compute_dtype(self, leaf: Leaf, value: Any) -> Any:
        if leaf.original_dtype is not None:
            # A frozen weight that is kept in another format than the model has it in.
            return value.astype(self.compute_dtype or leaf.original_dtype)
        return cast_floats(value, jnp.float32, self.compute_dtype)

    def _kept(self) -> list[int]:
        return [*self.leaves.indices("state"), *self.written]

    def _same_weights(self, jaxpr: Jaxpr, weights: set[int]) -> set[int]:
        """Return the weights among these that the program returns as they were."""
        # The model gets weights in the compute dtype, so casts from and to it change nothing.
        compute = self.compute_dtype
        casts_to = () if compute is None else (jnp.dtype(jnp.float32), jnp.dtype(compute))
        kept = self._kept()
        outputs = zip(kept, jaxpr.outvars[len(jaxpr.outvars) - len(kept) :], strict=True)
        return {
            i
            for i, atom in outputs
            if i in weights and origin(jaxpr, atom, casts_to) is jaxpr.invars[i]
        }


def _kept_value(leaf: Leaf, value: Any) -> Any:
    """Return the new value of a leaf that the model has written to."""
    if tuple(value.shape) != leaf.shape:
        raise UserError(
            f"the model changes the shape of `{leaf.path}` in its call",
            why=f"it is {list(leaf.shape)} before and {list(value.shape)} after the call, and a "
            "step is compiled for one shape",
            fix="write values of the same shape, or make a new variable",
        )
    return value.astype(leaf.dtype)

"""Building a model from its source: its structure without computing weights, and initial values.

What a constructor computes without random numbers (tables, masks, sizes) is computed at once where
the structure is read. The model may therefore keep it anywhere, also in closures and static
attributes, and read it as Python numbers, as if it were built outside of a trace.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from meshwright.program.jaxpr.equations import ClosedJaxpr
from meshwright.program.trace.model_leaves import ModelLeaves, split_model
from meshwright.program.trace.replaced_jax import brief_about_sharding
from meshwright.program.trace.trained_leaves import Trained
from meshwright.trees import is_key

ModelSource = Callable[[nnx.Rngs], Any]
"""Builds the model from its random streams."""

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises if Python code reads the value of an array that is only traced."""


def describe_model(source: ModelSource, trainable: Trained = nnx.Param) -> ModelLeaves:
    """Return the structure and leaves of a model, without computing its random weights.

    An NNX filter, or adapters, says which variables are trained.
    """
    found: list[ModelLeaves] = []
    _trace_shapes(source, lambda model: found.append(split_model(model, trainable)))
    return found[0] if found else split_model(_build(source, _key(0)), trainable)


def abstract_model(source: ModelSource) -> Any:
    """Return a model whose arrays have shapes and no values, with its Python parts as they are."""
    graphs: list[Any] = []

    def split(model: Any) -> Any:
        graph, state = nnx.split(model)
        graphs.append(graph)
        return state

    state = _trace_shapes(source, split)
    if not graphs:
        return _build(source, _key(0))
    arrays = [(path, _stand_in(value)) for path, value in nnx.to_flat_state(state)]
    return nnx.merge(graphs[0], nnx.from_flat_state(arrays))


def _trace_shapes(source: ModelSource, read: Callable[[Any], Any]) -> Any:
    """Return the shapes of what is read from a model without computing its random weights.

    Nothing is read from a model that can only be built outside of a program.
    """

    def build(words: Any) -> Any:
        with jax.ensure_compile_time_eval(), _traced_seeds(words):
            return read(_build(source, jax.random.wrap_key_data(words)))

    try:
        return jax.eval_shape(build, _key_words(0))
    except NEEDS_VALUES:
        return None


def _stand_in(value: Any) -> Any:
    """Return an array without memory for a plain array: Flax finds no shapes in a dict or list."""
    if not isinstance(value, jax.ShapeDtypeStruct) or is_key(value):
        return value
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def trace_values(
    source: ModelSource, leaves: ModelLeaves, seed: int
) -> tuple[ClosedJaxpr, Any] | None:
    """Return the program from the words of a random key to leaf values, and the seed's words.

    None for models that can only be built outside of a program.
    """
    words = _key_words(seed)
    # Constants are part of the program only if they have to be: the compiler would store them.
    for context in (nullcontext, jax.ensure_compile_time_eval):

        def create(words: Any, context: Any = context) -> list[Any]:
            with context():
                key = jax.random.wrap_key_data(words)
                return leaves.values(_build(source, key), key)

        with suppress(*NEEDS_VALUES):
            return jax.make_jaxpr(create)(words), words
    return None


def initial_values(
    source: ModelSource,
    leaves: ModelLeaves,
    seed: int,
    only: Sequence[int] | None = None,
    **jit_options: Any,
) -> list[Any]:
    """Return initial leaf values, or only those with these numbers.

    One compiled program computes them if the model allows it, with these options for `jax.jit`.
    """
    numbers = range(len(leaves.leaves)) if only is None else only
    traced = trace_values(source, leaves, seed)
    if traced is None:
        values = build_values(source, leaves, seed)
        return [values[n] for n in numbers]
    create = jaxpr_as_fun(traced[0])

    def chosen(words: Any) -> list[Any]:
        values = create(words)
        return [values[n] for n in numbers]

    # The key is an argument: XLA would spend minutes folding what follows from a constant.
    return jax.jit(chosen, **jit_options)(traced[1])


def build_values(source: ModelSource, leaves: ModelLeaves, seed: int) -> list[Any]:
    """Build a model outside of any program, and return its leaf values."""
    return leaves.values(_build(source, _key(seed)), _key(seed))


def _build(source: ModelSource, key: Any) -> Any:
    # By default Flax shards annotated variables when they are created, which needs a mesh already.
    with nnx.use_eager_sharding(False), brief_about_sharding():
        model = source(nnx.Rngs(key))
    _declare_arrays(model)
    return model


def _declare_arrays(model: Any) -> None:
    """Declare arrays in plain attributes as data: inside a trace Flax takes them for static."""
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))


def _key_words(seed: int) -> Any:
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def _key(seed: int) -> Any:
    return jax.random.wrap_key_data(_key_words(seed))


@contextmanager
def _traced_seeds(traced: Any) -> Generator[None]:
    """Trace what follows from a seed that the model chooses itself, instead of computing it."""
    thread = threading.get_ident()

    def replacement(make: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            key = make(*args, **kwargs)
            if threading.get_ident() != thread or isinstance(key, Tracer):
                return key
            zero = traced.ravel()[0] * 0
            if not is_key(key.dtype):
                return key + zero
            words = jax.random.key_data(key) + zero
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))

        return seeded

    with (
        mock.patch.object(jax.random, "key", replacement(jax.random.key)),
        mock.patch.object(jax.random, "PRNGKey", replacement(jax.random.PRNGKey)),
    ):
        yield

"""A lowered program that is kept on disk, so that later processes neither trace nor lower it.

To compile a program that the compilation cache has, JAX still needs its text, and tracing and
lowering a step take longer than all else at a start. What is kept is the module of `jax.export`,
without its description of arguments and results: a trivial program of the same signature has the
same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from meshwright.compiled.disk_cache import keep_content, load_content

Function = Callable[[Any, Any], tuple[Any, dict[str, Any]]]

_ALL = [export.DisabledSafetyCheck.custom_call("ALL")]
"""The same versions read a program that wrote it, so that operations need not be stable."""


def kept_program(
    jitted: Any, arguments: tuple[Any, Any], key: str, jit: Callable[[Function], Any]
) -> Function | None:
    """Return a function that calls what was kept of ``jitted`` under a key; keep it first if new.

    None if it cannot be kept: it has effects, or changes the formats of its state. The key must
    stand for all that is traced and for all that tracing and lowering depend on.

    Args:
        jitted: from state and batch to the next state and metrics.
        arguments: state and batch, as shapes with shardings.
        key: stands for the program.
        jit: jits a function with the same arguments and results as ``jitted`` is.
    """
    name = f"{key}.program.gz"
    content = load_content(name)
    if content is None:
        content = _serialized(jitted, arguments)
        keep_content(name, content)
    description, _, module = content.partition(b"\n")
    if not module:
        return None
    facts = json.loads(description)

    def signature(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        del batch
        return state, {name: jnp.zeros(shape, dtype) for name, shape, dtype in facts["metrics"]}

    # Both processes take this way, so that the cache has what the second one compiles.
    whole = replace(
        export.export(jit(signature))(*arguments),
        fun_name=jitted.__name__,
        mlir_module_serialized=module,
        module_kept_var_idx=tuple(facts["arguments"]),
    )

    def called(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return whole.call(state, batch)

    called.__name__ = called.__qualname__ = jitted.__name__
    return called


def _serialized(jitted: Any, arguments: tuple[Any, Any]) -> bytes:
    """Return a description and the module of a program; no module if it cannot be kept."""
    try:
        with _for_this_version():
            exported = export.export(jitted, disabled_checks=_ALL)(*arguments)
    except (NotImplementedError, ValueError):
        return b""
    state, metrics = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(arguments[0])]
    effects = exported.ordered_effects or exported.unordered_effects
    if effects or kinds != [(x.shape, x.dtype) for x in jax.tree.leaves(state)]:
        return b""
    facts = {
        "metrics": [(name, value.shape, str(value.dtype)) for name, value in metrics.items()],
        "arguments": exported.module_kept_var_idx,
    }
    return json.dumps(facts).encode() + b"\n" + exported.mlir_module_serialized


@contextmanager
def _for_this_version() -> Generator[None]:
    """Export the program that is compiled otherwise, not one that older versions can read too."""
    name = "jax_export_ignore_forward_compatibility"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)

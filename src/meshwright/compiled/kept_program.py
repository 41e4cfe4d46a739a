"""A lowered program that is kept on disk, so that later processes neither trace nor lower it.

To find a program in the compilation cache, JAX needs its text, and tracing and lowering a step take
longer than all else at a start. What is kept is the module of `jax.export`, without its description
of arguments and results: that of a trivial program with the same signature is the same.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from meshwright.compiled.disk_cache import keep_content, load_content

Function = Callable[[Any, Any], tuple[Any, dict[str, Any]]]

_ALL = [export.DisabledSafetyCheck.custom_call("ALL")]
"""Operations need not be stable, because the versions that read a program have written it."""
_COMPATIBLE = "jax_export_ignore_forward_compatibility"


def kept_program(
    jitted: Any, arguments: tuple[Any, Any], key: str, jit: Callable[[Function], Any]
) -> Function | None:
    """Return a function that calls what was kept of ``jitted`` under a key; keep it first if new.

    None if it cannot be kept: it has effects, or changes the formats of its state.

    Args:
        jitted: from state and batch to the next state and metrics.
        arguments: state and batch, as shapes with shardings.
        key: stands for all that is traced, and for all that tracing and lowering depend on.
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

    def signature(state: Any, _: Any) -> tuple[Any, dict[str, Any]]:
        return state, {name: jnp.zeros(shape, dtype) for name, shape, dtype in facts["metrics"]}

    # The process that writes it takes this way too, so that the cache has what the next one finds.
    whole = replace(
        export.export(jit(signature))(*arguments),
        fun_name=jitted.__name__,
        mlir_module_serialized=module,
        module_kept_var_idx=tuple(facts["arguments"]),
    )

    def called(state: Any, batch: Any) -> Any:
        return whole.call(state, batch)

    called.__name__ = called.__qualname__ = jitted.__name__
    return called


def _serialized(jitted: Any, arguments: tuple[Any, Any]) -> bytes:
    """Return a description and the module of a program; nothing if it cannot be kept."""
    before = jax.config.values[_COMPATIBLE]
    # Otherwise it may be another program, which older versions can read too.
    jax.config.update(_COMPATIBLE, True)
    try:
        exported = export.export(jitted, disabled_checks=_ALL)(*arguments)
    except (NotImplementedError, ValueError):
        return b""
    finally:
        jax.config.update(_COMPATIBLE, before)
    state, metrics = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (arguments[0], state)]
    if exported.ordered_effects or exported.unordered_effects or kinds[0] != kinds[1]:
        return b""
    facts = {
        "metrics": [(name, value.shape, str(value.dtype)) for name, value in metrics.items()],
        "arguments": exported.module_kept_var_idx,
    }
    return json.dumps(facts).encode() + b"\n" + exported.mlir_module_serialized

"""A program that was lowered once is called from disk: the same numbers, buffers and names."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.compiled import disk_cache
from meshwright.compiled.kept_program import kept_program

pytestmark = pytest.mark.usefixtures("own_disk_cache")
STATE = {"b": jnp.arange(4.0), "a": jnp.ones((4, 4)), "unused": jnp.zeros(2)}
BATCH = [jnp.linspace(0.0, 1.0, 12).reshape(3, 4)]
JIT = functools.partial(jax.jit, donate_argnums=0)


def update(state, batch):
    with jax.named_scope("~layer"):
        rows = jnp.tanh(batch[0] @ state["a"] + state["b"])
    return {**state, "a": state["a"] - rows.T @ rows}, {"loss": rows.mean(), "count": rows.size}


@pytest.fixture(autouse=True)
def _cached(tmp_path):
    disk_cache.use_disk_cache(tmp_path)


def lowered(function, key="key"):
    kept = kept_program(JIT(function), (STATE, BATCH), key, JIT)
    return None if kept is None else JIT(kept).lower(STATE, BATCH)


def run(program):
    # The program donates what it is given.
    return jax.tree.map(np.asarray, program(jax.tree.map(jnp.copy, STATE), BATCH))


def test_the_second_process_neither_traces_nor_changes_the_program():
    def traced(*_):
        raise AssertionError("traced again")

    plain = JIT(update).lower(STATE, BATCH).compile()
    first = lowered(update)
    traced.__name__ = "update"
    second = lowered(traced)
    assert second.as_text() == first.as_text()
    compiled = second.compile()
    jax.tree.map(np.testing.assert_array_equal, run(compiled), run(plain))
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    for name in ("alias", "argument", "output", "temp"):
        sizes = (getattr(p.memory_analysis(), f"{name}_size_in_bytes") for p in (compiled, plain))
        assert len(set(sizes)) == 1
    names = [set(re.findall(r"~\w+", p.as_text())) for p in (compiled, plain)]
    assert names == [{"~layer"}] * 2


def test_what_cannot_be_kept_is_lowered_by_the_caller():
    def printing(state, batch):
        jax.debug.print("{}", batch[0].sum())
        return update(state, batch)

    def other_format(state, batch):
        after, metrics = update(state, batch)
        return {**after, "b": after["b"].astype(jnp.bfloat16)}, metrics

    for key, function in (("effects", printing), ("format", other_format)):
        assert lowered(function, key) is None
        assert lowered(update, key) is None, "it is not tried again"


def test_a_damaged_file_is_written_again(tmp_path):
    lowered(update)
    (path,) = (tmp_path / "texts").glob("*.program.gz")
    path.write_bytes(path.read_bytes()[:-20])
    assert lowered(update) is not None
    assert disk_cache.load_content(path.name)

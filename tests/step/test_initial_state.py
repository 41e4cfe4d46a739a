"""Initial states: the values of one program, from few compilations, born sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from step.runs import make_plan

from meshwright.compiled.compile_program import quick_options
from meshwright.program.trace.build_model import build_values
from meshwright.step import initial_state
from meshwright.step.assemble import assemble
from meshwright.trees import key_data

WIDTH, BLOCKS = 32, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.table = jnp.arange(WIDTH, dtype=jnp.float32)

    def __call__(self, x):
        x = x + self.table
        for block in self.blocks:
            x = block(x)
        return x


class OneDraw(nnx.Module):
    """All weights are parts of one draw, so none can be drawn without the others."""

    def __init__(self, rngs):
        drawn = jax.random.normal(rngs.params(), (8, WIDTH, WIDTH))
        for _ in range(10):
            drawn = drawn / jnp.linalg.norm(drawn, axis=(1, 2), keepdims=True)
        self.weights = nnx.List([nnx.Param(row) for row in drawn])

    def __call__(self, x):
        for weight in self.weights:
            x = jnp.tanh(x @ weight[...])
        return x


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"])))


def assembled(model, mesh, **options):
    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}
    return assemble(model, loss, optax.adamw(1e-3), make_plan(mesh, samples=16, **options), batch)


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        (Net, {"fsdp": 4, "tensor": 2}, {}),
        (OneDraw, {"data": 8}, {}),
        pytest.param(Net, {"fsdp": 8}, {"blocks": "scan"}, marks=pytest.mark.full),
        pytest.param(OneDraw, {"fsdp": 4, "tensor": 2}, {}, marks=pytest.mark.full),
    ],
)
def test_the_values_are_those_of_the_model_built_outside_of_a_program(model, mesh, options):
    step = assembled(lambda rngs: model(rngs), mesh, **options)
    state = step.init(3)
    expected = build_values(lambda rngs: model(rngs), step.model_leaves, 3)
    for (path, value), plain in zip(step.canonical(state).items(), expected, strict=True):
        # Operations that are compiled together round less often.
        np.testing.assert_allclose(key_data(value), key_data(plain), atol=1e-6, err_msg=path)
    for value, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(step.step.shardings.state), strict=True
    ):
        assert value.sharding.is_equivalent_to(sharding, value.ndim)


def test_leaves_that_are_drawn_alike_are_compiled_once(monkeypatch):
    quick_options()  # finds out once per process what the compiler knows
    compiled = []
    jit = jax.jit
    monkeypatch.setattr(
        initial_state.jax, "jit", lambda *a, **k: compiled.append(1) or jit(*a, **k)
    )
    monkeypatch.setattr(initial_state, "_functions", {})
    step = assembled(Net, {"fsdp": 8})
    assert len(step.traced.layout.leaves) > 6 * BLOCKS
    step.init(0)
    kinds_of_leaves = 6  # two kernels; scales; biases of two sizes; the table and keys as they are
    kinds_of_moments = 4  # zeros of as many shapes, and a counter
    assert 0 < len(compiled) <= kinds_of_leaves + kinds_of_moments + 4

    again = assembled(Net, {"fsdp": 8})
    compiled.clear()
    values = again.canonical(again.init(1))
    assert not compiled, "an equal model uses what this process has compiled"
    assert np.abs(np.asarray(values["blocks.0.up.kernel"])).max() > 0.1
    expected = dict(zip(values, build_values(Net, again.model_leaves, 1), strict=True))
    for path, value in values.items():
        np.testing.assert_allclose(key_data(value), key_data(expected[path]), atol=1e-6)


def test_two_rows_of_a_stack_are_two_draws():
    step = assembled(Net, {"fsdp": 8}, blocks="scan")
    values = step.canonical(step.init(0))
    first, second = (np.asarray(values[f"blocks.{n}.up.kernel"]) for n in (0, 1))
    assert np.abs(first - second).max() > 0.1


def test_jax_may_have_accelerators_only(monkeypatch):
    step = assembled(OneDraw, {"data": 8})
    expected = step.init(0)

    def no_cpu(*args, **kwargs):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    for value, other in zip(step.init(0).params, expected.params, strict=True):
        np.testing.assert_array_equal(value, other)

"""Every equation of a traced model knows its module, and the classes come back unharmed."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import modules_by_primitive, trace
from small_models import WIDTH, Residual, Residuals, fill, numbers, square_loss, vectors

from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.trace.scopes import module_scopes

pytestmark = pytest.mark.quick

X = numbers(4, WIDTH)


def modules(build, function):
    """Trace a function of a model; return the modules each primitive runs in."""
    graphdef, state = nnx.split(nnx.eval_shape(build))

    def run(state, x):
        model = nnx.merge(graphdef, state)
        with module_scopes(model):
            return function(model, x)

    return modules_by_primitive(jax.make_jaxpr(run)(state, X))


class Part(nnx.Module):
    """A layer with a second public method and a private one."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    def encode(self, x):
        return jnp.sin(self._hidden(x))

    def _hidden(self, x):
        return jnp.cos(x)


class Scanned(nnx.Module):
    """Copies of one part, made by vmap and run by scan."""

    def __init__(self, *, rngs):
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Part(rngs=rngs)))
        self.stack = make(rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, part: part(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.stack)


class Whole(nnx.Module):
    """Every kind of place a module can have."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = Scanned(rngs=rngs), Scanned(rngs=rngs)
        self.named = nnx.Dict(a=Part(rngs=rngs), b=Part(rngs=rngs))
        self.listed = nnx.List([Part(rngs=rngs)])
        self.shared = self.listed[0]

    def __call__(self, x):
        x = self.second(self.first(x))
        return jnp.exp(self.shared(self.named["a"](self.named["b"].encode(x))))


def test_every_equation_carries_the_path_of_its_module():
    found = modules(Whole, lambda model, x: jnp.log(model(x)))
    assert found["dot_general"] == [
        "first.stack.linear",
        "second.stack.linear",
        "named.a.linear",
        "listed.0.linear",
    ]
    assert found["tanh"] == ["first.stack", "second.stack", "named.a", "listed.0"]
    assert found["scan"] == ["first", "second"]
    assert found["sin"] == found["cos"] == ["named.b"]
    assert found["exp"] == ["model"]
    assert found["log"] == [""]


def test_a_dict_of_models_is_named_by_its_keys():
    def build():
        rngs = nnx.Rngs(0)
        return {"teacher": Part(rngs=rngs), "student": Part(rngs=rngs)}

    found = modules(build, lambda models, x: models["student"](models["teacher"](x)))
    assert found["dot_general"] == ["teacher.linear", "student.linear"]


def test_a_model_the_context_does_not_know_lends_no_name_to_anything():
    teacher = fill(Residuals)
    found = modules(Residuals, lambda model, x: model(x) - teacher(x))
    assert found["tanh"] == ["blocks.0", "blocks.1", "", ""]


def test_whole_models_may_be_mapped_by_the_loss():
    found = modules(
        Residuals, lambda model, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x)
    )
    assert found["tanh"] == ["blocks.0", "blocks.1"]


def test_a_module_made_during_the_call_works_for_its_caller():
    class Maker(nnx.Module):
        def __init__(self):
            self.known = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(1))(self.known(x))

    found = modules(Maker, lambda model, x: model(x))
    assert found["dot_general"] == ["known"]
    assert set(found["rsqrt"]) == {"model"}


def test_inherited_methods_are_named():
    class Child(Part):
        def __call__(self, x):
            return jnp.exp(super().__call__(x))

    found = modules(lambda: {"child": Child(rngs=nnx.Rngs(0))}, lambda m, x: m["child"](x))
    assert found["exp"] == found["tanh"] == ["child"]


def test_classes_are_restored_after_an_exception():
    before = dict(Residual.__dict__), dict(nnx.Linear.__dict__)

    def use_and_fail(model):
        with module_scopes(model):
            assert Residual.__call__ is not before[0]["__call__"]
            raise KeyError("from the loss")

    with pytest.raises(KeyError, match="from the loss"):
        use_and_fail(nnx.eval_shape(Residuals))
    assert (dict(Residual.__dict__), dict(nnx.Linear.__dict__)) == before


def test_nested_contexts_name_the_innermost_model_only():
    inner = {"inner": fill(Residuals)}
    before = Residual.__dict__["__call__"]

    def both(model, x):
        x = model(x)
        with module_scopes(inner):
            x = inner["inner"](x)
            x = model(x)
        return model(x)

    found = modules(Residuals, both)
    blocks = ["blocks.0", "blocks.1"]
    assert found["tanh"] == [*blocks, "inner.blocks.0", "inner.blocks.1", "", "", *blocks]
    assert Residual.__dict__["__call__"] is before


def test_a_bound_method_kept_from_inside_still_works_outside():
    model = nnx.eval_shape(lambda: Part(rngs=nnx.Rngs(0)))
    with module_scopes(model):
        encode = model.encode
    assert jnp.array_equal(encode(X), jnp.sin(jnp.cos(X)))


def checkpointed(transform):
    """Return a model of two blocks whose call is wrapped by a Flax transform."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.part = Part(rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        @transform
        def __call__(self, x):
            return jnp.sin(self.dropout(self.part(x)))

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Model


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_methods_that_are_traced_once_are_named_after_each_block(transform):
    _, traced = trace(checkpointed(transform), square_loss, vectors(), jnp.bfloat16)
    found = modules_by_primitive(traced.closed)
    assert found["sin"] == [f"blocks.{n}" for n in range(3)]
    assert found["dot_general"] == [f"blocks.{n}.part.linear" for n in range(3)]
    assert roll_program(traced).remarks == ()

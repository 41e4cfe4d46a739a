"""The setting `kernels`, and kernels in evaluation, prediction, rolled blocks and many models."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled, assert_equal, both, differentiate
from zoo.matrix import ZOO

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.program.kernels.find_kernels import NO_KERNELS
from meshwright.sharding.decide import decide
from meshwright.step.step_program import planned_forward

WIDTH, LENGTH, CLASSES = 16, 8, 256


class Block(nnx.Module):
    """Attention by Flax, and a layer."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return x + jax.nn.gelu(self.layer(self.attention(self.norm(x), mask=mask)))


class Model(nnx.Module):
    """Blocks in a list, or stacked and scanned, and a last projection."""

    def __init__(self, *, stacked=False, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=rngs)
        self.stacked = stacked
        if stacked:
            make = nnx.vmap(Block, in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(2))
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.stacked:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.embed.attend(x)


def loss(model, batch):
    logits, tokens = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    right = (logits.argmax(-1) == tokens).mean()
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return nats.mean(), {"accuracy": right}


def batch(samples=4, seed=0):
    random = np.random.default_rng(seed)
    return {"tokens": random.integers(CLASSES, size=(samples, LENGTH + 1), dtype=np.int32)}


@pytest.mark.full
@pytest.mark.parametrize("stacked", [True, False])
def test_flax_attention_in_scanned_and_rolled_blocks(stacked):
    sharding = mw.ShardingConfig(blocks="unroll" if stacked else "scan")
    build = functools.partial(Model, stacked=stacked)
    found = differentiate(build, loss, batch(), "xla", sharding=sharding)
    assert [(u.kernel, u.detail) for u in found.uses if u.kind == "attention"] == [
        ("xla", "causal")
    ]
    assert_equal(found, differentiate(build, loss, batch(), "none", sharding=sharding))


def test_flax_attention_is_found_in_every_block():
    uses = assembled(Model, loss, batch(), "xla").decision.kernels.uses
    found = [(use.module, use.kernel, use.detail) for use in uses if use.kind == "attention"]
    assert found == [(f"blocks.{n}.attention", "xla", "causal") for n in range(2)]


def test_without_kernels_the_program_is_the_one_without_the_search():
    """Compared as lowered text."""
    made = assembled(Model, loss, batch(), "none", wide=False)
    assert made.decision.kernels == NO_KERNELS
    plain = decide(made.traced, made.plan.mesh, made.plan.sharding)
    leaves = [step.leaf.struct for step in made.traced.layout.step_leaves]
    texts = {
        jax.jit(planned_forward(made.traced, decision, made.plan, made.mesh).outputs)
        .lower(leaves, jax.tree.leaves(batch()))
        .as_text()
        for decision in (made.decision, plain)
    }
    assert len(texts) == 1


def test_on_cpus_nothing_is_replaced_by_default():
    assert assembled(Model, loss, batch(), "auto").decision.kernels == NO_KERNELS


@pytest.mark.full
def test_training_and_evaluation_with_kernels_give_what_they_give_without():
    results = {}
    for kernels in ("xla", "none"):
        trainer = mw.Trainer(
            model=Model,
            loss=loss,
            optimizer=optax.sgd(0.1),
            kernels=kernels,
            mesh="data=1",
            devices=jax.devices()[:1],
        )
        trainer.fit(lambda step, batch_size: batch(batch_size, step), steps=2, batch_size=4)
        results[kernels] = trainer.evaluate([batch(seed=9)])
        logits = trainer.predict(batch(seed=9)["tokens"])
        results[kernels]["logits"] = float(np.abs(logits).mean())
    assert results["xla"].keys() == results["none"].keys()
    for name, value in results["none"].items():
        assert results["xla"][name] == pytest.approx(value, rel=1e-5)


class Ignoring(Model):
    """Computes what nothing reads."""

    def __call__(self, tokens):
        logits = super().__call__(tokens)
        jax.nn.softmax(logits, axis=0).sum()
        return logits


def test_values_that_nothing_reads_are_no_obstacle():
    made = assembled(Ignoring, loss, batch(), "xla", wide=False)
    uses = made.decision.kernels.uses
    assert {use.kind for use in uses} == {"attention", "loss", "norm", "activation"}
    assert all(use.kernel for use in uses)
    forward = planned_forward(made.traced, made.decision, made.plan, made.mesh)
    leaves = [step.leaf.struct for step in made.traced.layout.step_leaves]
    found = jax.eval_shape(forward, leaves, jax.tree.leaves(batch()))
    assert found.objective.total.shape == ()


@jax.custom_vjp
def own_gradient(x):
    return jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x


own_gradient.defvjp(lambda x: (own_gradient(x), x), lambda x, g: (g * x,))


class Custom(nnx.Module):
    """Attention with a gradient of its own."""

    def __init__(self):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return own_gradient(self.layer(x))


def test_a_gradient_of_the_model_itself_is_kept():
    random = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
    mean = lambda model, batch: jnp.mean(model(batch["x"]))  # noqa: E731
    found, expected = both(Custom, mean, {"x": random})
    assert not found.uses
    assert_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo_with_kernels(name):
    entry = ZOO[name]
    build = lambda: entry.model(nnx.Rngs(0))  # noqa: E731
    options = {"trainable": entry.trainable, "mesh": "data=2"}
    assert_equal(*both(build, entry.loss, entry.batches(0), **options), tolerance=1e-9)


def test_an_unknown_choice_of_kernels_is_refused():
    with pytest.raises(UserError, match="there are no kernels 'fast'") as refusal:
        mw.Trainer(model=Model, loss=loss, optimizer=optax.sgd(0.1), kernels="fast")
    assert "'auto' or 'xla' or 'none'" in refusal.value.fix
    with pytest.raises(UserError, match="there are no kernels 'cudnn'") as refusal:
        mw.Trainer(model=Model, loss=loss, optimizer=optax.sgd(0.1), kernels="cudnn")
    assert refusal.value.fix.endswith(": did you mean `auto`?")


@pytest.mark.parametrize(
    ("written", "meant"), [("cudn", "auto"), ("XAL", "xla"), ("off", "none"), ("false", "none")]
)
def test_the_command_line_lists_the_choices_and_suggests_one(written, meant, capfd):
    assert main(["config", f"kernels={written}"]) == 2
    error = capfd.readouterr().err
    assert f"`kernels={written.replace('false', 'False')}` is not valid" in error
    assert "'auto', 'xla' or 'none'" in error
    assert f"did you mean `{meant}`?" in error


def test_inspect_lists_kernels(capfd):
    assert main(["inspect", "kernels=xla", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["kernels"]
    assert {use["kind"] for use in found} == {"attention", "loss", "norm", "activation"}


@pytest.mark.parametrize(
    ("choice", "said"),
    [("auto", "kernels: none on CPUs (kernels=auto)"), ("none", "kernels: off (kernels=none)")],
)
def test_inspect_says_why_there_are_no_kernels(capfd, choice, said):
    assert main(["inspect", "model=mlp", f"kernels={choice}"]) == 0
    assert said in capfd.readouterr().out

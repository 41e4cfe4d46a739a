"""What blocks with kernels recompute for their backward pass."""

import jax
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled, assert_equal, differentiate
from program.programs import equations

import meshwright as mw
from meshwright.models import build_model
from meshwright.step.step_program import planned_forward
from meshwright.tasks.language_modeling import LanguageModeling

LENGTH, BLOCKS = 12, 2
TASK = LanguageModeling(vocab_size=64, context_length=LENGTH)
BATCH = TASK.synthetic_batch(0, 4)


def build():
    return build_model(
        "gpt",
        rngs=nnx.Rngs(0),
        vocab_size=64,
        context_length=LENGTH,
        num_blocks=BLOCKS,
        hidden_size=16,
        num_heads=2,
        dropout=0.0,
    )


def with_softcap():
    sizes = {"vocab_size": 64, "context_length": LENGTH, "num_blocks": BLOCKS, "hidden_size": 16}
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 16}
    return build_model("gemma3", rngs=nnx.Rngs(0), attention_softcap=5.0, **sizes, **heads)


def count_exponentials(mesh, model=build, **sharding):
    """Return how often a gradient computes the exponentials of all scores."""
    config = mw.ShardingConfig(**sharding)
    made = assembled(model, TASK.loss, BATCH, "xla", wide=False, mesh=mesh, sharding=config)
    forward = planned_forward(made.traced, made.decision, made.plan, made.mesh)
    leaves = [step.leaf.struct for step in made.traced.layout.step_leaves]
    numbers = [n for n, s in enumerate(made.traced.layout.step_leaves) if s.leaf.role == "param"]

    def total(params):
        merged = [*leaves]
        for number, value in zip(numbers, params, strict=True):
            merged[number] = value
        return forward(merged, jax.tree.leaves(BATCH)).objective.total

    program = jax.make_jaxpr(jax.grad(total))([leaves[n] for n in numbers])
    shapes = [eqn.outvars[0].aval.shape for eqn, _ in equations(program.jaxpr) if _is_exp(eqn)]
    return sum(shape[-2:] == (LENGTH, LENGTH) for shape in shapes)


def _is_exp(eqn):
    return eqn.primitive.name == "exp"


@pytest.mark.parametrize(
    ("mesh", "remat", "times"),
    [
        pytest.param("data=1", "none", 2, marks=pytest.mark.full),
        ("data=1", "full", 3),
        pytest.param("data=1", "dots", 2, marks=pytest.mark.full),
        ("data=2", "dots", 2),
    ],
)
def test_attention_is_recomputed_only_if_nothing_is_saved(mesh, remat, times):
    """Once forward, once by its own gradient, and once more if its results are not saved."""
    assert count_exponentials(mesh, remat=remat) == BLOCKS * times


@pytest.mark.parametrize(
    ("remat", "times"), [("dots", 2), pytest.param("full", 3, marks=pytest.mark.full)]
)
def test_so_is_attention_with_a_function_of_its_scores(remat, times):
    assert count_exponentials("data=1", with_softcap, remat=remat) == BLOCKS * times


@pytest.mark.full
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialized_blocks_give_the_same_gradients(remat):
    sharding = mw.ShardingConfig(remat=remat)
    found = differentiate(build, TASK.loss, BATCH, "xla", sharding=sharding)
    assert_equal(found, differentiate(build, TASK.loss, BATCH, "none"))

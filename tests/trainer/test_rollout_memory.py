"""Plans count what rollouts need: the cache that generation allocates, weights, the reference."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.config.batch import solve_batch
from meshwright.generation import token_loop
from meshwright.generation.generate import make_generator
from meshwright.generation.token_loop import Prompt, Row
from meshwright.generation.token_programs import token_programs
from meshwright.hardware import parse_hardware
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.planner.estimate.estimator import Estimator
from meshwright.trainer.starting.planning import rollout_needs

pytestmark = pytest.mark.full

ROWS, LENGTH = 16, 64
TASK = mw.GRPO(rewards=lambda completion: 1.0, max_prompt_length=32, max_generation_steps=32)


def build(rngs):
    sizes = {"num_blocks": 2, "hidden_size": 32, "num_heads": 2, "context_length": LENGTH}
    return build_model("gpt", vocab_size=128, dropout=0.0, **sizes, rngs=rngs)


def test_the_cache_is_what_generation_allocates():
    made = make_generator(build(nnx.Rngs(0)), max_new_tokens=32, samples=4, temperature=1.0)
    programs = token_programs(made.model, LENGTH, made.placement, made.vocabulary)
    prompts = [Prompt(n, np.ones(32, np.int32)) for n in range(ROWS // 4)]
    slots = [Row(prompt, sample, 32) for prompt in prompts for sample in range(4)]
    cache, *_ = programs.start(
        programs.decoder.prepare(made.model.weights),
        made.placement.put(made.sampling.numbers(128, 0)),
        token_loop._prompts(slots, made.placement, LENGTH),
        method=made.sampling.method,
    )
    logits = 3 * 4 * 128
    expected = ROWS * (rollout_needs(TASK, build, "no").row_bytes - logits)
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == expected


@pytest.mark.parametrize(
    ("mesh", "precision", "weight_bytes"),
    [({}, "no", 0), ({}, "bf16", 2), ({"fsdp": 4, "tensor": 2}, "bf16", 2), ({"fsdp": 8}, "no", 4)],
)
def test_a_mesh_divides_rows_and_gathers_weights(mesh, precision, weight_bytes):
    fsdp, tensor = mesh.get("fsdp", 1), mesh.get("tensor", 1)
    batch = solve_batch(global_batch_size=ROWS, replicas=fsdp)
    plan = Plan(mesh=mesh, batch=batch, precision=precision)
    hardware = parse_hardware(f"{fsdp * tensor}xH100")
    needs = rollout_needs(TASK, build, precision)
    parts = (build, TASK.loss, optax.adam(1e-3), TASK.synthetic_batch(0, ROWS))
    alone, both = (
        Estimator(*parts, precision=precision, rollout=each).estimate(plan, hardware).memory
        for each in (None, needs)
    )
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(build(nnx.Rngs(0)), nnx.Param)))
    needed = ROWS / fsdp * needs.row_bytes / tensor + weight_bytes * parameters / tensor
    # What no axis divides is whole on every device, such as norms.
    assert both.reference == pytest.approx(alone.parameters, rel=0.01)
    free = alone.compiled - alone.state
    assert both.rollout == pytest.approx(max(0, needed - free), abs=0.05 * needed)
    assert both.total == alone.total + both.reference + both.rollout

"""What the simplest pipeline cannot run is said in its own words."""

import jax.numpy as jnp
import pytest
from flax import nnx
from small_models import fill

from meshwright.distributed.gpipe import GPipePipeline, PipelineStage, pipeline_forward
from meshwright.errors import UserError

SPEC = {"in_features": 8, "out_features": 4}


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([{}], "layer 0 of stage 1 lacks in_features and out_features"),
        ([SPEC, {"in_features": 4, "out_feature": 4}], "did you mean `out_features`"),
        ([{**SPEC, "activation": "gelu"}], "has the unknown key activation"),
        ([{**SPEC, "in_features": "8"}], "in_features='8' is not valid"),
        ([SPEC, SPEC], "write in_features=4"),
        ([(8, 4)], "layer 0 of stage 1 is of type tuple"),
        (SPEC, "layer_specs is one mapping"),
        ([], "layer_specs is empty"),
    ],
)
def test_layers_that_cannot_be_built_are_refused(specs, said):
    with pytest.raises(UserError, match=said):
        PipelineStage(specs, 1, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def stage():
    return fill(lambda: PipelineStage([SPEC], 0, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("count", "inputs", "microbatches", "said"),
    [
        (0, jnp.ones((4, 8)), 2, "stages is empty"),
        (2, jnp.ones((4, 8)), 2, r"stage 1 fails(.|\n)*float32\[2, 4\]"),
        (1, jnp.ones((4, 8)), 0, "num_microbatches=0 is not valid"),
        (1, jnp.ones(()), 1, "not an array of samples"),
    ],
)
def test_a_forward_pass_that_cannot_be_is_refused(stage, count, inputs, microbatches, said):
    with pytest.raises(UserError, match=said):
        pipeline_forward([stage] * count, inputs, microbatches)


def test_one_stage_is_no_list_and_numbers_are_those_of_stages(stage):
    with pytest.raises(UserError, match="one module or function"):
        pipeline_forward(stage, jnp.ones((4, 8)), 2)
    model = fill(lambda: GPipePipeline(2, 1, 8, rngs=nnx.Rngs(0)))
    for number in (-1, 2):
        with pytest.raises(UserError, match=f"there is no stage {number}"):
            model.forward_stage(number, jnp.ones((4, 8)))
    with pytest.raises(UserError, match="num_stages=0"):
        GPipePipeline(0, 1, 8, rngs=nnx.Rngs(0))

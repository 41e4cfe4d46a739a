"""What a decoded token sends: nothing over fsdp, and over tensor the sums of its blocks."""

import numpy as np
import pytest
from flax import nnx

import meshwright as mw
from meshwright.compiled.collectives import read_collectives
from meshwright.generation.row_placement import placement_of
from meshwright.generation.sampling import Sampling
from meshwright.generation.token_decoder import split_model
from meshwright.generation.token_loop import Prompt, Row, _prompts
from meshwright.generation.token_programs import token_programs
from meshwright.models.llama3 import Llama3

BLOCKS, WIDTH, VOCABULARY, ROWS, STEPS = 1, 32, 64, 8, 3
SIZES = {"fsdp": 4, "tensor": 2}


def decoded_collectives(model):
    """Return the collectives of a compiled program that adds tokens to each row."""
    split, method = split_model(model), Sampling().method
    placement = placement_of([], mw.build_mesh(SIZES))
    _, weights, _ = placement.place(split)
    # A loaded model's weights are divided over tensor, all but norms.
    held = [w.addressable_shards[0].data.nbytes for w in weights]
    assert held == [w.nbytes // (SIZES["tensor"] if w.ndim > 1 else 1) for w in weights]
    programs = token_programs(split, 32, placement, VOCABULARY)
    weights, numbers = programs.decoder.prepare(weights), Sampling().numbers(VOCABULARY, 0)
    slots = [Row(Prompt(n, np.ones(5, np.int32)), 0, 4) for n in range(ROWS)]
    prompts = _prompts(slots, placement, 32)
    cache, rows, _ = programs.start(weights, numbers, prompts, method=method)
    # Keys and values: rows over fsdp, heads over tensor.
    assert {array.sharding.shard_shape(array.shape)[:3] for array in cache["rows"]} == {(2, 1, 1)}
    lowered = programs.advance.lower(
        weights, numbers, cache=cache, rows=rows, method=method, steps=STEPS
    )
    return read_collectives(lowered.compile().as_text(), SIZES)


@pytest.mark.full
def test_a_token_sends_nothing_over_fsdp_and_the_closed_form_over_tensor():
    model = Llama3(
        vocab_size=VOCABULARY, context_length=64, num_blocks=BLOCKS, hidden_size=WIDTH,
        num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64, rngs=nnx.Rngs(0),
    )  # fmt: skip
    found = decoded_collectives(model)
    assert {each.axes for each in found} == {("tensor",)}
    numbers = ROWS // SIZES["fsdp"] * np.dtype(np.float32).itemsize
    # The embedding and two products of each block are sums over both devices. To choose a token
    # takes five numbers for each row: two maxima, where it is, a sum and the logit.
    per_token = (1 + 2 * BLOCKS) * WIDTH * numbers + 5 * numbers
    assert sum(each.sent_bytes for each in found) == STEPS * per_token

"""What a decoded token sends: nothing over fsdp, and over tensor what two products per block add."""

import numpy as np
from flax import nnx

import meshwright as mw
from meshwright.compiled.collectives import read_collectives
from meshwright.generation.row_placement import placement_of
from meshwright.generation.sampling import Sampling
from meshwright.generation.token_decoder import split_model
from meshwright.generation.token_loop import Prompt, Row, _prompts
from meshwright.generation.token_programs import token_programs
from meshwright.models.llama3 import Llama3

BLOCKS, WIDTH, VOCABULARY, ROWS = 2, 32, 64, 8
SIZES = {"fsdp": 4, "tensor": 2}


def decoded_collectives(model, rows):
    """Return the collectives of a compiled program that adds two tokens to each row."""
    split, method = split_model(model), Sampling().method
    placement = placement_of([], mw.build_mesh(SIZES))
    weights, _ = placement.place(split)
    programs = token_programs(split, 32, placement, VOCABULARY)
    weights = programs.decoder.prepare(weights)
    numbers = Sampling().numbers(VOCABULARY, 0)
    slots = [Row(Prompt(n, np.ones(5, np.int32)), 0, 4) for n in range(rows)]
    started = programs.start.lower(weights, numbers, _prompts(slots, placement, 32), method=method)
    cache, state, _ = started.compile()(weights, numbers, _prompts(slots, placement, 32))
    compiled = programs.advance.lower(
        weights, numbers, cache=cache, rows=state, method=method, steps=2
    ).compile()
    return read_collectives(compiled.as_text(), SIZES)


def test_a_token_sends_nothing_over_fsdp_and_the_closed_form_over_tensor():
    model = Llama3(
        vocab_size=VOCABULARY, context_length=64, num_blocks=BLOCKS, hidden_size=WIDTH,
        num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64, rngs=nnx.Rngs(0),
    )  # fmt: skip
    for each in decoded_collectives(model, ROWS):
        print(each.kind, each.axes, each.count, each.payload_bytes, each.module, each.op_name[-80:])
    assert 0

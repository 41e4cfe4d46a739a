"""Unannotated models are divided over a tensor axis as a person would, and for stated reasons."""

import jax
import pytest
from flax import nnx
from sharding.tensor_models import (
    BATCH,
    HEADS,
    HIDDEN,
    LENGTH,
    WIDE,
    Attention,
    Convolutional,
    Experts,
    FusedAttention,
    Language,
    Library,
    Modern,
    Perceptron,
    Recurrent,
    Residual,
    Shared,
    Stacked,
    general,
    gpt,
    grouped,
    library,
    numbers,
    square_loss,
    tokens,
    trace,
    word_loss,
)

from meshwright.errors import UserError
from meshwright.sharding.tensor import check_tensor_size, choose_tensor_dims

pytestmark = pytest.mark.quick

DEVICES = 4


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def choose(make, loss=word_loss, batch=None, size=DEVICES):
    traced = trace(make, loss, tokens() if batch is None else batch)
    return choose_tensor_dims(traced.classes, size)


def dims(choice, **wanted):
    """Return the divided dims of the leaves of a prefix, by the rest of their path."""
    (prefix,) = wanted.values()
    return {
        path.removeprefix(prefix): leaf.dim
        for path, leaf in choice.leaves.items()
        if path.startswith(prefix)
    }


BLOCK = {
    "norm.scale": None,
    "norm.bias": None,
    "attn.q.kernel": 1,
    "attn.q.bias": 0,
    "attn.k.kernel": 1,
    "attn.k.bias": 0,
    "attn.v.kernel": 1,
    "attn.v.bias": 0,
    "attn.out.kernel": 0,
    "attn.out.bias": None,
    "up.kernel": 1,
    "up.bias": 0,
    "down.kernel": 0,
    "down.bias": None,
}


def test_gpt_is_divided_by_heads_hidden_units_and_vocabulary():
    choice = choose(gpt)
    assert dims(choice, prefix="blocks.0.") == BLOCK
    assert dims(choice, prefix="blocks.1.") == BLOCK
    assert choice.dim_of("embed.embedding") == 0
    assert choice.dim_of("head.kernel") == 1
    assert choice.dim_of("head.bias") == 0


def test_reasons_name_the_dims_and_the_modules():
    leaves = choose(gpt).leaves
    reason = {path: str(leaf.reason) for path, leaf in leaves.items()}
    assert reason["blocks.0.attn.q.kernel"] == (
        "column: feeds 4 heads × 16, contracted in blocks.0.attn.out"
    )
    assert reason["blocks.1.down.kernel"] == "row: contracts 256, fed by blocks.1.up.kernel"
    assert reason["blocks.1.attn.k.bias"].startswith("follows blocks.1.attn.k.kernel")
    assert reason["embed.embedding"].startswith("vocabulary")
    assert reason["head.kernel"] == "column: feeds 256, reduced in the loss"
    assert "sharded another way" in reason["blocks.0.norm.scale"]
    assert leaves["blocks.0.attn.out.kernel"].role == "row"


def test_library_attention_and_tied_embeddings():
    choice = choose(library)
    assert dims(choice, prefix="blocks.0.attn.attend.") == {
        "query.kernel": 1,
        "query.bias": 0,
        "key.kernel": 1,
        "key.bias": 0,
        "value.kernel": 1,
        "value.bias": 0,
        "out.kernel": 0,
        "out.bias": None,
    }
    assert choice.leaves["embed.embedding"].dim == 0
    assert choice.leaves["embed.embedding"].role == "vocabulary"


@pytest.mark.parametrize("length", [2, 8, 64])
def test_the_dim_of_a_head_is_no_substitute_for_heads(length):
    """Three heads cannot be divided by 4; their dim of 16 could, at the price of local softmax."""
    make = lambda r: Language(r, attention=lambda r: Library(r, 3, 48), hidden=48)  # noqa: E731
    choice = choose(make, batch=tokens(length=length))
    assert not [d for d in dims(choice, prefix="blocks.0.attn.").values() if d is not None]
    reason = str(choice.leaves["blocks.0.attn.attend.value.kernel"].reason)
    assert reason == "not sharded over tensor: 3 heads are not divisible by tensor=4"
    assert choice.dim_of("blocks.0.up.kernel") == 1


def test_key_heads_too_few_to_divide_are_replicated_while_query_heads_are_divided():
    choice = choose(grouped)
    assert choice.dim_of("blocks.0.attn.q.kernel") == 1
    assert choice.dim_of("blocks.0.attn.out.kernel") == 0
    assert choice.dim_of("blocks.0.attn.k.kernel") is None
    reason = str(choice.leaves["blocks.0.attn.v.kernel"].reason)
    assert reason == "not sharded over tensor: 2 heads are not divisible by tensor=4"


def test_enough_key_heads_are_divided_with_the_query_heads():
    choice = choose(grouped, size=2)
    assert {choice.dim_of(f"blocks.0.attn.{w}.kernel") for w in "qkv"} == {1}


def test_a_fused_kernel_is_reported_with_the_shape_that_would_divide():
    choice = choose(lambda r: Language(r, attention=FusedAttention))
    leaf = choice.leaves["blocks.0.attn.qkv.kernel"]
    assert leaf.dim is None
    assert "3 × 4 heads × 16" in str(leaf.reason)
    assert "no PartitionSpec" in str(leaf.reason)
    out = choice.leaves["blocks.0.attn.out.kernel"]
    assert "blocks.0.attn.qkv.kernel" in str(out.reason)
    assert choice.dim_of("blocks.0.up.kernel") == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_query_key_and_value_are_never_told_apart_by_device(size):
    choice = choose(lambda r: Language(r, attention=FusedAttention), size=size)
    assert choice.dim_of("blocks.0.attn.qkv.kernel") is None


def test_a_kernel_with_its_factors_as_dims_is_divided_by_heads():
    choice = choose(general)
    assert choice.dim_of("blocks.0.attn.qkv.kernel") == 2
    assert choice.dim_of("blocks.0.attn.qkv.bias") == 1
    assert choice.dim_of("blocks.0.attn.out.kernel") == 0


def test_rotary_positions_and_gates_do_not_get_in_the_way():
    choice = choose(Modern)
    assert {choice.dim_of(f"attn.{w}.kernel") for w in "qkv"} == {1}
    assert choice.dim_of("attn.out.kernel") == 0
    assert choice.dim_of("attn.norm.scale") is None
    assert (choice.dim_of("mlp.up.kernel"), choice.dim_of("mlp.gate.kernel")) == (1, 1)
    assert choice.dim_of("mlp.down.kernel") == 0


@pytest.mark.parametrize("size", [2, 4])
def test_a_fused_gate_is_reported_with_the_shape_that_would_divide(size):
    choice = choose(lambda r: Modern(r, fused=True), size=size)
    leaf = choice.leaves["mlp.up.kernel"]
    assert leaf.dim is None
    assert f"the factor {WIDE} is inside its dim (2 × {WIDE})" in leaf.reason


def test_a_chain_of_layers_alternates_column_and_row():
    choice = choose(Perceptron, square_loss, numbers(784))
    roles = [choice.leaves[f"layers.{n}.kernel"].role for n in range(4)]
    assert roles == ["column", "row", "column", "row"]
    biases = [choice.dim_of(f"layers.{n}.bias") for n in range(4)]
    assert biases == [0, None, 0, None]


def test_channels_alternate_and_statistics_follow():
    choice = choose(Convolutional, square_loss, numbers(8, 8, 3))
    assert [choice.dim_of(f"convs.{n}.kernel") for n in range(3)] == [3, 2, 3]
    assert choice.leaves["head.kernel"].role == "row"
    assert [choice.dim_of(f"norms.{n}.scale") for n in range(3)] == [0, None, 0]
    assert [choice.dim_of(f"norms.{n}.mean") for n in range(3)] == [0, None, 0]


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell])
def test_a_recurrent_kernel_is_refused(cell):
    choice = choose(lambda r: Recurrent(r, cell))
    assert choice.dim_of("embed.embedding") == 0
    assert choice.dim_of("head.kernel") == 1
    cells = {path: leaf for path, leaf in choice.leaves.items() if path.startswith("rnn.cell")}
    assert all(leaf.dim is None for leaf in cells.values())
    assert any("recurrent" in str(leaf.reason) for leaf in cells.values())


def test_residual_layers_are_columns_where_nothing_else_can_be_sharded():
    choice = choose(Residual, square_loss, numbers(30))
    assert [choice.dim_of(f"layers.{n}.kernel") for n in range(2)] == [1, 1]
    assert (choice.dim_of("first.kernel"), choice.dim_of("last.kernel")) == (1, 0)
    assert choice.leaves["layers.0.kernel"].reason == "column: feeds 64, contracted in layers.0"
    cheaper = choose(lambda r: Residual(r, ends=(32, 10)), square_loss, numbers(32))
    assert cheaper.dim_of("first.kernel") == 0
    assert "same class" in cheaper.leaves["layers.0.kernel"].reason


def test_experts_are_spread_over_devices():
    choice = choose(Experts)
    assert (choice.dim_of("up"), choice.dim_of("down")) == (0, 0)
    assert choice.leaves["up"].role == "expert"


def test_experts_that_do_not_divide_are_divided_inside():
    choice = choose(lambda r: Experts(r, experts=6))
    assert (choice.dim_of("up"), choice.dim_of("down")) == (2, 1)


def test_a_scanned_stack_is_divided_like_the_list_of_its_blocks():
    choice = choose(Stacked)
    shifted = {path: None if dim is None else dim + 1 for path, dim in BLOCK.items()}
    assert dims(choice, prefix="blocks.") == shifted


def test_a_layer_dim_that_would_divide_is_still_run_through():
    choice = choose(lambda r: Stacked(r, blocks=4))
    assert all(dim != 0 for dim in dims(choice, prefix="blocks.").values())


def test_a_vocabulary_that_does_not_divide_is_replicated_not_replaced():
    choice = choose(lambda r: Language(r, words=257), batch=tokens(257))
    leaf = choice.leaves["embed.embedding"]
    assert leaf.dim is None
    assert (
        str(leaf.reason) == "not sharded over tensor: vocabulary 257 is not divisible by tensor=4"
    )
    assert dims(choice, prefix="blocks.0.") == BLOCK


def test_the_hidden_dim_does_not_stand_in_for_a_vocabulary_it_costs_more_than():
    """Nothing else wants the hidden dim here: it is refused for what it would send."""
    choice = choose(lambda r: Recurrent(r, words=2001), batch=tokens(2001))
    assert all(leaf.dim is None for leaf in choice.leaves.values())
    reason = str(choice.leaves["rnn.cell.ii.kernel"].reason)
    assert "vocabulary 2001 is not divisible by tensor=4, and 64 instead would send" in reason


def test_an_odd_layer_is_avoided_where_its_neighbours_divide():
    choice = choose(lambda r: Perceptron(r, (784, 510, 512, 10)), square_loss, numbers(784))
    assert choice.dim_of("layers.0.kernel") == 0
    assert choice.dim_of("layers.1.kernel") == 1
    assert choice.dim_of("layers.2.kernel") == 0
    assert (
        str(choice.leaves["layers.0.bias"].reason)
        == "not sharded over tensor: 510 is not divisible by tensor=4"
    )


def test_a_shared_block_and_several_outputs():
    choice = choose(Shared, square_loss, numbers(LENGTH, 12))
    assert dims(choice, prefix="block.") == BLOCK
    assert choice.leaves["enter.kernel"].role == "row"
    assert (
        str(choice.leaves["first.kernel"].reason)
        == "not sharded over tensor: 5 is not divisible by tensor=4"
    )
    assert (
        str(choice.leaves["second.kernel"].reason)
        == "not sharded over tensor: 7 is not divisible by tensor=4"
    )


def test_activations_carry_the_divided_class():
    traced = trace(gpt, word_loss, tokens())
    choice = choose_tensor_dims(traced.classes, DEVICES)
    root = traced.classes.root
    shapes = {}
    for equation in root.jaxpr.eqns:
        for variable in equation.outvars:
            where = choice.sharded_dim(root.dims(variable))
            shapes.setdefault(tuple(variable.aval.shape), set()).add(where)
    assert shapes[BATCH, LENGTH, WIDE] >= {2}
    assert shapes[BATCH, LENGTH, HEADS, 16] == {2}
    assert None in shapes[BATCH, LENGTH, HIDDEN]


def test_one_device_divides_nothing():
    choice = choose(gpt, size=1)
    assert not choice.splits


def test_more_devices_than_heads_is_one_clear_error():
    make = lambda r: Language(r, attention=lambda r: Attention(r, heads=2))  # noqa: E731
    traced = trace(make, word_loss, tokens())
    choice = choose_tensor_dims(traced.classes, DEVICES)
    with pytest.raises(UserError, match=r"tensor=4 is larger than the 2 attention heads") as caught:
        check_tensor_size(traced.classes, choice)
    assert 'mesh="tensor=2"' in caught.value.fix


def test_a_model_that_cannot_be_divided_is_one_clear_error():
    traced = trace(lambda r: Perceptron(r, (7, 5, 3)), square_loss, numbers(7))
    choice = choose_tensor_dims(traced.classes, DEVICES)
    with pytest.raises(UserError, match="no parameter can be sharded over tensor=4") as caught:
        check_tensor_size(traced.classes, choice)
    assert "5 is not divisible by tensor=4" in caught.value.why


@pytest.mark.parametrize("make", [gpt, grouped], ids=["gpt", "grouped"])
def test_a_fitting_axis_passes(make):
    traced = trace(make, word_loss, tokens())
    check_tensor_size(traced.classes, choose_tensor_dims(traced.classes, DEVICES))

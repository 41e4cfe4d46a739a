"""Mistakes in what is handed to the trainer are told before anything is built."""

import jax
import numpy as np
import optax
import pytest

from meshwright.config.argument_checks import check_clip_norm, check_count, check_optimizer
from meshwright.errors import UserError
from meshwright.inputs.checks import check_loss, check_precision, mesh_sizes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("optimizer", "fix"),
    [
        (3e-4, "write optimizer=optax.adamw(0.0003) if it is a learning rate"),
        ("lion", "write optimizer=optax.lion(…) if it is the name of one"),
        (optax.adamw, "call it: optimizer=adamw(…)"),
        (None, "write one such as optax.adamw(3e-4)"),
    ],
)
def test_an_optimizer_that_is_none_says_how_to_make_one(optimizer, fix):
    with pytest.raises(UserError, match="the optimizer is ") as caught:
        check_optimizer(optimizer)
    assert caught.value.fix == fix


def test_every_optax_transformation_is_an_optimizer():
    check_optimizer(optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    check_optimizer(optax.MultiSteps(optax.sgd(0.1), 2))


def test_a_precision_that_does_not_exist_lists_those_that_do():
    with pytest.raises(UserError, match="there is no precision 'bf32'") as caught:
        check_precision("bf32")
    assert caught.value.fix == "write precision='no' or 'bf16' or 'fp16'"
    for name in ("no", "bf16", "fp16"):
        check_precision(name)


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3", None])
def test_counts_are_whole_and_positive(count):
    with pytest.raises(UserError, match=f"steps={count!r} is not valid"):
        check_count("steps", count)
    check_count("steps", np.int64(3))


def test_a_norm_of_zero_would_stop_learning():
    with pytest.raises(UserError, match="stop all learning"):
        check_clip_norm(0)
    check_clip_norm(None)
    check_clip_norm(0.5)


def test_a_loss_is_a_function():
    with pytest.raises(UserError, match=r"loss\(model, batch\)"):
        check_loss("mse")


def test_auto_and_an_empty_text_leave_all_sizes_open():
    assert mesh_sizes("auto") == mesh_sizes("") == {}
    with pytest.raises(UserError, match='neither axis sizes nor "auto"') as caught:
        mesh_sizes("automatic")
    assert 'mesh="auto"' in caught.value.fix
    assert mesh_sizes("fsdp=4,tp=2") == {"fsdp": 4, "tensor": 2}
    assert mesh_sizes({"fsdp": 8}) == {"fsdp": 8}


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        (jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor")),
         'mesh="fsdp=4, tensor=2"'),
        (8, 'mesh="fsdp=4,tensor=2"'),
        ("autp", 'mesh="auto" to let the planner choose'),
    ],
)  # fmt: skip
def test_what_is_no_mesh_says_what_to_write(mesh, fix):
    with pytest.raises(UserError) as caught:
        mesh_sizes(mesh)
    assert fix in caught.value.fix

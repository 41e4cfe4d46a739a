"""A task of one's own is a loss function, or a class with one."""

import pytest

from meshwright.errors import UserError
from meshwright.inputs.user_task import read_task

pytestmark = pytest.mark.quick


class Own:
    def __init__(self, *, scale: float = 1.0):
        self.scale = scale

    def loss(self, model, batch):
        return self.scale * model * batch


class Lossless:
    pass


def own_loss(model, batch, *, scale: float = 1.0):
    return scale * model * batch


def one_argument(batch):
    return batch


@pytest.mark.parametrize("builder", [Own, own_loss])
def test_a_class_or_a_function_with_its_settings(builder):
    assert read_task("own:it", builder, {}).loss(2, 3) == 6
    assert read_task("own:it", builder, {"scale": "10"}).loss(2, 3) == 60
    with pytest.raises(UserError, match=r"did you mean `task\.scale`"):
        read_task("own:it", builder, {"scael": 1})


@pytest.mark.parametrize("key", ["model", "batch"])
def test_model_and_batch_are_not_settings(key):
    with pytest.raises(UserError, match=f"there is no `task.{key}`"):
        read_task("own:it", own_loss, {key: 1})


def test_a_class_without_a_loss_is_refused():
    with pytest.raises(UserError, match=r"task\.kind=own:Lossless has no loss") as caught:
        read_task("own:Lossless", Lossless, {})
    assert "loss(self, model, batch)" in caught.value.fix


def test_a_function_that_is_no_loss_is_refused():
    with pytest.raises(UserError, match="is not a loss") as caught:
        read_task("own:it", one_argument, {})
    assert "it takes (batch)" in caught.value.why

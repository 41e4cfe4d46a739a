"""Reading what users hand over as batches: arrays of numbers, all of one form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.data.batches import form_of, read_batch, read_batches
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


class Tensor:
    """An array of another library, which NumPy can read."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        if self.values is None:
            raise TypeError("it lives on another device")
        return np.array(self.values)


def x(samples: int = 4, width: int = 3) -> np.ndarray:
    return np.zeros((samples, width), np.float32)


def test_arrays_of_32_bits_pass_as_they_are():
    batch = {"x": x(), "y": jnp.zeros(4, jnp.bfloat16), "z": (np.ones(4, bool), np.ones(4, "u1"))}
    read = read_batch(batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, batch, read))
    assert form_of(read).num_samples == 4


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"), ("complex128", "complex64")],
)
def test_64_bits_become_32_as_on_the_devices(wide, narrow):
    values = np.arange(4).astype(wide)
    read = read_batch({"x": values})["x"]
    assert read.dtype == narrow
    np.testing.assert_array_equal(read, values)
    with jax.enable_x64(True):
        assert read_batch({"x": values})["x"].dtype == wide


def test_integers_that_would_be_cut_off_are_refused():
    with pytest.raises(UserError, match="more than 32 bits") as caught:
        read_batch({"id": np.array([1, 2**31])})
    assert "from 1 to 2147483648" in caught.value.why


def test_shapes_stand_for_arrays():
    struct = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    assert read_batch({"x": struct})["x"] is struct


def test_tensors_of_other_libraries_become_arrays():
    read = read_batch([Tensor([[1.0], [2.0]])])[0]
    assert isinstance(read, np.ndarray)
    assert (read.shape, read.dtype) == ((2, 1), np.float32)
    with pytest.raises(UserError, match="`0` of the batch cannot become an array") as caught:
        read_batch([Tensor(None)])
    assert caught.value.why == "it lives on another device"


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"text": np.array(["a", "bc"])}, "`text` of the batch holds text"),
        ({"a": {"b": np.array([b"a"])}}, "`a.b` of the batch holds text"),
        ({"x": np.array([None, 1], object)}, "`x` of the batch holds no numbers"),
        ({"when": np.zeros(2, "M8[s]")}, "`when` of the batch holds no numbers"),
        ({"x": "hello"}, "`x` of the batch is of type str"),
        ({"x": [1, 2]}, "`x.0` of the batch is of type int"),
        ({"x": np.float32(1)}, "`x` of the batch is a single number"),
        ({"x": jax.random.key(0)}, "`x` of the batch holds no numbers"),
        ({}, "the batch has no arrays"),
        (None, "the batch is None"),
        ({"x": x(0)}, "the batch has no samples"),
        ({"x": x(4), "y": x(3)}, "the arrays of the batch have different numbers of samples"),
    ],
)
def test_what_is_no_batch_is_named(batch, what):
    with pytest.raises(UserError) as caught:
        read_batch(batch)
    assert caught.value.what.startswith(what)
    assert caught.value.why or caught.value.fix


def test_batches_are_read_one_by_one():
    endless = iter(lambda: {"x": x()}, None)
    stream = read_batches(endless)
    assert next(stream)["x"].shape == next(stream)["x"].shape == (4, 3)


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({"x": x(3), "y": x(3)}, "it has 3 samples, and the first batch had 4"),
        ({"x": x()}, "before: x, y; now: x"),
        ({"x": x(), "z": x()}, "before: x, y; now: x, z"),
        ([x(), x()], "before: x, y; now: 0, 1"),
        ({"x": x(), "y": x(4, 5)}, "`y` was float32[4, 3] and is now float32[4, 5]"),
        ({"x": x(), "y": x().astype(int)}, "`y` was float32[4, 3] and is now int32[4, 3]"),
    ],
)
def test_a_later_batch_of_another_form_says_what_changed(later, why):
    first = {"x": x(), "y": x()}
    stream = read_batches([first, first, later])
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(UserError, match="batch 2 differs") as caught:
        next(stream)
    assert caught.value.why == why

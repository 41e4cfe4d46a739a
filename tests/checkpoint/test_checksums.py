"""Checksums: the same on every mesh, and different after every change."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.checkpoint.checksums import block_sum, json_checksum, merge_sums, sums_of

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
DTYPES = ["float32", "float16", "int8", "bool", "float64", "complex128", ml_dtypes.bfloat16, "i4"]


def values(shape, dtype):
    bits = RANDOM.integers(0, 2, size=shape) if dtype == "bool" else RANDOM.normal(size=shape) * 50
    return np.asarray(bits).astype(dtype)


def by_hand(array):
    """The definition, word by word: no blocks, no shortcuts."""
    from meshwright.checkpoint.checksums import _COLUMN_FACTORS, _COLUMNS, _factors

    flat = array.reshape(1) if array.ndim == 0 else array
    rows = flat.reshape(-1, flat.shape[-1])
    total = 0
    for number, row in enumerate(rows):
        raw = row.tobytes()
        raw += bytes(-len(raw) % 8)
        factor = 1
        for dim, index in enumerate(np.unravel_index(number, flat.shape[:-1])):
            factor *= int(_factors(dim + 1, int(index), 1)[0])
        for column in range(len(raw) // 8):
            word = int.from_bytes(raw[8 * column : 8 * column + 8], "little")
            own = int(_COLUMN_FACTORS[column % _COLUMNS])
            own *= int(_factors(0, column // _COLUMNS, 1)[0])
            total += word * own * factor
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 7), (2, 5000)])
def test_the_sum_is_its_definition(shape, dtype):
    array = values(shape, dtype)
    assert block_sum(array, (0,) * array.ndim) == by_hand(array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_any_grid_add_up(dtype):
    array = values((7, 9, 13), dtype)
    whole = block_sum(array, (0, 0, 0))
    for rows, columns in ((7, 13), (3, 5), (1, 1), (2, 13)):
        blocks = (
            block_sum(array[i : i + rows, :, j : j + columns], (i, 0, j))
            for i in range(0, 7, rows)
            for j in range(0, 13, columns)
        )
        assert sum(blocks) % 2**64 == whole


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_flipped_bit_shows(data):
    shape = data.draw(st.sampled_from([(1,), (6,), (3, 5), (2, 3, 4)]))
    array = values(shape, data.draw(st.sampled_from(DTYPES[:3])))
    raw = bytearray(array.tobytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    changed = np.frombuffer(bytes(raw), array.dtype).reshape(shape)
    start = (0,) * array.ndim
    assert block_sum(changed, start) != block_sum(array, start)


def test_rows_and_columns_that_change_places_show():
    array = values((6, 8), "float32")
    for other in (array[::-1], array[:, ::-1], np.roll(array, 1), -array, np.zeros_like(array)):
        assert block_sum(other, (0, 0)) != block_sum(array, (0, 0))


@pytest.mark.parametrize("spec", [(), ("a",), (None, "b"), ("a", "b"), (("a", "b"),)])
def test_every_sharding_has_the_same_sum(spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    array = values((8, 12), "float32")
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    own = sums_of({"params": {"kernel": sharded}})["params/kernel"]
    assert own == sums_of({"params": {"kernel": array}})["params/kernel"]
    assert own.complete


def test_processes_add_their_parts():
    array = values((8, 12), "float32")
    # NumPy arrays are counted by the main process alone.
    parts = [sums_of({"params": {"kernel": array}}, main=main) for main in (True, False)]
    assert not parts[1]["params/kernel"].complete
    assert merge_sums(parts) == parts[0]


def test_json_has_the_same_checksum_however_it_is_written():
    assert json_checksum({"a": (1, 2), "b": {"c": 0.1}}) == json_checksum(
        {"b": {"c": 0.1}, "a": [1, 2]}
    )
    assert json_checksum({"seed": 1}) != json_checksum({"seed": 3})

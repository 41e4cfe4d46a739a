"""Files of weights, against the library of the format."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshwright.errors import UserError
from meshwright.weights import safetensors_format
from meshwright.weights.safetensors_format import read_header, write_file

ARRAYS = {
    "matrix": np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32),
    "vector": np.arange(3, dtype=np.float32),
    "number": np.array(2.5, np.float32),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def whole(tensor):
    return tensor.read([(0, size) for size in tensor.shape])


def test_files_of_the_library_are_read(tmp_path):
    file = tmp_path / "file.safetensors"
    save_file(ARRAYS, file, metadata={"format": "pt"})
    for name, tensor in read_header(file).items():
        np.testing.assert_array_equal(whole(tensor), ARRAYS[name])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_library_reads_our_files(tmp_path, dtype):
    file = tmp_path / "file.safetensors"
    write_file(file, SHAPES, dtype, iter(ARRAYS.values()))
    for name, array in load_file(file).items():
        np.testing.assert_array_equal(np.asarray(array), ARRAYS[name].astype(dtype))
        assert array.dtype == np.dtype(dtype)


def test_half_precision_is_read_as_it_is(tmp_path):
    file = tmp_path / "file.safetensors"
    write_file(file, SHAPES, "bfloat16", iter(ARRAYS.values()))
    read = whole(read_header(file)["matrix"])
    np.testing.assert_array_equal(read, ARRAYS["matrix"].astype(ml_dtypes.bfloat16))


def test_a_slice_is_read_alone(tmp_path):
    file = tmp_path / "file.safetensors"
    save_file(ARRAYS, file)
    read = read_header(file)["matrix"].read([(1, 5), (2, 6)])
    np.testing.assert_array_equal(read, ARRAYS["matrix"][1:5, 2:6])


def test_tensors_are_compared_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_format, "BLOCK_BYTES", 60)
    other = ARRAYS["matrix"].copy()
    other[4, 6] += 1
    save_file({**ARRAYS, "same": ARRAYS["matrix"], "other": other}, tmp_path / "file")
    tensors = read_header(tmp_path / "file")
    assert tensors["matrix"].equals(tensors["same"])
    assert not tensors["matrix"].equals(tensors["other"])


@pytest.mark.parametrize(
    "header",
    [
        {"a": [0, 8], "b": [4, 12]},
        {"a": [-8, 0]},
        {"a": [8, 16]},
        {"a": [0, 8], "b": [12, 16]},
        {"a": [0, 8]},
        {"a": [16, 8]},
        {"a": [0, 2**70]},
    ],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(tmp_path, header):
    entries = {
        name: {"dtype": "F32", "shape": [abs(end - start) // 4], "data_offsets": [start, end]}
        for name, (start, end) in header.items()
    }
    text = json.dumps(entries).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        read_header(tmp_path / "file")


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_refused_with_its_size(tmp_path, keep):
    file = tmp_path / "file.safetensors"
    save_file(ARRAYS, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="is not a complete safetensors file") as error:
        read_header(file)
    assert f"{file.stat().st_size:,} bytes" in error.value.why or "header" in error.value.why

"""DeviceMeshManager: shapes, names, order, sub-meshes and errors."""

import jax
import pytest
from jax.sharding import AxisType

from meshwright.distributed import DeviceMeshManager
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def manager():
    return DeviceMeshManager()


def ids(mesh):
    return [[d.id for d in row] for row in mesh.devices.reshape(mesh.devices.shape[0], -1)]


def test_sees_all_devices(manager):
    assert manager.num_devices == 8
    assert manager.devices == jax.devices()


def test_its_list_of_devices_is_its_own(manager):
    manager.devices.clear()
    assert manager.num_devices == 8


@pytest.mark.parametrize("shape", [{"data": 4, "model": 2}, [("data", 4), ("model", 2)]])
def test_dict_and_pairs_make_the_same_mesh(manager, shape):
    mesh = manager.create_device_mesh(shape)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_names_and_order_are_the_callers(manager):
    mesh = manager.create_device_mesh([("model", 2), ("rows", 2), ("data", 2)])
    assert mesh.axis_names == ("model", "rows", "data")
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_sub_mesh_starts_at_device_0(manager):
    mesh = manager.create_data_parallel_mesh(num_devices=4)
    assert dict(mesh.shape) == {"data": 4}
    assert [d.id for d in mesh.devices] == [0, 1, 2, 3]


def test_flat_meshes_take_all_devices_and_any_name(manager):
    assert dict(manager.create_data_parallel_mesh().shape) == {"data": 8}
    assert dict(manager.create_model_parallel_mesh().shape) == {"model": 8}
    assert dict(manager.create_data_parallel_mesh(2, axis_name="batch").shape) == {"batch": 2}


def test_hybrid_mesh(manager):
    assert dict(manager.create_hybrid_mesh().shape) == {"data": 1, "model": 1}
    mesh = manager.create_hybrid_mesh(2, 4, data_axis="d", model_axis="m")
    assert dict(mesh.shape) == {"d": 2, "m": 4}


def test_mesh_info(manager):
    mesh = manager.create_hybrid_mesh(2, 2)
    info = manager.get_mesh_info(mesh)
    assert info == {"total_devices": 4, "axes": {"data": 2, "model": 2}}


def test_given_devices_are_used():
    last_two = jax.devices()[6:]
    assert [d.id for d in DeviceMeshManager(last_two).create_data_parallel_mesh().devices] == [6, 7]
    mesh = DeviceMeshManager().create_device_mesh({"data": 2}, devices=last_two)
    assert [d.id for d in mesh.devices] == [6, 7]


def test_too_few_devices_shows_the_equation(manager):
    with pytest.raises(ValueError, match=r"Not enough devices.* 16 .* 8\ndata=4 × model=4 = 16"):
        manager.create_hybrid_mesh(4, 4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({}, "no axes"),
        ({"data": 0}, "`data` has size 0"),
        ({"data": -1}, "`data` has size -1"),
        ([("data", 2), ("data", 4)], "`data` is given twice"),
    ],
)
def test_impossible_shapes_are_refused(manager, shape, message):
    with pytest.raises(UserError, match=message):
        manager.create_device_mesh(shape)

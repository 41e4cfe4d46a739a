"""Models written without Meshwright in mind train on every mesh like on one device."""

import pytest
from quick import quick_compilation
from zoo.matrix import CELLS, HIGHER, STAGES, ZOO, certify, highest_ratio

__all__ = ["quick_compilation"]
pytestmark = pytest.mark.usefixtures("quick_compilation")

COVERING = (
    ("deep equilibrium", "data=8"),
    ("Fourier operator", "fsdp=8"),
    ("tied autoencoder", "fsdp=4,tensor=2"),
    ("hypernetwork", "tensor=4,data=2"),
    ("graph network", STAGES),
)


def test_the_covering_cells_cover():
    assert len(ZOO) == 20
    assert {mesh for _, mesh in COVERING} == {mesh for _, mesh in CELLS}
    assert {name for name, *_ in HIGHER} <= set(ZOO)


def check(name, mesh, steps):
    certificate, ledger = certify(name, mesh, steps)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert not certificate.not_compared
    for axis, own in ledger.axes.items():
        limit = highest_ratio(name, mesh, axis)
        assert own.ratio is not None
        assert own.ratio <= limit, own.excess


# Every day, tests/step has other such models, and tests/ledgers, tests/parity and tests/pipeline
# have these meshes.
@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), COVERING)
def test_a_model_of_the_zoo_trains_like_on_one_device(name, mesh):
    check(name, mesh, steps=1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), CELLS)
def test_every_model_of_the_zoo_trains_on_every_mesh_like_on_one_device(name, mesh):
    check(name, mesh, steps=3)

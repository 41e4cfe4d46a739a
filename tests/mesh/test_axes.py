"""Names, aliases and arithmetic of mesh axes."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.config.schema import MeshConfig
from meshwright.errors import UserError
from meshwright.mesh import axes
from meshwright.mesh.axes import (
    ALIASES,
    AXES,
    canonical_axis,
    canonical_sizes,
    describe_sizes,
    nearest_sizes,
    parse_mesh,
    resolve_sizes,
    shown_sizes,
)

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("command_line")]

device_counts = st.integers(1, 1024)
mesh_sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 64), max_size=4)


@settings(deadline=None)
@given(mesh_sizes, st.sampled_from([None, *AXES]), device_counts)
def test_a_resolved_mesh_multiplies_to_the_device_count(sizes, inferred, num_devices):
    asked = {**sizes, **({inferred: -1} if inferred else {})}
    try:
        resolved = resolve_sizes(asked, num_devices)
    except UserError:
        known = math.prod(size for size in asked.values() if size != -1)
        leftover_has_a_place = inferred or "data" not in asked
        assert num_devices % known or (not leftover_has_a_place and known != num_devices)
        return
    assert math.prod(resolved.values()) == num_devices
    assert {a: s for a, s in asked.items() if s != -1}.items() <= resolved.items()
    assert list(resolved) == [axis for axis in AXES if axis in resolved]


@settings(deadline=None)
@given(mesh_sizes, device_counts)
def test_every_nearest_mesh_is_a_valid_one(sizes, num_devices):
    nearest = nearest_sizes(sizes, num_devices)
    assert nearest
    for mesh in nearest:
        assert math.prod(resolve_sizes(mesh, num_devices).values()) == num_devices
        assert math.prod(mesh.values()) == num_devices


@settings(deadline=None)
@given(mesh_sizes, device_counts)
def test_a_mismatch_shows_the_equation_and_only_meshes_that_work(sizes, num_devices):
    product = math.prod(sizes.values())
    assume(num_devices % product or ("data" in sizes and product != num_devices))
    with pytest.raises(UserError) as caught:
        resolve_sizes(sizes, num_devices)
    why, fix = caught.value.why, caught.value.fix
    stated = {word.strip(",") for word in why.split()}
    factors = {f"{axis}={size}" for axis, size in shown_sizes(sizes).items()}
    assert factors <= stated
    assert str(num_devices) in stated
    assert len(factors) < 2 or str(product) in stated
    for suggestion in fix.removeprefix("nearest meshes that work: ").split("; "):
        mesh = parse_mesh(suggestion.replace("mesh.", "").replace(" ", ","))
        assert math.prod(resolve_sizes(mesh, num_devices).values()) == num_devices


def test_the_nearest_mesh_keeps_what_it_can():
    assert nearest_sizes({"fsdp": 3, "tensor": 2}, 8)[0] in (
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
    )
    assert nearest_sizes({"data": 4, "tensor": 4}, 8)[0] in (
        {"data": 4, "tensor": 2},
        {"data": 2, "tensor": 4},
    )


def test_minus_one_takes_what_is_left():
    assert resolve_sizes({"fsdp": -1, "tensor": 2}, 8) == {"fsdp": 4, "tensor": 2}
    assert resolve_sizes({"data": -1, "fsdp": 8}, 8) == {"data": 1, "fsdp": 8}


def test_data_takes_what_is_left_when_it_is_not_given():
    assert resolve_sizes({"fsdp": 4}, 8) == {"data": 2, "fsdp": 4}
    assert resolve_sizes({"fsdp": 8}, 8) == {"fsdp": 8}
    assert resolve_sizes({}, 8) == {"data": 8}
    assert resolve_sizes({}, 1) == {"data": 1}


def test_two_inferred_axes_are_refused_by_name():
    with pytest.raises(UserError, match=r"mesh\.data and mesh\.fsdp are both -1"):
        resolve_sizes({"fsdp": -1, "data": -1}, 8)


@pytest.mark.parametrize(("alias", "axis"), ALIASES.items())
def test_aliases_mean_their_axis(alias, axis):
    assert canonical_axis(alias) == axis
    assert canonical_sizes({alias: 2}) == {axis: 2}


def test_an_axis_and_its_alias_together_are_refused():
    with pytest.raises(UserError, match="`tensor` is given twice"):
        canonical_sizes({"tp": 2, "tensor": 2})
    with pytest.raises(UserError, match="given twice in `dp=2,data=4`"):
        parse_mesh("dp=2,data=4")


def test_an_unknown_axis_suggests_the_nearest():
    with pytest.raises(UserError, match="unknown mesh axis `tensr`: did you mean `tensor`"):
        canonical_axis("tensr")


@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(UserError, match=f"`fsdp` has size {size}"):
        canonical_sizes({"fsdp": size})


def test_axes_come_in_canonical_order_whatever_the_order_asked():
    assert list(canonical_sizes({"tp": 2, "fsdp": 2, "cp": 2, "dp": 2, "pp": 2})) == list(AXES)


def test_a_mesh_is_read_from_text():
    assert parse_mesh("tensor=2, fsdp=4") == {"fsdp": 4, "tensor": 2}
    assert parse_mesh("dp=-1,tp=2") == {"data": -1, "tensor": 2}
    assert parse_mesh("") == {}


@pytest.mark.parametrize("text", ["fsdp", "fsdp=", "fsdp=x", "fsdp=2.0", "=4", "fsdp=--4"])
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(UserError):
        parse_mesh(text)


def test_sizes_of_one_are_not_shown():
    assert describe_sizes({"data": 1, "fsdp": 4, "tensor": 2}) == "fsdp=4 × tensor=2"
    assert describe_sizes({"data": 1}) == "1 device"


def listed_axes(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of tuples, lists, sets and dicts in which two or more axes are spelled out.

    A dict that changes a mesh, such as ``{**mesh, "data": 1, "fsdp": 2}``, is no list of axes.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = node.elts
        elif isinstance(node, ast.Dict) and None not in node.keys:
            items = node.keys
        else:
            continue
        names = {item.value for item in items if isinstance(item, ast.Constant)}
        if len(names & set(AXES)) > 1:
            yield node.lineno


MEASURED = {"planner/workload/gpu_rules.py"}
"""What was measured of some axes is recorded beside the other rules for GPUs."""


def test_no_other_module_lists_the_axes():
    source = Path(axes.__file__).parent.parent
    paths = set(source.rglob("*.py")) - {source / name for name in MEASURED}
    texts = {path: path.read_text() for path in sorted(paths)}
    found = [
        f"{path.relative_to(source)}:{line}"
        for path, text in texts.items()
        if sum(f'"{axis}"' in text for axis in AXES) > 1
        for line in listed_axes(ast.parse(text))
    ]
    assert not found, f"these read `MESH_AXES` instead: {found}"


def test_every_axis_is_a_key_of_the_mesh():
    assert set(MeshConfig.model_fields) == {*AXES, "auto"}

"""DistributedConfig: documented examples, inference, and every equation as a rejection."""

import copy
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.config import DistributedBackend, DistributedConfig
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

quick = settings(max_examples=100, deadline=None, derandomize=True)

DOCUMENTED = [
    {
        "enabled": True,
        "world_size": 4,
        "backend": "nccl",
        "mesh_shape": (2, 2),
        "mesh_axis_names": ("data", "model"),
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
    },
    {
        "enabled": True,
        "world_size": 8,
        "num_nodes": 2,
        "num_processes_per_node": 4,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
    },
    {
        "enabled": True,
        "world_size": 8,
        "num_nodes": 2,
        "num_processes_per_node": 4,
        "master_addr": "192.168.1.10",
        "master_port": 29500,
        "rank": 5,
        "local_rank": 1,
        "mesh_shape": (8,),
        "mesh_axis_names": ("data",),
    },
    {"tensor_parallel_size": 4, "mesh_shape": (2, 4)},
]


def assert_all_equations(config: DistributedConfig) -> None:
    parallel = config.tensor_parallel_size * config.pipeline_parallel_size
    assert config.world_size == config.num_nodes * config.num_processes_per_node
    assert parallel <= config.world_size
    assert config.world_size % parallel == 0
    assert 0 <= config.rank < config.world_size
    assert 0 <= config.local_rank < config.num_processes_per_node
    assert math.prod(config.mesh_shape) == config.world_size
    assert len(config.mesh_shape) == len(config.mesh_axis_names)
    assert 1024 <= config.master_port <= 65535
    assert config.get_data_parallel_size() * parallel == config.world_size
    sizes = config.mesh_sizes()
    assert math.prod(s for n, s in sizes.items() if n in ("model", "tp", "tensor", "mp")) == (
        config.tensor_parallel_size
    )
    assert math.prod(s for n, s in sizes.items() if n in ("pipeline", "pp", "pipe")) == (
        config.pipeline_parallel_size
    )


@pytest.mark.parametrize("example", DOCUMENTED)
def test_documented_examples_are_accepted_as_written(example):
    config = DistributedConfig(**example)
    assert_all_equations(config)
    assert {key: getattr(config, key) for key in example} == example


def test_eight_processes_two_by_two_leave_two_copies():
    config = DistributedConfig(**DOCUMENTED[1])
    assert config.get_data_parallel_size() == 2
    assert config.mesh_sizes() == {"data": 2, "model": 2, "pipeline": 2}


def test_defaults_describe_one_process():
    config = DistributedConfig()
    assert_all_equations(config)
    assert (config.enabled, config.world_size, config.rank) == (False, 1, 0)
    assert (config.master_addr, config.master_port) == ("localhost", 29500)
    assert (config.backend, config.mixed_precision) == ("nccl", "no")


@pytest.mark.parametrize(
    ("given_values", "inferred"),
    [
        ({"world_size": 8}, {"num_nodes": 1, "num_processes_per_node": 8, "mesh_shape": (8,)}),
        ({"world_size": 8}, {"enabled": True}),
        ({"world_size": 8, "num_nodes": 2}, {"num_processes_per_node": 4}),
        ({"world_size": 8, "num_processes_per_node": 2}, {"num_nodes": 4}),
        ({"num_nodes": 2, "num_processes_per_node": 4}, {"world_size": 8, "mesh_shape": (8,)}),
        ({"num_nodes": 3}, {"world_size": 3, "num_processes_per_node": 1}),
        ({"mesh_shape": (2, 4)}, {"world_size": 8, "tensor_parallel_size": 4}),
        (
            {"mesh_shape": (2, 2, 3)},
            {
                "mesh_axis_names": ("data", "model", "pipeline"),
                "pipeline_parallel_size": 3,
                "world_size": 12,
            },
        ),
        (
            {"mesh_shape": (4, 2), "mesh_axis_names": ("fsdp", "tp")},
            {"tensor_parallel_size": 2, "mesh_axis_names": ("fsdp", "tp")},
        ),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"world_size": 4}),
        ({"tensor_parallel_size": 3, "num_nodes": 2}, {"world_size": 6, "mesh_shape": (2, 3)}),
        ({"world_size": 8, "mesh_axis_names": ("fsdp", "tp")}, {"mesh_shape": (8, 1)}),
        (
            {"world_size": 8, "mesh_axis_names": ("model",)},
            {"mesh_shape": (8,), "tensor_parallel_size": 8},
        ),
        ({"num_nodes": 2, "num_processes_per_node": 4, "rank": 6}, {"local_rank": 2}),
        ({"world_size": 8, "rank": None, "num_nodes": None}, {"rank": 0, "num_nodes": 1}),
    ],
)
def test_unset_values_are_inferred_from_set_ones(given_values, inferred):
    config = DistributedConfig(**given_values)
    assert_all_equations(config)
    assert {key: getattr(config, key) for key in inferred} == inferred


def test_ranks_need_not_be_in_node_order():
    config = DistributedConfig(num_nodes=2, num_processes_per_node=4, rank=3, local_rank=1)
    assert (config.rank, config.local_rank) == (3, 1)
    assert not config.is_main_process()
    assert not config.is_local_main_process()


def test_main_processes_are_the_first_of_all_and_of_a_node():
    first = DistributedConfig(num_nodes=2, num_processes_per_node=2)
    assert first.is_main_process()
    assert first.is_local_main_process()
    other_node = DistributedConfig(num_nodes=2, num_processes_per_node=2, rank=2, local_rank=0)
    assert not other_node.is_main_process()
    assert other_node.is_local_main_process()


@pytest.mark.parametrize(
    ("given_values", "equation", "nearest"),
    [
        (
            {"world_size": 8, "num_nodes": 2, "num_processes_per_node": 3},
            "num_nodes=2 × num_processes_per_node=3 = 6, not 8",
            "world_size=6 or num_processes_per_node=4",
        ),
        (
            {"world_size": 8, "num_nodes": 3},
            "num_nodes=3 × num_processes_per_node=2 = 6, not 8",
            "num_nodes=2 or 4",
        ),
        (
            {"world_size": 8, "tensor_parallel_size": 3, "pipeline_parallel_size": 2},
            "8 is not divisible by 3 × 2 = 6",
            "4 or 8",
        ),
        (
            {"world_size": 2, "tensor_parallel_size": 4},
            "2 is not divisible by 4 × 1 = 4",
            "1 or 2",
        ),
        (
            {"world_size": 8, "rank": 8},
            "world_size=8, and rank < world_size",
            "rank=0 to 7, or world_size=9 or more",
        ),
        (
            {"num_nodes": 2, "num_processes_per_node": 4, "local_rank": 4},
            "num_processes_per_node=4, and local_rank < num_processes_per_node",
            "local_rank=0 to 3",
        ),
        (
            {"world_size": 8, "mesh_shape": (2, 2), "mesh_axis_names": ("data", "fsdp")},
            "2 × 2 = 4 devices, not 8",
            "world_size=4 or mesh_shape=(4, 2)",
        ),
        (
            {"num_nodes": 2, "num_processes_per_node": 4, "mesh_shape": (2, 2)},
            "2 × 2 = 4 devices, not 8",
            "mesh_shape=(4, 2)",
        ),
        (
            {"mesh_shape": (2, 2), "mesh_axis_names": ("data",)},
            "there are 1 name and 2 sizes",
            "2 of data, fsdp, model, pipeline",
        ),
        (
            {"mesh_shape": (2, 2, 2, 2)},
            "there are 3 names and 4 sizes",
            "4 of data, fsdp, model, pipeline",
        ),
        (
            {"mesh_shape": (2, 4), "tensor_parallel_size": 2},
            "the tensor axis has size 4",
            "tensor_parallel_size=4",
        ),
        (
            {"mesh_shape": (8,), "pipeline_parallel_size": 2},
            "the pipe axis has size 1",
            "pipeline_parallel_size=1",
        ),
        (
            {"world_size": 8, "tensor_parallel_size": 2, "mesh_axis_names": ("data",)},
            "world_size=8 needs tensor=2",
            "('data', 'tensor')",
        ),
        (
            {"world_size": 8, "tensor_parallel_size": 2, "mesh_axis_names": ("model",)},
            "world_size=8 needs data=4",
            "('model', 'data')",
        ),
    ],
)
def test_contradictions_show_the_equation_and_the_nearest_values(given_values, equation, nearest):
    with pytest.raises(UserError) as caught:
        DistributedConfig(**given_values)
    assert equation in caught.value.why
    assert nearest in caught.value.fix


@pytest.mark.parametrize(
    "given_values",
    [
        {"master_port": 1023},
        {"master_port": 65536},
        {"world_size": 0},
        {"world_size": True},
        {"world_size": 10**12},
        {"rank": -1},
        {"backend": "tcp"},
        {"mixed_precision": "fp8"},
        {"master_addr": ""},
        {"mesh_shape": ()},
        {"mesh_shape": (2, 0)},
        {"mesh_shape": "8"},
        {"mesh_axis_names": ()},
    ],
)
def test_values_out_of_range_name_the_key_and_the_value(given_values):
    ((key, value),) = given_values.items()
    with pytest.raises(UserError) as caught:
        DistributedConfig(**given_values)
    assert f"`{key}" in caught.value.what
    assert caught.value.why
    assert str(value) in caught.value.what or key == "mesh_shape"


@pytest.mark.parametrize(
    ("given_values", "what"),
    [
        (
            {"mesh_shape": (2, 3), "world_size": 4},
            "mesh_shape=(2, 3) contradicts world_size=4",
        ),
        (
            {"mesh_shape": (2, 3), "num_nodes": 2, "num_processes_per_node": 4},
            "mesh_shape=(2, 3) contradicts num_nodes=2 × num_processes_per_node=4",
        ),
        ({"mesh_shape": (2, 3), "num_nodes": 4}, "mesh_shape=(2, 3) contradicts num_nodes=4"),
        (
            {"world_size": 8, "num_processes_per_node": 3},
            "world_size=8 contradicts num_processes_per_node=3",
        ),
    ],
)
def test_contradictions_name_the_values_that_were_written(given_values, what):
    with pytest.raises(UserError) as caught:
        DistributedConfig(**given_values)
    assert caught.value.what == what
    assert "tensor_parallel_size" not in str(caught.value)


def test_mesh_and_labels_of_a_config():
    config = DistributedConfig(
        name="run",
        description="two by two",
        tags=["small"],
        metadata={"owner": "me"},
        world_size=4,
        tensor_parallel_size=2,
        backend=DistributedBackend.GLOO,
        find_unused_parameters=True,
        gradient_as_bucket_view=False,
        broadcast_buffers=False,
    )
    assert config.get_mesh_config() == {"mesh_shape": (2, 2), "axis_names": ("data", "model")}
    assert config.backend is DistributedBackend.GLOO
    assert config.backend == "gloo"
    assert (config.name, config.tags, config.metadata) == ("run", ("small",), {"owner": "me"})
    assert config.find_unused_parameters
    assert not config.gradient_as_bucket_view
    assert not config.broadcast_buffers


def test_backends_are_their_texts():
    assert [f"{backend}" for backend in DistributedBackend] == ["nccl", "gloo", "mpi"]
    assert DistributedConfig(backend="mpi").backend is DistributedBackend("mpi")
    with pytest.raises(UserError, match="did you mean `nccl`"):
        DistributedConfig(backend="ncll")


def test_local_rank_is_checked_before_world_size():
    with pytest.raises(UserError, match="local_rank=4"):
        DistributedConfig(world_size=9, num_nodes=2, num_processes_per_node=4, local_rank=4)


def test_an_axis_named_twice_or_unknown_is_refused():
    with pytest.raises(UserError, match="data axis twice"):
        DistributedConfig(mesh_shape=(2, 2), mesh_axis_names=("data", "dp"))
    with pytest.raises(UserError, match="did you mean `model`"):
        DistributedConfig(mesh_shape=(2, 2), mesh_axis_names=("data", "modle"))


@pytest.mark.parametrize("value", [8, None])
def test_unknown_fields_are_refused_with_the_nearest_name(value):
    with pytest.raises(UserError, match="did you mean `world_size`"):
        DistributedConfig(wrld_size=value)


def test_config_is_frozen_and_takes_keywords_only():
    config = DistributedConfig(world_size=8)
    with pytest.raises(ValidationError, match="frozen"):
        config.world_size = 4
    with pytest.raises(TypeError):
        DistributedConfig(8)
    assert config.world_size == 8


def test_dictionaries_are_validated_the_same_way():
    assert DistributedConfig.parse({"world_size": 8}) == DistributedConfig(world_size=8)
    with pytest.raises(UserError, match="contradicts num_nodes=3"):
        DistributedConfig.parse({"world_size": 8, "num_nodes": 3})


near = st.sampled_from([1, 1, 2, 2, 4, 8])
names = st.sampled_from(["data", "fsdp", "model", "tp", "pipeline", "dp", "batch", ""])
wrong = st.one_of(
    st.integers(-3, 10**13), st.text(max_size=5), st.booleans(), st.floats(), st.lists(st.none())
)
near_the_truth = st.fixed_dictionaries(
    {},
    optional={
        "world_size": st.sampled_from([1, 2, 4, 8, 8, 16]),
        "num_nodes": near,
        "num_processes_per_node": near,
        "rank": st.integers(-1, 4),
        "local_rank": st.integers(-1, 2),
        "tensor_parallel_size": near,
        "pipeline_parallel_size": near,
        "mesh_shape": st.lists(near, max_size=5).map(tuple),
        "mesh_axis_names": st.lists(names, max_size=5).map(tuple),
    },
)
spoiled = st.dictionaries(
    st.sampled_from([*DistributedConfig.model_fields, "wrold_size"]), wrong, max_size=2
)


@settings(quick, max_examples=200)
@given(values=near_the_truth, spoiled_values=st.just({}) | spoiled)
def test_any_input_is_refused_politely_or_satisfies_all_equations(values, spoiled_values):
    try:
        config = DistributedConfig(**{**values, **spoiled_values})
    except UserError:
        return
    assert_all_equations(config)


@st.composite
def consistent_runs(draw):
    tensor, pipe, data = draw(near), draw(near), draw(near)
    world = tensor * pipe * data
    nodes = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    rank = draw(st.integers(0, world - 1))
    return {
        "world_size": world,
        "num_nodes": nodes,
        "num_processes_per_node": world // nodes,
        "rank": rank,
        "local_rank": rank % (world // nodes),
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipe,
        "mesh_shape": (data, tensor, pipe),
        "mesh_axis_names": ("data", "model", "pipeline"),
    }


@quick
@given(
    values=consistent_runs(), left_out=st.sampled_from(["world_size", "num_nodes", "mesh_shape"])
)
def test_a_consistent_run_is_accepted_and_what_is_left_out_comes_back(values, left_out):
    whole = DistributedConfig(**values)
    assert_all_equations(whole)
    assert {key: getattr(whole, key) for key in values} == values
    partial = DistributedConfig(**{k: v for k, v in values.items() if k != left_out})
    assert partial == whole


@quick
@given(values=consistent_runs())
def test_a_config_survives_dumping_copying_and_pickling(values):
    config = DistributedConfig(**values)
    assert DistributedConfig(**config.model_dump()) == config
    assert DistributedConfig.model_validate_json(config.model_dump_json()) == config
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("values", DOCUMENTED)
def test_a_dict_and_back(values):
    config = DistributedConfig(**values)
    assert DistributedConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

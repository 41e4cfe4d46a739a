"""The schema: what a run's settings may be."""

import importlib

import pytest

import meshwright.config
from meshwright.config.base import field_paths
from meshwright.config.compose import compose_config
from meshwright.config.schema import (
    Config,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def test_the_package_offers_its_two_classes_and_nothing_unknown():
    assert meshwright.config.Config is Config
    assert meshwright.config.DistributedConfig.__name__ == "DistributedConfig"
    with pytest.raises(AttributeError):
        importlib.import_module("meshwright.config").Nothing  # noqa: B018


def test_library_users_need_no_hydra():
    sections = {s: {"kind": "x"} for s in ("model", "task", "data", "optimizer")}
    config = Config.parse({**sections, "mesh": {"fsdp": 4, "tp": 2}})
    others = {"pipe": 1, "data": -1, "context": 1}
    assert config.mesh.sizes() == {**others, "fsdp": 4, "tensor": 2}


def test_every_section_and_key_is_documented():
    for section, info in Config.model_fields.items():
        doc = getattr(info.annotation, "__doc__", "") or ""
        keys = [k for k in field_paths(Config) if k.startswith(f"{section}.")]
        for key in keys:
            name = key.rpartition(".")[2]
            assert name in doc or name == "kind", f"{key} is not documented"


def test_hardware_is_known_before_anything_starts():
    sections = {s: {"kind": "x"} for s in ("model", "task", "data", "optimizer")}
    assert Config.parse({**sections, "hardware": "2x8xH100"}).hardware == "2x8xH100"
    with pytest.raises(UserError, match="unknown chip `banana`"):
        Config.parse({**sections, "hardware": "banana"})


def test_further_keys_of_an_open_section_are_arguments():
    model = ModelConfig.parse({"kind": "gpt", "hidden_size": 8, "arguments": 1})
    assert model.arguments() == {"hidden_size": 8, "arguments": 1}


@pytest.mark.parametrize("value", ["no", False])
def test_no_is_a_word_even_where_yaml_makes_it_false(value):
    assert TrainingConfig.parse({"mixed_precision": value}).mixed_precision == "no"
    assert PrecisionConfig.parse({"compute": value}).compute == "no"


@pytest.mark.parametrize("size", [0, -2])
def test_axis_sizes_are_positive_or_what_is_left(size):
    with pytest.raises(UserError, match="1 or more, or -1"):
        MeshConfig.parse({"fsdp": size})
    assert MeshConfig.parse({"fsdp": -1}).fsdp == -1


def test_an_alias_over_what_is_left_wins_and_over_another_number_does_not():
    assert MeshConfig.parse({"data": -1, "dp": 2}).data == 2
    assert MeshConfig.parse({"dp": 2, "data": -1}).data == 2
    with pytest.raises(UserError, match=r"as 4 and, by mesh\.dp, as 2"):
        MeshConfig.parse({"data": 4, "dp": 2})


def test_mesh_shape_is_sizes_and_names():
    model = ModelConfig.parse({"kind": "x", "mesh_shape": [[4, 2], ["fsdp", "tp"]]})
    assert model.mesh_shape == ((4, 2), ("fsdp", "tp"))
    for shape in (4, "44", [4, 2], [[4, 2]], [[4], ["fsdp"], []], {"a": 1}):
        with pytest.raises(UserError, match="write sizes and names"):
            ModelConfig.parse({"kind": "x", "mesh_shape": shape})


def test_defaults_of_the_schema_and_of_the_files_agree():
    composed = compose_config([]).values
    defaults = Config.parse({s: composed[s] for s in ("model", "task", "data", "optimizer")})
    assert Config.parse(composed) == defaults

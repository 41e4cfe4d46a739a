"""Origins: every value knows whether a default, a file or an override set it."""

import pytest

from meshwright.config.compose import compose_config, validate
from meshwright.config.origins import Origin, chosen_keys, trace_origins
from meshwright.text.json_text import flatten

pytestmark = pytest.mark.quick


def origins_of(*overrides, config_dir=None) -> dict[str, Origin]:
    composed = compose_config(overrides, config_dir)
    return {origin.key: origin for origin in trace_origins(validate(composed), composed)}


def said(origin: Origin) -> tuple[object, str, str]:
    return (origin.value, origin.source, origin.detail)


def test_default_file_and_override_are_told_apart():
    origins = origins_of("training.micro_batch_size=4")
    assert said(origins["training.micro_batch_size"]) == (
        4,
        "override",
        "training.micro_batch_size=4",
    )
    assert said(origins["training.steps"]) == (600, "file", "training/default.yaml")
    assert said(origins["training.global_batch_size"]) == (None, "default", "")


def test_every_value_of_the_schema_is_listed_once():
    composed = compose_config([])
    config = validate(composed)
    keys = [origin.key for origin in trace_origins(config, composed)]
    assert keys == [key for key, _ in flatten(config.model_dump(mode="json"))]
    assert len(set(keys)) == len(keys)


def test_choosing_a_group_counts_as_its_file():
    origins = origins_of("optimizer=lion", "precision=bf16")
    assert said(origins["optimizer.learning_rate"]) == (1e-4, "file", "optimizer/lion.yaml")
    assert said(origins["precision.compute"]) == ("bf16", "file", "precision/bf16.yaml")


def test_a_task_chosen_by_the_model_counts_as_its_file():
    origins = origins_of("model=mlp")
    assert said(origins["task.kind"]) == ("classification", "file", "task/classification.yaml")
    assert said(origins["data.kind"]) == ("digits", "file", "data/digits.yaml")


def test_ones_own_kind_is_an_override_and_what_it_left_out_is_gone():
    origins = origins_of("model.kind=own:Net", "model.width=3")
    assert said(origins["model.kind"]) == ("own:Net", "override", "model.kind=own:Net")
    assert {key for key in origins if key.startswith("model.")} == {
        "model.init_from",
        "model.init_patterns",
        "model.kind",
        "model.mesh_shape",
        "model.width",
        "model.weights",
    }


def test_an_experiment_file_overlays_the_groups():
    origins = origins_of("+experiment=quick_test", "training.steps=7")
    assert said(origins["tracking.log_every"]) == (5, "file", "experiment/quick_test.yaml")
    assert said(origins["model.vocab_size"]) == (1024, "file", "model/gpt2_nano.yaml")
    assert said(origins["training.steps"]) == (7, "override", "training.steps=7")


@pytest.mark.parametrize("override", ["mesh.tp=2", "++mesh.tensor=2"])
def test_axes_set_by_any_name_are_overrides(override):
    assert said(origins_of(override)["mesh.tensor"]) == (2, "override", override)


def test_a_deleted_key_is_a_default_again():
    assert said(origins_of("~training.steps")["training.steps"]) == (600, "default", "")
    assert said(origins_of("training.steps=5", "~training.steps")["training.steps"]) == (
        600,
        "default",
        "",
    )


def test_a_mapping_set_by_one_override_is_an_override_throughout():
    origins = origins_of("sharding.rules={a:column,b:row}")
    assert said(origins["sharding.rules.b"]) == (
        "row",
        "override",
        "sharding.rules={a:column,b:row}",
    )


def test_a_users_file_and_the_files_it_builds_on_are_files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "base.yaml").write_text("kind: gpt\nnum_blocks: 1\n")
    (tmp_path / "model" / "own.yaml").write_text("defaults: [base]\nhidden_size: 8\n")
    origins = origins_of("model=own", config_dir=tmp_path)
    assert said(origins["model.hidden_size"]) == (8, "file", "model/own.yaml")
    assert said(origins["model.num_blocks"]) == (1, "file", "model/own.yaml")
    assert origins["model.mesh_shape"].source == "default"


def test_only_overrides_and_own_files_are_the_users_choice(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "slow.yaml").write_text("kind: sgd\nwarmup_steps: 10\n")
    shipped = compose_config(["training.steps=5", "optimizer=adamw"], tmp_path)
    assert chosen_keys(validate(shipped), shipped) == {"training.steps"}
    own = compose_config(["optimizer=slow"], tmp_path)
    assert {"optimizer.kind", "optimizer.warmup_steps"} <= chosen_keys(validate(own), own)

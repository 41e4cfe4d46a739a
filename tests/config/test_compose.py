"""Composition: Hydra's grammar, our groups, the user's files, and nothing but UserErrors."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.config.base import field_paths
from meshwright.config.compose import (
    compose_config,
    compose_yaml,
    parse_overrides,
    quoted,
    validate,
)
from meshwright.config.groups import GROUPS, group_options
from meshwright.config.origins import trace_origins
from meshwright.config.schema import Config
from meshwright.errors import Spelling, UserError, spelled_for
from meshwright.plan import make_plan

quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

DOCUMENTED = [
    ['model.mesh_shape=[[1,1],["fsdp","tp"]]'],
    ['model.mesh_shape=[[4,1],["fsdp","tp"]]'],
    ['model.mesh_shape=[[1,4],["fsdp","tp"]]'],
    ['model.mesh_shape=[[8,2],["fsdp","tp"]]'],
    # A shell takes the quotes away.
    ["model.mesh_shape=[[4,1],[fsdp,tp]]", "training.micro_batch_size=4"],
    ['model.mesh_shape=[[8,2],["fsdp","tp"]]', "training.micro_batch_size=8"],
    ["training.micro_batch_size=2"],
    ["training.gradient_accumulation_steps=4", "training.sync_gradients_every=2"],
    ["training.mixed_precision=bf16"],
    ["training.gradient_accumulation_steps=2", "training.micro_batch_size=2"],
]


def config_of(*overrides: str, config_dir: Path | None = None) -> Config:
    return validate(compose_config(overrides, config_dir))


@pytest.mark.parametrize("overrides", DOCUMENTED)
def test_documented_overrides_are_accepted_and_take_effect(overrides):
    config = config_of(*overrides)
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        written = str(value).replace(" ", "").replace("(", "[").replace(")", "]").replace("'", "")
        assert written == text.replace('"', "")


def files_of_every_group():
    """Yield the first files of all groups, then the second ones, and so on."""
    options = group_options()
    for number in range(max(map(len, options.values()))):
        files = {group: names[number] for group, names in options.items() if number < len(names)}
        # There are many more models than files of any other group.
        marks = pytest.mark.full if set(files) == {"model"} and number % 12 else ()
        yield pytest.param(files, id=str(files), marks=marks)


@pytest.mark.parametrize("chosen", list(files_of_every_group()))
def test_every_file_we_ship_makes_a_valid_config(chosen):
    composed = compose_config([f"{group}={choice}" for group, choice in chosen.items()])
    assert chosen.items() <= composed.choices.items()
    assert isinstance(validate(composed), Config)


def test_every_group_has_a_file():
    assert set(group_options()) == set(GROUPS)
    assert all(group_options().values())


def test_a_key_no_file_mentions_can_be_set_without_a_plus():
    assert config_of("training.micro_batch_size=4").training.micro_batch_size == 4


def test_the_last_of_two_overrides_wins():
    assert config_of("training.steps=4", "training.steps=5").training.steps == 5


def test_deleting_a_key_gives_its_default_back():
    assert config_of("+experiment=quick_test").training.steps == 20
    assert config_of("+experiment=quick_test", "~training.steps").training.steps == 600


def test_experiments_work_with_and_without_the_plus():
    assert config_of("experiment=quick_test") == config_of("+experiment=quick_test")
    assert config_of("+experiment=quick_test", "model.num_blocks=3").model.arguments()[
        "num_blocks"
    ] == (3)


@pytest.mark.parametrize(
    ("overrides", "arguments"),
    [
        (["model.kind=own:Net"], {}),
        (["model.kind=own:Net", "model.width=64"], {"width": 64}),
        (["model.width=64", "model.kind=own:Net", "+experiment=quick_test"], {"width": 64}),
    ],
)
def test_a_kind_of_ones_own_takes_nothing_of_a_file_nobody_chose(overrides, arguments):
    assert config_of(*overrides).model.arguments() == arguments


def test_a_file_that_was_chosen_and_the_files_own_kind_keep_its_arguments():
    chosen = config_of("model=gpt2_nano", "model.kind=own:Net")
    assert chosen.model.arguments() == config_of("model=gpt2_nano").model.arguments()
    assert config_of("model.kind=gpt") == config_of()


def test_every_section_with_a_kind_starts_anew_with_another():
    config = config_of("optimizer.kind=adam", "optimizer.b1=0.8", "model=mlp", "task.kind=own:loss")
    assert config.optimizer.arguments() == {"b1": 0.8}
    assert (config.task.kind, config.data.kind) == ("own:loss", "digits")
    assert config_of("optimizer.kind=adamw").optimizer == config_of().optimizer


def test_what_an_experiment_gives_to_ones_own_kind_stays(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nmodel:\n  width: 3\n")
    config = config_of("+experiment=own", "model.kind=own:Net", config_dir=tmp_path)
    assert config.model.arguments() == {"width": 3}


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["mesh.tp=2"], {"tensor": 2, "data": -1}),
        (["mesh.dp=2"], {"data": 2}),
        (["mesh=fsdp", "mesh.dp=2"], {"data": 2, "fsdp": -1}),
        (["mesh.model=2", "mesh.pp=4"], {"tensor": 2, "pipe": 4}),
        (["mesh.tp=2", "mesh.tensor=2"], {"tensor": 2}),
    ],
)
def test_aliases_of_axes_are_accepted(overrides, sizes):
    found = config_of(*overrides).mesh.sizes()
    assert {axis: found[axis] for axis in sizes} == sizes


def test_an_axis_given_under_two_names_must_agree():
    with pytest.raises(UserError, match="tensor axis of the mesh is given twice"):
        config_of("mesh.tp=2", "mesh.tensor=4")


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("training.micro_batchsize=4", "did you mean `training.micro_batch_size`?"),
        ("trainig.steps=4", "did you mean `training.steps`?"),
        ("training.fsdp=4", "did you mean `mesh.fsdp`?"),
        ("mesh.tensr=2", "did you mean `mesh.tensor`?"),
        ("simulat=8", "did you mean `simulate`?"),
        ("optimizer=adam", "did you mean `adamw`?"),
        ("precision=fp8", "can be: bf16, default, fp16, no"),
        ("+experiment=quicktest", "did you mean `quick_test`?"),
        ("model=gemma_1b", "did you mean `gemma3_1b`?"),
        ("model=llama_8b", "did you mean `llama3_8b`?"),
        ("model=qwen3_0_6b", "did you mean `qwen3_0.6b`?"),
        ("model=null", "`model` can be: "),
        ("training.steps=1,2", "add --multirun"),
        ("mesh.fsdp=true", "should be a number"),
        ("training.steps=-1", "greater than or equal to 0"),
        ("run.project=../x", "`run.project=../x` is not valid"),
        ("run.project=..", "`run.project=..` is not valid"),
        ("run.project='a b'", "digits, underscores, dots and dashes"),
        ("run.project='a b'", "write run.project=a-b"),
        ("run.project=''", "write run.project=my-project"),
        ("run.project=3", "valid string"),
        ("model.mesh_shape=[[4]]", '[[4,2],["fsdp","tp"]]'),
        ("model.mesh_shape=4", '[[4,2],["fsdp","tp"]]'),
        ("~model", "`model` is missing"),
        ("training.steps=${nope}", "'nope' not found"),
        ("hydra/launcher=fast", "there is no `hydra/launcher=fast`"),
        ("hydrate=1", "there is no `hydrate`"),
        ("", "write key=value"),
        ("=", "write key=value"),
        ("training", "write key=value"),
        ("x={", "write key=value"),
        (f"mesh.fsdp={'9' * 400}", "less than or equal to"),
    ],
)
def test_mistakes_say_what_to_write(override, suggestion):
    with spelled_for(Spelling.COMMAND_LINE), pytest.raises(UserError) as caught:
        config_of(override)
    assert suggestion in str(caught.value)
    assert len(str(caught.value)) < 600


def test_runs_go_to_outputs_by_project_date_and_time():
    composed = compose_config(["run.project=demo"])
    moment = r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"
    assert re.fullmatch(rf"outputs/demo/{moment}", str(composed.run_dir))
    assert re.fullmatch(rf"multirun/demo/{moment}", str(composed.sweep_dir))
    assert compose_config(["hydra.run.dir='my runs/a,b'"]).run_dir == Path("my runs/a,b")


def test_composing_leaves_no_hydra_state_behind():
    from hydra.core.global_hydra import GlobalHydra

    with pytest.raises(UserError):
        compose_config(["training.steps=${nope}"])
    assert not GlobalHydra.instance().is_initialized()
    assert compose_config(["training.steps=3"]).values["training"]["steps"] == 3


@pytest.mark.parametrize("folder", ["conf", "my conf, [v1]", "it's"])
def test_a_users_own_group_files_are_found(tmp_path, folder):
    own = tmp_path / folder
    (own / "model").mkdir(parents=True)
    (own / "model" / "tiny.yaml").write_text("kind: gpt\nnum_blocks: 1\n")
    config = config_of("model=tiny", config_dir=own)
    assert config.model.arguments() == {"num_blocks": 1}
    with pytest.raises(UserError, match="stacked_gpt_tiny, tiny, vae"):
        config_of("model=tniy", config_dir=own)


@pytest.mark.parametrize(
    "text",
    [
        "kind: [",
        "- 1",
        "kind: gpt\n\tx: 1",
        "defaults:\n  - missing\nkind: gpt",
        "defaults: 3",
        "3",
    ],
)
def test_a_users_broken_file_is_a_user_error(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text(text)
    with pytest.raises(UserError):
        config_of("model=own", config_dir=tmp_path)


def test_yaml_no_is_a_precision_in_files(tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "own.yaml").write_text("compute: no\n")
    assert config_of("precision=own", config_dir=tmp_path).precision.compute == "no"


def test_yaml_of_each_part():
    job = yaml.safe_load(compose_yaml(compose_config(["training.steps=3"]), "job"))
    hydra = yaml.safe_load(compose_yaml(compose_config([]), "hydra"))
    everything = yaml.safe_load(compose_yaml(compose_config(["training.steps=3"]), "all"))
    assert job["training"]["steps"] == 3
    assert set(hydra) == {"hydra"}
    assert set(everything) == {"hydra", *job}
    assert Config.parse(job) == config_of("training.steps=3")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12))
def test_quoted_text_is_read_back_unchanged(text):
    assert parse_overrides([f"run.project={quoted(text)}"])[0].value() == text


@pytest.mark.parametrize(
    ("text", "why", "instead"),
    [
        (
            'sharding.rules={"blocks.*.kernel":replicate}',
            "keys in braces are written without quotes",
            "sharding.rules={blocks.*.kernel:replicate}",
        ),
        (
            "sharding.rules={a.b: [null, tensor], '**': row}",
            "keys in braces are written without quotes",
            "sharding.rules={a.b: [null, tensor], **: row}",
        ),
        (
            "sharding.rules.blocks.*.kernel=[fsdp]",
            "`blocks.*.kernel` is a pattern",
            "sharding.rules={blocks.*.kernel:[fsdp]}",
        ),
        (
            "+sharding.rules.head.kernel=replicate",
            "`head.kernel` is a pattern",
            "sharding.rules={head.kernel:replicate}",
        ),
    ],
)
def test_rules_written_in_another_way_are_shown_as_they_can_be_read(text, why, instead):
    with pytest.raises(UserError, match="cannot read the override") as caught:
        parse_overrides([text])
    assert why in caught.value.why
    assert f"write '{instead}'" in caught.value.fix
    (read,) = parse_overrides([instead])
    assert all(isinstance(key, str) for key in read.value())


def only_user_errors(overrides: list[str]) -> None:
    try:
        composed = compose_config(overrides)
        config = validate(composed)
        trace_origins(config, composed)
        plan = make_plan(config, 8)
    except UserError:
        return
    assert plan.num_devices == 8
    batch = plan.batch
    assert batch.global_batch_size == (
        batch.micro_batch_size * batch.replicas * batch.gradient_accumulation_steps
    )


@settings(quick, max_examples=60)
@given(text=st.text(max_size=12) | st.text("amodel=.{}[]()$~+,:'\"\\ 1", max_size=20))
def test_no_text_gives_anything_but_a_user_error(text):
    only_user_errors([text])


keys = st.sampled_from([*field_paths(Config), *GROUPS, "mesh.tp", "mesh.dp", "hydra.run.dir"])
words = "1 2 4 8 0 -1 3 null true bf16 no 1e9 nan [] {} default fsdp gpt ${run.seed} ??? 'a' 1,2"
long_words = "[[4,2],[fsdp,tp]] [[2,2,2],[dp,tp,pp]] 99999999999999999999999999 {a:1} [1,x]"
values = st.sampled_from([*words.split(), *long_words.split(), "", "'a b'"])
near_overrides = st.builds(
    "{}{}={}".format, st.sampled_from(["", "", "", "+", "++", "~"]), keys, values
)
valid_overrides = st.sampled_from(
    [
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "mesh.pipe=2",
        "mesh=fsdp",
        "precision=bf16",
        "training.global_batch_size=64",
        "training.micro_batch_size=2",
        "training.gradient_accumulation_steps=4",
    ]
)


@quick
@given(near=near_overrides, valid=st.lists(valid_overrides, max_size=3))
def test_no_override_near_the_schema_gives_anything_but_a_user_error(near, valid):
    only_user_errors([*valid, near])

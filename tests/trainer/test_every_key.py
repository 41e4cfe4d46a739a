"""Every key of a config has its effect on what a run is made of, or is refused, from every door.

Nothing is compiled: what a trainer was made with is compared, with a key and without it.
"""

import dataclasses
import functools
from pathlib import Path

import pytest
from pydantic import BaseModel

import meshwright as mw
from meshwright.cli.main import main
from meshwright.config.compose import quoted
from meshwright.config.distributed_config import DistributedConfig
from meshwright.config.schema import Config
from meshwright.distributed import Trainer as DocumentsTrainer
from meshwright.errors import UserError
from meshwright.program.trace.build_model import describe_model
from meshwright.recipe import make_task
from meshwright.trainer.starting.process_facts import comparable, optimizer_settings

MODEL = {"kind": "mlp", "widths": [784, 10]}
TASK = {"kind": "classification", "num_classes": 10, "input_shape": [28, 28, 1]}
BASE = {
    "model": MODEL,
    "task": TASK,
    "data": {"kind": "digits", "num_samples": 64},
    "optimizer": {"kind": "adam"},
    "training": {"global_batch_size": 16},
}
ADAPTED = ("lora.alpha", "lora.targets", "lora.dropout", "lora.base_dtype", "lora.init_from")
REWARDS = {
    "grpo.rewards": ["exact_match"],
    "grpo.reward_weights": [2.0],
    "grpo.reward_seconds": 3.0,
    "grpo.reward_processes": 1,
    "grpo.num_generations": 2,
    "grpo.num_iterations": 2,
    "grpo.beta": 0.0,
    "grpo.kl": "reward",
    "grpo.epsilon": 0.3,
    "grpo.epsilon_high": 0.3,
    "grpo.dual_clip": 3.0,
    "grpo.scale_advantages": "none",
    "grpo.leave_one_out": True,
    "grpo.mean": "sequence",
    "grpo.ratio": "sequence",
    "grpo.mask_truncated": True,
    "grpo.importance_cap": None,
    "generation.max_prompt_length": 3,
    "generation.max_generation_steps": 3,
    "generation.temperature": 0.5,
    "generation.top_k": 3,
    "generation.top_p": 0.5,
    "generation.eos_tokens": [1],
    "generation.generation_batch_size": 4,
}
"""Keys that only `task=grpo` reads, each with another value than below."""
PIPE = {"mesh.pipe": 2, "mesh.data": 4, "training.global_batch_size": 32}
TEXT = {
    "model": {"kind": "gpt", "num_blocks": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 256,
              "context_length": 8},
    "task": {"kind": "language_modeling"},
}  # fmt: skip

OTHER = {
    "model.kind": "test_every_key:Net",
    "model.mesh_shape": [[8], ["fsdp"]],
    "model.weights": "folder",
    "model.init_from": "run",
    "model.init_patterns": ["layers.**"],
    "task.kind": "reconstruction",
    "data.kind": "synthetic",
    "data.eval_path": "text.txt",
    "data.eval_fraction": 0.25,
    "data.shuffle": False,
    "data.on_corrupt": "skip",
    "data.workers": 2,
    "data.prefetch": 7,
    "data.cache_dir": "cache",
    "optimizer.kind": "lion",
    "optimizer.learning_rate": 0.5,
    "optimizer.warmup_steps": 3,
    "optimizer.schedule": "cosine",
    "optimizer.clip_norm": 0.3,
    "optimizer.scale_learning_rate": "linear",
    "optimizer.base_batch_size": 4,
    "training.steps": 7,
    "training.max_duration": "9st",
    "training.global_batch_size": 24,
    "training.micro_batch_size": 1,
    "training.gradient_accumulation_steps": 2,
    "training.sync_gradients_every": 2,
    "training.mixed_precision": "bf16",
    "training.eval_every": 3,
    "training.eval_batches": 2,
    "training.eval_loss": "test_every_key:other_loss",
    "training.ema_decay": 0.9,
    "training.eval_ema": True,
    "training.early_stopping_patience": 3,
    "training.early_stopping_min_delta": 0.5,
    "training.callbacks": ["test_every_key:Own"],
    "training.sample_tokens": 5,
    "training.sample_prompt": "Once",
    "training.sample_every": 2,
    "training.on_nonfinite": "skip",
    "training.max_skipped": 4,
    "training.max_rewinds": 5,
    "training.profile_communication": True,
    "training.trainable": ["layers.**"],
    "mesh.pipe": 2,
    "mesh.data": 4,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "mesh.context": 2,
    "mesh.auto": True,
    "sharding.zero": 1,
    "sharding.keep_gathered": True,
    "sharding.blocks": "scan",
    "sharding.min_shard_size": 2,
    "sharding.rules": {"layers": "replicate"},
    "sharding.remat": "full",
    "pipeline.schedule": "gpipe",
    "pipeline.num_microbatches": 4,
    "pipeline.num_chunks": 3,
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "lora.targets": ["layers.**"],
    "lora.dropout": 0.25,
    "lora.base_dtype": "bfloat16",
    "lora.init_from": "adapters",
    "precision.compute": "fp16",
    "precision.matmul": "highest",
    "checkpoint.enabled": False,
    "checkpoint.every": 3,
    "checkpoint.keep_last": 5,
    "checkpoint.keep_best": 3,
    "checkpoint.accept_changes": True,
    "tracking.log_every": 3,
    "tracking.tensorboard": True,
    "tracking.wandb": True,
    "tracking.wandb_entity": "team",
    "tracking.mlflow": True,
    "tracking.mlflow_uri": "http://host:5000",
    "run.project": "other",
    "run.name": "named",
    "run.seed": 3,
    "simulate": 8,
    "hardware": "8xH100",
    "plan": "plan.yaml",
    "kernels": "none",
    "strict": True,
    "resume": "never",
    "compilation_cache": False,
}
"""A value for every key that is not the default."""

BESIDE = {
    "data.eval_path": {**TEXT, "data": {"kind": "text", "path": "text.txt", "eval_fraction": 0}},
    "data.on_corrupt": {"data": {"kind": "test_every_key:Source"}},
    "data.cache_dir": {"data": {"kind": "test_every_key:Source"}},
    "task.kind": {"task": {"kind": "classification", "input_shape": [28, 28, 1]}},
    "optimizer.base_batch_size": {
        "optimizer.scale_learning_rate": "linear",
        "optimizer.base_batch_size": 8,
    },
    "optimizer.scale_learning_rate": {"optimizer.base_batch_size": 4},
    "training.sync_gradients_every": {"training.gradient_accumulation_steps": 2},
    "training.micro_batch_size": {"training.global_batch_size": None},
    "training.early_stopping_min_delta": {"training.early_stopping_patience": 2},
    "mesh.pipe": {"training.global_batch_size": 32},
    "mesh.data": {"mesh.data": 2, "mesh.fsdp": -1},
    **{key: {"lora.rank": 2} for key in ADAPTED},
    "pipeline.schedule": PIPE,
    "pipeline.num_microbatches": PIPE,
    "pipeline.num_chunks": {**PIPE, "pipeline.schedule": "interleaved"},
}
"""What a key needs beside it to have its effect."""

REFUSED = {"mesh.auto", "simulate", "plan"}
"""Keys that the command line acts on before there is a trainer."""


class Own(mw.Callback):
    pass


class Source:
    """Samples that know the settings they are read with."""

    def __init__(self, *, on_corrupt, cache_dir):
        self.on_corrupt, self.cache_dir = on_corrupt, cache_dir

    def __len__(self):
        return 64

    def rows(self, ids):
        raise NotImplementedError


def other_loss(model, batch):
    return model(batch["image"]).mean()


def Net(*, widths, rngs):
    raise NotImplementedError


def keys(kind=Config, prefix=""):
    """Yield every key of the schema, with dots."""
    for name, field in kind.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from keys(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def with_key(values, key, value):
    section, _, name = key.rpartition(".")
    if not section:
        return {**values, name: value}
    return {**values, section: {**values.get(section, {}), name: value}}


def with_keys(values, given):
    for key, value in given.items():
        values = {**values, key: value} if isinstance(value, dict) else with_key(values, key, value)
    return values


def plain(value):
    """Return a value as it can be compared; functions are compared by what they depend on."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, mw.Callback):
        return type(value).__name__, vars(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return getattr(value, "__qualname__", "function") if callable(value) else value


def made_of(trainer):
    """Return what a run of this trainer would be made of, without the record of its config."""
    asked, recipe = trainer.defaults, trainer.defaults.recipe
    data = recipe.config_data
    recorded = {"config", "recipe", "model", "optimizer"}
    settings = {**vars(asked), **vars(trainer)}
    made = {n: plain(v) for n, v in settings.items() if n not in recorded and n[0] != "_"}
    made.pop("defaults")
    return made | {
        "model": [(leaf.path, leaf.shape) for leaf in parameters(trainer.model)],
        "optimizer": optimizer_settings(trainer.optimizer),
        "rates": [float(recipe.learning_rate(step)) for step in (0, 1, 5, 590)],
        "task": (type(recipe.task).__name__, comparable(recipe.task)),
        "data": [type(data.train).__name__, data.train.fingerprint(), source(data.train)],
        "shuffle": getattr(data.train, "shuffle", None),
        "held out": data.held_out and (data.held_out.num_samples, data.held_out.fingerprint()),
    }


def source(data):
    """Return the settings of the source that data are read from."""
    return comparable(getattr(data, "source", None))


def parameters(model):
    try:
        return describe_model(model, ...).leaves
    except UserError as error:
        return [dataclasses.make_dataclass("Leaf", ["path", "shape"])(str(error), ())]


@pytest.fixture(scope="module")
def _folder(tmp_path_factory):
    """Work in a folder with some data."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "text.txt").write_text("some text to train on, and to evaluate on. " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@functools.cache
def without(key):
    return made_of(mw.Trainer.from_config(Config.parse(with_keys(BASE, BESIDE.get(key, {})))))


def test_the_table_has_every_key():
    assert {*OTHER, *REWARDS} == {*keys()}


@pytest.mark.parametrize("key", REWARDS)
def test_a_task_of_rewards_is_made_of_every_key(key):
    base = with_keys(
        {**BASE, **TEXT, "task": {"kind": "grpo"}},
        {"grpo.rewards": ["number_match"], "generation.max_prompt_length": 4,
         "generation.max_generation_steps": 4},
    )  # fmt: skip
    made = make_task(Config.parse(with_key(base, key, REWARDS[key])))
    assert made != make_task(Config.parse(base))
    assert getattr(made, key.partition(".")[2]) == REWARDS[key]


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("key", ["", *BESIDE])
def test_the_same_config_makes_the_same_trainer(key):
    config = Config.parse(with_keys(BASE, BESIDE.get(key, {})))
    assert made_of(mw.Trainer.from_config(config)) == without(key)


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("key", [key for key in OTHER if key not in REFUSED])
def test_a_trainer_of_a_config_is_made_of_every_key(key):
    values = with_key(with_keys(BASE, BESIDE.get(key, {})), key, OTHER[key])
    made = made_of(mw.Trainer.from_config(Config.parse(values)))
    assert made != without(key if key in BESIDE else "")


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_what_only_the_command_line_does_is_refused(key):
    config = Config.parse(with_key(BASE, key, OTHER[key]))
    with pytest.raises(UserError, match="has no effect in Python"):
        mw.Trainer.from_config(config)


def value_of(config, key):
    return functools.reduce(getattr, key.split("."), config)


def expected(*left_out):
    """Return a config with every key but some set to its other value."""
    given = {key: value for key, value in OTHER.items() if key not in left_out}
    return given, Config.parse(functools.reduce(lambda v, k: with_key(v, k, given[k]), given, BASE))


def caught(monkeypatch, module):
    """Let no trainer be made in a module; return the configs that one would be made of."""
    configs = []

    def from_config(config, **_):
        configs.append(config)
        raise UserError("caught")

    monkeypatch.setattr(f"{module}.from_config", from_config)
    return configs


def word(key, value):
    def text(value):
        if isinstance(value, list):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{text(v)}' for k, v in value.items())}}}"
        if isinstance(value, bool | int | float):
            return str(value).lower()
        return quoted(value)

    return f"{key}={text(value)}"


def test_the_command_line_passes_every_key_on(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    configs = caught(monkeypatch, "meshwright.trainer.Trainer")
    # Files and the planner have tests of their own.
    given, config = expected("model.weights", "plan", "mesh.auto")
    assert main(["train", *(word(key, value) for key, value in given.items())]) == 2
    assert "error: caught" in capfd.readouterr().err
    lost = [k for k in given if value_of(configs[0], k) != value_of(config, k)]
    # JAX has the virtual devices by then.
    assert lost == ["simulate"]


def test_the_documents_class_passes_every_key_on_or_refuses_it(monkeypatch):
    name = "meshwright.distributed.distributed_trainer.MeshTrainer"
    configs = caught(monkeypatch, name)
    of_data = {k for k in OTHER if k.startswith("data.")} - {"data.workers", "data.prefetch"}
    given, config = expected(*of_data)
    values = functools.reduce(lambda v, k: with_key(v, k, given[k]), given, {})
    sections = {k: v for k, v in values.items() if k not in ("model", "training")}
    trainer = DocumentsTrainer(
        model_config=values["model"], training_config=values["training"], **sections
    )
    with pytest.raises(UserError, match="caught"):
        trainer.train({})
    assert not [k for k in given if value_of(configs[0], k) != value_of(config, k)]
    for key in of_data:
        with pytest.raises(UserError, match=f"{key} has no effect"):
            DocumentsTrainer(
                model_config=MODEL, training_config={}, **with_key({}, key, OTHER[key])
            )


def test_the_documents_class_takes_mesh_and_precision_from_one_place():
    own = {"model_config": MODEL, "training_config": {}, "task": TASK}
    distributed = DistributedConfig(world_size=8)
    for section in ({"mesh": {"fsdp": 8}}, {"precision": {"compute": "bf16"}}):
        with pytest.raises(UserError, match="is given twice"):
            DocumentsTrainer(**own, distributed_config=distributed, **section)
    both = DocumentsTrainer(**own, distributed_config=distributed, precision={"matmul": "highest"})
    assert both.config.precision.matmul == "highest"

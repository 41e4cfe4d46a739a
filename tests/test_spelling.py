"""Messages name settings as their reader writes them: in Python, or on the command line."""

import re
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.config.base import field_paths
from meshwright.config.schema import Config
from meshwright.data.digits import DigitSource
from meshwright.data.files import find_path
from meshwright.data.images import check_labels
from meshwright.data.token_rows import check_length, check_tokens
from meshwright.errors import MeshwrightError, Spelling, spelled_for
from meshwright.profile.profile import advise
from meshwright.recipe import learning_rate
from meshwright.tracking.setup import check_tracking
from meshwright.trainer.starting.resume import find_resume_point
from meshwright.trainer.starting.start import warm_start

KEYS = "|".join(re.escape(key) for key in field_paths(Config) if "." in key)
DOTTED = re.compile(rf"(?<![\w./])({KEYS}|hydra\.run\.dir|(model|task|data)\.[a-z_]+)(?![\w.])")
BATCH = np.ones((6, 4), np.float32)


def trainer(**settings):
    return mw.Trainer(
        **{
            "model": lambda rngs: nnx.Linear(4, 4, rngs=rngs),
            "loss": lambda model, batch: (model(batch) ** 2).mean(),
            "optimizer": optax.sgd(0.1),
            **settings,
        }
    )


def advice(axis):
    shares = {"compute": 0.2, "communication": 0.4, "input_wait": 0.2, "idle": 0.2}
    return "\n".join(advise(shares, {(axis,): 0.4}, load_balance=1.0, virtual=False))


def config(**sections):
    kinds = {name: {"kind": "any"} for name in ("model", "task", "data", "optimizer")}
    both = {name: {**kinds.get(name, {}), **sections.get(name, {})} for name in [*kinds, *sections]}
    return Config.parse(both)


MESSAGES = {
    "advice about tensor": lambda: advice("tensor"),
    "advice about fsdp": lambda: advice("fsdp"),
    "advice about data": lambda: advice("data"),
    "batch and mesh": lambda: trainer(mesh="data=4,fsdp=2").assemble(BATCH),
    "two sizes to infer": lambda: trainer(mesh="data=-1,fsdp=-1").assemble(BATCH),
    "mesh and devices": lambda: trainer(mesh="fsdp=3").assemble(BATCH),
    "gradients are reduced": lambda: trainer(
        mesh="data=1,fsdp=1,tensor=8", gradient_accumulation_steps=6, sync_gradients_every=4
    ).assemble(BATCH),
    "stages and microbatches": lambda: trainer(
        mesh="pipe=4,data=2", pipeline={"schedule": "interleaved", "num_microbatches": 3}
    ).assemble(BATCH),
    "epochs without an end": lambda: trainer(mesh="data=2,tensor=4").fit(
        lambda step, size: BATCH, max_duration="2ep", batch_size=6
    ),
    "nothing to resume": lambda: find_resume_point("must", Path("nowhere")),
    "patterns without a run": lambda: warm_start(None, ["a"], None),
    "early stopping": lambda: trainer(mesh="data=2,fsdp=1,tensor=4").fit(
        [BATCH], steps=1, callbacks=[mw.EarlyStopping(patience=1)]
    ),
    "early stopping at the end": lambda: trainer(mesh="data=2,tensor=4").fit(
        [BATCH], steps=1, callbacks=[mw.EarlyStopping(patience=1)], eval_data=[BATCH]
    ),
    "a tracker without a folder": lambda: check_tracking(mw.TrackingConfig(tensorboard=True), None),
    "a path": lambda: find_path("nowhere.npy"),
    "digits": lambda: DigitSource(input_shape=(3, 3)),
    "too few tokens": lambda: check_length(0, 3, 8, "it"),
    "an unknown token": lambda: check_tokens(np.array([9]), 4, "it"),
    "an unknown label": lambda: check_labels(np.array([9]), 4, "it"),
    "a schedule and a time": lambda: learning_rate(
        config(optimizer={"schedule": "cosine"}, training={"max_duration": "3min"}), 8, None
    ),
    "a scaled learning rate": lambda: learning_rate(
        config(optimizer={"scale_learning_rate": "linear"}), 8, 10
    ),
}
"""What each message is about; a call raises or returns it."""


def message_of(call) -> str:
    try:
        said = call()
    except MeshwrightError as error:
        return str(error)
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize("about", MESSAGES)
def test_a_message_speaks_the_language_of_its_reader(about, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_python = message_of(MESSAGES[about])
    assert not DOTTED.search(in_python), in_python
    with spelled_for(Spelling.COMMAND_LINE):
        on_command_line = message_of(MESSAGES[about])
    assert DOTTED.search(on_command_line), on_command_line


@pytest.mark.parametrize("given", ["zigzag", {"schedule": "zigzag"}, {"num_microbatch": 2}])
def test_a_pipeline_given_in_python_is_named_by_its_own_keys(given):
    message = message_of(lambda: trainer(pipeline=given))
    assert not DOTTED.search(message), message

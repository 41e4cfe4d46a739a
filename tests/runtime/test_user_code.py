"""Exceptions in the user's own model, loss, data and callbacks: their lines, and what was done."""

import sys
import textwrap

import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.cli.main import main

OWN = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
    def __call__(self, x):
        return self.layer(x) + undefined_name

class Net(nnx.Module):
    def __init__(self, *, broken: bool = False, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs)]) if broken else nnx.List([nnx.Linear(4, 4, rngs=rngs)])
    def __call__(self, x):
        return self.blocks[0](x)

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def data(step, batch_size):
    if step == 3:
        raise OSError("the disk is gone\\nfor good")
    return {"x": np.ones((batch_size, 4), "float32")}

def broken_data(step, batch_size):
    return {"x": np.ones((batch_size, 4))[nothing]}

def optimizer(learning_rate):
    def update(updates, state, params=None):
        return updates["absent"], state
    return optax.GradientTransformation(lambda params: (), update)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Put the module of a user into the working directory."""
    (tmp_path / "own_code.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "own_code.py"
    sys.modules.pop("own_code", None)


CASES = {
    "the model": (
        ["model.broken=true"],
        "NameError: name 'undefined_name' is not defined",
        ["in the module `blocks.0`", "return self.layer(x) + undefined_name"],
    ),
    "the first batch": (
        ["data.kind=own_code:broken_data"],
        "error: your code raised NameError: name 'nothing' is not defined\n",
        ["while reading batch 0", 'return {"x": np.ones((batch_size, 4))[nothing]}'],
    ),
    "a later batch": (
        [],
        "error: your code raised OSError: the disk is gone\n  for good\n",
        ["while reading batch 3", "in data", 'raise OSError("the disk is gone\\nfor good")'],
    ),
    "a batch read by another process": (
        ["data.workers=1"],
        "the disk is gone",
        ["reading batch 3", "in data"],
    ),
    "the optimizer": (
        ["optimizer.kind=own_code:optimizer"],
        "error: your code raised ",
        ['return updates["absent"], state'],
    ),
}


SLOW = "a batch read by another process"


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[pytest.mark.full] if each == SLOW else []) for each in CASES],
)
def test_the_command_line_shows_the_users_lines_and_exits_2(own, capfd, case):
    overrides, said, lines = CASES[case]
    kinds = ["model.kind=own_code:Net", "task.kind=own_code:loss", "data.kind=own_code:data"]
    code = main(["train", *kinds, "optimizer.kind=sgd", "training.steps=9", *overrides])
    err = capfd.readouterr().err
    assert code == 2, err
    assert said in err
    assert all(line in err for line in lines), err
    assert "internal error" not in err
    assert "Traceback" not in err
    frames = [line for line in err.splitlines() if line.strip().startswith('File "')]
    assert all(f'"{own}"' in line for line in frames), frames


def test_debug_shows_everything(own, capfd):
    kinds = ["model.kind=own_code:Net", "task.kind=own_code:loss"]
    code = main(["train", *kinds, "data.kind=own_code:broken_data", "--debug"])
    err = capfd.readouterr().err
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert "main.py" in err


def test_in_python_the_exception_is_the_users_own_with_a_note(own):
    import own_code

    class Failing(mw.Callback):
        def on_log(self, step, values):
            raise KeyError("mine")

    def trainer(**model):
        return mw.Trainer(
            model=lambda rngs: own_code.Net(rngs=rngs, **model),
            loss=own_code.loss,
            optimizer=optax.sgd(0.1),
        )

    with pytest.raises(OSError, match="the disk is gone") as disk:
        trainer().fit(own_code.data, batch_size=8, steps=9)
    assert "while reading batch 3" in disk.value.__notes__
    with pytest.raises(NameError) as name:
        trainer(broken=True).fit(own_code.data, batch_size=8, steps=9)
    assert name.value.__notes__[:2] == ["in the module `blocks.0`", "while tracing the loss"]
    arrays = {"x": np.ones((8, 4), "float32")}
    with pytest.raises(KeyError, match="mine") as key:
        trainer().fit(arrays, batch_size=8, steps=1, callbacks=[Failing()])
    assert key.value.__notes__ == ["while calling Failing.on_log"]


def test_an_installed_package_that_a_config_names_is_the_users(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "site-packages" / "users_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text(
        textwrap.dedent("""
            def data(step, batch_size):
                raise RuntimeError("from afar")
        """)
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr("meshwright.runtime.user_code._LIBRARIES", (str(folder.parent),))
    code = main(["train", "model=mlp", "data.kind=users_package.nets:data"])
    err = capfd.readouterr().err
    assert code == 2
    assert "error: your code raised RuntimeError: from afar" in err
    assert f'File "{folder}/nets.py", line 3, in data' in err

"""Processes that are about to do different things stop in all processes, and say what differs."""

import os
import subprocess
import sys

import pytest
from real_processes import free_port, run_processes

from meshwright.processes.handshake import differences

PROGRAM = """
import json, pathlib, sys
import jax, numpy as np, optax
from flax import nnx
from meshwright.processes import connect
jax.config.update("jax_num_cpu_devices", 1)
connect(sys.argv[1], 2, int(sys.argv[2]))
import meshwright as mw
me = int(sys.argv[2])
DATA = {"x": np.ones((8, 4), "float32")}

def make_loss(power):
    return lambda model, batch: (abs(model(batch["x"])) ** power).mean()

def said(rate=0.1, power=2, width=4, **settings):
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, width, rngs=rngs),
        loss=make_loss(power), optimizer=optax.adamw(rate), log_every=1,
    )
    try:
        trainer.fit(DATA, batch_size=4, **{"steps": 1, **settings})
    except ValueError as error:
        return str(error)
    return ""

out = [
    said(),
    said(rate=0.1 * (me + 1)),
    said(rate=optax.cosine_decay_schedule(0.1, 100 + me)),
    said(power=2 + me),
    said(width=4 + me),
    said(steps=1 + me),
]
folder = pathlib.Path(sys.argv[3]) / str(me)
folder.mkdir()
(folder / "helper.py").write_text(f"SCALE = {me}")
(folder / "own_loss.py").write_text(
    "import helper\\ndef loss(model, batch): return abs(model(batch['x'])).mean()"
)
sys.path.insert(0, str(folder))
from own_loss import loss
make_loss = lambda power: loss
out.append(said())
jax.distributed.shutdown()
print(json.dumps(out))
"""


@pytest.mark.full
def test_a_trainer_in_two_processes_compares_optimizer_loss_model_length_and_code(tmp_path):
    first, second = run_processes(PROGRAM, [str(tmp_path)], count=2)
    assert first == second
    same, rate, schedule, loss, model, steps, code = first
    assert same == ""
    assert "the 2 processes differ" in rate
    assert "optimizer.chain.2.scale.step_size is -0.1 in process 0 and -0.2 in process 1" in rate
    assert "decay_steps is 100 in process 0 and 101 in process 1" in schedule
    assert "loss.make_loss.power is 2 in process 0 and 3 in process 1" in loss
    assert "model.kernel is param float32[4, 4] in process 0 and param float32[4, 5]" in model
    assert "duration.steps is 1 in process 0 and 2 in process 1" in steps
    # The loss is the same in both processes, and a file that it imports is not.
    assert "code.helper is " in code
    assert "code.own_loss" not in code


@pytest.mark.parametrize(
    ("version", "devices"),
    [
        ("", "1"),
        pytest.param("9.9.9", "1", marks=pytest.mark.full),
        pytest.param("", "2", marks=pytest.mark.full),
    ],
)
def test_the_command_line_names_the_keys_in_every_process_and_exits_2(tmp_path, version, devices):
    # One process has another version of optax, another learning rate, or more devices.
    lie = (
        "import importlib.metadata as m; real = m.version;"
        f"m.version = lambda n: {version!r} if n == 'optax' else real(n);"
        if version
        else ""
    )
    program = "import sys; {lie} from meshwright.cli.main import entry; entry()"
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", program.format(lie=lie if rank else "")),
                *("train", "model=mlp"),
                f"optimizer.learning_rate={0.1 if version or devices == '2' else 0.1 * (rank + 1)}",
            ],
            env={**os.environ, **environ, "RANK": str(rank)}
            | {"JAX_NUM_CPU_DEVICES": devices if rank else "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    rates = "optimizer.learning_rate is 0.1 in process 0 and 0.2 in process 1"
    expected = "  version.optax is " if version else f"  {rates}"
    if devices == "2":
        expected = "  devices.per process is 1 in process 0 and 2 in process 1"
    assert [process.returncode for process in started] == [2, 2], outputs
    for out, err in outputs:
        assert out == ""
        assert "error: the 2 processes differ\n" in err
        assert expected in err
        assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_differences_are_grouped_by_value():
    everyone = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1", "b": "x", "c": "3"}]
    assert differences(everyone) == [
        "a is 1 in processes 0, 2 and 2 in process 1",
        "c is missing in processes 0, 1 and 3 in process 2",
    ]

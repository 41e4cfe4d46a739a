"""A training from rewards that is killed once, in the phase that its arguments name."""

import os
import signal
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import nnx

import meshwright as mw
from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.trainer.rollouts.completer import Completer
from meshwright.trainer.rollouts.rollout_files import RolloutFiles

PHASES = {
    "rollout": (Completer, "complete"),
    "scoring": (Completer, "score"),
    "before_the_update": (RolloutFiles, "keep"),
    "save": (CheckpointStore, "save"),
}
"""What a run is killed in, right after its third call."""


class Mean(nnx.Module):
    """Predicts a token from the mean of those before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 16, rngs=rngs)
        self.out = nnx.Linear(16, 128, rngs=rngs)

    def __call__(self, tokens):
        seen = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1])))
        return self.out(jnp.tanh(seen / seen.sum(axis=1, keepdims=True) @ self.embed(tokens)))


def kill_after(owner, name, marker):
    """Make the third call of a method the last of this process, unless it happened before."""
    called, whole = [], getattr(owner, name)

    def method(self, *args, **kwargs):
        result = whole(self, *args, **kwargs)
        called.append(name)
        if len(called) == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, method)


def main(folder, phase):
    if phase:
        kill_after(*PHASES[phase], Path(folder).with_suffix(".killed"))
    task = mw.GRPO(
        rewards=["rewards.reward_samples:timed"],
        reward_seconds=1.0,
        num_generations=4,
        num_iterations=2,
        max_prompt_length=4,
        max_generation_steps=3,
        tokenizer=ByteTokenizer(),
    )
    trainer = mw.Trainer(model=Mean, task=task, optimizer=optax.adam(0.01), mesh="data=1")
    trainer.fit(
        [{"prompt": f"{n}="} for n in range(6)],
        steps=9,
        batch_size=8,
        run_dir=folder,
        checkpoint=mw.CheckpointConfig(every=3),
        progress=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

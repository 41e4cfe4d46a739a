"""A key that stands for the step of a run that is made of Meshwright's own code alone."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
import optax

from meshwright.compiled.disk_cache import digest_here, disk_cache
from meshwright.errors import Spelling, current_spelling
from meshwright.processes import process_count
from meshwright.program.kernels.regions import describe
from meshwright.runtime.user_code import is_users_file
from meshwright.runtime.versions import installed_packages, users_code
from meshwright.step.assemble import Assembled
from meshwright.trainer.fit_settings import FitSettings

_NOT_TRACED = ("run", "data", "tracking", "checkpoint", "resume")
"""Keys of a config that no program depends on, but for what the traced loss and the rates show."""


def step_key(asked: FitSettings, assembled: Assembled, training: Mapping[str, Any]) -> str | None:
    """Return a hash of all that a step is made of, though its own program has not been traced.

    The loss is in it as the program that was traced, the optimizer as its settings, and what makes
    a step of them as the digest of Meshwright's code. None where other code could have a say: the
    user's derivatives, for one, are not to be seen in a traced loss.
    ``training`` is what `training_facts` says of the step.
    """
    own = asked.recipe is not None and current_spelling() is Spelling.COMMAND_LINE
    changed = any(is_users_file(str(module.__file__)) for module in (jax, flax, optax))
    # Processes would have to agree whether they have it; programs of stages are checked as text.
    apart = process_count() > 1 or assembled.step.pipeline is not None
    if not own or changed or apart or users_code() or disk_cache() is None:
        return None
    leaves = [(leaf.path, leaf.role, str(leaf.struct)) for leaf in assembled.traced.layout.leaves]
    return digest_here(
        {
            "training": training,
            "config": {k: v for k, v in asked.config.items() if k not in _NOT_TRACED},
            "plan": assembled.plan.model_dump(mode="json"),
            "leaves": leaves,
            "kernels": describe(assembled.decision.kernels.uses),
            "batch": [str(leaf) for leaf in assembled.traced.batch],
            "jax": sorted(kv for kv in jax.config.values.items() if "cache" not in kv[0]),
            "packages": installed_packages(),
        }
    )

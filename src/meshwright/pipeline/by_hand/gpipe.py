"""PipelineStage, pipeline_forward and GPipePipeline: a simple pipeline of dense layers."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen, nnx

from meshwright.config.argument_checks import check_count
from meshwright.errors import UserError, did_you_mean, typed_line
from meshwright.pipeline.by_hand.stage_checks import describe

LayerSpec = Mapping[str, int | bool]
"""``in_features``, ``out_features`` and optionally ``relu`` of a dense layer."""

SPEC_KEYS = ("in_features", "out_features", "relu")
SPEC_EXAMPLE = 'write {"in_features": 784, "out_features": 128}'


class PipelineStage(nnx.Module):
    """Dense layers, each followed by a ReLU.

    Args:
        layer_specs: for each layer, ``in_features`` and ``out_features``; ``relu=False`` omits the
            ReLU, as after the layer that computes logits.
        stage_id: the number of the stage.
        rngs: random streams.
    """

    def __init__(self, layer_specs: Sequence[LayerSpec], stage_id: int, *, rngs: nnx.Rngs) -> None:
        _check_specs(layer_specs, stage_id)
        self.stage_id = stage_id
        self.relu = tuple(bool(spec.get("relu", True)) for spec in layer_specs)
        sizes = [(spec["in_features"], spec["out_features"]) for spec in layer_specs]
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers to x [B, in_features]."""
        for layer, relu in zip(self.layers, self.relu, strict=True):
            x = nnx.relu(layer(x)) if relu else layer(x)
        return x


def warn_of_relu(layers: Sequence[object]) -> None:
    """Warn if a loss gets the output of a ReLU, which a `PipelineStage` has after every layer."""
    last = layers[-1]
    if not isinstance(last, PipelineStage) or not last.relu[-1]:
        return
    warnings.warn(
        "the output of the last layer passes a ReLU before the loss: it is never negative, and "
        "where it is 0, nothing is learned; write relu=False in the spec of the last layer",
        stacklevel=3,
    )


def pipeline_forward(
    stages: Sequence[Callable[[jax.Array], jax.Array]], inputs: jax.Array, num_microbatches: int
) -> jax.Array:
    """Run a batch through the stages in S+M-1 ticks, each stage on a different microbatch.

    The result equals that of applying the stages one after another to the whole batch. A stage is
    an NNX module, a Linen module bound to its variables, or a function.
    """
    _check_stages(stages)
    check_count("num_microbatches", num_microbatches)
    if not getattr(inputs, "shape", ()):
        raise UserError(
            "the inputs are not an array of samples",
            why=f"they are of type {type(inputs).__name__}",
            fix="pass an array [B, …]",
        )
    if num_microbatches > inputs.shape[0]:
        raise UserError(
            f"{inputs.shape[0]} samples cannot be divided into {num_microbatches} microbatches",
            why="each microbatch needs at least one sample",
            fix=f"write num_microbatches={max(1, inputs.shape[0])}, or pass more samples",
        )
    microbatches = jnp.array_split(inputs, num_microbatches)
    activations: dict[int, jax.Array] = {}
    outputs: list[jax.Array] = []
    for tick in range(len(stages) + num_microbatches - 1):
        # Last stage first: each stage reads the activation of the previous tick.
        for stage in reversed(range(len(stages))):
            number = tick - stage
            if 0 <= number < num_microbatches:
                x = microbatches[number] if stage == 0 else activations[stage - 1]
                activations[stage] = _run_stage(stages[stage], stage, x)
                if stage == len(stages) - 1:
                    outputs.append(activations[stage])
    return jnp.concatenate(outputs)


class GPipePipeline(nnx.Module):
    """Stages of equal dense layers, run as a pipeline.

    Args:
        num_stages: number of stages.
        layers_per_stage: layers per stage.
        hidden_dim: width of every layer.
        rngs: random streams.
    """

    def __init__(
        self, num_stages: int, layers_per_stage: int, hidden_dim: int, *, rngs: nnx.Rngs
    ) -> None:
        for name, count in (("num_stages", num_stages), ("layers_per_stage", layers_per_stage)):
            check_count(name, count)
        self.num_stages = num_stages
        spec = {"in_features": hidden_dim, "out_features": hidden_dim}
        self.stages = nnx.List(
            [PipelineStage([spec] * layers_per_stage, n, rngs=rngs) for n in range(num_stages)]
        )

    def forward_stage(self, stage_id: int, x: jax.Array) -> jax.Array:
        """Apply one stage to x [B, hidden_dim]."""
        if not 0 <= stage_id < self.num_stages:
            raise UserError(
                f"there is no stage {stage_id}",
                why=f"the pipeline has {self.num_stages}",
                fix=f"write a number from 0 to {self.num_stages - 1}",
            )
        return _run_stage(self.stages[stage_id], stage_id, x)

    def __call__(self, x: jax.Array, num_microbatches: int = 1) -> jax.Array:
        """Apply all stages to x [B, hidden_dim], divided into microbatches."""
        return pipeline_forward(list(self.stages), x, num_microbatches)


def _run_stage(stage: Callable[[jax.Array], jax.Array], number: int, x: jax.Array) -> jax.Array:
    try:
        return stage(x)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"stage {number} fails on its input",
            why=f"its input is {describe(x)}: {typed_line(error)}",
            fix="make each stage accept the output of the previous one, and the first the inputs",
        ) from error


def _check_stages(stages: object) -> None:
    if not isinstance(stages, Sequence) or not stages:
        single = (
            "one module or function" if callable(stages) else f"of type {type(stages).__name__}"
        )
        raise UserError(
            "stages is not a list of stages",
            why=f"stages is {'empty' if isinstance(stages, Sequence) else single}",
            fix="write stages=[first, second, …]",
        )
    for number, stage in enumerate(stages):
        if isinstance(stage, linen.Module) and stage.scope is None:
            name = type(stage).__name__
            raise UserError(
                f"stage {number} ({name}) is a Linen module without parameters",
                why="a Linen module does not hold its parameters",
                fix="write stage.bind(variables), or "
                f"nnx.bridge.ToNNX({name}(…), rngs=rngs).lazy_init(x)",
            )


def _check_specs(specs: Sequence[LayerSpec], stage_id: int) -> None:
    if isinstance(specs, Mapping) or not specs:
        raise UserError(
            f"layer_specs of stage {stage_id} is not a list of layers",
            why=f"layer_specs is {'empty' if not specs else 'one mapping'}",
            fix='write layer_specs=[{"in_features": 784, "out_features": 128}, …]',
        )
    before = None
    for number, spec in enumerate(specs):
        where = f"layer {number} of stage {stage_id}"
        _check_keys(spec, where)
        for key in SPEC_KEYS[:2]:
            check_count(f"{where}: {key}", spec[key])
        if before not in (None, spec["in_features"]):
            raise UserError(
                f"{where} does not fit the layer before it",
                why=f"in_features is {spec['in_features']}, and the layer before has out_features "
                f"{before}",
                fix=f"write in_features={before}",
            )
        before = spec["out_features"]


def _check_keys(spec: object, where: str) -> None:
    if not isinstance(spec, Mapping):
        raise UserError(
            f"{where} is of type {type(spec).__name__}",
            why="a layer is described by a mapping",
            fix=SPEC_EXAMPLE,
        )
    missing = [key for key in SPEC_KEYS[:2] if key not in spec]
    unknown = [str(key) for key in spec if key not in SPEC_KEYS]
    if missing or unknown:
        absent = f"lacks {' and '.join(missing)}" if missing else ""
        extra = f"has the unknown key {', '.join(unknown)}" if unknown else ""
        raise UserError(
            f"{where} {' and '.join(filter(None, (absent, extra)))}",
            why=f"a layer has the keys {', '.join(SPEC_KEYS)}, the last of which is optional",
            fix=(did_you_mean(unknown[0], SPEC_KEYS) if unknown else "") or SPEC_EXAMPLE,
        )

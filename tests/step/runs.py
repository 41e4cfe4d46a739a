"""Training on one device by hand, and on a mesh by the step, for comparison."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from program.programs import quick
from small_models import SAMPLES, double, fill, plain_value

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.plan import Plan
from meshwright.program.evaluate.widen import wide_evaluator, widen
from meshwright.step.assemble import assemble

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def make_plan(mesh, *, samples=SAMPLES, accumulation=1, precision="no", **sharding):
    """Return a plan whose arrays are divided however small they are."""
    batch = solve_batch(
        replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
        global_batch_size=samples,
        gradient_accumulation_steps=accumulation,
    )
    config = ShardingConfig(**{"min_shard_size": 0, **sharding})
    return Plan(mesh=mesh, batch=batch, sharding=config, precision=precision)


def put_together(build, loss, batch, mesh, *, optimizer=None, wide=True, **options):
    """Assemble a step on as many devices as the mesh has."""
    own = {name: options.pop(name) for name in ("trainable", "clip_norm") if name in options}
    devices = options.pop("devices", None)
    samples = options.pop("samples", jax.tree.leaves(batch)[0].shape[0])
    plan = make_plan(mesh, samples=samples, **options)
    with jax.enable_x64(False):
        return assemble(
            lambda rngs: build(),
            loss,
            optimizer or OPTIMIZER,
            plan,
            batch,
            devices=devices or jax.devices()[: plan.num_devices],
            wide=wide,
            **own,
        )


class Run:
    """What some steps gave: losses, and the model's leaves by path."""

    def __init__(self, losses, leaves, metrics=None):
        self.losses = [float(x) for x in losses]
        self.leaves = {path: np.asarray(value) for path, value in leaves.items()}
        self.metrics = metrics


def on_mesh(assembled, model, batches):
    """Run the step once for each batch, in float64 if it was assembled wide."""
    state = assembled.start(
        [jax.device_get(v) for v in map(widen, assembled.model_leaves.values(model))]
    )
    run = quick(lambda state, batch: assembled.step(state, batch))
    losses, metrics = [], {}
    for batch in batches:
        state, metrics = run(state, assembled.put_batch(batch))
        losses.append(metrics["loss"])
    return Run(losses, _numbers(assembled.canonical(state)), metrics)


def by_hand(model, loss, batches, *, optimizer=None, accumulation=1, trainable=nnx.Param):
    """Train with Flax and optax alone on one device, in float64."""
    model = double(model)
    graphdef, params, rest = nnx.split(model, trainable, ...)
    transformation = optimizer or OPTIMIZER
    state = transformation.init(params)

    @quick
    def update(params, rest, state, batch):
        def total(params, rest, micro):
            model = nnx.merge(graphdef, params, rest, copy=True)
            out = loss(model, micro)
            out = out[0] if isinstance(out, tuple) else out
            weight = getattr(out, "weight", 1.0)
            return plain_value(out) * weight, (weight, nnx.state(model, nnx.Not(trainable)))

        totals, weights, sums = 0.0, 0.0, None
        for number in range(accumulation):
            micro = {name: array[number::accumulation] for name, array in batch.items()}
            (value, (weight, rest)), grads = jax.value_and_grad(total, has_aux=True)(
                params, rest, micro
            )
            totals, weights = totals + value, weights + weight
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        grads = jax.tree.map(lambda g: g / weights, sums)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, totals / weights

    losses = []
    for batch in batches:
        wide = {name: np.asarray(widen(array)) for name, array in batch.items()}
        params, rest, state, value = update(params, rest, state, wide)
        losses.append(value)
    leaves = nnx.to_flat_state(nnx.state(nnx.merge(graphdef, params, rest)))
    return Run(losses, _numbers({".".join(map(str, p)): v[...] for p, v in leaves}))


def on_one_device(assembled, model, batches, *, optimizer=None):
    """Train on the traced program alone, without a mesh and without any pass but widening."""
    leaves = assembled.traced.layout.leaves
    transformation = optimizer or OPTIMIZER
    accumulation = assembled.plan.batch.gradient_accumulation_steps
    traced = assembled.traced
    split = lambda values, role: {  # noqa: E731
        leaf.path: v for leaf, v in zip(leaves, values, strict=True) if leaf.role == role
    }

    @quick
    def update(params, rest, state, batch):
        def total(params, rest, micro):
            merged = params | rest
            values = traced.layout.from_canonical([merged[leaf.path] for leaf in leaves])
            value = traced.read_outputs(wide_evaluator().run(traced.closed, [*values, *micro]))
            steps = [s for s in traced.layout.step_leaves if s.leaf.role == "state"]
            after = {
                leaves[source].path: new[n] if step.stacked else new
                for step, new in zip(steps, value.state, strict=True)
                for n, source in enumerate(step.sources)
            }
            return value.objective.total, (value.objective.weight, after)

        totals, weights, sums = 0.0, 0.0, None
        for number in range(accumulation):
            micro = [array[number::accumulation] for array in batch]
            (value, (weight, rest)), grads = jax.value_and_grad(total, has_aux=True)(
                params, rest, micro
            )
            totals, weights = totals + value, weights + weight
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        grads = jax.tree.map(lambda g: g / weights, sums)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, totals / weights

    values = [jax.device_get(v) for v in map(widen, assembled.model_leaves.values(model))]
    params, rest = split(values, "param"), split(values, "state")
    state = transformation.init(params)
    losses = []
    for batch in batches:
        params, rest, state, value = update(params, rest, state, jax.tree.leaves(batch))
        losses.append(value)
    return Run(losses, _numbers(params | rest))


def _numbers(leaves):
    is_key = lambda v: jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {p: jax.random.key_data(v) if is_key(v) else v for p, v in leaves.items()}


def filled(build, seed=0):
    """Return a model with numpy weights, as it is without float64."""
    with jax.enable_x64(False):
        return fill(build, seed=seed)

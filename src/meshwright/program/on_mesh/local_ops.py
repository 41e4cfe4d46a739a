"""Operations that every device runs on its own samples, because XLA would gather them first.

XLA's partitioner replicates the operands of Fourier transforms and of top-k, although samples are
independent there. The gradient of a grouped convolution's kernel is summed over axes that shard
nothing (see `grouped_convolutions`). Inside a `jax.shard_map` neither happens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import entry_names
from meshwright.program.dims.classes import DimClasses
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var, aval_of
from meshwright.program.kernels.find_kernels import LayoutOf
from meshwright.program.on_mesh.grouped_convolutions import is_grouped
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype


@dataclass(frozen=True)
class LocalOp:
    """The layouts of the operands and results of an operation that devices run on their own."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the first operand."""
        return tuple(axis for entry in self.operands[0] for axis in entry_names(entry))


def find_local_ops(
    classes: DimClasses, layout: LayoutOf, batch_axes: Mapping[str, int], tensor_size: int
) -> dict[Var, LocalOp]:
    """Return, by first result, the operations that devices run on their own samples.

    ``batch_axes`` are the mesh axes that samples are sharded over, and their sizes.
    """
    found: dict[Var, LocalOp] = {}
    # JAX writes an entry of one axis as the axis itself.
    samples = PartitionSpec(tuple(batch_axes))[0]
    for program, eqn in classes.equations() if batch_axes else ():
        one_batch = is_grouped(eqn) and eqn.params["batch_group_count"] == 1
        is_candidate = one_batch or eqn.primitive.name in ("fft", "top_k")
        if not is_candidate or isinstance(eqn.invars[0], Literal):
            continue
        operand, whole = eqn.invars[0], _whole_dims(eqn)
        specs = [layout(program, variable) for variable in (operand, *eqn.outvars)]
        layouts = [_without(spec, whole) for spec in specs if spec is not None]
        if len(layouts) < len(specs) or not all(samples in x for x in layouts):
            continue
        if is_grouped(eqn) and (tensor_size == 1 or any("tensor" in x for x in layouts)):
            continue
        others = [PartitionSpec()] * (len(eqn.invars) - 1)
        found[eqn.outvars[0]] = LocalOp((layouts[0], *others), tuple(layouts[1:]))
    return found


def _whole_dims(eqn: Equation) -> Sequence[int]:
    """Return the dims along which the operation mixes what it is given."""
    rank = len(aval_of(eqn.outvars[0]).shape)
    if eqn.primitive.name == "fft":
        return range(rank - len(eqn.params["fft_lengths"]), rank)
    return [eqn.params.get("axis", -1) % rank] if eqn.primitive.name == "top_k" else []


def _without(spec: PartitionSpec, dims: Sequence[int]) -> PartitionSpec:
    return PartitionSpec(*(None if d in dims else axes for d, axes in enumerate(spec)))


@dataclass(frozen=True, eq=False)
class LocalOps:
    """Runs operations inside a `jax.shard_map`, each device on its own samples."""

    mesh: MeshView
    ops: Mapping[Var, LocalOp]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate one of the operations; None for other equations."""
        op = self.ops.get(eqn.outvars[0]) if eqn.outvars else None
        if op is None:
            return None

        def run(samples: Value, *weights: Value) -> tuple[Value, ...]:
            # The gradient of a weight is summed over the devices that have other samples.
            varying = [jax.lax.pcast(weight, op.axes, to="varying") for weight in weights]
            inner = env.with_operands(eqn, [samples, *varying])
            return tuple(env.evaluator.continue_after(self, eqn, inner))

        mapped = jax.shard_map(run, mesh=self.mesh.mesh, in_specs=op.operands, out_specs=op.results)
        return list(mapped(*env.operands(eqn, operands_in_param_dtype(eqn, env))))

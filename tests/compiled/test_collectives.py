"""Collectives read from compiled programs, against the closed forms of ring algorithms.

Run as a program with a number of virtual devices, this file prints the figures of its steps on
that many: `python tests/compiled/test_collectives.py 64`.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.compiled.collectives import (
    IRREGULAR,
    Collective,
    parse_replica_groups,
    phase_of,
    read_collectives,
    ring_bytes,
)
from meshwright.compiled.compile_program import CompiledProgram, compile_program
from meshwright.errors import UserError
from meshwright.program.jaxpr.names import MODULE_MARK, module_of

WIDTH, BLOCKS, ROWS = 128, 2, 2
PARAMETERS = BLOCKS * 2 * WIDTH * WIDTH
P = PartitionSpec


def sent_by_axes(collectives: Iterable[Collective]) -> dict[tuple[str, ...], float]:
    """Return the bytes each device sends, added up by the axes they run over."""
    total: dict[tuple[str, ...], float] = {}
    for collective in collectives:
        total[collective.axes] = total.get(collective.axes, 0.0) + collective.sent_bytes
    return total


def build_mesh(sizes: dict[str, int]) -> Mesh:
    grid = np.array(jax.devices()).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@cache
def compiled_step(
    axes: tuple[tuple[str, int], ...],
    *,
    dtype: str = "float32",
    remat: bool = False,
    scan: bool = False,
    pinned: bool = True,
    microbatches: int = 1,
) -> CompiledProgram:
    """Compile an SGD step of a two-block MLP: parameters over `fsdp`, the batch over every axis."""
    mesh = build_mesh(dict(axes))
    names = tuple(name for name, _ in axes)
    batch = NamedSharding(mesh, P(names))
    stored = NamedSharding(mesh, P(*((None,) * scan), "fsdp" if "fsdp" in names else None))

    def pin(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, batch) if pinned else x

    def block(x: Any, weights: dict[str, Any], path: str) -> Any:
        for name in ("up", "down"):
            with jax.named_scope(f"{MODULE_MARK}{path}.{name}"):
                x = pin(jnp.tanh(pin(x @ weights[name].astype(dtype))))
        return x

    def blocks(x: Any, weights: Any) -> Any:
        run = jax.checkpoint(block, static_argnums=2) if remat else block
        if scan:
            return jax.lax.scan(lambda x, w: (run(x, w, "blocks"), None), x, weights)[0]
        for i, layer in enumerate(weights):
            with jax.named_scope(f"{MODULE_MARK}blocks.{i}"):
                x = run(x, layer, f"blocks.{i}")
        return x

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(blocks(x.astype(dtype), weights).astype(jnp.float32) ** 2)

    def step(weights: Any, x: Any) -> Any:
        def accumulate(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        gradients = (
            jax.grad(loss)(weights, x)
            if microbatches == 1
            else jax.lax.scan(accumulate, zeros, x.reshape(microbatches, -1, WIDTH))[0]
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    shape = (BLOCKS, WIDTH, WIDTH) if scan else (WIDTH, WIDTH)
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=stored)
    layer = {"up": kernel, "down": kernel}
    weights = layer if scan else [layer] * BLOCKS
    rows = ROWS * mesh.size * microbatches
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=batch)
    out = jax.tree.map(lambda w: w.sharding, weights)
    return compile_program(jax.jit(step, donate_argnums=0, out_shardings=out).lower(weights, x))


def kinds(collectives: list[Collective]) -> Counter[tuple[str, tuple[str, ...], str]]:
    counts: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for c in collectives:
        counts[c.kind, c.axes, c.dtype] += c.count
    return counts


def figures(devices: int) -> dict[str, float]:
    """Bytes sent per device in units of (n−1)/n times the bytes of the parameters."""
    half = devices // 4
    cases = {
        "data": ({"data": devices}, {}, 4),
        "data bfloat16": ({"data": devices}, {"dtype": "bfloat16"}, 2),
        "fsdp": ({"fsdp": devices}, {}, 4),
        "fsdp bfloat16 remat": ({"fsdp": devices}, {"dtype": "bfloat16", "remat": True}, 2),
        "fsdp scan remat": ({"fsdp": devices}, {"scan": True, "remat": True}, 4),
        "data fsdp": ({"data": 4, "fsdp": half}, {}, 4),
    }
    found: dict[str, float] = {}
    for name, (sizes, options, width) in cases.items():
        program = compiled_step(tuple(sizes.items()), **options)
        for text in ("partitioned", "optimized"):
            sent = sent_by_axes(read_collectives(getattr(program, text), sizes))
            for axes, sent_bytes in sent.items():
                n = int(np.prod([sizes[axis] for axis in axes]))
                unit = (n - 1) / n * PARAMETERS * width
                found[f"{name}: {' '.join(axes)}, {text}"] = sent_bytes / unit
    return found


def check_figures(found: dict[str, float], fsdp: int) -> None:
    partitioned = {k.split(",")[0]: v for k, v in found.items() if k.endswith("partitioned")}
    assert partitioned == pytest.approx(
        {
            "data: data": 2,
            "data bfloat16: data": 2,
            "fsdp: fsdp": 2,
            "fsdp bfloat16 remat: fsdp": 3,
            "fsdp scan remat: fsdp": 3,
            "data fsdp: fsdp": 2,
            "data fsdp: data": 2 / fsdp,
        },
        rel=0.01,
    )
    # On CPU the optimizer changes dtypes, but in float32 nothing else that is sent.
    for name in ("data: data", "fsdp: fsdp", "fsdp scan remat: fsdp", "data fsdp: fsdp"):
        assert found[f"{name}, optimized"] == pytest.approx(partitioned[name], rel=0.01)
    assert found["data bfloat16: data, optimized"] == pytest.approx(4, rel=0.01)


def test_bytes_equal_theory_on_eight_devices() -> None:
    check_figures(figures(8), fsdp=2)


@pytest.mark.full
def test_bytes_equal_theory_on_sixty_four_devices() -> None:
    """Beyond ten devices offset tables are too long for ordinary text, so both sizes are run."""
    done = subprocess.run(
        [sys.executable, __file__, "64"], capture_output=True, text=True, check=True
    )
    check_figures(json.loads(done.stdout), fsdp=16)


def test_data_parallel_is_one_all_reduce_per_kernel_named_by_module() -> None:
    found = read_collectives(compiled_step((("data", 8),)).partitioned, {"data": 8})
    assert kinds(found) == {("all-reduce", ("data",), "f32"): 4}
    assert {c.module for c in found} == {
        f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("up", "down")
    }
    assert {c.phase for c in found} == {"backward"}
    assert {c.payload_bytes for c in found} == {WIDTH * WIDTH * 4}
    assert all(c.group_size == 8 for c in found)


def test_fsdp_gathers_in_the_compute_dtype_and_scatters_gradients() -> None:
    step = compiled_step((("fsdp", 8),), dtype="bfloat16", remat=True)
    found = read_collectives(step.partitioned, {"fsdp": 8})
    assert kinds(found) == {
        ("all-gather", ("fsdp",), "bf16"): 8,
        ("reduce-scatter", ("fsdp",), "bf16"): 4,
    }
    phases = Counter((c.kind, c.phase) for c in found)
    assert phases["all-gather", "forward"] == phases["all-gather", "backward"] == 4
    assert phases["reduce-scatter", "backward"] == 4
    for kind in ("all-gather", "reduce-scatter"):
        assert {c.module for c in found if c.kind == kind} == {
            f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("up", "down")
        }


def test_combined_collectives_are_listed_one_by_one_with_their_modules() -> None:
    text = compiled_step((("data", 4), ("fsdp", 2))).optimized
    assert text.count(" all-reduce(") < 8, "nothing was combined, so this would show nothing"
    found = read_collectives(text, {"data": 4, "fsdp": 2})
    assert kinds(found) == {
        ("all-gather", ("fsdp",), "f32"): 4,
        ("reduce-scatter", ("fsdp",), "f32"): 4,
        ("all-reduce", ("data",), "f32"): 4,
    }
    for kind in ("reduce-scatter", "all-reduce"):
        modules = [c.module for c in found if c.kind == kind]
        assert len(set(modules)) == 4


def test_loops_multiply_counts_also_when_nested() -> None:
    step = compiled_step((("fsdp", 8),), scan=True, remat=True, microbatches=3)
    for text in (step.partitioned, step.optimized):
        found = read_collectives(text, {"fsdp": 8})
        weights = [c for c in found if c.module.startswith("blocks")]
        assert kinds(weights)["all-gather", ("fsdp",), "f32"] == 2 * 2 * BLOCKS * 3
        assert kinds(weights)["reduce-scatter", ("fsdp",), "f32"] == 2 * BLOCKS * 3


def test_a_missing_reduction_shows_as_too_few_bytes() -> None:
    """Per-device gradients applied without a sum compile and run; only the ledger sees it."""
    mesh = build_mesh({"data": 8})

    def step(reduce: bool) -> float:
        def local(w: Any, x: Any) -> Any:
            gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - (jax.lax.pmean(gradient, "data") if reduce else gradient)

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        lowered = jax.jit(mapped).lower(jnp.ones((WIDTH, WIDTH)), jnp.ones((16, WIDTH)))
        found = read_collectives(compile_program(lowered).partitioned, {"data": 8})
        return sum(c.sent_bytes for c in found) / ring_bytes("all-reduce", WIDTH * WIDTH * 4, 8)

    assert step(reduce=True) == pytest.approx(1.0, rel=0.01)
    assert step(reduce=False) == 0.0


def test_an_involuntary_gather_of_activations_shows_with_its_module() -> None:
    axes = (("fsdp", 8),)
    asked = read_collectives(compiled_step(axes).partitioned, {"fsdp": 8})
    drifted = read_collectives(compiled_step(axes, pinned=False).partitioned, {"fsdp": 8})
    weight = WIDTH * WIDTH * 4
    assert {c.payload_bytes for c in asked} == {weight}
    activations = [c for c in drifted if c.kind == "all-gather" and c.payload_bytes != weight]
    assert activations
    assert all(c.payload_bytes == ROWS * 8 * WIDTH * 4 for c in activations)
    assert all(c.module.startswith("blocks.") for c in activations)
    ratio = sum(c.sent_bytes for c in drifted) / sum(c.sent_bytes for c in asked)
    assert not 0.98 <= ratio <= 1.05


def test_tensor_parallel_pairs_reduce_once_forward() -> None:
    mesh = build_mesh({"data": 2, "tensor": 4})

    def forward(up: Any, down: Any, x: Any) -> Any:
        with jax.named_scope(MODULE_MARK + "mlp"):
            hidden = jnp.tanh(x @ up)
            return jax.lax.with_sharding_constraint(hidden @ down, NamedSharding(mesh, P("data")))

    def spec(*dims: str | None) -> Any:
        return jax.ShapeDtypeStruct(
            (WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(*dims))
        )

    lowered = jax.jit(forward).lower(spec(None, "tensor"), spec("tensor", None), spec("data"))
    (only,) = read_collectives(compile_program(lowered).partitioned, {"data": 2, "tensor": 4})
    assert (only.kind, only.axes, only.module) == ("all-reduce", ("tensor",), "mlp")
    assert only.phase == "forward"
    assert only.sent_bytes == 2 * 3 / 4 * (WIDTH // 2) * WIDTH * 4


def test_permutes_and_all_to_alls_of_shard_map() -> None:
    mesh = build_mesh({"data": 2, "pipe": 4})

    def local(x: Any) -> Any:
        ring = [(i, (i + 1) % 4) for i in range(4)]
        x = jax.lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)
        return jax.lax.ppermute(x, "pipe", ring)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data", "pipe"), out_specs=P("data", "pipe")
    )
    program = compile_program(jax.jit(mapped).lower(jnp.ones((8, 16), jnp.float32)))
    for text in (program.partitioned, program.optimized):
        found = {c.kind: c for c in read_collectives(text, {"data": 2, "pipe": 4})}
        assert found["all-to-all"].axes == ("data",)
        assert found["all-to-all"].payload_bytes == 4 * 4 * 4
        assert found["all-to-all"].sent_bytes == 4 * 4 * 4 / 2
        assert found["collective-permute"].axes == ("pipe",)
        assert found["collective-permute"].sent_bytes == 4 * 4 * 4


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh[x=8,y=1] {x}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2,'x'}", ((0, 4, 2, 6), (1, 5, 3, 7))),
    ],
)
def test_replica_groups_in_every_notation(text: str, groups: Any) -> None:
    assert parse_replica_groups(text, 8) == groups


@pytest.mark.parametrize(
    ("kind", "multiple"),
    [
        ("all-reduce", 1.5),
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
        ("collective-permute", 1.0),
    ],
)
def test_ring_bytes_of_four_devices(kind: str, multiple: float) -> None:
    assert ring_bytes(kind, 1000, 4) == multiple * 1000


@pytest.mark.parametrize(
    ("op_name", "module", "phase"),
    [
        ("jit(step)/transpose(jvp(~blocks.0))/~blocks.0.up/dot_general", "blocks.0.up", "backward"),
        ("jit(step)/jvp(~blocks.0.mlp)/dot_general", "blocks.0.mlp", "forward"),
        ("jit(f)/transpose(jvp())/checkpoint/rematted_computation/~a.b/dot", "a.b", "backward"),
        ("jit(step)/while/body/closed_call/jvp()/while/body/~blocks/add", "blocks", "forward"),
        ("jit(evaluate)/~head/dot_general", "head", "forward"),
        ("jit(step)/(transpose(jvp(~a))/mul:transpose(jvp(~b))/~b.c/mul)", "b.c", "backward"),
        ("jit(step)/mul;~a/mul", "a", "forward"),
        ("jit(step)/sub", "", "update"),
        ("jit(step)/tilde~not_a_module/sub", "", "update"),
        ("", "", "update"),
    ],
)  # fmt: skip
def test_modules_and_phases_come_from_op_names(op_name: str, module: str, phase: str) -> None:
    assert module_of(op_name) == module
    assert phase_of(op_name) == phase


def written(body: str, before: str = "") -> str:
    """An HLO module of eight devices around hand-written instructions."""
    return f"""HloModule written, num_partitions=8

add {{
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}}
{before}
ENTRY main {{
  p = f32[64,4]{{1,0}} parameter(0)
{body}
}}
"""


def offsets(table: str, groups: str, size: int = 8) -> str:
    """An all-reduce of (64, 4) of which each device keeps rows by a table of its own number."""
    return f"""
  ar = f32[64,4]{{1,0}} all-reduce(p), channel_id=1, replica_groups={groups}, to_apply=add
  id = u32[] partition-id()
  table = s32[8]{{0}} constant({table})
  entry = s32[1]{{0}} dynamic-slice(table, id), dynamic_slice_sizes={{1}}
  row = s32[] reshape(entry)
  zero = s32[] constant(0)
  ROOT mine = f32[{size},4]{{1,0}} dynamic-slice(ar, row, zero), dynamic_slice_sizes={{{size},4}}
"""


WHOLE = 64 * 4 * 4
DATA_FSDP = {"data": 2, "fsdp": 4}


def parts(text: str, mesh: dict[str, int]) -> list[tuple[str, tuple[str, ...], int]]:
    return [(c.kind, c.axes, c.payload_bytes) for c in read_collectives(text, mesh)]


def test_a_value_reduced_over_one_axis_and_then_another_is_reduced_once() -> None:
    mesh = build_mesh({"data": 2, "context": 4})
    by_device = NamedSharding(mesh, P("data", "context"))

    def total(x: jax.Array, twice: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("btc,btd->cd", x, x), jnp.einsum("btc->bc", twice)

    shapes = [jax.ShapeDtypeStruct((4, 8, WIDTH), "float32", sharding=by_device)] * 2
    lowered = jax.jit(total, out_shardings=NamedSharding(mesh, P())).lower(*shapes)
    found = read_collectives(compile_program(lowered).partitioned, dict(mesh.shape))
    reduced = {(c.axes, c.payload_bytes) for c in found if c.kind == "all-reduce"}
    # What is gathered after its reduction stays a reduction of its own.
    assert reduced == {(("data", "context"), 4 * WIDTH * WIDTH), (("context",), 4 * 2 * WIDTH)}


def test_an_all_reduce_sliced_over_all_its_axes_is_a_reduce_scatter() -> None:
    text = written(offsets("{0, 8, 16, 24, 32, 40, 48, 56}", "[1,8]<=[8]"))
    assert parts(text, {"fsdp": 8}) == [("reduce-scatter", ("fsdp",), WHOLE)]
    assert parts(text, DATA_FSDP) == [("reduce-scatter", ("data", "fsdp"), WHOLE)]


def test_an_all_reduce_sliced_over_some_axes_is_a_scatter_and_a_smaller_all_reduce() -> None:
    text = written(offsets("{0, 16, 32, 48, 0, 16, 32, 48}", "{}", size=16))
    assert parts(text, DATA_FSDP) == [
        ("reduce-scatter", ("fsdp",), WHOLE),
        ("all-reduce", ("data",), WHOLE // 4),
    ]


def test_axes_of_equal_size_are_distinguished_by_who_takes_which_slice() -> None:
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    inner = written(offsets("{0, 32, 0, 32, 0, 32, 0, 32}", "{}", size=32))
    outer = written(offsets("{0, 0, 0, 0, 32, 32, 32, 32}", "{}", size=32))
    assert parts(inner, mesh)[0] == ("reduce-scatter", ("tensor",), WHOLE)
    assert parts(inner, mesh)[1] == ("all-reduce", ("data", "fsdp"), WHOLE // 2)
    assert parts(outer, mesh)[0] == ("reduce-scatter", ("data",), WHOLE)


@pytest.mark.parametrize(
    ("table", "groups", "size"),
    [
        # Sliced over fsdp, but reduced over data: every device still receives all it slices from.
        ("{0, 16, 32, 48, 0, 16, 32, 48}", "{{0,4},{1,5},{2,6},{3,7}}", 16),
        # Every device takes the same rows.
        ("{8, 8, 8, 8, 8, 8, 8, 8}", "{}", 8),
        # The slices overlap: they are not a division of the whole.
        ("{0, 1, 2, 3, 4, 5, 6, 7}", "{}", 16),
    ],
)
def test_other_slices_leave_an_all_reduce(table: str, groups: str, size: int) -> None:
    (only,) = parts(written(offsets(table, groups, size)), DATA_FSDP)
    assert only[0] == "all-reduce"


def test_an_all_reduce_that_is_also_used_whole_stays_one() -> None:
    text = (
        written(offsets("{0, 8, 16, 24, 32, 40, 48, 56}", "{}"))
        .replace("ROOT mine", "mine")
        .replace(
            "\n\n}", "\n  whole = f32[64,4]{1,0} negate(ar)\n  ROOT both = tuple(mine, whole)\n}"
        )
    )
    text = text.replace("both = tuple", "both = (f32[8,4]{1,0}, f32[64,4]{1,0}) tuple")
    assert parts(text, {"fsdp": 8}) == [("all-reduce", ("fsdp",), WHOLE)]


def test_slices_by_a_loop_counter_are_not_a_scatter() -> None:
    text = written("""
  ar = f32[64,4]{1,0} all-reduce(p), replica_groups={}, to_apply=add
  row = s32[] parameter(1)
  zero = s32[] constant(0)
  ROOT mine = f32[8,4]{1,0} dynamic-slice(ar, row, zero), dynamic_slice_sizes={8,4}
""")
    assert parts(text, {"fsdp": 8}) == [("all-reduce", ("fsdp",), WHOLE)]


def test_elided_tables_are_judged_by_the_size_of_the_slice() -> None:
    text = written(offsets("{...}", "{}", size=16))
    assert parts(text, DATA_FSDP)[0] == ("reduce-scatter", ("fsdp",), WHOLE)
    assert parts(text, {"fsdp": 4, "tensor": 2})[0] == ("reduce-scatter", ("fsdp",), WHOLE)
    ambiguous = written(offsets("{...}", "{}", size=32))
    assert parts(ambiguous, {"data": 2, "fsdp": 2, "tensor": 2})[0][0] == "all-reduce"


def test_slices_are_found_inside_fusions_and_behind_tuples() -> None:
    text = written(
        """
  q = bf16[128]{0} parameter(1)
  ar = (f32[64,4]{1,0}, bf16[128]{0}) all-reduce(p, q), replica_groups=[1,8]<=[8], to_apply=add
  first = f32[64,4]{1,0} get-tuple-element(ar), index=0
  second = bf16[128]{0} get-tuple-element(ar), index=1
  id = u32[] partition-id()
  state = f32[8,4]{1,0} parameter(2)
  new = f32[8,4]{1,0} fusion(state, first, id), kind=kLoop, calls=update
  ROOT out = (f32[8,4]{1,0}, bf16[128]{0}) tuple(new, second)
""",
        """
update {
  state = f32[8,4]{1,0} parameter(0)
  grad = f32[64,4]{1,0} parameter(1)
  id = u32[] parameter(2)
  flat = f32[256]{0} bitcast(grad)
  wide = s32[] convert(id)
  stride = s32[] constant(32)
  row = s32[] multiply(wide, stride)
  mine = f32[32]{0} dynamic-slice(flat, row), dynamic_slice_sizes={32}
  shaped = f32[8,4]{1,0} bitcast(mine)
  ROOT new = f32[8,4]{1,0} subtract(state, shaped)
}
""",
    )
    found = read_collectives(text, {"fsdp": 8})
    assert [(c.kind, c.payload_bytes, c.dtype) for c in found] == [
        ("reduce-scatter", WHOLE, "f32"),
        ("all-reduce", 256, "bf16"),
    ]


def test_async_pairs_count_once_with_the_bytes_of_the_plain_form() -> None:
    text = written("""
  ags = (f32[64,4]{1,0}, f32[512,4]{1,0}) all-gather-start(p), replica_groups={}, dimensions={0}
  ag = f32[512,4]{1,0} all-gather-done(ags)
  ars = f32[64,4]{1,0} all-reduce-start(p), replica_groups=[2,4]<=[8], to_apply=add
  ar = f32[64,4]{1,0} all-reduce-done(ars)
  rss = ((f32[64,4]{1,0}), f32[8,4]{1,0}) reduce-scatter-start(p), replica_groups={}, dimensions={0}, to_apply=add
  rs = f32[8,4]{1,0} reduce-scatter-done(rss)
  cps = (f32[64,4]{1,0}, f32[64,4]{1,0}, u32[], u32[]) collective-permute-start(p), source_target_pairs={{0,4},{1,5}}
  cp = f32[64,4]{1,0} collective-permute-done(cps)
  a2as = ((f32[64,4]{1,0}), f32[64,4]{1,0}) async-start(p), calls=wrapped
  a2a = f32[64,4]{1,0} async-done(a2as), calls=wrapped
  ROOT out = (f32[512,4]{1,0}, f32[64,4]{1,0}) tuple(ag, ar)
""", """
wrapped {
  value = f32[64,4]{1,0} parameter(0)
  ROOT moved = f32[64,4]{1,0} all-to-all(value), replica_groups=[2,4]<=[8], dimensions={0}
}
""")  # fmt: skip # noqa: E501
    assert parts(text, DATA_FSDP) == [
        ("all-gather", ("data", "fsdp"), WHOLE * 8),
        ("all-reduce", ("fsdp",), WHOLE),
        ("reduce-scatter", ("data", "fsdp"), WHOLE),
        ("collective-permute", ("data",), WHOLE),
        ("all-to-all", ("fsdp",), WHOLE),
    ]


def test_an_async_all_reduce_that_is_sliced_is_a_reduce_scatter() -> None:
    text = written(offsets("{0, 8, 16, 24, 32, 40, 48, 56}", "{}")).replace(
        "  ar = f32[64,4]{1,0} all-reduce(p)",
        "  ar = f32[64,4]{1,0} all-reduce-done(ars)\n  ars = f32[64,4]{1,0} all-reduce-start(p)",
    )
    assert parts(text, {"fsdp": 8}) == [("reduce-scatter", ("fsdp",), WHOLE)]


def test_a_gather_without_a_module_belongs_to_the_module_that_reads_it() -> None:
    text = written("""
  ag = f32[512,4]{1,0} all-gather(p), replica_groups={}, dimensions={0}, metadata={op_name="p"}
  flat = f32[2048]{0} reshape(ag), metadata={op_name="jit(f)/reshape"}
  ROOT used = f32[2048]{0} negate(flat), metadata={op_name="jit(f)/transpose(jvp(~head))/neg"}
""")
    (only,) = read_collectives(text, {"fsdp": 8})
    assert (only.module, only.phase) == ("head", "backward")


def test_groups_that_cut_an_axis_are_flagged() -> None:
    text = written(
        "  ROOT ar = f32[64,4]{1,0} all-reduce(p), replica_groups=[4,2]<=[8], to_apply=add"
    )
    (only,) = read_collectives(text, {"fsdp": 8})
    assert only.axes == IRREGULAR == ("?",)
    assert only.group_size == 2
    assert only.sent_bytes == WHOLE


def test_groups_of_one_device_send_nothing_and_are_not_listed() -> None:
    text = written(
        "  ROOT ar = f32[64,4]{1,0} all-reduce(p), replica_groups=[8,1]<=[8], to_apply=add"
    )
    assert read_collectives(text, {"fsdp": 8}) == []


CALLS = """
body {
  state = (s32[], f32[64,4]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  v = f32[64,4]{1,0} get-tuple-element(state), index=1
  ar = f32[64,4]{1,0} all-reduce(v), replica_groups={}, to_apply=add
  ROOT next = (s32[], f32[64,4]{1,0}) tuple(i, ar)
}

cond {
  state = (s32[], f32[64,4]{1,0}) parameter(0)
  ROOT go = pred[] custom-call(state), custom_call_target="oracle"
}

small {
  v = f32[64,4]{1,0} parameter(0)
  ROOT same = f32[64,4]{1,0} copy(v)
}

large {
  v = f32[64,4]{1,0} parameter(0)
  ROOT ar = f32[64,4]{1,0} all-reduce(v), replica_groups={}, to_apply=add
}
"""


def test_a_loop_of_unknown_length_counts_once() -> None:
    loop = """
  zero = s32[] constant(0)
  start = (s32[], f32[64,4]{1,0}) tuple(zero, p)
  ROOT w = (s32[], f32[64,4]{1,0}) while(start), condition=cond, body=body"""
    (unknown,) = read_collectives(written(loop, CALLS), {"data": 8})
    assert unknown.count == 1
    counted = loop + ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{}}'
    (known,) = read_collectives(written(counted, CALLS), {"data": 8})
    assert known.count == 12
    assert known.sent_bytes == 12 * unknown.sent_bytes


@pytest.mark.parametrize(
    "branches",
    [
        "conditional(which, p, p), branch_computations={small, large}",
        "conditional(which, p, p), true_computation=large, false_computation=small",
    ],
)
def test_a_conditional_counts_its_heaviest_branch(branches: str) -> None:
    text = written(f"  which = s32[] parameter(1)\n  ROOT c = f32[64,4]{{1,0}} {branches}", CALLS)
    (only,) = read_collectives(text, {"data": 8})
    assert (only.kind, only.count) == ("all-reduce", 1)


def test_calls_are_followed_each_time() -> None:
    body = """
  one = f32[64,4]{1,0} call(p), to_apply=large
  ROOT two = f32[64,4]{1,0} call(one), to_apply=large"""
    assert len(read_collectives(written(body, CALLS), {"data": 8})) == 2


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="8 devices, the mesh for 4"):
        read_collectives(written("  ROOT n = f32[64,4]{1,0} negate(p)"), {"data": 4})


def test_bytes_add_up_by_axes() -> None:
    text = written("""
  a = f32[64,4]{1,0} all-reduce(p), replica_groups=[2,4]<=[8], to_apply=add
  b = f32[64,4]{1,0} all-reduce(p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=add
  ROOT c = f32[64,4]{1,0} all-reduce(p), replica_groups=[2,4]<=[8], to_apply=add
""")
    assert sent_by_axes(read_collectives(text, DATA_FSDP)) == {
        ("fsdp",): 2 * 1.5 * WHOLE,
        ("data",): 1.0 * WHOLE,
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    print(json.dumps(figures(int(sys.argv[1]))))

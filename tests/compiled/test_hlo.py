"""Reading HLO text: shapes, instructions, calls, loop counts, and getting the text from JAX."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.compiled.compile_program import compile_program
from meshwright.compiled.hlo import (
    Program,
    Shape,
    dtype_bits,
    parse_hlo,
    trip_count,
)
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.program.jaxpr.names import MODULE_MARK

pytestmark = pytest.mark.quick

TEXT = r"""HloModule jit_f, is_scheduled=true, num_partitions=8, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "a file.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}, execution_thread="main"

%fused (p.0: f32[8], p.1: s32[3]) -> f32[8] {
  %p.1 = s32[3]{0} parameter(1)
  %p.0 = f32[8]{0} parameter(0)
  %table = s32[3]{0} constant({1, -2, 3})
  ROOT %negate = f32[8]{0} negate(%p.0)
}

ENTRY %main (a: f32[8], b: s32[3]) -> f32[8] {
  %a = f32[8]{0:T(256)S(1)} parameter(0), sharding={devices=[8]<=[8]}, metadata={op_name="p[\'u, v\']"}
  %b = s32[3]{0} parameter(1)
  %both = (f32[8]{0}, /*index=1*/(s32[3]{0}, token[])) custom-call(f32[8]{0} %a, s32[3]{0} %b), custom_call_target="two, \"three\"", api_version=API_VERSION_TYPED_FFI
  %ar = f32[8]{0} all-reduce(%a), channel_id=1, replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/\302\247/psum" stack_frame_id=1}
  %pick = f32[8]{0} conditional(%b, %ar, %ar), branch_computations={%fused, %fused.2}
  ROOT %out = f32[8]{0} fusion(%ar, %b), kind=kLoop, calls=%fused, backend_config={"outer":{"n":"1,2"}}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program() -> Program:
    return parse_hlo(TEXT)


@pytest.mark.parametrize(
    ("text", "shape", "size_bytes"),
    [
        ("f32[256,16]{1,0}", Shape("f32", (256, 16), "1,0"), 256 * 16 * 4),
        ("bf16[]", Shape("bf16"), 2),
        ("pred[3]{0}", Shape("pred", (3,), "0"), 3),
        ("f8e4m3fn[4]{0:T(8,128)(4,1)S(1)}", Shape("f8e4m3fn", (4,), "0:T(8,128)(4,1)S(1)"), 4),
        ("s4[5]", Shape("s4", (5,)), 3),
        ("f32[<=8,2]", Shape("f32", (8, 2)), 64),
        ("token[]", Shape("token"), 0),
        ("c128[2]", Shape("c128", (2,)), 32),
        ("()", Shape("tuple"), 0),
        (
            "(f32[2]{0}, (u32[], bf16[3]{0}))",
            Shape(
                "tuple",
                elements=(
                    Shape("f32", (2,), "0"),
                    Shape("tuple", elements=(Shape("u32"), Shape("bf16", (3,), "0"))),
                ),
            ),
            18,
        ),
    ],
)
def test_shapes_have_dtype_dims_layout_and_bytes(text: str, shape: Shape, size_bytes: int) -> None:
    module = f"HloModule m\n\nENTRY main {{\n  ROOT p = {text} parameter(0)\n}}\n"
    found = parse_hlo(module).entry.root.shape
    assert (found, found.bytes) == (shape, size_bytes)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, jnp.float8_e4m3fn, jnp.bool_],
)
def test_dtype_bits_agree_with_jax(dtype: Any) -> None:
    text = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3,), dtype)).compile().as_text()
    parameter = parse_hlo(text).entry.parameters[0]
    assert dtype_bits(parameter.shape.dtype) == jnp.dtype(dtype).itemsize * 8


def test_module_has_its_entry_and_partitions(program: Program) -> None:
    assert program.num_partitions == 8
    assert program.entry.name == "main"
    assert list(program.computations) == ["add", "fused", "main"]
    assert program.entry.root.name == "out"


def test_operands_are_names_with_or_without_shapes(program: Program) -> None:
    assert program.entry.by_name["both"].operands == ("a", "b")
    assert program.entry.by_name["out"].operands == ("ar", "b")
    assert program.entry.by_name["both"].shape.elements[1].elements[1].dtype == "token"


def test_parameters_and_literals_keep_their_number_and_text(program: Program) -> None:
    fused = program.computations["fused"]
    assert {number: p.name for number, p in fused.parameters.items()} == {0: "p.0", 1: "p.1"}
    assert fused.by_name["table"].literal == "{1, -2, 3}"


def test_attributes_survive_nested_commas_and_quotes(program: Program) -> None:
    entry = program.entry.by_name
    assert entry["ar"].attributes["replica_groups"] == "mesh['x'=4,'y'=2]"
    assert entry["ar"].attributes["device_ids"] == "([2,4]T(1,0)) {'x'}"
    assert entry["both"].attributes["custom_call_target"] == r'"two, \"three\""'
    assert entry["out"].attributes["backend_config"] == '{"outer":{"n":"1,2"}}'


def test_called_computations_are_listed_by_role(program: Program) -> None:
    entry = program.entry.by_name
    assert entry["ar"].called == {"to_apply": ("add",)}
    assert entry["pick"].called == {"branch_computations": ("fused", "fused.2")}
    assert program.called_by(entry["out"], "calls") == [program.computations["fused"]]


def test_op_names_are_unescaped(program: Program) -> None:
    assert program.entry.by_name["a"].op_name == "p['u, v']"
    assert program.entry.by_name["ar"].op_name == "jit(f)/§/psum"


def test_users_are_listed_once_each(program: Program) -> None:
    assert [user.name for user in program.entry.users["ar"]] == ["pick", "out"]
    assert program.entry.users["out"] == ()


def test_abbreviated_tuple_elements_are_spelled_out() -> None:
    text = """HloModule f
ENTRY main {
  %p = (f32[4]{0}, (s32[], bf16[2]{0})) parameter(0)
  %a = bf16[2]{0} negate(%p#1#1)
  ROOT %b = bf16[2]{0} add(%a, bf16[2]{0} %p#1#1)
}
"""
    entry = parse_hlo(text).entry
    element = entry.by_name["p#1#1"]
    assert (element.opcode, element.operands) == ("get-tuple-element", ("p#1",))
    assert element.shape == Shape("bf16", (2,), "0")
    assert element.attributes["index"] == "1"
    assert [user.name for user in entry.users["p#1#1"]] == ["a", "b"]
    assert [user.name for user in entry.users["p"]] == ["p#1"]


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(UserError, match="not an HLO module"):
        parse_hlo("module @jit_f {\n}\n")


def loops_of(text: str) -> list[int | None]:
    program = parse_hlo(text)
    return [
        trip_count(program, computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    ]


def mesh_of_eight() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


def lowered_sum(body: Any) -> Any:
    sharding = NamedSharding(mesh_of_eight(), PartitionSpec("data"))
    return jax.jit(body).lower(jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding))


def test_trip_counts_agree_before_and_after_optimization() -> None:
    def nested(x: Any) -> Any:
        def inner(carry: Any, _: None) -> Any:
            return jnp.sin(carry) + carry.sum(), None

        def outer(i: Any, carry: Any) -> Any:
            return jax.lax.scan(inner, carry * i, None, length=5)[0]

        return jax.lax.fori_loop(2, 9, outer, x)

    program = compile_program(lowered_sum(nested))
    assert "known_trip_count" not in program.partitioned
    assert sorted(map(str, loops_of(program.partitioned))) == ["5", "7"]
    assert sorted(map(str, loops_of(program.optimized))) == ["5", "7"]


def test_a_loop_that_ends_by_its_data_has_no_trip_count() -> None:
    def grow(x: Any) -> Any:
        return jax.lax.while_loop(lambda v: v.sum() < 1000.0, lambda v: v * 2 + 1, x)

    program = compile_program(lowered_sum(grow))
    assert loops_of(program.partitioned) == [None]
    assert loops_of(program.optimized) == [None]


def test_partitioned_text_keeps_the_dtype_that_was_asked_for() -> None:
    program = compile_program(
        lowered_sum(lambda x: x.astype(jnp.bfloat16).sum(0, dtype="bfloat16"))
    )
    assert "bf16[4]{0} all-reduce(" in program.partitioned
    assert "bf16[4]{0} all-reduce(" not in program.optimized
    assert "all-reduce(" in program.optimized


def test_the_compiled_program_runs_and_is_one_compilation() -> None:
    x = jnp.arange(64.0).reshape(16, 4)
    sharding = NamedSharding(mesh_of_eight(), PartitionSpec("data"))
    program = compile_program(lowered_sum(lambda x: x.sum(0)))
    result = program.compiled(jax.device_put(x, sharding))
    np.testing.assert_array_equal(result, np.arange(64.0).reshape(16, 4).sum(0))
    assert program.optimized == program.compiled.as_text()


def test_one_device_has_no_partitioner_and_reads_the_optimized_text() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert parse_hlo(compile_program(lowered).partitioned).num_partitions == 1


def test_a_compiler_that_dumps_nothing_is_reported() -> None:
    class Silent:
        def compile(self, compiler_options: Any) -> Any:
            return self

        def as_text(self) -> str:
            return TEXT

    with pytest.raises(EnvironmentProblem, match="8 devices"):
        _ = compile_program(Silent()).partitioned


def test_the_partitioned_text_does_not_depend_on_the_disk_cache(tmp_path: Path) -> None:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        lowered_sum(lambda x: x.sum(0) * 3).compile()
        assert any(tmp_path.iterdir()), "the cache took no part, so this would show nothing"
        for _ in range(2):
            assert "all-reduce(" in compile_program(lowered_sum(lambda x: x.sum(0) * 3)).partitioned
        assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_the_module_mark_survives_compilation_and_an_at_sign_does_not() -> None:
    def op_names(mark: str) -> str:
        def f(x: Any) -> Any:
            with jax.named_scope(mark + "blocks.0.up"):
                return jnp.sin(x).sum(0)

        text = compile_program(lowered_sum(jax.grad(lambda x: f(x).sum()))).partitioned
        entry = parse_hlo(text).entry
        return " ".join(i.op_name for i in entry.instructions if i.opcode == "cosine")

    assert MODULE_MARK + "blocks.0.up" in op_names(MODULE_MARK)
    assert "blocks.0.up" not in op_names("@")

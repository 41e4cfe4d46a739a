"""Which collectives of a program's schedule overlap with products, counted by hand.

The fixtures are cut from the programs that XLA compiles for eight GPUs.
"""

from pathlib import Path

import pytest

from meshwright.compiled.asynchronous import is_scheduled, scheduled_collectives
from meshwright.compiled.collectives import read_collectives

FIXTURES = Path(__file__).parent.parent / "fixtures" / "scheduled"

HEAD = """HloModule jit_f, is_scheduled=true, num_partitions=8

%with_product (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%without (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  ROOT %m = f32[8,8]{1,0} multiply(%b, %b)
}
"""
ENTRY = (
    HEAD
    + "\nENTRY %main (p: f32[8,8], c: pred[]) -> f32[8,8] {\n  %p = f32[8,8]{1,0} parameter(0)\n"
)
ROOT = "\n  ROOT %r = f32[8,8]{1,0} copy(%p)\n}\n"
GATHER = "((f32[8,8]{1,0}), f32[64,8]{1,0})"
PERMUTE = "collective-permute-start(%p), source_target_pairs={{0,1},{1,2}}"


def entry(*lines: str) -> str:
    return ENTRY + "\n".join(f"  {line}" for line in lines) + ROOT


def overlaps(text: str) -> dict[str, bool | None]:
    found = scheduled_collectives(text, {"fsdp": 8})
    return {each.collective.name: each.overlapped for each in found}


def between(line: str) -> bool | None:
    """Whether a gather overlaps with an instruction between its start and its end."""
    text = entry(
        f"%s = {GATHER} all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={{0}}",
        line,
        "%e = f32[64,8]{1,0} all-gather-done(%s)",
    )
    return overlaps(text)["s"]


def test_bytes_between_start_and_done_are_those_of_the_ring():
    text = (FIXTURES / "fsdp8.hlo").read_text()
    assert is_scheduled(text)
    found = scheduled_collectives(text, {"fsdp": 8})
    assert [each.collective for each in found] == read_collectives(text, {"fsdp": 8})
    sent = {
        (each.collective.name, each.overlapped): each.collective.sent_bytes
        for each in found
        if each.collective.module != "vocabulary.positions" and each.collective.payload_bytes > 6144
    }
    assert sent == {
        ("all-gather-start.1", False): 7 / 8 * 768 * 768 * 2,
        ("all-gather-start.2", True): 7 / 8 * 3072 * 768 * 2,
        ("reduce-scatter-start", True): 7 / 8 * 3072 * 768 * 4,
        ("reduce-scatter-start.1", False): 7 / 8 * 50304 * 768 * 4,
        ("all-reduce-start", True): 2 * 7 / 8 * 6912 * 4,
    }
    modules = {each.collective.name: each.modules for each in found}
    assert modules["reduce-scatter-start.1"] == ("vocabulary.tokens",)
    assert modules["all-reduce-start"] == ("blocks.0.attention_norm", "blocks.0.mlp_norm")


def test_a_loop_counts_its_iterations_and_overlaps_with_what_is_started_before_it():
    text = (FIXTURES / "fsdp8_scan.hlo").read_text()
    found = scheduled_collectives(text, {"fsdp": 8})
    assert {(e.collective.name, e.overlapped, e.collective.sent_bytes) for e in found} == {
        ("all-gather-start", False, 12 * 7 / 8 * 3072 * 768 * 2),
        ("reduce-scatter-start", True, 12 * 7 / 8 * 3072 * 768 * 4),
        ("all-gather-start.1", True, 7 / 8 * 50304 * 768 * 2),
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%x = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            True,
        ),
        ("%x = f32[8,8]{1,0} convolution(%p, %p), dim_labels=bf_io->bf", True),
        ('%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cublas$gemm"', True),
        ('%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cudnn$convForward"', True),
        ('%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="__cudnn$norm"', False),
        ('%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="cu_threefry2x32"', False),
        ("%x = f32[8,8]{1,0} fusion(%p), kind=kCustom, calls=%with_product", True),
        ("%x = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%without", False),
        ("%x = f32[8,8]{1,0} call(%p), to_apply=%with_product", True),
        (
            "%x = f32[8,8]{1,0} conditional(%c, %p, %p), true_computation=%without, "
            "false_computation=%with_product",
            True,
        ),
    ],
)
def test_what_counts_as_a_product(line, expected):
    assert between(line) is expected


def test_other_ways_to_start_a_collective():
    wrapped = """
%wrapped (q: f32[8,8]) -> f32[64,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %g = f32[64,8]{1,0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
    product = "%x = f32[8,8]{1,0} fusion(%p), kind=kCustom, calls=%with_product"
    start = "((f32[8,8]{1,0}), f32[64,8]{1,0}, u32[])"
    lines = (
        f"%s = {start} async-start(%p), calls=%wrapped",
        f"%n = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}) {PERMUTE}",
        f"%u = {start} async-update(%s)",
        product,
        "%e = f32[64,8]{1,0} async-done(%u)",
        "%o = f32[8,8]{1,0} collective-permute-done(%n)",
        f'%t = {GATHER} all-gather-start(%p), dimensions={{0}}, backend_config={{"is_sync":true}}',
        product.replace("%x", "%y"),
        "%f = f32[64,8]{1,0} all-gather-done(%t)",
        "%w = f32[64,8]{1,0} all-gather(%p), dimensions={0}",
    )
    text = entry(*lines).replace("\nENTRY", wrapped + "\nENTRY")
    assert overlaps(text) == {"g": True, "n": True, "t": False, "w": False}
    alone = text.replace(product, "%x = f32[8,8]{1,0} copy(%p)")
    assert overlaps(alone)["g"] is False
    # Nothing says what the code of a fusion does at the same time.
    fused = entry("%z = f32[64,8]{1,0} fusion(%p), kind=kCustom, calls=%wrapped")
    assert overlaps(fused.replace("\nENTRY", wrapped + "\nENTRY")) == {"g": None}


def pipelined(early: str, late: str, done: str) -> str:
    """A loop that ends in each iteration what the one before has started."""
    state = f"(s32[], {GATHER})"
    return f"""{HEAD}
%body (t: {state}) -> {state} {{
  %t = {state} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %before = {GATHER} get-tuple-element(%t), index=1
  %k = f32[8,8]{{1,0}} constant({{...}})
  {early}
  {done}
  %s = {GATHER} all-gather-start(%k), dimensions={{0}}
  {late}
  ROOT %n = {state} tuple(%i, %s)
}}

%condition (v: {state}) -> pred[] {{
  %v = {state} parameter(0)
  ROOT %y = pred[] constant(true)
}}

ENTRY %main (p: f32[8,8]) -> f32[64,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %first = {GATHER} all-gather-start(%p), dimensions={{0}}
  %start = {state} tuple(%zero, %first)
  %w = {state} while(%start), condition=%condition, body=%body
  %last = {GATHER} get-tuple-element(%w), index=1
  ROOT %end = f32[64,8]{{1,0}} all-gather-done(%last)
}}
"""


def test_what_the_next_iteration_ends_overlaps_with_what_is_between():
    done = "%e = f32[64,8]{1,0} all-gather-done(%before)"
    product = "%x = f32[8,8]{1,0} fusion(%k), kind=kCustom, calls=%with_product"
    other = "%z = f32[8,8]{1,0} fusion(%k), kind=kLoop, calls=%without"
    assert overlaps(pipelined(product, "", done)) == {"first": True, "s": True}
    assert overlaps(pipelined(other, product, done)) == {"first": False, "s": True}
    assert overlaps(pipelined("", other, f"{done}\n  {product}")) == {"first": False, "s": False}
    # The state's own start is never ended inside; what the loop leaves behind is, after it.
    assert overlaps(pipelined("", product, "")) == {"first": None, "s": True}


def test_a_start_whose_end_is_not_in_the_text_is_unknown():
    start = f"%s = {GATHER} all-gather-start(%p), dimensions={{0}}"
    assert overlaps(entry(start)) == {"s": None}

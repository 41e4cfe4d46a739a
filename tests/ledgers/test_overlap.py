"""The shares of a ledger that overlap with computing, against those counted by hand."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from small_models import SAMPLES, Residuals, square_loss, vectors

from meshwright.compiled.compile_program import CompiledProgram
from meshwright.compiled.disk_cache import ProgramFacts
from meshwright.compiled.memory import MemoryUse
from meshwright.config.batch import solve_batch
from meshwright.ledgers import read_ledger
from meshwright.plan import Plan
from meshwright.step.assemble import assemble

FIXTURES = Path(__file__).parent.parent / "fixtures" / "scheduled"
NO_MEMORY = MemoryUse(**{field.name: 0 for field in dataclasses.fields(MemoryUse)})

TICKS = """HloModule jit_f, is_scheduled=true, num_partitions=4

%tick (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %s = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%x), \
source_target_pairs={{0,2},{1,3}}, metadata={op_name="jit(f)/while/body/tick-send/ppermute"}
  %c = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %e = f32[8,8]{1,0} collective-permute-done(%s)
  %b = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%c), \
source_target_pairs={{2,0},{3,1}}, metadata={op_name="jit(f)/while/body/tick-send_back/ppermute"}
  %a = f32[8,8]{1,0} collective-permute-done(%b)
  %p = f32[8,8]{1,0} collective-permute(%a), source_target_pairs={{0,2},{1,3}}
  ROOT %n = (s32[], f32[8,8]{1,0}) tuple(%i, %p)
}

%condition (u: (s32[], f32[8,8])) -> pred[] {
  %u = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p0: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}) tuple(%zero, %p0)
  %w = (s32[], f32[8,8]{1,0}) while(%start), condition=%condition, body=%tick, \
backend_config={"known_trip_count":{"n":"10"}}
  ROOT %r = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""


def assembled_for(mesh, **schedule):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    batch = solve_batch(
        replicas=replicas,
        global_batch_size=SAMPLES,
        gradient_accumulation_steps=schedule.get("num_microbatches", 1),
    )
    plan = Plan(mesh=mesh, batch=batch, **schedule)
    devices = jax.devices()[: plan.num_devices]
    model = lambda rngs: Residuals(2, rngs=rngs)  # noqa: E731
    return assemble(model, square_loss, optax.sgd(0.1), plan, vectors(), devices=devices)


def on_gpus(assembled, text):
    """Read the ledger of a kept program as on GPUs, whose cached programs have no text."""
    device = SimpleNamespace(platform="gpu")
    mesh = SimpleNamespace(shape=assembled.mesh.shape, devices=np.array([device]))
    program = CompiledProgram(
        SimpleNamespace(as_text=lambda: ""), ProgramFacts(text, text, NO_MEMORY)
    )
    return read_ledger(dataclasses.replace(assembled, mesh=mesh), program, compile_seconds=0.0)


@pytest.fixture(scope="module")
def fsdp():
    return assembled_for({"fsdp": 8})


def test_gathers_and_reductions_have_shares_of_their_own(fsdp):
    ledger = on_gpus(fsdp, (FIXTURES / "fsdp8.hlo").read_text())
    own = ledger.axes["fsdp"]
    kernel, table, small = 3072 * 768, 50304 * 768, 2 * 6912
    gathered, reduced = own.overlap["all-gather"], own.overlap["reduce"]
    assert gathered.sent_bytes == 7 / 8 * 2 * (1024 * 768 + 768 * 768 + 3072 + kernel)
    assert gathered.overlapped_bytes == 7 / 8 * 2 * kernel
    assert reduced.sent_bytes == 7 / 8 * 4 * (kernel + table + small)
    assert reduced.overlapped_bytes == 7 / 8 * 4 * (kernel + small)
    assert gathered.overlapped == round(kernel / (1792 * 768 + 3072 + kernel), 4) == 0.6311
    assert reduced.overlapped == round((kernel + small) / (kernel + table + small), 4) == 0.0579
    assert own.overlapped_bytes == gathered.overlapped_bytes + reduced.overlapped_bytes
    assert own.overlapped == round(own.overlapped_bytes / own.sent_bytes, 4)
    text = str(ledger).splitlines()
    assert text[2].endswith("63% of gathers, 6% of reductions")
    assert [line.strip() for line in text if line.startswith("  not overlapped")] == [
        "not overlapped on fsdp: reduce-scatter of 135.2 MB, vocabulary.tokens (backward)",
        "not overlapped on fsdp: all-gather of 2.4 MB, vocabulary, blocks.0 (forward)",
    ]
    assert "not known" not in str(ledger)


def test_iterations_are_counted_and_blocks_named(fsdp):
    ledger = on_gpus(fsdp, (FIXTURES / "fsdp8_scan.hlo").read_text())
    (exposed,) = ledger.not_overlapped
    assert (exposed.modules, exposed.count, exposed.kind) == (["blocks.*.mlp.up"], 12, "all-gather")
    assert exposed.sent_bytes == 12 * 7 / 8 * 3072 * 768 * 2
    assert "all-gather of 49.5 MB in 12 iterations, blocks.*.mlp.up (forward)" in str(ledger)
    assert ledger.axes["fsdp"].overlap["reduce"].overlapped == 1.0


def test_what_the_program_does_not_show_is_unknown_and_not_zero(fsdp):
    text = (FIXTURES / "fsdp8.hlo").read_text()
    unordered = on_gpus(fsdp, text.replace("is_scheduled=true, ", ""))
    unended = on_gpus(fsdp, text.replace("all-gather-done(", "copy("))
    for ledger, why in ((unordered, "order"), (unended, "ends")):
        own = ledger.axes["fsdp"]
        assert own.overlapped is own.overlapped_bytes is None
        assert why in ledger.overlap_unknown
        assert str(ledger).splitlines()[2].endswith("–")


def test_one_device_has_nothing_to_say():
    text = "HloModule f\n\nENTRY %f {\n  ROOT %c = f32[] constant(0)\n}\n"
    ledger = on_gpus(assembled_for({}), text)
    assert (ledger.axes, ledger.not_overlapped, ledger.overlap_unknown) == ({}, [], "")


def test_stages_count_what_they_send():
    stages = assembled_for({"pipe": 2, "data": 2}, schedule="gpipe", num_microbatches=4)
    ledger = on_gpus(stages, TICKS)
    # In 10 ticks the first stage hands on 4 times, during a product, and nothing back; what no
    # operation of a tick sends is sent in all of them.
    (permutes,) = ledger.axes["pipe"].overlap.values()
    assert permutes.sent_bytes == (4 + 10) * 256
    assert permutes.overlapped_bytes == 4 * 256
    assert "29% of permutes" in str(ledger)

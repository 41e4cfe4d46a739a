"""The tables of rules: against optax, against arithmetic by hand, and as the page shows them."""

import importlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from meshwright.errors import UserError
from meshwright.hardware import load_chips, parse_hardware

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

tables = importlib.import_module("hardware_tables")

PAGE = ROOT / "docs" / "hardware.md"
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "adafactor": optax.adafactor(0.1),
    "lion": optax.lion(0.1),
    "muon": optax.contrib.muon(0.1),
    "adamw": optax.adamw(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_keep_as_many_bytes_as_the_table_says(name):
    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    state = jax.eval_shape(OPTIMIZERS[name].init, {"weight": weight})
    kept = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert tables.parameter_bytes(name).state == pytest.approx(kept / 4096**2, abs=0.01)


def test_adam_takes_sixteen_bytes_and_two_for_the_copy():
    assert tables.parameter_bytes("adamw", "float32").total == 4 + 4 + 8
    assert tables.parameter_bytes("adamw", "bfloat16").total == 4 + 2 + 4 + 8
    assert len(tables.parameter_bytes_rows()) == 2 * len(OPTIMIZERS)
    with pytest.raises(UserError, match="did you mean `adamw`"):
        tables.parameter_bytes("adamww")


def test_the_largest_model_grows_with_devices_only_if_it_is_sharded():
    one, eight = (tables.largest_model(parse_hardware(text)) for text in ("1xH100", "8xH100"))
    room = 80e9 * load_chips()["H100"].memory_share * 0.75
    assert one.replicated == eight.replicated == pytest.approx(room / 18)
    assert eight.sharded == pytest.approx(8 * room / 16)


def test_scaling_without_overlap_pays_for_all_communication():
    assert tables.scaling_efficiency(1.0, 0.25, overlap=False) == pytest.approx(0.8)
    assert tables.scaling_efficiency(3.0, 2.0, overlap=True) == 1
    assert tables.scaling_efficiency(3.0, 3.0, overlap=True) == pytest.approx(3 / 4)
    assert tables.scaling_efficiency(3.0, 3.0, overlap=False) == pytest.approx(1 / 2)


def test_data_parallel_rows_follow_from_flops_and_a_ring():
    chip = load_chips()["H100"]
    one, eight, many = tables.data_parallel_rows("H100", 1e9, 8192, [1, 8, 64])
    assert (one.all_reduce_s, one.efficiency, one.overlapped) == (0, 1, 1)
    computing = 6e9 * 8192 / (989e12 * chip.product_share)
    assert one.compute_s == eight.compute_s == pytest.approx(computing)
    ring = 2 * 7 / 8 * 4e9 / (450e9 * chip.link_share)
    assert eight.all_reduce_s == pytest.approx(ring, rel=0.01)
    assert eight.efficiency == pytest.approx(computing / (computing + ring), rel=0.01)
    assert many.all_reduce_s > eight.all_reduce_s
    assert many.overlapped > many.efficiency


def test_interconnects_by_the_time_they_take():
    rows = {row.link: row for row in tables.interconnect_rows("H100", 4096)}
    chip = load_chips()["H100"]
    rate, sent = 989e12 * chip.product_share, 450e9 * chip.link_share
    nvlink = rows["NVLink (H100)"]
    # Per token: 16 · 7/8 · width bytes, against 72/8 · width² FLOPs.
    assert nvlink.tensor == pytest.approx(2 / 9 * 7 * rate / (4096 * sent))
    assert nvlink.data_tokens == round(8 / 6 * rate / sent)
    assert nvlink.axes == "tensor, fsdp, data, pipe"
    assert rows["infiniband-ndr"].axes == "fsdp, data, pipe"
    # Per token: 4 · width bytes, against 8 · 72 · width² FLOPs.
    assert nvlink.pipe == pytest.approx(rate / (144 * 4096 * sent))
    assert rows["ethernet-100gb"].axes == "pipe"
    assert rows["ethernet-10gb"].axes == "none"
    rates = [row.gb_per_s for row in tables.interconnect_rows()]
    assert rates == sorted(rates, reverse=True)


def test_the_page_shows_these_tables():
    page = PAGE.read_text()
    shown = (
        tables.interconnect_rows("H100", 4096),
        tables.parameter_bytes_rows(),
        [tables.largest_model(parse_hardware(text)) for text in ("1xH100", "8xH100", "64xH100")],
        tables.data_parallel_rows("H100", 1e9, 8192, [1, 8, 64, 512]),
    )
    missing = [table for table in map(tables.markdown_table, shown) if table not in page]
    assert not missing, "docs/hardware.md should show:\n\n" + "\n\n".join(missing)

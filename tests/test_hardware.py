"""Chips and links: the table, recognising devices, and reading hardware descriptions."""

import dataclasses
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshwright.cli.commands import COMMANDS
from meshwright.cli.help import command_help
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.hardware import (
    MEMORY_SHARE,
    Hardware,
    detect,
    find_chip,
    load_chips,
    load_links,
    parse_hardware,
    roofline_batch_sizes,
    unknown_batch_sizes,
)

pytestmark = pytest.mark.quick

# Published: dense 16-bit TFLOP/s, memory GB, memory TB/s, fast links GB/s one way, network GB/s.
PUBLISHED = {
    "V100-16GB": (125, 16, 0.9, 150, 12),
    "V100-32GB": (125, 32, 0.9, 150, 12),
    "A100-40GB": (312, 40, 1.555, 300, 25),
    "A100-80GB": (312, 80, 2.039, 300, 25),
    "H100": (989, 80, 3.35, 450, 50),
    "H200": (989, 141, 4.8, 450, 50),
    "B200": (2250, 192, 8, 900, 50),
    "GB200": (2500, 192, 8, 900, 50),
    "H20": (148, 96, 4.0, 450, 50),
    "RTX-PRO-6000": (504, 96, 1.597, 64, None),
    "RTX-5090": (209.5, 32, 1.792, 64, None),
    "RTX-4090": (165.2, 24, 1.008, 32, None),
    "L40S": (362, 48, 0.864, 32, 6.25),
    "L4": (121, 24, 0.3, 32, 1.56),
    "A10G": (70, 24, 0.6, 32, 1.56),
    "T4": (65, 16, 0.32, 16, 1.56),
    "MI300X": (1307, 192, 5.3, 448, 50),
    "TPU-v4": (275, 32, 1.2, 6 * 45, None),
    "TPU-v5e": (197, 16, 0.82, 4 * 45, 3.1),
    "TPU-v5p": (459, 95, 2.765, 6 * 90, 6.25),
    "TPU-v6e": (918, 32, 1.64, 4 * 90, None),
    "TPU7x": (2307, 192, 7.4, 1200 / 2, None),
}


OWN = """
chips:
  H200:
    usd_per_hour: 3.5
  h100-pcie:
    like: H100
    device_kinds: [NVIDIA H100 PCIe]
    peak_tflops: 756
    hbm_tb_per_s: 2.0
    links_per_chip: 1
    link_gb_per_s: 64
  Toy-1:
    platform: cuda
    peak_tflops: 100
    hbm_gb: 24
    hbm_tb_per_s: 1.0
    links_per_chip: 1
    link_gb_per_s: 32
    topology: switch
    fast_domain_chips: 4
links:
  ethernet-25gb: {gb_per_s: 3.125}
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """Return a function that writes the user's hardware file."""

    def write(text):
        path = tmp_path / "chips.yaml"
        path.write_text(text)
        monkeypatch.setenv("MESHWRIGHT_HARDWARE", str(path))
        return path

    return write


def device(kind, process_index=0, slice_index=None):
    return SimpleNamespace(device_kind=kind, process_index=process_index, slice_index=slice_index)


def test_plans_may_take_as_much_of_a_gpu_as_jax_is_told_to_use():
    assert load_chips()["H100"].memory_share == MEMORY_SHARE
    # Help texts are printed without importing the hardware.
    words = " ".join(command_help(COMMANDS["plan"]).split())
    assert f"(default {MEMORY_SHARE})" in words


@pytest.mark.parametrize("name", PUBLISHED)
def test_chip_has_the_published_figures(name):
    chip = load_chips()[name]
    figures = (
        chip.peak_tflops,
        chip.hbm_gb,
        chip.hbm_tb_per_s,
        chip.intra_node_gb_per_s,
        chip.inter_node_gb_per_s,
    )
    assert figures == PUBLISHED[name]


def test_table_holds_the_published_chips_and_cpu():
    assert set(load_chips()) == {*PUBLISHED, "CPU"}


def test_chips_are_frozen_and_loaded_once():
    assert load_chips() is load_chips()
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_chips()["H100"].hbm_gb = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        load_chips()["X"] = load_chips()["H100"]  # type: ignore[index]


def test_no_spelling_names_two_chips():
    seen: dict[str, str] = {}
    for chip in load_chips().values():
        for text in {chip.name, *chip.aliases, *chip.device_kinds}:
            plain = text.lower().replace(" ", "").replace("-", "")
            assert seen.setdefault(plain, chip.name) == chip.name


def test_infiniband_hdr_is_200_gigabits():
    assert {name: link.gb_per_s for name, link in load_links().items()} == {
        "pcie-4.0-x16": 32,
        "pcie-5.0-x16": 64,
        "ethernet-10gb": 10 / 8,
        "ethernet-100gb": 100 / 8,
        "infiniband-hdr": 200 / 8,
        "infiniband-ndr": 400 / 8,
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v4", "TPU-v4"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v5", "TPU-v5p"),
        ("TPU v5p", "TPU-v5p"),
        ("TPU v6 lite", "TPU-v6e"),
        ("TPU7x", "TPU7x"),
        ("cpu", "CPU"),
    ],
)
def test_device_kind_is_recognised(kind, name):
    chip = find_chip(kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 PCIe",
        "NVIDIA GH200 480GB",
        "NVIDIA A10",
        "TPU v4 lite",
        "gpu",
        "",
    ],
)
def test_unknown_device_kind_is_not_guessed_at(kind):
    assert find_chip(kind) is None
    assert detect([device(kind)]) is None


def test_tpu7x_shows_two_devices_per_chip():
    chip = load_chips()["TPU7x"]
    assert chip.devices_per_chip == 2
    assert chip.tflops_per_device == 2307 / 2
    assert chip.hbm_gb_per_device == 96
    assert chip.hbm_tb_per_s_per_device == 3.7
    assert chip.devices_per_domain == 2 * 9216


def test_detect_finds_the_virtual_devices():
    found = detect()
    assert found is not None
    assert (found.chip.name, found.count, found.nodes) == ("CPU", 8, 1)


def test_detect_counts_nodes_by_slice_then_by_process():
    by_slice = detect([device("TPU v5p", process_index=i, slice_index=i // 2) for i in range(4)])
    by_process = detect([device("NVIDIA H200", process_index=i // 2) for i in range(4)])
    assert by_slice is not None
    assert by_process is not None
    assert (by_slice.nodes, by_process.nodes) == (2, 2)


def test_detect_does_not_name_a_mixture():
    assert detect([device("NVIDIA H200"), device("NVIDIA B200")]) is None


@pytest.mark.parametrize(
    ("text", "chip", "count", "nodes"),
    [
        ("8xA100-40GB", "A100-40GB", 8, 1),
        ("2x8xH100", "H100", 16, 2),
        ("16xH100", "H100", 16, 2),
        ("4×MI300X", "MI300X", 4, 1),
        ("8 x a100 80gb", "A100-80GB", 8, 1),
        ("H200", "H200", 1, 1),
        ("8xTPU7x", "TPU7x", 8, 1),
        ("TPU7x", "TPU7x", 2, 1),
        ("256xv5e", "TPU-v5e", 256, 1),
        ("8xNVIDIA H100 80GB HBM3", "H100", 8, 1),
        ("1024xCPU", "CPU", 1024, 1),
        ("8xtpu v5", "TPU-v5p", 8, 1),
        ("72xGB200", "GB200", 72, 1),
        ("1024xA100-80GB", "A100-80GB", 1024, 128),
        ("128x8xH100", "H100", 1024, 128),
    ],
)
def test_hardware_text_is_read(text, chip, count, nodes):
    assert parse_hardware(text) == Hardware(chip=load_chips()[chip], count=count, nodes=nodes)


def test_hardware_writes_what_it_reads():
    for text in ("8xA100-40GB", "2x8xH100", "4xTPU7x"):
        assert str(parse_hardware(text)) == text
    assert parse_hardware("2x8xH100").devices_per_node == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xA100", "A100-40GB or A100-80GB"),
        ("8xH1000", "nearest: H100"),
        ("8xB2000", "nearest: B200"),
        ("zzzz", "known chips: V100-16GB"),
        ("8x", "names no chip"),
        ("8x", "write it as 8xH100"),
        ("8", "write it as 8xH100"),
        ("2x8", "write it as 2x8xH100"),
        ("x", "write it as 8xH100"),
        ("", "empty"),
        ("0xH100", "no devices"),
        ("3xTPU7x", "write 4 instead of 3"),
        ("2x3xTPU7x", "write 4 instead of 3"),
        ("12xH100", "2x6xH100"),
        ("9" * 5000 + "xH100", "not a whole number from 1 to 9,999,999"),
        ("-8xH100", "`-8` is not a whole number"),
        ("2.5xH100", "`2.5` is not a whole number"),
        ("2x4x8xH100", "`8` is not a whole number .* or a third number"),
    ],
)
def test_bad_hardware_text_says_what_to_write(text, message):
    with pytest.raises(UserError, match=message):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["TPU-v5e"], (64, 256, 240)),
        (["TPU-v5p"], (128, 512, 480)),
        (["TPU-v4"], (64, 256, 192)),
        (["H100"], (64, 320, 298)),
        (["A100-40GB", "A100-80GB"], (32, 256, 240)),
        (["V100-16GB", "V100-32GB"], (16, 128, 96)),
        (["CPU"], (1, 32, 16)),
        (["H200"], (64, 256, round(989e12 / 4.8e12))),
        (["B200"], (64, 320, round(2250e12 / 8e12))),
        (["MI300X"], (64, 256, round(1307e12 / 5.3e12))),
        (["TPU-v6e"], (128, 576, round(918e12 / 1.64e12))),
        (["TPU7x"], (64, 320, round(2307e12 / 7.4e12))),
    ],
)
def test_batch_sizes(names, sizes):
    for name in names:
        found = load_chips()[name].batch_sizes
        triple = (found.min_batch_size, found.optimal_batch_size, found.critical_batch_size)
        assert triple == sizes


def test_unknown_hardware_gets_cautious_batch_sizes():
    sizes = unknown_batch_sizes()
    assert (sizes.min_batch_size, sizes.optimal_batch_size, sizes.critical_batch_size) == (
        32,
        128,
        64,
    )


def test_roofline_rule_gives_the_documented_optimal_size():
    """The rounding rule reproduces every published optimal size from its critical size."""
    for name in ("TPU-v5e", "TPU-v5p", "TPU-v4", "H100", "A100-40GB", "V100-16GB"):
        documented = load_chips()[name].batch_sizes
        derived = roofline_batch_sizes(documented.critical_batch_size, 1.0)
        assert derived.optimal_batch_size == documented.optimal_batch_size
        assert "roofline" in derived.notes


def test_hardware_does_not_import_jax():
    code = (
        "import sys, meshwright.hardware as h; h.parse_hardware('8xH100'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_users_file_adds_chips_and_changes_known_ones(own_file):
    built_in = load_chips()["H200"]
    path = own_file(OWN)
    assert load_chips()["H200"] == dataclasses.replace(built_in, usd_per_hour=3.5, source=str(path))
    assert load_chips()["H100"].source == "table"
    toy = parse_hardware("8xtoy1")
    assert (toy.chip.name, toy.nodes, toy.chip.family) == ("Toy-1", 2, "toy1")
    # What it does not give is typical of the platform.
    assert toy.chip.float32_share == 0.5
    assert toy.chip.batch_sizes.critical_batch_size == 100
    assert load_links()["ethernet-25gb"].gb_per_s == 3.125


def test_a_chip_like_another_has_its_own_names(own_file):
    own_file(OWN)
    pcie = find_chip("NVIDIA H100 PCIe")
    assert pcie is not None
    assert (pcie.name, pcie.family, pcie.hbm_gb, pcie.intra_node_gb_per_s) == (
        "h100-pcie",
        "h100",
        80,
        64,
    )
    assert pcie.aliases == ()
    assert pcie.batch_sizes.critical_batch_size == round(756 / 2.0)
    found = find_chip("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.name == "H100"


def test_the_file_is_read_again_after_a_change_and_forgotten_without_it(own_file, monkeypatch):
    path = own_file(OWN)
    assert load_chips()["H200"].usd_per_hour == 3.5
    path.write_text(OWN.replace("3.5", "4.25"))
    os.utime(path, ns=(1, 1))
    assert load_chips()["H200"].usd_per_hour == 4.25
    monkeypatch.delenv("MESHWRIGHT_HARDWARE")
    assert load_chips()["H200"].usd_per_hour is None
    assert "Toy-1" not in load_chips()


def test_the_file_of_the_config_folder_is_read_but_not_that_of_the_current_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hardware.yaml").write_text(OWN)
    assert "Toy-1" not in load_chips()
    (tmp_path / "config" / "meshwright").mkdir(parents=True)
    (tmp_path / "config" / "meshwright" / "hardware.yaml").write_text(OWN)
    assert "Toy-1" in load_chips()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chips: {H200: {peak_tflop: 1}}", "no `peak_tflop`.*did you mean `peak_tflops`"),
        ("chips: {H200: {peak_tflops: fast}}", "peak_tflops: 'fast'.*valid number"),
        ("chips: {H200: {hbm_share: 1.5}}", "hbm_share: 1.5.*less than or equal to 1"),
        ("chips: {H200: {usd_per_hour: true}}", "chips.H200.usd_per_hour.*true or false"),
        ("chips: {H200: {peak_tflops: -1}}", "greater than 0"),
        ("chips: {H200: {topology: star}}", "'switch'"),
        ("chips: {New: {platform: cuda}}", "`peak_tflops` is missing; `hbm_gb` is missing"),
        ("chips: {New: {like: H1OO}}", "like `H1OO`, which is not known"),
        ("chips: {New: {like: H100, aliases: [v5e]}}", "`v5e` of chips.New.*TPU-v5e"),
        ("chips: {H200: {batch_sizes: {min: 1}}}", "batch_sizes"),
        ("chips: {New: {aliases: 3}, H200: {}}", "`aliases: 3`"),
        ("chips: {H200: {1: 2}}", "there is no `1`"),
        ("chips: {H200: {launch_us: .inf}}", "finite"),
        ("chip: {}", "unknown section `chip`.*\n.*\ndid you mean `chips`"),
        ("chips: [H200]", "not a mapping"),
        ("chips: {H200: 3}", "chips.H200 in .* is 3, not a mapping"),
        ("chips: {H200", "cannot read the hardware file"),
    ],
)
def test_a_mistake_in_the_users_file_is_explained(own_file, text, message):
    own_file(text)
    with pytest.raises(UserError, match=re.compile(message, re.S)):
        load_chips()


def test_a_missing_file_is_an_error_on_the_command_line(capfd, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HARDWARE", "nowhere.yaml")
    assert main(["config", "hardware=8xH100"]) == 2
    assert "MESHWRIGHT_HARDWARE=nowhere.yaml is not a file" in capfd.readouterr().err


def test_own_chips_can_be_planned_for_on_the_command_line(own_file, capfd, monkeypatch):
    own_file(OWN)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["config", "hardware=8xToy-1"]) == 0
    assert "override hardware=8xToy-1" in capfd.readouterr().out


def test_a_chip_may_be_called_x(own_file):
    own_file("chips:\n  X: {like: H100}\n")
    assert parse_hardware("8xX").chip.name == "X"
    assert parse_hardware("x").count == 1
    with pytest.raises(UserError, match="names no chip"):
        parse_hardware("8x")


def test_a_file_that_is_not_yaml_says_where(own_file):
    path = own_file("chips:\n  X: [1\n")
    with pytest.raises(UserError) as found:
        load_chips()
    assert str(path) in found.value.what
    assert found.value.why.startswith("line 3, column 1: expected ',' or ']'")


def test_this_machine_is_hardware_too(capfd):
    assert main(["config", "hardware=Local"]) == 0
    assert "override hardware=Local" in capfd.readouterr().out


def test_rates_of_products_by_type_and_shape():
    h200, v100 = load_chips()["H200"], load_chips()["V100-32GB"]
    assert h200.peak_of("bfloat16") == 989e12
    assert h200.peak_of("float32") == 989e12 / 2
    assert v100.peak_of("bfloat16") == v100.peak_of("float32") == 125e12 / 8
    assert v100.peak_of("float16") == 125e12
    large = h200.product_flops_per_s(1e9, 1e9, 1e9)
    assert large == pytest.approx(801e12, rel=1e-3)
    half = h200.product_flops_per_s(h200.product_half_size, 1e9, 1e9)
    assert half == pytest.approx(large / 2, rel=1e-6)
    tpu = load_chips()["TPU7x"]
    assert tpu.peak_of("bfloat16") == 2307e12 / 2


def test_prices_and_usable_memory_are_per_device():
    chip = dataclasses.replace(load_chips()["TPU7x"], usd_per_hour=6.0, memory_share=0.5)
    assert (chip.usd_per_device_hour, chip.usable_gb_per_device) == (3.0, 48)
    assert load_chips()["TPU7x"].usd_per_device_hour is None


def test_products_of_gpt2_take_about_as_long_as_they_did_on_an_h200():
    """The profile of a GPT-2 124M step with 32 × 1024 tokens had 32 ms of matrix products."""
    chip, tokens = load_chips()["H200"], 32 * 1024
    shapes = 12 * [(768, 2304), (768, 768), (768, 3072), (3072, 768)] + [(768, 50257)]
    seconds = sum(
        # Forward, and the gradients of inputs and weights.
        3 * (2 * tokens * i * o / chip.product_flops_per_s(tokens, o, i) + chip.launch_us * 1e-6)
        for i, o in shapes
    )
    assert seconds == pytest.approx(0.032, rel=0.05)

"""Digests of the step of every configured model on its meshes, lowered and not compiled.

A change that only restructures code leaves these as they are:

    python tools/lowered_programs.py            # compare with tools/lowered_programs.json
    python tools/lowered_programs.py --write    # write that file
    python tools/lowered_programs.py tiny --save FOLDER    # some models only; keep their texts

A digest depends on the release of JAX, so the file has one table per release.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from meshwright.config.compose import compose_config, validate
from meshwright.config.groups import CONF_DIR
from meshwright.errors import UserError
from meshwright.ledgers import lower_step
from meshwright.mesh.simulate import simulate_devices
from meshwright.plan import make_plan
from meshwright.planner.fit.fit_check import batch_shapes
from meshwright.recipe import make_recipe
from meshwright.trees import resize_batch

RECORD = Path(__file__).with_suffix(".json")

NEEDS_A_FOLDER = {"hf"}
"""Models without a shape of their own."""

SMALL = {"conv", "mlp", "linen_mlp", "vae"}
"""Models with more plans, besides those that are called tiny."""

LARGE = ("4b", "8b", "12b", "27b", "70b", "_xl", "_large", "vit_1b", "vit_l")
"""Models with one plan: tracing their blocks one by one takes a minute and more."""

DEVICES = 8

MESHES = {
    "one device": (1, []),
    "data=8": (DEVICES, ["mesh.data=8"]),
    "fsdp=4 tensor=2": (DEVICES, ["mesh.fsdp=4", "mesh.tensor=2"]),
    "pipe=2 data=4": (DEVICES, ["mesh.pipe=2", "mesh.data=4"]),
}

MORE = {
    "fsdp=8 scan full": (DEVICES, ["mesh.fsdp=8", "sharding.blocks=scan", "sharding.remat=full"]),
    "fsdp=8 scan dots bf16": (
        DEVICES,
        [
            "mesh.fsdp=8",
            "sharding.blocks=scan",
            "sharding.remat=dots",
            "training.mixed_precision=bf16",
        ],
    ),
    "fsdp=8 zero1": (DEVICES, ["mesh.fsdp=8", "sharding.zero=1"]),
    "data=2 fsdp=2 tensor=2 microbatches": (
        DEVICES,
        ["mesh.fsdp=2", "mesh.tensor=2", "training.gradient_accumulation_steps=2"],
    ),
    "data=8 sync=2": (
        DEVICES,
        ["training.gradient_accumulation_steps=4", "training.sync_gradients_every=2"],
    ),
    "pipe=2 data=2 tensor=2 interleaved": (
        DEVICES,
        ["mesh.pipe=2", "mesh.tensor=2", "pipeline=interleaved"],
    ),
    "pipe=2 fsdp=4 zb_h1": (DEVICES, ["mesh.pipe=2", "mesh.fsdp=4", "pipeline=zb_h1"]),
    "muon": (DEVICES, ["mesh.fsdp=4", "mesh.tensor=2", "optimizer=muon"]),
}
"""More plans, for small models only."""


def cases(words: list[str], *, large: bool) -> Iterator[tuple[str, str, int, list[str]]]:
    """Yield model, plan in words, number of devices and overrides."""
    names = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
    for model in sorted(names, key=lambda name: name.endswith(LARGE)):
        if model.endswith(LARGE) and not large:
            continue
        if model in NEEDS_A_FOLDER or (words and not any(word in model for word in words)):
            continue
        small = "_tiny" in model or model in SMALL
        plans = MESHES | (MORE if small else {})
        if model.endswith(LARGE):
            plans = {name: plans[name] for name in ("fsdp=4 tensor=2",)}
        for plan, (devices, overrides) in plans.items():
            yield model, plan, devices, overrides


def lowered_text(model: str, devices: int, overrides: list[str]) -> str:
    """Return the lowered step, without the places in the source its equations come from."""
    overrides = [f"model={model}", "data=synthetic", "training.micro_batch_size=2", *overrides]
    config = validate(compose_config(overrides))
    plan = make_plan(config, devices)
    recipe = make_recipe(config, plan.batch.global_batch_size)
    batch = resize_batch(recipe.example_batch(1), plan.batch.global_batch_size)
    assembled = recipe.assemble(plan, batch, devices=jax.devices()[:devices])
    text = lower_step(assembled, batch_shapes(assembled)).as_text()
    return re.sub(r"\s*loc\(.*?\)|^#loc.*$", "", text, flags=re.M)


def main() -> int:
    """Compare or write the digests; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="only models whose name has one of these words")
    parser.add_argument("--write", action="store_true", help="write the digests")
    parser.add_argument("--large", action="store_true", help="also models of 4B and more: minutes")
    parser.add_argument("--save", type=Path, help="a folder for the texts themselves")
    given = parser.parse_args()
    simulate_devices(DEVICES)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known = record.setdefault(jax.__version__, {})
    found: dict[str, str] = {}
    for model, plan, devices, overrides in cases(given.words, large=given.large):
        started, name = time.perf_counter(), f"{model}: {plan}"
        try:
            text = lowered_text(model, devices, overrides)
        except UserError:
            text = "refused"
        found[name] = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()[:16]
        if given.save:
            given.save.mkdir(parents=True, exist_ok=True)
            (given.save / f"{name.replace(' ', '_').replace(':', '')}.mlir").write_text(text)
        same = "" if known.get(name) == found[name] else "  DIFFERS" if name in known else "  new"
        seconds = time.perf_counter() - started
        print(f"{name:50} {found[name]:20} {seconds:5.1f} s{same}", flush=True)
        if given.write:
            known.update(found)
            RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        jax.clear_caches()
        gc.collect()
    differing = [name for name, digest in found.items() if known.get(name) != digest]
    print(f"{len(found)} programs, {len(differing)} of them differ from {RECORD.name}")
    return 0 if given.write or not differing else 1


if __name__ == "__main__":
    sys.exit(main())

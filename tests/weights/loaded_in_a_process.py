"""Loads a model of 200 MB onto eight devices and prints what the process held at most.

The numbers are the bytes of the state, those of its largest slice, and by how much the memory of
the process at its highest exceeded what it was before plus the state.
"""

import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

import meshwright as mw
from meshwright.program.trace.build_model import describe_model
from meshwright.weights.families import read_architecture
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.kept import published_config
from meshwright.weights.load import load_state, weights_of
from meshwright.weights.match import place_arrays, tensor_shapes
from meshwright.weights.safetensors_format import write_file

SIZES = {"num_blocks": 4, "hidden_size": 1024, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128}


def write_model(folder: Path) -> None:
    """Write a Llama with random weights in bfloat16."""
    config = published_config("llama3", {**SIZES, "mlp_size": 2816, "vocab_size": 1024}, {})
    (folder / "config.json").write_text(json.dumps(config))
    leaves = describe_model(mw.hf_model(folder)).leaves
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    places = place_arrays(read_architecture(config, "the folder"), shapes)
    tensors = tensor_shapes(places, shapes, {})
    random = np.random.default_rng(0)
    arrays = (random.standard_normal(shape, np.float32) for shape in tensors.values())
    write_file(folder / "model.safetensors", tensors, "bfloat16", arrays)


def memory(key: str) -> int:
    """Return what the system says of this process's memory, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Load, and print the numbers."""
    mw.simulate_devices(8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        trainer = mw.Trainer(
            model=mw.hf_model(folder),
            loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
            optimizer=optax.sgd(1e-3),
            mesh="fsdp=4,tensor=2",
        )
        assembled = trainer.assemble({"x": np.zeros((8, 16), np.int32)})
        weights = weights_of(open_folder(folder), assembled)
        # Resets the highest value to the present one.
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        state = jax.block_until_ready(load_state(weights, assembled, 0))
        highest = memory("VmHWM")
    slices = [s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards]
    print(sum(slices), max(slices), max(0, highest - before - sum(slices)))


if __name__ == "__main__":
    main()

"""The table of models: every kind builds, lazily, and knows nothing of Meshwright."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import meshwright.models
from meshwright.models import MODEL_KINDS, build_model, find_builder

pytestmark = pytest.mark.quick

TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((2, 28, 28, 1), jnp.float32)
COLOR_IMAGES = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
SHAPES = {
    "gpt": (TOKENS, (2, 16, 1024)),
    "gemma2": (TOKENS, (2, 16, 1024)),
    "gemma3": (TOKENS, (2, 16, 1024)),
    "llama3": (TOKENS, (2, 16, 1024)),
    "mistral": (TOKENS, (2, 16, 1024)),
    "phi3": (TOKENS, (2, 16, 1024)),
    "qwen2": (TOKENS, (2, 16, 1024)),
    "qwen3": (TOKENS, (2, 16, 1024)),
    "stacked_gpt": (TOKENS, (2, 16, 1024)),
    "moe": (TOKENS, (2, 16, 1024)),
    "lstm": (TOKENS, (2, 16, 1024)),
    "mlp": (IMAGES, (2, 10)),
    "linen_mlp": (IMAGES, (2, 10)),
    "conv": (IMAGES, (2, 10)),
    "resnet": (COLOR_IMAGES, (2, 1000)),
    "vit": (IMAGES, (2, 10)),
    "vae": (IMAGES, (2, 784)),
}


def test_every_kind_has_its_shapes_listed_here():
    assert set(SHAPES) == set(MODEL_KINDS)


# A whole ResNet-50 is traced slowly; its output is also that of tests/models/test_resnet.py.
# The others have classes that others test.
LIKE_OTHERS = ("resnet", "gemma2", "mistral", "phi3", "llama3", "qwen2", "stacked_gpt")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.full] * (k in LIKE_OTHERS)) for k in MODEL_KINDS],
)
def test_default_sizes_give_the_documented_output(kind):
    inputs, expected = SHAPES[kind]
    output = nnx.eval_shape(lambda x: build_model(kind, rngs=nnx.Rngs(0))(x), inputs)
    logits = output.logits if kind == "vae" else output
    assert logits.shape == expected
    assert logits.dtype == jnp.float32


def test_sizes_reach_the_model():
    model = nnx.eval_shape(lambda: build_model("mlp", rngs=nnx.Rngs(0), widths=(6, 5, 4)))
    assert [layer.kernel.shape for layer in model.layers] == [(6, 5), (5, 4)]


def test_unknown_kind_lists_the_kinds():
    with pytest.raises(ValueError, match=r"no model kind 'gtp'; the kinds are gpt, gemma2, gemma3"):
        find_builder("gtp")


def test_importing_the_table_loads_no_array_library():
    code = "import sys, meshwright.models; print([m for m in ('jax', 'flax') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_models_import_nothing_of_meshwright():
    folder = Path(meshwright.models.__file__).parent
    files = sorted(folder.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for name in imported_names(ast.parse(file.read_text())):
            inside = name == "meshwright.models" or name.startswith("meshwright.models.")
            assert inside or name.split(".")[0] != "meshwright", f"{file.name} imports {name}"


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield node.module

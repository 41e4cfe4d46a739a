"""Generated tokens and log-probabilities beside those of transformers and of whole passes."""

import json

import jax
import numpy as np
import pytest
from hf_folders import HF, change_config, copy_folder

import meshwright as mw

FOUND = json.loads((HF.parent / "hf_cases" / "greedy.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", FOUND["tokens"])
def test_the_likeliest_tokens_are_those_of_transformers(name, tmp_path):
    folder, expected = copy_folder(name, tmp_path / name), FOUND["tokens"][name]
    if name != "gpt2":
        change_config(folder, max_position_embeddings=128)
    model = mw.load_model(folder)
    got = mw.generate(model, FOUND["prompts"], max_new_tokens=len(expected[0]), dtype="float32")
    assert got.tokens == expected
    assert not got.remarks
    for row, prompt in zip(got, FOUND["prompts"], strict=True):
        # Log-probabilities are those of one pass over the whole row.
        whole = np.array([[*prompt, *row.tokens]], np.int32)
        log_probs = np.asarray(jax.nn.log_softmax(model(whole).astype("float32"))[0])
        own = log_probs[np.arange(len(prompt) - 1, whole.shape[1] - 1), row.tokens]
        np.testing.assert_allclose(row.log_probs, own, atol=1e-5)

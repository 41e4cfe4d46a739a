"""A small tokenizer of the Hugging Face kind, trained on a few words."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = ["the mesh has an axis", "the axis has devices", "a device has an axis; naïve ☃ text"]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(autouse=True, scope="module")
def _spelled(command_line):
    """Let messages spell settings as the command line does."""

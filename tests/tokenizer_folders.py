"""Folders of tokenizers that differ in what starts and ends a document."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["<unk>", "<bos>", "<|done|>", "<|endoftext|>", "<eot>"]
WORDS = ["the", "mesh", "has", "an", "axis"]


def make_folder(folder, *, special=SPECIAL, template=None, truncation=None, **files):
    """Write a tokenizer of words to a folder.

    Args:
        folder: where to write it.
        special: its special tokens, whose ids are their places.
        template: what its post-processor puts around a text, such as ``<bos> $A``.
        truncation: the tokens at which a text is cut.
        files: the contents of further JSON files, by name.
    """
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    if template is not None:
        ids = [(name, vocabulary[name]) for name in special if name in template]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=ids
        )
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


NAMES = {"bos_token": "<bos>", "eos_token": "<|done|>"}
BOS, DONE, END_OF_TEXT, EOT = 1, 2, 3, 4

FOLDERS = {
    "named in tokenizer_config": ({"tokenizer_config": NAMES}, (), (DONE,)),
    "an object in tokenizer_config": (
        {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<|done|>"}}},
        (),
        (DONE,),
    ),
    "special_tokens_map over tokenizer_config": (
        {
            "tokenizer_config": {"eos_token": "<eot>"},
            "special_tokens_map": {"eos_token": {"content": "<|done|>"}},
        },
        (),
        (DONE,),
    ),
    "an id in generation_config": ({"generation_config": {"eos_token_id": DONE}}, (), (DONE,)),
    "a list in generation_config": (
        {"generation_config": {"eos_token_id": [DONE, EOT]}, "config": {"eos_token_id": EOT}},
        (),
        (DONE,),
    ),
    "config of a multimodal model": (
        {"config": {"text_config": {"eos_token_id": DONE}}},
        (),
        (DONE,),
    ),
    "like Llama 3": ({"template": "<bos> $A", "tokenizer_config": NAMES}, (BOS,), (DONE,)),
    "BOS although the config says no": (
        {"template": "<bos> $A", "tokenizer_config": {**NAMES, "add_bos_token": False}},
        (BOS,),
        (DONE,),
    ),
    "add_bos_token alone": ({"tokenizer_config": {**NAMES, "add_bos_token": True}}, (), (DONE,)),
    "both by the post-processor": (
        {"template": "<bos> $A <|done|>", "tokenizer_config": NAMES},
        (BOS,),
        (DONE,),
    ),
    "an end by the post-processor only": ({"template": "$A <eot>"}, (), (EOT,)),
    "like GPT-2": (
        {"tokenizer_config": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}},
        (),
        (END_OF_TEXT,),
    ),
    "a known name": ({}, (), (END_OF_TEXT,)),
    "a file that cuts texts": ({"truncation": 2, "tokenizer_config": NAMES}, (), (DONE,)),
    "neither": ({"special": ["<unk>", "<bos>", "<|done|>"]}, (), ()),
}
"""How each folder is made, and what documents start and end with."""

"""Conversations and templates that are compared with those of transformers and TRL."""

import hashlib

from meshwright.data.chat_source import CHATML

TEMPLATES = (
    "cohere", "cohere2", "deepseekv3", "gemma", "gemma3", "glm4moe", "lfm2", "llama3", "phi3",
    "qwen2_5", "qwen3", "qwen3_instruct_2507",
)  # fmt: skip
"""Templates that TRL ships, by the names of their files."""

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
OWN = {"plain": PLAIN, "marked": MARKED, "chatml": CHATML}
"""Templates of the project."""


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def said(*contents, system=None):
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[at % 2], "content": c} for at, c in enumerate(contents)]


CONVERSATIONS = [
    said("What is a mesh?", "A named grid of devices."),
    said("Héllo ☃", "Bonjour, ça va?\n\nYes.", 'Why "so"?', "  Because.  ", "ok", "naïve 😀"),
    said("2 + 2 =", "4", "And 3 more?", "7\n", system="Answer briefly."),
    said("code?", "```python\nprint(1)\n```", "thanks", "You are welcome."),
]

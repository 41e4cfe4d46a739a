"""Makes tests/fixtures/peft: adapters that the package peft has made, and the logits with them.

Needs torch, transformers and peft: ``python tools/make_peft_fixtures.py``.
"""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
LAYERS = ["q_proj", "v_proj", "down_proj"]


def main():
    """Write the adapters of a tiny Llama, and what it computes with them."""
    torch.manual_seed(0)
    base = FIXTURES / "hf" / "llama"
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    config = LoraConfig(
        r=2,
        lora_alpha=3,
        use_rslora=True,
        target_modules=LAYERS,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    adapted = get_peft_model(model, config).eval()
    ids = np.load(base / "expected.npz")["input_ids"]
    with torch.no_grad():
        logits = adapted(torch.tensor(ids)).logits.numpy()
    target = FIXTURES / "peft" / "llama"
    adapted.peft_config["default"].base_model_name_or_path = "llama"
    adapted.save_pretrained(target)
    (target / "README.md").unlink()
    np.savez(target / "expected.npz", input_ids=ids, logits=logits)


if __name__ == "__main__":
    main()

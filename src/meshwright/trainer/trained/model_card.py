"""The model card of an export: what was trained, on which data, how and where."""

import json
from pathlib import Path
from typing import Any

from meshwright.checkpoint import CheckpointMetadata
from meshwright.plan import Plan
from meshwright.text.json_text import flatten
from meshwright.text.units import counted
from meshwright.trainer.trained.base_weights import Base

CARD = "README.md"
CERTIFICATE = "certificate.json"
_SECTIONS = ("data", "task", "optimizer", "training", "lora")


def model_card(
    name: str, metadata: CheckpointMetadata, run: Path | None, base: Base | None, *, peft: bool
) -> str:
    """Return the card as Markdown; a PEFT folder holds adapters alone."""
    origin = base.weights if base is not None else metadata.config.get("model", {}).get("weights")
    head = {
        "library_name": "peft" if peft else "transformers",
        "tags": ["meshwright", *(["lora"] if base is not None and base.adapters else [])],
        **({"base_model": Path(origin).name} if origin else {}),
    }
    plan = Plan.model_validate(metadata.plan).describe() if metadata.plan else "not known"
    samples = "" if metadata.num_samples is None else f", {metadata.num_samples:,} samples"
    rows = [
        ("Trained", f"{counted(metadata.step, 'step')} of {metadata.global_batch_size} samples"),
        ("Started from", origin or "random weights, or a model in memory"),
        ("Data", f"`{metadata.dataset or 'no fingerprint'}`{samples}"),
        ("Mesh and batch", plan),
        ("Seed", str(metadata.seed)),
        ("Proof", _proof(run)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in metadata.versions.items())),
    ]
    if base is not None and base.adapters:
        first = base.adapters[0]
        scaled = f"rank {first.rank}, scale {first.scale:g}, on {len(base.adapters)} weights"
        rows.insert(1, ("Adapters", scaled + ("" if peft else "; merged here")))
    chosen = {key: metadata.config[key] for key in _SECTIONS if metadata.config.get(key)}
    settings = [f"- `{k}={v}`" for k, v in flatten(chosen) if v not in (None, "", [])]
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    return "\n".join(
        [
            f"---\n{front}\n---\n\n# {name}\n",
            "Trained with [Meshwright](https://pypi.org/project/meshwright).\n",
            *("| | |\n|---|---|".splitlines()),
            *(f"| {key} | {value} |" for key, value in rows),
            *(["\n## Settings\n", *settings] if settings else []),
            "",
        ]
    )


def _proof(run: Path | None) -> str:
    """Say what the certificate in a run folder proves."""
    file = None if run is None else run / CERTIFICATE
    if file is None or not file.is_file():
        return "none (`meshwright verify` compares the mesh with one device)"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    verdict = "trains like one device" if found.get("equal") else "differs from one device"
    return f"the mesh {verdict} ({counted(found.get('steps', 0), 'step')}, {found.get('date', '')})"

"""The section of adapters."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from meshwright.config.base import Count, Frozen
from meshwright.errors import Setting, UserError
from meshwright.text.json_text import parse_json


class LoRA(Frozen):
    """Low-rank adapters, which are trained instead of the weights that they are added to.

    Attributes:
        rank: the rank of every adapter; null trains without adapters, or is that of init_from.
        alpha: adapters are multiplied by alpha / rank; null is the rank itself.
        targets: path patterns of the weights to adapt, such as ``blocks.*.attn.**``; null adapts
            every linear layer and convolution, without embeddings and the layer of the logits.
        dropout: the share of an adapter's inputs that are dropped while training.
        base_dtype: the format in which frozen weights are kept; null keeps them as they are.
        init_from: a PEFT folder whose adapters training starts from.
    """

    rank: Count | None = None
    alpha: float | None = Field(default=None, gt=0)
    targets: Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda x: (x,) if isinstance(x, str) else x)
    ] = Field(default=None, min_length=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    init_from: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _rank_of_folder(cls, given: Any) -> Any:
        known = isinstance(given, dict) and given.get("rank") is None and given.get("init_from")
        file = Path(str(known)).expanduser() / "adapter_config.json"
        if not known or not file.is_file():
            return given
        config = parse_json(file.read_bytes())
        return {**given, "rank": config.get("r") if isinstance(config, dict) else None}

    @model_validator(mode="after")
    def _of_adapters(self) -> Self:
        others = sorted(self.model_fields_set - {"rank"})
        if self.rank is None and any(getattr(self, key) for key in others):
            raise UserError(
                f"{Setting(f'lora.{others[0]}')} has no effect without adapters",
                fix=f"write {Setting('lora.rank', 16)} too"
                + (f"; {self.init_from} has no adapter_config.json" if self.init_from else ""),
            )
        return self

"""The peer's side of a comparison: a model of transformers or torchvision, compiled by PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from peer_cases import Case, Images
from peer_process import since_start, tell, told_to_go, turn_over


def train_torch(
    case: Case,
    side: str,
    data: Path,
    steps: int,
    prepare: Callable[[Any], tuple[Any, str]] | None = None,
) -> None:
    """Train with bf16 autocast, fused attention and AdamW, and torch.compile of model and loss.

    ``prepare`` changes the model before it is trained, and says how; it stays in float32 without.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # On CPUs only the plain forms are tried: compiled ones take minutes, and some crash.
    attention = case.peer_attention if device == "cuda" else "eager"
    model, adapters = build_model(case, side, attention).to(torch.float32), ""
    if prepare is not None:
        model, adapters = prepare(model)
    model = model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if side == "torchvision" or "ResNet" in type(model).__name__:
        model = model.to(memory_format=torch.channels_last)
    params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # The loss is compiled too: otherwise the logits are held in float32.
    backend = "inductor" if device == "cuda" else "eager"
    compiled = torch.compile(loss_of(model, case), backend=backend)
    batches = batches_of(case, data, device)

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    step().item()
    tell(first_update=since_start())
    for _ in range(3):
        step().item()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while told_to_go():
        start = time.perf_counter()
        done, value = 0, 0.0
        while not done or not turn_over(start):
            for _ in range(steps):
                loss = step()
            done, value = done + steps, loss.item()
        tell(
            seconds=time.perf_counter() - start,
            updates=done,
            peak=torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            loss=value,
            parameters=params,
            **({"adapters": adapters} if adapters else {}),
        )


def build_model(case: Case, side: str, attention: str) -> Any:
    """Return the model of the case."""
    if side == "torchvision":
        import torchvision  # pyright: ignore[reportMissingImports]

        return torchvision.models.resnet50(zero_init_residual=True)
    import transformers

    assert case.peer is not None, "this case has no peer"
    kind, arguments = case.peer
    config = getattr(transformers, kind)(**arguments)
    settings = {} if kind == "ResNetConfig" else {"attn_implementation": attention}
    if isinstance(case.data, Images):
        return transformers.AutoModelForImageClassification.from_config(config, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, **settings)


def loss_of(model: Any, case: Case) -> Callable[..., Any]:
    """Return the loss as a function of the tensors of a batch."""
    from torch.nn.functional import cross_entropy

    def of_tokens(rows: Any) -> Any:
        logits = model(input_ids=rows[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def of_images(images: Any, labels: Any) -> Any:
        # Stored with the channels last, which the permuted tensor still is in memory.
        found = model(images.permute(0, 3, 1, 2).float())
        return cross_entropy(getattr(found, "logits", found).float(), labels)

    return of_images if isinstance(case.data, Images) else of_tokens


def batches_of(case: Case, data: Path, device: str) -> Iterator[tuple[Any, ...]]:
    """Yield batches on the device; a thread reads one ahead, into pinned memory."""
    import torch

    order = np.random.default_rng(0)
    if isinstance(case.data, Images):
        images, labels = (np.load(data / f"{n}.npy", mmap_mode="r") for n in ("image", "label"))
    else:
        images = labels = np.load(data, mmap_mode="r")

    def read() -> list[Any]:
        if isinstance(case.data, Images):
            ids = order.integers(0, len(images), case.rows)
            arrays = [images[ids], labels[ids].astype(np.int64)]
        else:
            starts = order.integers(0, len(images) - case.data.length - 1, case.rows)
            rows = [images[s : s + case.data.length + 1] for s in starts]
            arrays = [np.stack(rows).astype(np.int64)]
        tensors = [torch.from_numpy(array) for array in arrays]
        return [t.pin_memory() for t in tensors] if device == "cuda" else tensors

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(read)
        while True:
            tensors, ahead = ahead.result(), pool.submit(read)
            yield tuple(t.to(device, non_blocking=True) for t in tensors)

"""The other side of ddp_scaling.py: a process of PyTorch, under torchrun with DDP, in turns."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

from ddp_turns import CASES, CHANNELS, IMAGE, WIDTHS, Turns

TURNS = Turns()

import torch
from torch import nn

torch.set_num_threads(1)


def build(name: str) -> nn.Module:
    """Return the model of a case."""
    layers: list[nn.Module] = []
    if name == "mlp":
        for a, b in pairwise(WIDTHS):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
    for a, b in pairwise(CHANNELS):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()]
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], 10)]
    return nn.Sequential(*layers, *pooled)


def main(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(TURNS.rank)
    shape = (WIDTHS[0],) if name == "mlp" else (CHANNELS[0], IMAGE, IMAGE)
    x, y = torch.randn(case.batch, *shape), torch.randint(0, 10, (case.batch,))
    model: Any = build(name)
    if name == "cnn":
        # The form that its convolutions on CPUs are made for.
        model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    if TURNS.count > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    TURNS.tell(ready=True)
    while TURNS.told_to_go():
        start = time.perf_counter()
        for _ in range(case.steps):
            step()
        TURNS.tell(seconds=time.perf_counter() - start)
    if TURNS.count > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:
        TURNS.tell(failed=repr(error))
        raise

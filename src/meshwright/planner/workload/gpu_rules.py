"""The rules for GPUs, in one table: what compilers and kernels do that a program does not say.

A rule names the record in benchmarks/results that shows it. `benchmarks/fit_gpu_times.py` fits the
times of kernels; `tests/planner/test_gpu_records.py` predicts the recorded plans again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")

PLATFORMS: Mapping[str, str] = {"cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}
"""By the platform of a chip, whose kernels it runs."""

_GPUS = ("gpu",)


class KernelTimes(NamedTuple):
    """Constants of the time of kernels.

    Attention and its gradient reach a share of a chip's attainable product rate. Arithmetic of
    products runs at ``product`` times the rate of a large product with its memory traffic, of which
    ``exposed_traffic`` is not hidden. Where compilers join kernels that read the same arrays,
    ``read_once`` of the traffic of others is left. Kernels that add up rows, such as those of a
    bias, take ``row_sum`` times their traffic: few of a GPU's processors work on a sum, and they
    add it in two steps. Convolutions reach ``convolution`` times the rate of products. An iteration
    of a loop takes seconds besides its kernels on GPUs: the host asks whether it continues, and
    nothing overlaps.
    """

    attention: float
    attention_gradient: float
    product: float
    exposed_traffic: float
    read_once: float
    row_sum: float
    convolution: float
    iteration: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a compiler or a kernel does, and how that is known.

    ``rows`` is a part of the names of the record's rows that show it, all of them if empty; ``jax``
    is the release of the record.
    """

    models: str
    record: str
    rows: str = ""
    jax: str = "0.11.2"
    platforms: tuple[str, ...] = ("gpu", "tpu")

    def on(self, platform: str) -> bool:
        """Whether it applies to the kernels of a platform."""
        return platform in self.platforms


@dataclass(frozen=True, kw_only=True)
class Constant(Rule, Generic[Value]):
    """A rule with a number, or several."""

    value: Value


PRODUCTS_STAY = Rule(
    models="Nothing is written over the result of a product: the gradient of logits has its own "
    "memory.",
    record="gpu_memory",
    rows="GPT-2 124M, one GPU",
    platforms=_GPUS,
)
FILLED_DIMS = Constant(
    models="Products in half precision read copies of operands whose last dim is not a multiple of "
    "this.",
    record="gpu_memory",
    rows="ViT-B",
    value=8,
    platforms=_GPUS,
)
RECOMPUTED_SUMS = Rule(
    models="A fused value with several readers is recomputed for each, unless that reads more from "
    "memory than storing the value does.",
    record="gpu_memory",
    rows="GPT-2 124M, one GPU",
)
SAVED_ONCE = Rule(
    models="What a checkpoint rounds for several products is saved once.",
    record="gpu_memory",
    rows="GPT-2 124M, fsdp=8",
)
SHARDED_CASTS = Rule(
    models="Weights that a loop casts and saves stay sharded as they are between steps.",
    record="gpu_memory",
    rows="GPT-2 124M, fsdp=8, blocks=scan",
)
LAST_ITERATION_TWICE = Rule(
    models="A loop gathers the weights of an iteration during the one before it, so that the last "
    "one runs outside of the loop: its results stay in memory besides the rows that it saves.",
    record="gpu_memory",
    rows="fsdp=8, blocks=scan",
    platforms=_GPUS,
)
DELAYED_GRADIENTS = Rule(
    models="With several microbatches, products for gradients are delayed until all of them exist, "
    "to hide communication. A single GPU has none to hide.",
    record="gpu_memory",
    rows="4 microbatches",
)
PACKED_ARRAYS = Constant(
    models="Every array has a fixed place; the largest are placed first, or those that live "
    "longest, whichever needs less. Arrays below this part of the peak fill gaps.",
    record="gpu_memory",
    value=1 / 200,
)
WHOLE_GRADIENTS = Rule(
    models="A gradient is whole until the next one is computed: reducing it runs beside that.",
    record="gpu_unseen",
    rows="MLP, 8192 wide, fsdp=8",
)
REDUCED_LAST = Rule(
    models="On data × fsdp, where blocks run one by one, gradients are reduced over both axes as a "
    "whole, and each device takes its part when all of them exist.",
    record="gpu_unseen",
    rows="data=2 × fsdp=4",
)
SUMMED_IN_PLACE = Rule(
    models="Where blocks run one by one, a loss in parts adds the gradients of its parts up in the "
    "memory of their sum.",
    record="gpu_unseen",
    rows="Qwen, wide",
)
STAGE_MICROBATCHES = Constant(
    models="Besides the slots of its schedule, a stage holds the saved values of this many "
    "microbatches: one that it writes to a slot, and one that it has read.",
    record="gpu_memory",
    rows="pipe=",
    value=2,
)
STAGE_RECOMPUTES = Rule(
    models="What a stage recomputes, it keeps for all of its blocks.",
    record="gpu_memory",
    rows="pipe=2 × fsdp=2 × tensor=2, remat=full",
)
KERNEL_TIMES = Constant(
    models="How long kernels take, by their arithmetic and their memory traffic, in runs of "
    "minutes: at its limit of power, a GPU computes 13% slower than in the first second.",
    record="gpu_peers",
    rows="gpt2",
    value=KernelTimes(
        attention=0.54,
        attention_gradient=0.413,
        product=0.93,
        exposed_traffic=0.58,
        read_once=0.55,
        row_sum=1.7,
        convolution=0.55,
        iteration=170e-6,
    ),
)
STAGE_OVERHEAD: Constant[Mapping[str, float]] = Constant(
    models="Time of a stage by schedule, relative to its share of the work.",
    record="gpu_pipeline",
    value={"gpipe": 1.4, "1f1b": 1.4, "interleaved": 1.5, "zb_h1": 1.7},
)
HIDDEN_TRAFFIC: Constant[Mapping[str, Mapping[str, float]]] = Constant(
    models="By how blocks run, the part of an axis's traffic that runs behind products; else none.",
    record="gpu_overlap",
    jax="0.12.0.1",
    value={"unroll": {"fsdp": 0.85, "data": 0.63}, "scan": {"fsdp": 0.65, "data": 0.63}},
)

"""Why a program sends more than the minimum: what it exchanges, and how it reads its weights."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.compiled.collectives import Collective
from meshwright.mesh.axes import BATCH_AXES, CONTEXT
from meshwright.program.jaxpr.equations import PRODUCTS
from meshwright.program.weight_reads import WeightRead

# A bias has one gradient for each addition, and an embedding one for each lookup.
_ONCE = PRODUCTS | {"add", "add_any", "gather"}
_MOVES = frozenset({"all-to-all", "ragged-all-to-all", "collective-permute"})


@dataclass(frozen=True)
class Reason:
    """Why a collective is sent; the minimum counts what is of a weight or its gradient once."""

    text: str
    of_weight: bool = False


_OF_SEVERAL = Reason("the gradient of what is computed from several weights reduced whole", True)


class Reasons:
    """The reasons of a program's collectives, from how the traced program reads its weights."""

    def __init__(self, reads: Sequence[WeightRead], mesh: dict[str, int]) -> None:
        self._reads = reads
        self._times = Counter((read.leaf, read.iterations) for read in reads)
        parts = [mesh.get("fsdp", 1), mesh.get("tensor", 1)]
        self._divisors = {1, *parts, parts[0] * parts[1]}

    def of(self, collectives: Iterable[Collective]) -> list[tuple[Collective, Reason | None]]:
        """Return the reason of each collective; None for what the minimum counts as well.

        A read of a weight accounts for one reduction: any further reduction is not of a gradient.
        """
        left = list(self._reads)
        return [(c, self._reason(c, left)) for c in collectives]

    def _reason(self, collective: Collective, left: list[WeightRead]) -> Reason | None:
        if set(collective.axes) <= {*BATCH_AXES, CONTEXT}:
            if collective.kind == "all-gather" and collective.op_name.endswith("_constraint"):
                return self._gather(collective)
            if collective.phase == "backward" and "reduce" in collective.kind:
                fitting = [
                    read
                    for read in left
                    if collective.module in (read.module, *read.through)
                    and collective.count >= read.iterations
                    and self._fits(collective, read)
                ]
                if fitting:
                    # What is computed from a weight alone may be reduced before or after it.
                    read = min(fitting, key=lambda read: read.module != collective.module)
                    left.remove(read)
                    if collective.kind == "all-reduce" and len(read.together) > 1:
                        return _OF_SEVERAL
                    return self._gradient(read)
        return _exchange(collective)

    def _fits(self, collective: Collective, read: WeightRead) -> bool:
        # Half precision is sent with half the bytes of the weight.
        payload = collective.payload_bytes * (2 if collective.dtype in ("bf16", "f16") else 1)
        return any(payload * parts in read.sizes for parts in self._divisors)

    def _gradient(self, read: WeightRead) -> Reason | None:
        reads = self._times[read.leaf, read.iterations]
        if read.iterations > 1:
            text = f"gradients reduced in each of {read.iterations} iterations of a loop"
            return Reason(f"{text}, for each of {reads} reads" if reads > 1 else text, True)
        if read.operation not in _ONCE:
            text = f"weights read by {read.operation} instead of a matrix product"
            return Reason(f"{text}, gradients reduced separately", True)
        if reads > 1:
            return Reason("gradients of several reads of a weight reduced separately", True)
        return None

    def _gather(self, collective: Collective) -> Reason | None:
        """Explain weights that are gathered in another module than the one that reads them."""
        fitting = [r for r in self._reads if r.iterations > 1 and self._fits(collective, r)]
        if not fitting or any(read.module == collective.module for read in fitting):
            return None
        where = fitting[0].module.rpartition(".")[0] or fitting[0].module
        return Reason(f"weights of {where} gathered before the loop that reads them")


def _exchange(collective: Collective) -> Reason:
    """Say what a collective exchanges that is neither a weight nor its gradient."""
    operation = collective.op_name.rpartition("/")[2] or "the compiler"
    if operation == "sharding_constraint":
        operation = "a sharding constraint"
    if collective.phase == "update":
        how = "gathered for" if collective.kind == "all-gather" else "combined by"
        return Reason(f"parts of all devices {how} {operation}, outside the loss")
    axes = set(collective.axes)
    what = "samples" if axes <= set(BATCH_AXES) else "positions" if axes == {CONTEXT} else ""
    if collective.kind in _MOVES:
        return Reason(f"{what or 'values'} moved between devices by {operation}")
    if collective.kind == "all-gather":
        whose = f"{what} of all devices" if what else "sharded values"
        return Reason(f"{whose} gathered for {operation}")
    over = f"over the {what} of all devices" if what else "over sharded values"
    return Reason(f"{operation} {over}")


def explain(
    sent: Sequence[tuple[Reason | None, float]], needed: float, negligible: float
) -> dict[str, float]:
    """Return what a module sends beyond what it needs, by reason, the largest first.

    ``sent`` has the reason and the bytes of each collective; up to ``negligible`` bytes, nothing is
    explained.
    """
    excess = sum(size for _, size in sent) - needed
    if excess <= negligible:
        return {}
    weights: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    for reason, size in sent:
        if reason is not None:
            (weights if reason.of_weight else others)[reason.text] += size
    counted = max(sum(weights.values()) + sum(others.values()) - excess, 0.0)
    less = min(counted, sum(weights.values()))
    shares = {**_reduced(weights, less), **_reduced(others, counted - less)}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {text: size for text, size in ordered if size > negligible}


def _reduced(sizes: dict[str, float], less: float) -> dict[str, float]:
    """Return sizes that are smaller by ``less`` in all, each by the same share."""
    total = sum(sizes.values())
    return {text: size * (1 - less / total) for text, size in sizes.items() if total}

"""Changes to a plan that need less memory, and how much each is predicted to save."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.config.batch import microbatches_setting
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.errors import Setting
from meshwright.hardware import Hardware
from meshwright.mesh.axes import canonical_sizes, mesh_setting, shown_sizes
from meshwright.plan import Plan
from meshwright.planner.estimate.estimator import Estimator
from meshwright.text.units import human_bytes


@dataclass(frozen=True)
class Remedy:
    """A change to a plan, as its reader would write it, with what it is predicted to save.

    ``samples`` are those of a microbatch, if the change is that there are fewer.
    """

    plan: Plan
    text: str
    saving: int | None = None
    fits: bool | None = None
    samples: int | None = None

    def __str__(self) -> str:
        if self.saving is None:
            return self.text
        fits = "" if self.fits is None else ", which fits" if self.fits else ", which is not enough"
        return f"{self.text}: {human_bytes(self.saving)} less{fits}"


def find_remedies(
    plan: Plan,
    *,
    has_blocks: bool,
    rolls_blocks: bool,
    trains: bool = True,
    same_results: bool = False,
    shared_memory: bool = False,
) -> list[Remedy]:
    """Return the changes that apply to a plan, those that cost least first.

    Blocks can be recomputed, and become a scan if they are alike (``rolls_blocks``). Evaluations
    keep nothing for gradients (``trains``). With ``same_results``, what a resumed run refuses is
    left out, such as another precision; with ``shared_memory``, more devices have no more.
    """
    sharding = _sharding(plan, has_blocks, rolls_blocks) if trains else ()
    found = [*_fewer_samples(plan), *sharding, *_sharded_state(plan)]
    if plan.precision == "no" and not same_results:
        half: Precision = "bf16"
        found.append(Remedy(_changed(plan, precision=half), str(Setting("precision", half))))
    return found if shared_memory else [*found, *_more_devices(plan)]


def rank_remedies(
    remedies: Sequence[Remedy], plan: Plan, hardware: Hardware, estimator: Estimator
) -> list[Remedy]:
    """Return remedies with their predicted savings, those that fit and the largest first.

    Those that are predicted to save nothing, or cannot be predicted, are left out. Of smaller
    microbatches only the largest that fits is kept, or the smallest if none does.
    """
    now = estimator.estimate(plan, hardware).memory.total
    ranked: list[Remedy] = []
    for remedy in remedies:
        if remedy.samples and any(other.samples and other.fits for other in ranked):
            continue
        more = replace(hardware, count=remedy.plan.num_devices, nodes=1)
        try:
            changed = estimator.estimate(remedy.plan, more)
            saving = now - changed.memory.total
        except Exception:
            # Not every plan suits every model, and the message about memory comes first.
            continue
        if saving > 0:
            ranked = [other for other in ranked if not (remedy.samples and other.samples)]
            ranked.append(replace(remedy, saving=saving, fits=changed.fits()))
    return sorted(ranked, key=lambda r: (not r.fits, -(r.saving or 0)))


def unranked(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Return remedies without predictions: of smaller microbatches the largest and the smallest."""
    sizes = [remedy.samples for remedy in remedies if remedy.samples]
    kept = {None, *sizes[:1], *sizes[-1:]}
    return [remedy for remedy in remedies if remedy.samples in kept]


def shard_further(plan: Plan, *, more_devices: bool) -> Iterator[Remedy]:
    """Yield plans with less of the training state on each device, the smallest change first.

    With ``more_devices``, two, four, … times as many are tried too, as far as the global batch can
    be divided over them.
    """
    yield from _sharding(plan, has_blocks=False, rolls_blocks=False)
    for remedy in _sharded_state(plan):
        yield remedy
        plan = remedy.plan
    while more_devices and (remedy := next(_more_devices(plan), None)) is not None:
        yield remedy
        plan = remedy.plan


def _fewer_samples(plan: Plan) -> Iterator[Remedy]:
    """Yield smaller microbatches of the same global batch, each about half of the one before."""
    micro, steps = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
    smaller = micro
    while smaller > 1:
        smaller = next(d for d in range(smaller // 2, 0, -1) if micro % d == 0)
        more = steps * (micro // smaller)
        changed = _with_batch(plan, micro_batch_size=smaller, gradient_accumulation_steps=more)
        yield Remedy(changed, microbatches_setting(smaller, more), samples=smaller)


def _sharding(plan: Plan, has_blocks: bool, rolls_blocks: bool) -> Iterator[Remedy]:
    now, gathers = plan.sharding, plan.size("fsdp") > 1
    rolls_blocks = rolls_blocks and now.blocks == "unroll" and plan.size("pipe") == 1
    for name, value, applies in (
        ("remat", "dots", has_blocks and now.remat == "none"),
        ("remat", "full", has_blocks and now.remat in ("none", "dots")),
        ("blocks", "scan", rolls_blocks),
        ("zero", 3, gathers and now.zero < 3),
        ("keep_gathered", False, gathers and now.keep_gathered),
    ):
        if applies:
            sharding = ShardingConfig(**{**now.model_dump(), name: value})
            yield Remedy(_changed(plan, sharding=sharding), str(Setting(f"sharding.{name}", value)))


def _sharded_state(plan: Plan) -> Iterator[Remedy]:
    """Yield the plan with its state sharded over the same devices, instead of copied."""
    copies = plan.size("data")
    if copies > 1:
        sizes = _outermost_first({**plan.mesh, "data": 1, "fsdp": copies * plan.size("fsdp")})
        setting = f"{mesh_setting(sizes)} instead of {mesh_setting({'data': copies})}"
        yield Remedy(_changed(plan, mesh=sizes), setting)


def _more_devices(plan: Plan) -> Iterator[Remedy]:
    """Yield the plan on twice as many devices, with the same global batch."""
    batch, sizes = plan.batch, _outermost_first({**plan.mesh, "fsdp": 2 * plan.size("fsdp")})
    micro, steps = batch.micro_batch_size, batch.gradient_accumulation_steps
    micro, steps = (micro // 2, steps) if micro % 2 == 0 else (micro, steps // 2)
    replicas = 2 * batch.replicas
    whole = steps % max(plan.num_microbatches, batch.sync_gradients_every, 1) == 0
    if steps and micro * steps * replicas == batch.global_batch_size and whole:
        divided = {"micro_batch_size": micro, "gradient_accumulation_steps": steps}
        batch = batch.model_copy(update={**divided, "replicas": replicas})
        changed = _changed(plan, mesh=sizes, batch=batch)
        yield Remedy(changed, f"{mesh_setting(sizes)} on {changed.num_devices} devices")


def _with_batch(plan: Plan, **sizes: int) -> Plan:
    batch = plan.batch.model_copy(update=sizes)
    # The pipeline stays filled: each of its flushes has as many microbatches of the new size.
    factor = batch.gradient_accumulation_steps // plan.batch.gradient_accumulation_steps
    count = plan.num_microbatches * factor if plan.size("pipe") > 1 else plan.num_microbatches
    return _changed(plan, batch=batch, num_microbatches=count)


def _outermost_first(sizes: dict[str, int]) -> dict[str, int]:
    """Return axis sizes in the order of meshes, without those of 1."""
    return shown_sizes(canonical_sizes(sizes))


def _changed(plan: Plan, **changes: Any) -> Plan:
    return Plan(**{**{name: getattr(plan, name) for name in Plan.model_fields}, **changes})

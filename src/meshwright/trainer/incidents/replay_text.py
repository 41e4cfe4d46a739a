"""The result of replaying a step, as a record, as text and as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.program.evaluate.nonfinite_origin import Origin
from meshwright.text.json_text import finite
from meshwright.text.units import numbered
from meshwright.trainer.incidents.not_finite import parameters_fail, tell_wrong
from meshwright.trainer.incidents.responsible import Responsible

SHOWN = 16


@dataclass(frozen=True)
class BadArray:
    """An array of the batch that is not finite: how many elements, and which samples."""

    name: str
    nans: int
    infs: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """The result of rerunning a step.

    Attributes:
        step: the step, from 1.
        batch: the number of its batch, from 0.
        loss: the loss that was recorded, and that of the replay.
        grad_norm: the gradient norm that was recorded, and that of the replay.
        same_bits: whether the loss is the same bit for bit.
        reproduced: whether it is not finite again.
        bad_arrays: the arrays of the batch that are not finite.
        indices: the indices of the batch that are out of range, as sentences.
        origin: where values stop being finite; None if no single equation could be found.
        numbered: whether samples are numbered as the data have them, or by their row in the batch.
    """

    folder: Path
    step: int
    batch: int
    loss: tuple[str, str]
    grad_norm: tuple[str, str]
    same_bits: bool
    reproduced: bool
    where: str
    bad_arrays: tuple[BadArray, ...]
    origin: Origin | None
    responsible: Responsible | None
    numbered: bool
    indices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a few lines for a terminal."""
        return "\n".join(
            [
                f"step {self.step}, batch {self.batch}, on {self.where}",
                *(
                    f"the batch is not finite itself: `{each.name}` has "
                    f"{tell_wrong(each.nans, each.infs)} in {_samples(each.samples, self)}"
                    for each in self.bad_arrays
                ),
                *(f"out of range: {each}" for each in self.indices),
                _verdict(self),
                *_origin_lines(self),
                *_sample_lines(self),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        origin = self.origin
        first = None if origin is None else origin.first
        return finite(
            {
                "record": str(self.folder),
                "step": self.step,
                "batch": self.batch,
                "where": self.where,
                "reproduced": self.reproduced,
                "loss": {"recorded": self.loss[0], "now": self.loss[1]},
                "loss_bit_equal": self.same_bits,
                "grad_norm": {"recorded": self.grad_norm[0], "now": self.grad_norm[1]},
                "bad_arrays": [asdict(each) for each in self.bad_arrays],
                "indices_out_of_range": list(self.indices),
                "first": None if first is None else _origin_json(first),
                "then": None if origin is None or origin is first else _origin_json(origin),
                "samples": None if self.responsible is None else asdict(self.responsible),
                "numbered": self.numbered,
            }
        )


def _verdict(replay: Replay) -> str:
    what = "loss" if replay.loss[0] in ("nan", "inf", "-inf") else "gradient norm"
    recorded, now = replay.loss if what == "loss" else replay.grad_norm
    if not replay.reproduced:
        return (
            f"not reproduced: the {what} was {recorded}, and is {now} now; the devices or the "
            "versions may differ"
        )
    bits = "bit for bit" if replay.same_bits else f"but it was {replay.loss[0]}"
    if what == "loss":
        return f"reproduced: the loss is {now} again, {bits}"
    again = "again, bit for bit" if replay.same_bits else f"now, {bits}"
    return f"reproduced: the gradient norm is {now} again; the loss is {replay.loss[1]} {again}"


def _origin_lines(replay: Replay) -> list[str]:
    origin = replay.origin
    if origin is None:
        known = "the norm of finite gradients overflows, or a kernel computes it differently"
        return [f"no single operation makes it: {known}"] if replay.reproduced else []
    first = origin.first
    lines = [f"first: {_place(first)}", *(f"  reads {each}" for each in first.before)]
    lines.append(f"  {'gives' if first.order >= 0 else 'holds'} {first.after}")
    if origin is not first:
        lines.append(f"then: {_place(origin)}, which makes a NaN of it")
    return lines


def _place(origin: Origin) -> str:
    if origin.order < 0:
        return f"the {origin.operation}, which is not finite itself"
    module = f"`{origin.module}`" if origin.module else "the loss, outside of the model's modules"
    passes = "backward" if origin.backward else "forward"
    return f"{origin.operation} in {module}, in the {passes} pass"


def _sample_lines(replay: Replay) -> list[str]:
    found = replay.responsible
    if found is None:
        return ["samples: the loss cannot be computed for one sample alone"]
    if not found.samples:
        return ["samples: each of them alone is finite"] if replay.reproduced else []
    if found.finite_without is None:
        lines = [f"samples: none is finite alone ({_samples(found.samples, replay)})"]
        if not replay.bad_arrays and len(found.samples) > 1:
            lines.append(f"leaving out the batch would not help: {parameters_fail()}")
        return lines
    rest = "finite" if found.finite_without else "still not finite"
    without = "it" if len(found.samples) == 1 else "them"
    named = _samples(found.samples, replay)
    return [f"samples: {named}; without {without} the step is {rest}"]


def _samples(samples: tuple[int, ...], replay: Replay) -> str:
    more = f" ({len(samples)} in all)" if len(samples) > SHOWN else ""
    return numbered("sample" if replay.numbered else "row", samples, SHOWN) + more


def _origin_json(origin: Origin) -> dict[str, Any]:
    values = asdict(origin)
    return {
        "module": origin.module,
        "operation": origin.operation,
        "pass": None if origin.order < 0 else "backward" if origin.backward else "forward",
        "before": values["before"],
        "after": values["after"],
    }

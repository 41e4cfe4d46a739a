"""`meshwright ledger`: what a compiled step sends over each mesh axis, and the minimum."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.errors import CheckFailed, ExitCode
from meshwright.ledgers import Ledger, make_ledger
from meshwright.ledgers.ledger_text import explanations
from meshwright.mesh.axes import describe_sizes
from meshwright.recipe import make_recipe
from meshwright.units import human_bytes

_STAGES_NOTE = "With pipeline stages, these are the bytes of the stage that sends most."


def run(request: Request) -> int:
    """Compile the step without running it and list its collectives."""
    plan, config = request.plan(), request.config
    remarks = request.report_unused_settings(plan)
    recipe = make_recipe(config, plan.batch.global_batch_size)
    batch = recipe.data.batch(0, plan.batch.global_batch_size)
    assembled = recipe.assemble(plan, batch)
    request.output.say(Text(f"compiling for {plan.num_devices} devices …", style="dim"))
    ledger = make_ledger(assembled, batch)
    report = {
        **ledger.model_dump(mode="json"),
        "suspicious": ledger.suspicious,
        "remarks": remarks,
    }
    request.output.result(report, _picture(ledger))
    if config.strict and ledger.suspicious:
        raise _deviation_error(ledger)
    return ExitCode.DONE


def _deviation_error(ledger: Ledger) -> CheckFailed:
    axis = ledger.suspicious[0]
    own = ledger.axes[axis]
    return CheckFailed(
        f"the program sends {own.ratio} times what the plan needs over {axis}",
        why=f"{own.sent_bytes:,} bytes against {own.minimum_bytes:,}; "
        + "; ".join(own.excess[:3] or ["no module stands out"]),
        fix="run without strict=true to see the whole ledger",
    )


def _picture(ledger: Ledger) -> RenderableType:
    axes = Table(box=None, pad_edge=False)
    for name in ("axis", "devices", "sent", "needed", "ratio"):
        axes.add_column(name, justify="left" if name == "axis" else "right")
    for axis, own in ledger.axes.items():
        ratio = "–" if own.ratio is None else f"{own.ratio:.3f}"
        style = "bold red" if own.suspicious else "green"
        axes.add_row(
            axis,
            str(own.size),
            human_bytes(own.sent_bytes),
            human_bytes(own.minimum_bytes),
            Text(ratio, style=style),
        )
    parts: list[RenderableType] = [
        Text.assemble(
            (describe_sizes(ledger.mesh), "bold"), ", bytes each device sends per update"
        ),
        axes,
    ]
    if ledger.mesh.get("pipe", 1) > 1:
        parts.append(Text(_STAGES_NOTE))
    for axis, own in ledger.axes.items():
        parts += [Text(f"  beyond the minimum on {axis}: {line}") for line in own.excess]
    parts += [Text(f"  {line}") for line in explanations(ledger)]
    parts += [Text(), _lines(ledger), Text(), Text(_memory(ledger))]
    return Group(*parts)


def _lines(ledger: Ledger, shown: int = 24) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name in ("module", "kind", "axes", "phase"):
        table.add_column(name)
    for name in ("count", "sent"):
        table.add_column(name, justify="right")
    ordered = sorted(ledger.lines, key=lambda line: -line.sent_bytes)
    for line in ordered[:shown]:
        table.add_row(
            line.module or "outside modules",
            line.kind,
            "×".join(line.axes),
            line.phase,
            str(line.count),
            human_bytes(line.sent_bytes),
        )
    rest = ordered[shown:]
    if rest:
        sent = human_bytes(sum(line.sent_bytes for line in rest))
        table.add_row(f"… and {len(rest)} smaller", "", "", "", "", sent)
    return table


def _memory(ledger: Ledger) -> str:
    return (
        f"per device: {human_bytes(ledger.argument_bytes)} of state and batch, "
        f"{human_bytes(ledger.temp_bytes)} of temporaries; compiled in {ledger.compile_seconds} s"
    )

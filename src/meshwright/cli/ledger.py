"""`meshwright ledger`: what a compiled step sends over each mesh axis, and the minimum."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.errors import CheckFailed, ExitCode
from meshwright.ledgers import Ledger, make_ledger
from meshwright.ledgers.ledger_records import axes_table, beyond_minimum, overlap_lines
from meshwright.mesh.axes import describe_sizes
from meshwright.recipe import make_recipe
from meshwright.text.columns import Columns, Indented
from meshwright.text.units import human_bytes

_STAGES_NOTE = "With pipeline stages, these are the bytes of the stage that sends most."


def run(request: Request) -> int:
    """Compile the step without running it and list its collectives."""
    plan, config = request.plan(), request.config
    remarks = request.report_unused_settings(plan)
    recipe = make_recipe(config, plan.batch.global_batch_size)
    batch = recipe.first_batch(plan.batch.global_batch_size)
    assembled = recipe.assemble(plan, batch)
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
    parts: list[RenderableType] = [
        Text.assemble(
            (describe_sizes(ledger.mesh), "bold"), ", bytes each device sends per update"
        ),
        axes_table(ledger),
    ]
    if ledger.mesh.get("pipe", 1) > 1:
        parts.append(Text(_STAGES_NOTE))
    parts += [Indented(line, 2) for line in [*beyond_minimum(ledger), *overlap_lines(ledger)]]
    parts += [Text(), _lines(ledger), Text(), Text(_memory(ledger))]
    return Group(*parts)


def _lines(ledger: Ledger, shown: int = 24) -> Columns:
    ordered = sorted(ledger.lines, key=lambda line: -line.sent_bytes)
    rows = [
        (
            line.module or "outside modules",
            line.kind,
            "×".join(line.axes),
            line.phase,
            str(line.count),
            human_bytes(line.sent_bytes),
        )
        for line in ordered[:shown]
    ]
    if rest := ordered[shown:]:
        sent = human_bytes(sum(line.sent_bytes for line in rest))
        rows.append((f"… and {len(rest)} smaller", "", "", "", "", sent))
    head = ("module", "kind", "axes", "phase", "count", "sent")
    return Columns(head, rows, right=("count", "sent"))


def _memory(ledger: Ledger) -> str:
    return (
        f"per device: {human_bytes(ledger.argument_bytes)} of state and batch, "
        f"{human_bytes(ledger.temp_bytes)} of temporaries; compiled in {ledger.compile_seconds} s"
    )

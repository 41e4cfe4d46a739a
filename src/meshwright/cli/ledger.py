"""`meshwright ledger`: what a compiled step sends over each mesh axis, and the minimum."""

from meshwright.cli.request import Request, assemble_first
from meshwright.errors import CheckFailed, ExitCode
from meshwright.ledgers import make_ledger
from meshwright.ledgers.ledger_records import ledger_picture


def run(request: Request) -> int:
    """Compile the step without running it and list its collectives."""
    remarks = request.report_unused_settings(request.plan())
    batch, assembled = assemble_first(request.trainer())
    ledger = make_ledger(assembled, batch)
    report = {**ledger.model_dump(mode="json"), "suspicious": ledger.suspicious, "remarks": remarks}
    request.output.result(report, ledger_picture(ledger))
    if request.config.strict and ledger.suspicious:
        axis = ledger.suspicious[0]
        own = ledger.axes[axis]
        raise CheckFailed(
            f"the program sends {own.ratio} times what the plan needs over {axis}",
            why=f"{own.sent_bytes:,} bytes against {own.minimum_bytes:,}; "
            + "; ".join(own.excess[:3] or ["no module stands out"]),
            fix="run without strict=true to see the whole ledger",
        )
    return ExitCode.DONE

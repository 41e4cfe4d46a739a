"""`meshwright inspect`: the mesh, the plan, and what each device holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.errors import ExitCode, UserError
from meshwright.mesh.build import build_mesh
from meshwright.mesh.draw import render_mesh
from meshwright.mesh.svg import mesh_svg


def run(request: Request) -> int:
    """Show the mesh and the plan."""
    plan = request.plan()
    mesh = build_mesh(plan.mesh)
    if request.arguments.has("--svg"):
        _write(Path(request.arguments.flags["--svg"]), mesh_svg(mesh))
    report: dict[str, Any] = {
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "plan": plan.model_dump(mode="json"),
    }
    picture = Group(render_mesh(mesh), Text(), Text(plan.describe()))
    request.output.result(report, picture)
    return ExitCode.DONE


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}", why=str(error)) from error

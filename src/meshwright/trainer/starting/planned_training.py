"""What the planner says about a trainer's model on some hardware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.guidance.plan_report import PlanReport
from meshwright.planner.guidance.plan_text import report_text
from meshwright.text.columns import as_text


@dataclass(frozen=True)
class PlannedTraining:
    """The best plan for a model on some hardware; as text, what `meshwright plan` prints.

    Attributes:
        report: all that is known about it and about other plans.
    """

    report: PlanReport

    @property
    def plan(self) -> Plan:
        """The plan: what `meshwright.Trainer` takes as its mesh."""
        return self.report.best.plan

    @property
    def estimate(self) -> Estimate:
        """Its time per update and its memory per device."""
        return self.report.best

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that ``meshwright train plan=FILE`` reads."""
        Path(path).write_text(self.report.to_yaml(), encoding="utf-8")

    def __str__(self) -> str:
        """Return the report for reading."""
        return as_text(report_text(self.report))

"""The doctor's report as text, with a block to paste into a bug report."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from meshwright.text.columns import Indented
from meshwright.text.units import counted

Report = Mapping[str, Any]


def render(report: Report) -> RenderableType:
    """Return the report for the terminal."""
    facts = list(_facts(report))
    width = max(len(name) for name, _ in facts) + 2
    return Group(
        _verdict(report),
        Text(),
        *(
            Indented(Text.assemble((f"{name:<{width}}", "dim"), value), width, first=0)
            for name, value in facts
        ),
        Text(),
        *_warnings(report),
        Text("For a bug report, copy this:", "dim"),
        Text(_block(report), overflow="fold"),
    )


def _verdict(report: Report) -> Text:
    count = report["devices"]
    if report["all_reduce_ok"] and count == 1:
        return Text("✓ The device works.", "bold green")
    if report["all_reduce_ok"]:
        terms = "1 + 2" if count == 2 else f"1 + … + {count}"
        total = report["all_reduce"]["expected"]
        return Text(
            f"✓ The {count} devices work together: {terms} = {total} on each.", "bold green"
        )
    if not count:
        return Text("✗ There is no device to train on.", "bold red")
    return Text(f"✗ The {count} devices do not work together.", "bold red")


def _warnings(report: Report) -> Iterator[RenderableType]:
    for warning in report["warnings"]:
        yield Indented(f"! {warning['problem']}", 2, "yellow", first=0)
        yield Indented(warning["remedy"], 2)
    if report["warnings"]:
        yield Text()


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the facts by name, each as one line of text."""
    kinds = ", ".join(f"{count} × {kind}" for kind, count in report["device_kinds"].items())
    # JAX has one CPU device per machine, so several in a process are virtual.
    virtual = ", virtual" if report["backend"] == "cpu" and report["local_devices"] > 1 else ""
    totals = {device["memory_total_bytes"] for device in report["device_list"]} - {None}
    usable = f", {' or '.join(map(decimal, sorted(totals)))} usable each" if totals else ""
    yield "devices", (kinds or "none") + virtual + usable
    count = report["process_count"]
    among = "the only one" if count == 1 else f"among {count}"
    devices = counted(report["local_devices"], "device")
    yield "process", f"{report['process_index']}, {among}, with {devices}"
    for entry in report["ranks"]:
        rank = f"rank {entry['rank']} of {entry['world_size']}"
        if entry["local_rank"] is not None:
            rank += f", local rank {entry['local_rank']}"
        names = ", ".join(entry.get("variables", {}).values())
        yield f"  {entry['source']}", rank + (f" (from {names})" if names else "")
    if where := report.get("coordinator"):
        source = where["variable"] or "the default"
        yield "  process 0", f"at {where['address']} port {where['port']} (from {source})"
    versions = (f"{name} {version or 'missing'}" for name, version in report["versions"].items())
    yield "versions", ", ".join(versions)
    yield "system", f"{report['platform']}, {report['usable_cores']} of {report['cores']} cores"
    yield "memory", _memory(report["memory"])
    free, total = report["disk"]["free_bytes"], report["disk"]["total_bytes"]
    yield "disk", f"{decimal(free)} of {decimal(total)} free here"
    variables = [f"{name}={value}" for name, value in report["environment"].items()]
    yield "environment", "\n".join(variables) or "nothing set that matters"


def _memory(memory: Mapping[str, int | None]) -> str:
    total, available = memory["host_total_bytes"], memory["host_available_bytes"]
    limit = memory["container_limit_bytes"]
    text = f"{decimal(available)} of {decimal(total)} available" if total and available else "?"
    return text + (f", this container may use {decimal(limit)}" if limit else "")


def _block(report: Report) -> str:
    """Return the facts and warnings as fenced plain text."""
    reduced = "right" if report["all_reduce_ok"] else report["all_reduce"]["error"] or "wrong"
    lines = [f"all-reduce: {reduced}"]
    for name, value in _facts(report):
        lines += [f"{name.strip()}: {line}" for line in value.splitlines()]
    lines += [f"warning: {warning['problem']}" for warning in report["warnings"]]
    return "\n".join(["```text", *lines, "```"])

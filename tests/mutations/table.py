"""The table of mutations in docs/proof.md: `python -m mutations.table` in tests/ writes it."""

from pathlib import Path

from mutations.registry import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
START, END = "<!-- mutations: start -->\n", "<!-- mutations: end -->\n"


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| sabotage | caught by | where |", "|---|---|---|"]
    for kind, module in KINDS.items():
        lines.append(f"| **{kind}** | | |")
        for mutation in module.MUTATIONS:
            known = f" ({mutation.seen})" if mutation.seen else ""
            where = ", ".join(text.replace("_", " ") for text in mutation.caught)
            lines.append(f"| {mutation.does}{known} | {mutation.check.name} | {where} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the table that is in the page."""
    return PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]


def main() -> None:
    """Write the table to the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

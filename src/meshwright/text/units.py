"""Numbers with units, formatted for reading."""

from collections.abc import Iterable, Sequence


def human_bytes(count: float) -> str:
    """Return bytes with a decimal unit, as memory of chips is counted: ``36.0 GB``."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def human_count(count: float) -> str:
    """Return a number with three digits and a letter: ``52.7k``."""
    for letter in ("", "k", "M", "G"):
        if abs(count) < 999.5:
            return f"{count:.3g}{letter}"
        count /= 1000
    return f"{count:.3g}T"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: ``1 step``, ``3 steps``, ``4 meshes``, ``2 leaves``."""
    ending = "es" if noun.endswith(("ch", "s", "sh")) else "s"
    return f"{count} {noun if count == 1 else plural or noun + ending}"


def numbered(noun: str, numbers: Sequence[int], most: int = 8) -> str:
    """Return a noun and its numbers: ``process 3``, ``machines 0, 2``; after the first, ``…``."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    shown = [*map(str, numbers[:most]), *(["…"] if len(numbers) > most else [])]
    return f"{noun if len(numbers) == 1 else plural} {', '.join(shown)}"


def a_type(value: object) -> str:
    """Return the type of a value with its article: ``an int``, ``a list``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def either(numbers: Iterable[int]) -> str:
    """Return numbers to choose from: ``4 or 8``."""
    return " or ".join(map(str, numbers))


def human_seconds(seconds: float) -> str:
    """Return a duration in its two largest units: ``3m12s``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{rest:02d}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if days else f"{hours}h{minutes:02d}m"

"""The versions of the packages that affect what a run computes."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def own_version() -> str:
    """Return the version of Meshwright; from sources that are not installed it is not known."""
    return package_versions().get("meshwright", "(not installed)")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of these packages, by name."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions

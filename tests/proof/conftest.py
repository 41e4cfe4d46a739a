"""Proofs compile much and run little."""

import pytest
from quick import quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(autouse=True)
def _quick(quick_compilation):
    return quick_compilation

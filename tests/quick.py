"""Compiling for tests that run a program once or twice: machine code need not be polished."""

import sys

import jax
import pytest

from meshwright.compiled.compile_program import quick_options
from meshwright.step import initial_state

__all__ = ["quick_options"]


@pytest.fixture
def quick_compilation(monkeypatch):
    """Let the programs Meshwright compiles during a test be compiled quickly."""
    compile_quickly(monkeypatch)


@pytest.fixture(scope="module")
def quick_module():
    """Let the programs Meshwright compiles during all tests of a file be compiled quickly."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_quickly(monkeypatch)
        yield


_initializers = {}
"""Functions that draw initial values, compiled quickly: all tests of a process share them."""


def compile_quickly(monkeypatch):
    """Give every program Meshwright compiles the quick options."""
    compiled = jax.jit

    def jit(*args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        # Libraries mark functions that run inside of others, where options are refused.
        inside = ("meshwright.distributed", "meshwright.program.kernels.fused_attention")
        own = caller.startswith("meshwright") and not caller.startswith(inside)
        options = {"compiler_options": quick_options()} if own else {}
        return compiled(*args, **{**kwargs, **options})

    quick_options()
    # Initializers compiled before were compiled otherwise, and later ones will be again.
    monkeypatch.setattr(initial_state, "_functions", _initializers)
    monkeypatch.setattr(jax, "jit", jit)

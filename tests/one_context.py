"""Programs lowered in one context of the compiler's library, as JAX does from 0.12 on.

Making a context takes 5 ms, and tests lower tens of thousands of small programs. What a context has
interned stays in memory, so there is a new one now and then.
"""

import threading
from importlib.metadata import version

_USES = 10


def lower_in_one_context():
    """Let threads keep the context of a program for the next ones."""
    if not version("jax").startswith("0.10."):
        return
    from jax._src.interpreters import mlir

    make, kept = mlir.make_ir_context, threading.local()

    def reused():
        kept.left = getattr(kept, "left", 0) - 1
        if kept.left < 0:
            kept.context, kept.left = make(), _USES
        return kept.context

    mlir.make_ir_context = reused

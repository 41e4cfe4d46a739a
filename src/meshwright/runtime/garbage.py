"""Fewer garbage collections while programs are traced."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS = 100_000
"""New objects after which it looks for garbage; Python's own number is 700."""


@contextmanager
def few_collections() -> Generator[None]:
    """Look for garbage seldom inside, and not among what exists already. Also a decorator.

    Imports and traced programs are many objects that stay. To look through all of them again and
    again would take a tenth of the time in which they are made.
    """
    before = gc.get_threshold()
    # Python itself freezes some hundred objects. If the program froze its own, they stay so; to
    # count them takes long, and a program that looks as seldom itself has seen to it.
    freeze = before[0] < OBJECTS and gc.get_freeze_count() < OBJECTS
    if freeze:
        gc.freeze()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freeze:
            gc.unfreeze()

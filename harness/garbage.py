"""Python's cyclic garbage collector, kept out of work that makes objects by the million and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Without it every collection walks all that is there already: quadratic where nothing is let go, a fifth of the
    time where all is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""The end of a program with kernels in JAX's functions.

JAX's end waits for XLA's threads with the GIL, which a kernel may need there. So :func:`xla.end` has to come before it. What a
program itself has registered with ``atexit`` after this comes first, and may still make such calls.
"""

import atexit
import sys

from ..ground.once import once

__all__ = ["end_before_jax"]


@once
def end_before_jax() -> None:
    """Call ``xla.end`` when the program ends, before the end that JAX has registered when it was imported."""
    atexit.register(_end)


def _end() -> None:
    xla = sys.modules.get(f"{__package__}.xla")
    if xla is not None:
        xla.end()


if hasattr(sys.modules.get("jax"), "jit"):  # it is complete; else the handler's registration does this
    end_before_jax()

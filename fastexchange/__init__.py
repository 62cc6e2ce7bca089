"""fastexchange: tensors of any framework straight into Numba kernels, at the cost of hand-written C.

Start at :func:`fast_args`. The way of one argument: ``kernel`` (what is called), ``dispatch.shim`` (the native call),
``dispatch.plan`` and ``dispatch.walk`` (reading the arguments), ``dispatch.entry`` (into the kernel and out again);
``slow_path`` and ``discovery`` for what is met for the first time; ``dlpack``, ``cpython`` and ``native`` are the ground.
"""

from .dlpack import DLDataTypeCode, DLDeviceType
from .kernel import FastKernel, KernelStats, fast_args

__all__ = ["DLDataTypeCode", "DLDeviceType", "FastKernel", "KernelStats", "explain", "fast_args"]
__version__ = "0.1.0"


def explain(obj, /):
    """Which path `obj` takes into a kernel, and why not a faster one: an ``Explanation``; print it.

    >>> import numpy as np
    >>> explain(np.ones(3)).path
    'ndarray'
    """
    from .explanation import explain as explain_object

    return explain_object(obj)

"""``out = a * x + y`` of vectors: the update called axpy in the BLAS.

Source: C. L. Lawson, R. J. Hanson, D. R. Kincaid and F. T. Krogh, "Basic Linear Algebra Subprograms for Fortran
Usage", ACM TOMS 5 (1979); there ``y`` is overwritten, which is ``axpy(a, x, y, y)`` here.

Tested in ``tests/programs/test_kernels.py`` against ``torch.add(y, x, alpha=a)`` and NumPy's ``a * x + y``, and in
``test_kernels_half.py``.
"""

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from fastexchange import fast_args

from .exponential import is_narrow
from .overlap import apart_or_same, injective, place

_WORTH_THREADS = 1 << 15  # elements; with fewer, one thread is as fast


def _factor(a, x, y, out):
    """`a`, in float32 if it is real and all elements have 16 bits or fewer."""
    return a


@overload(_factor)
def _factor_of(a, x, y, out):
    if all(is_narrow(each.dtype) for each in (x, y, out)) and not isinstance(a, types.Complex):
        return lambda a, x, y, out: np.float32(a)
    return lambda a, x, y, out: a


@njit
def _check(x, y, out):
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    if y.shape != out.shape:
        raise ValueError("y: its shape must be that of out")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating or complex")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart_or_same(place(x), place(out)) and apart_or_same(place(y), place(out))):
        raise ValueError("out: overlaps x or y without being the same view")


@fast_args(out="x[n], y[n] -> out[n]: x", parallel=True, cache=True)
def axpy(a, x, y, out):
    """Write ``a * x + y`` into `out`.

    Parameters
    ----------
    a : a real or complex number.
    x, y : shape (n,), any real or complex dtypes.
    out : shape (n,), floating or complex; made in the dtype of `x`. Written.

    The sum is computed in the common type of `a`, the elements of `x` and those of `y` (float64, for a Python float
    and float32 arrays), and rounded once, to the dtype of `out`. If all arrays have 16 bits or fewer, it is computed in
    float32. Complex values do not go into a real `out`: Numba's
    compile error.

    Aliasing: `out` may be `x`, `y` or both; it must not overlap them otherwise, nor itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 1:
        raise ValueError("out: must have one dimension")
    _check(x, y, out)
    factor = _factor(a, x, y, out)
    if out.shape[0] < _WORTH_THREADS:
        for i in range(out.shape[0]):
            out[i] = factor * x[i] + y[i]
    else:
        for i in prange(out.shape[0]):
            out[i] = factor * x[i] + y[i]

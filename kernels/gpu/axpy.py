"""``out = a * x + y`` of vectors, a thread for each element.

Source: see ``kernels.axpy``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

from typing import Any

from fastexchange import fast_args

from .common import check, given

cuda: Any = None  # given


def _axpy(a, x, y, out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = a * x[i] + y[i]


def body(cuda):
    """The kernel ``axpy(a, x, y, out)``, for at least as many threads as elements."""
    return given(_axpy, cuda=cuda)


def make(cuda):
    """``axpy(a, x, y, out, stream=None)``: write ``a * x + y`` into `out`.

    `x`, `y`, `out`: shape (n,), floating; `out` may be `x`, `y` or both. The sum is computed in the common type of `a`
    and the elements, and rounded once. Raises ValueError for other shapes.
    """
    kernel = fast_args(cuda.jit(body(cuda)))

    def axpy(a, x, y, out, stream=None):
        check(len(out.shape) == 1, "out: must have one dimension")
        check(tuple(x.shape) == tuple(y.shape) == tuple(out.shape), "x, y: their shapes must be that of out")
        kernel.forall(out.shape[0], stream=stream)(a, x, y, out)

    axpy.kernel = kernel
    return axpy

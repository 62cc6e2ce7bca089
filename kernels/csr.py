"""Product of a sparse matrix in CSR form and a vector: ``out[i] = sum of data[k] * x[indices[k]]`` over row i's `k`.

Source: Y. Saad, "Iterative Methods for Sparse Linear Systems" (2nd ed., 2003), section 3.4: the compressed sparse row
format and its product with a vector (section 3.5).

Tested in ``tests/programs/test_kernels_sums.py`` against NumPy and ``scipy.sparse.csr_matrix @ x``.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .offsets import cut_within
from .overlap import apart, injective, place

_WORTH_THREADS = 1 << 15  # stored elements; with fewer, one thread is as fast
_BLOCKS = 64  # that the indices, and then the rows, are cut into: enough for threads to be equally busy


@njit
def _outside(indices, size):
    """How many integers are no index below `size`. One vectorised pass: as an unsigned number a negative one is large."""
    outside = 0
    for k in range(indices.shape[0]):
        outside += np.uint64(indices[k]) >= np.uint64(size)
    return outside


# "reassoc" lets the sum be vectorised; unlike all of fastmath it keeps NaN and infinities
@njit(fastmath={"reassoc"})
def _rows(indptr, indices, data, x, out, first, last):
    for i in range(first, last):
        total = out.dtype.type(0)
        for k in range(np.uintp(indptr[i]), np.uintp(indptr[i + 1])):
            total += data[k] * x[np.uintp(indices[k])]
        out[i] = total


@njit
def _check(indptr, indices, data, x, out):
    if indptr.dtype.kind != "i" and indptr.dtype.kind != "u":
        raise ValueError("indptr: must be integers")
    if indices.dtype.kind != "i" and indices.dtype.kind != "u":
        raise ValueError("indices: must be integers")
    if data.shape != indices.shape:
        raise ValueError("data: its shape must be that of indices")
    if out.shape[0] != indptr.shape[0] - 1:
        raise ValueError("out: its length must be that of indptr less one")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating or complex")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart(place(indptr), place(out)) and apart(place(indices), place(out))):
        raise ValueError("out: overlaps indptr or indices")
    if not (apart(place(data), place(out)) and apart(place(x), place(out))):
        raise ValueError("out: overlaps data or x")
    if not cut_within(indptr, indices.shape[0]):
        raise ValueError("indptr: must not decrease, and lie within indices")


@fast_args(out="data[stored], indptr[cuts], indices[stored], x[columns] -> out[cuts - 1]: data", parallel=True, cache=True)
def csr_matvec(indptr, indices, data, x, out):
    """Write the product of a matrix of ``(rows, columns)`` and `x` into `out`.

    Parameters
    ----------
    indptr : shape (rows + 1,), integers that do not decrease, from 0 to the number of stored elements: row `i` has the
        elements from ``indptr[i]`` up to ``indptr[i + 1]``.
    indices : shape (stored,), integers from 0 to ``columns - 1``, in any order; what occurs twice in a row is added.
    data : shape (stored,), any real or complex dtype: the elements.
    x : shape (columns,), any real or complex dtype.
    out : shape (rows,), floating or complex; made in the dtype of `data`. Written.

    Products and sums are in the common type of `data`, `x` and `out`, rounded once, to the dtype of `out`.

    All offsets and indices are checked before anything is read by them or written, in one pass over each.

    Aliasing: `out` must not overlap any input, nor itself.

    Raises ValueError if a shape, an offset, an index, a dtype or an overlap breaks these rules.
    """
    if indptr.ndim != 1:
        raise ValueError("indptr: must have one dimension")
    if indices.ndim != 1:
        raise ValueError("indices: must have one dimension")
    if x.ndim != 1:
        raise ValueError("x: must have one dimension")
    if out.ndim != 1:
        raise ValueError("out: must have one dimension")
    _check(indptr, indices, data, x, out)
    rows = out.shape[0]
    if indices.shape[0] < _WORTH_THREADS:
        if _outside(indices, x.shape[0]) != 0:
            raise ValueError("indices: must lie within x")
        _rows(indptr, indices, data, x, out, 0, rows)
        return
    outside = np.zeros(_BLOCKS, np.int64)
    for checking in (True, False):
        for block in prange(_BLOCKS):
            if checking:
                length = -(-indices.shape[0] // _BLOCKS)
                outside[block] = _outside(indices[block * length : (block + 1) * length], x.shape[0])
            else:
                first, last = rows * block // _BLOCKS, rows * (block + 1) // _BLOCKS
                _rows(indptr, indices, data, x, out, first, last)
        if outside.any():
            raise ValueError("indices: must lie within x")

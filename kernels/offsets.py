"""Do offsets cut an array into pieces that lie within it? What kernels ask that take offsets.

``n + 1`` offsets cut `n` pieces: piece `k` is what lies from ``offsets[k]`` up to, and without, ``offsets[k + 1]``. These
are the row pointers of a sparse matrix in CSR form, and the offsets of ``torch.segment_reduce``.
"""

import numpy as np
from numba import njit


@njit
def cut_within(offsets, size):
    """Whether integer `offsets` never decrease, and begin and end within an array of `size` elements.

    One pass over the offsets, vectorised. They may leave elements out before the first and after the last piece.
    """
    if offsets.shape[0] == 0:
        return False
    descents = 0
    for k in range(offsets.shape[0] - 1):
        descents += np.int64(offsets[k]) > np.int64(offsets[k + 1])
    return descents == 0 and np.int64(offsets[0]) >= 0 and np.int64(offsets[-1]) <= size

"""Kernels for CUDA: the GPU's side of the collection, written for ``numba.cuda`` and ``numba_cuda_mlir.cuda`` alike.

==============  ==============================================================================
``axpy``        ``out = a * x + y`` of vectors
``softmax``     softmax of each row of a matrix
``rms_norm``    root mean square normalisation of each row of a matrix
``heat``        one time step of the 2-D heat equation, five-point stencil
``histogram``   counts of a vector's values in bins of equal width
==============  ==============================================================================

Each module has ``body(cuda, …)``, the functions that ``cuda.jit`` compiles, and ``make(cuda)``, a function for tensors
on a GPU of any framework that launches them: ``axpy = kernels.gpu.axpy.make(numba.cuda)``, then ``axpy(2.0, x, y,
out)``. That checks shapes, chooses grid and block, and launches on the stream of the tensors' framework, or on
`stream`; it does not wait.

Rules that all of them keep: outputs come last and are given by the caller; inputs are only read; any memory layout is
taken; what would read or write out of bounds is a ValueError, before anything is launched. An output must not overlap
an input otherwise than its docstring allows: on a GPU that is not checked.

Arithmetic is in the elements' type, float32 or float64, the wider one of a call's tensors; float16 and bfloat16 are computed
in float32, and rounded once. That is another rule than that of the CPU's kernels, most of which compute in float64.
numba-cuda-mlir 0.6 rounds a NaN to bfloat16 as -0.0.
"""

__all__ = ["axpy", "heat", "histogram", "rms_norm", "softmax"]

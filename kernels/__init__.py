"""This repository's own kernels: small, real, and checked against PyTorch and NumPy.

They show how a kernel for ``@fast_args`` is written, and the tests, the benchmarks and the notebooks call them. The
folder is not installed with the package: import it from the repository's root.

===============================  =============================================================================
``axpy.axpy``                    ``out = a * x + y`` of vectors
``softmax.softmax``              softmax of each row of a matrix
``log_softmax.log_softmax``      its logarithm
``layer_norm.layer_norm``        layer normalisation of each row of a matrix
``rms_norm.rms_norm``            root mean square normalisation of each row of a matrix
``rotary.rotary``                rotary position embedding of attention's queries or keys
``cross_entropy.cross_entropy``  cross entropy of logits and targets, with label smoothing
``sampling.sample``              a token drawn from each row of logits: top-k, top-p, temperature
``adamw.adamw_step``             one step of the optimiser AdamW over a list of parameters
``histogram.histogram``          counts of a vector's values in bins of equal width
``heat.heat_step``               one time step of the 2-D heat equation, five-point stencil
``scan.exclusive_scan``          sum of all elements before each: lengths to offsets
``segments.segment_sum``         sum of each segment of a vector or matrix; also ``_mean``, ``_max``, ``_min``
``distances.pairwise``           Euclidean distances of the rows of two matrices
``distances.nearest``            each row's nearest rows in another matrix
``iir.sosfilt``                  IIR filter of second-order sections
``runs.run_length_encode``       runs of equal elements; ``run_length_decode`` goes back
``csr.csr_matvec``               sparse matrix in CSR form times vector
===============================  =============================================================================

What they share: ``overlap`` (which memory do arrays share?), ``offsets`` (are these rows of a ragged array?), ``exponential``
(``exp`` that is vectorised), ``rows``.

Rules that all of them keep:

- A kernel's outputs are its last parameters, ``out`` or several. What is given is written into; what is omitted, or None,
  is made first: a tensor of the framework of the first input in the notation, of the shape and the dtype that the
  kernel's docstring says ("made in the dtype of `x`"). The call returns its output, or a tuple of them. Inputs are only
  read. Only where the data decide an output's size does a kernel return new arrays and take none (``runs``).
  An optimiser's step (``adamw``) updates what it is given, and returns None.
- An output that is made like an integer input, where only a floating one can hold the result, is refused as one that is
  given: softmax of integers wants a floating ``out``.
- softmax, rms_norm, rotary and cross_entropy declare their gradients, for PyTorch and JAX.
- Any mix of producers, dtypes and memory layouts is taken: contiguous, transposed, strided, negative strides.
- What would read or write out of bounds, or give a wrong result, raises ValueError before anything is written: shapes
  that do not match, an ``out`` whose dtype cannot hold the result, an ``out`` that overlaps an input in a way that the
  kernel's aliasing rule does not allow (see ``overlap``). The message is constant and begins with the argument's name.
  Inputs from whose shapes none follows for an omitted output are refused by ``fast_args``, with a ValueError too.
- An array of the wrong number of dimensions is a ValueError or one of Numba's compile errors.
- Compiled code is cached on disk.
"""

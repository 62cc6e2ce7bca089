"""A hundred kernels whose machine code is in the wheel.

The modules with ``@fast_args`` need nothing else. In the others the functions are plain ``numba.njit``'s: ``accelerate`` makes
kernels of them, which find the package's code as the others do. It stands before the modules are imported.
"""

from fastexchange import accelerate

accelerate(__name__)

from . import activations, distances, elementwise, integers, matrices, reductions, sequences, series  # noqa: E402

MODULES = activations, distances, elementwise, integers, matrices, reductions, sequences, series


def __precompile__():
    """What the build compiles: the lists of all modules. The build asks the package, unless it has `targets`."""
    return [entry for module in MODULES for entry in module.__precompile__()]

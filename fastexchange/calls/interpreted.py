"""What ``fast_args`` makes under ``NUMBA_DISABLE_JIT=1``, where ``njit`` gives the function back: it sees NumPy views.

Its calls are those that a kernel leaves to Numba's own dispatcher (``calls.fallback``), with the Python function in its place. So
what a kernel refuses is refused here in the same words.
"""

import functools
from types import SimpleNamespace
from typing import Any

from ..ground.numba_internals import OmittedArg

__all__ = ["interpreted"]


def interpreted(func, kernel_options, parameters, outputs):
    """A function that gives `func` NumPy views of its tensors, and its results back as a kernel of this `kernel_options` does."""
    from ..dispatch.runtime import runtime
    from .bound_launch import OrdinaryLaunch
    from .fallback import call_numba, check_arguments

    def with_names(*args, **named):
        """Call `func`; what only a name can pass comes behind the positional arguments, as Numba's dispatcher takes it."""
        args = tuple(value.value if isinstance(value, OmittedArg) else value for value in args)
        if parameters.variadic is None:
            count = parameters.positional
            named.update(zip(parameters.names[count : len(args)], args[count:], strict=True))
            args = args[:count]
        return func(*args, **named)

    kernel = SimpleNamespace(
        __name__=func.__name__, __qualname__=func.__qualname__, _call_own=with_names, returns=kernel_options.returns,
        allows_grad=kernel_options.allows_grad, storage=kernel_options.storage, _parameters=parameters,
        _native=SimpleNamespace(runtime=runtime()), _is_numbas=False,
    )  # fmt: skip

    def run(bound: tuple):
        check_arguments(kernel, bound)
        return call_numba(kernel, bound)

    def call_bound(bound: tuple):
        return run(bound) if outputs is None else outputs.call(bound, kernel_options.returns, run)

    @functools.wraps(func)
    def call(*args, **kwargs):
        return call_bound(parameters.bind(*args, **kwargs))

    def bind(*args, **kwargs):
        """``FastKernel.bind``."""
        return OrdinaryLaunch(call, complete(parameters.bind(*args, **kwargs)))

    def complete(bound: tuple) -> tuple:
        return bound if outputs is None else outputs.complete(bound, kernel_options.returns)

    of_call: Any = call
    of_call.py_func, of_call.bind, kernel.itself = func, bind, call
    of_call._parameters, of_call._call_bound, of_call._complete = parameters, call_bound, complete
    return call

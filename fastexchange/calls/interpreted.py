"""``fast_args`` under ``NUMBA_DISABLE_JIT=1``, where ``njit`` returns the Python function: the function gets NumPy views.

Calls go by the fallback (``calls.fallback``), with the Python function in place of Numba's dispatcher. Errors are a kernel's.
``precompile`` compiles nothing, and returns no signatures; ``counts`` has slow calls only.
"""

import functools
from collections import Counter
from types import MethodType, SimpleNamespace
from typing import Any

from ..ground.numba_internals import OmittedArg
from ..ground.parameters import flatten
from ..producers.framework import framework_that_sees

__all__ = ["interpreted"]


class _Native:
    """What a kernel has natively: the table of this process. Functions with a kernel are pickled by value."""

    @property
    def runtime(self):
        from ..dispatch.runtime import runtime

        return runtime()


def interpreted(declared):
    """Return a function that calls another one with NumPy views of its tensors, and returns results as a kernel does.

    `declared`: the function's ``OptionsOf``.
    """
    from .bound_launch import BoundLaunch
    from .fallback import call_numba, check_arguments
    from .kernel import FastKernel, KernelCounts

    func, kernel_options = declared.function, declared.options
    parameters, outputs = declared.parameters, declared.outputs

    def with_names(*args, **named):
        """Call `func`. `args` has the keyword-only arguments after the positional ones, as Numba's dispatcher takes them."""
        args = tuple(value.value if isinstance(value, OmittedArg) else value for value in args)
        if parameters.variadic is None:
            count = parameters.positional
            named.update(zip(parameters.names[count : len(args)], args[count:], strict=True))
            args = args[:count]
        return func(*args, **named)

    kernel = SimpleNamespace(
        __name__=func.__name__, __qualname__=func.__qualname__, _call_own=with_names, _parameters=parameters,
        _native=_Native(), _is_numbas=False, _is_interpreted=True, **kernel_options._asdict(),
    )  # fmt: skip

    calls = 0

    def run(bound: tuple):
        nonlocal calls
        calls += 1
        check_arguments(kernel, bound)
        return call_numba(kernel, bound)

    def call_bound(bound: tuple):
        leaves = [value for i, item in enumerate(bound) for _, value in flatten(i, item)]
        framework = framework_that_sees(call, leaves)
        if framework is not None and (result := framework.call(call, bound)) is not NotImplemented:
            return result
        return run(bound) if outputs is None else outputs.call(bound, kernel_options.returns, run)

    @functools.wraps(func)
    def call(*args, **kwargs):
        return call_bound(parameters.bind(*args, **kwargs))

    def bind(*args, **kwargs):
        """``FastKernel.bind``."""
        return BoundLaunch(call, args, kwargs)

    def explain(*args, **kwargs):
        """``FastKernel.explain``."""
        from .explanation import Outcome, explained, refusal

        bound = parameters.bind(*args, **kwargs)
        try:
            bound = complete(bound)
            check_arguments(kernel, bound)
            outcome = Outcome("numba", "Python makes all calls, tensors as NumPy views: NUMBA_DISABLE_JIT is set")
        except Exception as error:
            outcome = refusal(error)
        return explained(kernel, bound, outcome)

    def complete(bound: tuple) -> tuple:
        return bound if outputs is None else outputs.complete(bound, kernel_options.returns)

    of_call: Any = call
    for name, value in kernel_options._asdict().items():
        setattr(of_call, name, value)
    of_call.py_func, of_call.bind, kernel._decorated = func, bind, call
    of_call.__signature__ = declared.signature
    of_call.precompile = lambda *calls: []
    of_call.explain, of_call.counts, of_call.recompile = explain, lambda: KernelCounts(0, calls, 0), lambda: None
    of_call.signatures, of_call.stats = [], SimpleNamespace(cache_path=None, cache_hits=Counter(), cache_misses=Counter())
    of_call._parameters, of_call._call_bound, of_call._complete = parameters, call_bound, complete
    of_call.as_torch_op = MethodType(FastKernel.as_torch_op, call)
    of_call._pattern, of_call._device_kernel, of_call._by_xla, of_call._vectorcall = declared.pattern, None, None, 0
    of_call._native, of_call._is_interpreted, of_call._is_numbas, of_call._call_differentiated = kernel._native, True, False, None
    return call

"""``precompile``: compile a kernel for signatures, or for example arguments, without calling it.

Everything that later calls of the same kind need is compiled, and kept where they look for it: the kernel (on disk with
``cache=True``), and the package's native code (on disk always).
"""

from collections.abc import Callable
from typing import Any

from numba.core import sigutils, types

from ..dispatch import boxing, structs
from ..dispatch.reading import DRY_RUN
from ..dispatch.trampoline import trampoline
from ..ground.numba_internals import (
    Signature,
    can_compile,
    compile_result,
    compiles_as_numba,
    declared_signature,
    is_object_mode,
    overloads_of,
    type_of_argument,
)
from ..ground.omitted import OMITTED
from ..ground.safe_repr import shown
from .compile_errors import not_declared
from .declared import as_computed
from .fallback import are_numbas, as_numba_takes_it, call_numba
from .resolve import Report, Resolver, declared_signature_for

__all__ = ["arguments_of", "compiled_natively", "precompile", "signature_in"]


def signature_in(call: Any) -> Any:
    """Return a signature among the arguments of ``precompile``; None for example arguments."""
    if isinstance(call, (str, Signature)):
        return call
    if type(call) is tuple and call and all(isinstance(each, types.Type) for each in call):
        return call
    return None


def arguments_of(call: Any, what: str) -> tuple[tuple, dict[str, Any]]:
    """Return example arguments: positional, and by name. `what`: the method, for the message of TypeError."""
    if type(call) is tuple:
        if any(isinstance(each, types.Type) for each in call):
            raise TypeError(f"{what}: {shown(call)} has Numba types beside values; give types alone, or values alone")
        return call, {}
    if type(call) is dict and all(type(name) is str for name in call):
        return (), call
    raise TypeError(
        f"{what} takes signatures, tuples of example arguments, and dicts of example arguments by name, not {shown(call)}; put "
        "the arguments of one call into a tuple"
    )


def precompile(kernel, calls: tuple) -> list[tuple]:
    """See :meth:`FastKernel.precompile`."""
    what = f"{kernel.__qualname__}.precompile()"
    done = []
    for call in calls:
        signature = signature_in(call)
        if signature is not None:
            done.append(_for_signature(kernel, signature, what))
        else:
            args, kwargs = arguments_of(call, what)
            done.append(_for_example(kernel, args, kwargs, what))
    return done


def _for_signature(kernel, signature, what: str) -> tuple:
    """Compile for a signature, and how native code calls such kernels and returns their results.

    A call compiles for its arguments' types, and looks for code by them. So a result's type declares nothing here.
    """
    arguments, result = sigutils.normalize_signature(as_computed(signature))
    given = tuple(arguments)
    taken: tuple | None = given
    if can_compile(kernel):
        kernel.compile(given)
    else:
        taken = declared_signature_for(kernel, given)
    if taken is None:
        raise not_declared(kernel, given, what)
    returned = compile_result(kernel, taken).signature.return_type
    if result is not None and result != returned:
        raise TypeError(f"{what}: with arguments ({', '.join(map(str, given))}) it returns {returned}, not {result}")
    if is_object_mode(kernel) or not kernel._has_parameters or not kernel._native.runtime.is_native:
        return taken
    try:
        trampoline(given, taken)
        boxing.box(returned)
    except boxing.UnsupportedEntry:  # Numba's own dispatcher makes such calls
        pass
    return taken


def _for_example(kernel, args: tuple, kwargs: dict[str, Any], what: str) -> tuple:
    """Compile for a call with these arguments."""
    bound = None if is_object_mode(kernel) or not kernel._has_parameters else kernel._bind(args, kwargs)
    if bound is None:
        return _taken_by(kernel, lambda: kernel._compile_for_args(*args, **kwargs))
    bound = kernel._complete(bound)
    report = None
    if kernel._native.runtime.is_native and compiles_as_numba(kernel):
        report = compiled_natively(kernel, bound)
        if report.overload is not None:
            return report.overload.taken
    if kernel._is_for_device_kernel(bound, report is not None and report.status == structs.STATUS_DEVICE):
        return kernel.cuda.precompile(kwargs or args)[0]
    if not can_compile(kernel):
        values = [as_numba_takes_it(kernel, i, value) for i, value in enumerate(bound) if value is not OMITTED]
        given = tuple(map(type_of_argument, values))
        if (taken := declared_signature(kernel, given)) is None:
            raise not_declared(kernel, given, what)
        return taken
    taken = _taken_by(kernel, lambda: call_numba(kernel, bound, is_made=False))
    if report is not None and report.unmade is not None:
        kernel._native.add_numba_only(*report.unmade)
    return taken


def compiled_natively(kernel, bound: tuple) -> Report:
    """Compile for a call that native code makes: ``overload`` of the report. If that is None, it does not."""
    resolver = Resolver(kernel, bound)
    report = resolver.report
    try:
        resolver.run(DRY_RUN)
        if report.status == structs.STATUS_UNKNOWN_SHAPE:
            overload = kernel._native.find(report.keys) or resolver.specialise()
            report.overload = overload if overload is not None and overload.is_native else None
    except Exception:
        if not are_numbas(kernel, bound):
            raise
    return report


def _taken_by(kernel, compile_call: Callable[[], Any]) -> tuple:
    """The argument types of the code whose entry point `compile_call` returns."""
    while True:
        entry_point = compile_call()
        taken = next((taken for taken, compiled in overloads_of(kernel) if compiled.entry_point is entry_point), None)
        if taken is not None:  # else another thread has recompiled the kernel
            return taken

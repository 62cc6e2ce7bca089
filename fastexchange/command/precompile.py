"""``precompile [MODULE[:OBJECT] …]``: compile kernels before they are called, for images and continuous integration.

Without a module: the native code of this package.
"""

import argparse
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..interpreter import DISABLED
from . import CommandError
from .objects import find, imported, split
from .probe import one_line
from .record import kernels_in

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Compile, and print a line for each signature. Returns 1 if one cannot be compiled, or is not kept on disk.

    Raises CommandError for a target that names nothing to compile.
    """
    if DISABLED:
        raise CommandError("FASTEXCHANGE_DISABLE is set: what is compiled with it is of no use without")
    if not options.targets:
        return _own_code()
    work = [each for target in options.targets for each in _work_of(target)]
    is_right = True
    for name, kernel, call in work:
        line, is_done = _compiled(kernel, call)
        print(f"{name}{line}")
        is_right &= is_done
    return 0 if is_right else 1


def _own_code() -> int:
    """Load all native code of this package, or compile what the machine does not have."""
    from ..ground.cfunction import code_cache
    from .native_code import native_code

    for each in native_code():
        each.address  # noqa: B018 - reading it loads or compiles the function
    found = f"shipped {code_cache.shipped}, loaded {code_cache.hits}, compiled {code_cache.misses}"
    why_not = code_cache.why_not_kept if code_cache.misses else ""
    print(f"native code of fastexchange: {found}: {f'not kept: {why_not}' if why_not else f'kept in {code_cache.directory}'}")
    return 1 if why_not else 0


def _work_of(target: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a target names: for each call to compile for, the kernel's name, the kernel and the call."""
    if target.endswith(".json"):
        kernels = kernels_in(Path(target))
        if not any(kernels.values()):
            raise CommandError(f"{target} has no signatures")
        for of, signatures in kernels.items():
            name, dotted = split(of)
            kernel = _kernel(find(imported(name), dotted, name), of)
            yield from ((of, kernel, signature) for signature in signatures)
        return
    name, dotted = split(target)
    module = imported(name)
    wanted = _kernel(find(module, dotted, name), target) if dotted else None
    found = False
    for kernel, *calls in _listed(module, name):
        if wanted is None or kernel is wanted:
            found = True
            yield from ((f"{name}:{kernel.__qualname__}", kernel, call) for call in calls)
    if not found:
        raise CommandError(f"{name}.__precompile__ has no entry for {dotted}" if dotted else f"{name}.__precompile__ is empty")


def _kernel(found: Any, name: str) -> Any:
    from ..calls.kernel import Kernel

    if inspect.isfunction(found) and hasattr(found, "py_func"):
        raise CommandError(f"{name} is not compiled because NUMBA_DISABLE_JIT is set")
    if not issubclass(type(found), Kernel):
        raise CommandError(f"{name} is not a kernel of fast_args")
    return found


def _listed(module, name: str) -> list[tuple]:
    """The entries of a module's ``__precompile__``."""
    listed = getattr(module, "__precompile__", None)
    try:
        listed = listed() if callable(listed) else listed
    except (Exception, SystemExit) as error:
        raise CommandError(f"{name}.__precompile__() failed: {one_line(error)}") from error
    if listed is None:
        raise CommandError(f"{name} has no __precompile__: a list of (kernel, call, ...), or a function that returns it; or give "
                           "a file of `python -m fastexchange record`")  # fmt: skip
    if not isinstance(listed, list | tuple) or not all(type(entry) is tuple and len(entry) > 1 for entry in listed):
        raise CommandError(f"{name}.__precompile__ has to be a list of tuples (kernel, call, ...)")
    for entry in listed:
        _kernel(entry[0], f"{getattr(entry[0], '__qualname__', repr(entry[0]))} in {name}.__precompile__")
    return list(listed)


def _compiled(kernel, call) -> tuple[str, bool]:
    """Compile for a call. Returns what is said of it, and whether later processes find the code."""
    from ..calls.kernel import FastKernel

    with warnings.catch_warnings(record=True) as caught:  # for example why the code is not kept
        warnings.simplefilter("always")
        try:
            (signature,) = kernel.precompile(call)
        except Exception as error:
            return f": not compiled: {one_line(error)}", False
    line = f"({', '.join(map(str, signature))}): "
    if not isinstance(kernel, FastKernel):
        return f"{line}compiled for this device; what is kept is up to {kernel.target.name}", True
    folder, is_kept = kernel.stats.cache_path, kernel._stored_on_disk(signature) is not None
    if is_kept:
        return f"{line}kept in {folder}", True
    why = "; ".join(str(each.message) for each in caught)
    return f"{line}not kept: {why or ('it has no cache=True' if folder is None else f'{folder} cannot be written')}", False

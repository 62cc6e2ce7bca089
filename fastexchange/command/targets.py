"""What the targets of ``precompile`` name: modules with a list of calls, and files of ``record``."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ground.safe_repr import one_line
from . import CommandError
from .objects import find, imported, split
from .record import kernels_in

__all__ = ["work_of"]


def work_of(target: str, may_be_empty: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a target names: for each call to compile for, the kernel's name, the kernel and the call.

    `may_be_empty`: a module without ``__precompile__`` is right, too: its declared signatures are compiled at its import.
    """
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
    if may_be_empty and not dotted and not hasattr(module, "__precompile__"):
        return
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

"""Launches that the kernel's own package makes: with arrays of the host, records, hints, for kernels with ``debug=True`` …

The package checks less than this one, so this module checks the arguments first. Its errors get the argument's name.
"""

import contextlib
from typing import Any

from numba.core.errors import NumbaError

from ..exchange.errors import argument
from ..ground.numba_internals import can_compile
from ..ground.safe_repr import a_type_name, type_name
from .classify import ArgumentInfo, device_and_streams, for_package, only_for_package, unknown_to_package
from .specialising import check_range, loading, taken_for
from .streams import in_order

__all__ = ["call_own", "own_launch", "why_package", "why_package_cannot"]


def call_own(launcher, infos: list[ArgumentInfo], why_not: str) -> None:
    """Check the arguments, and let the package launch the kernel. `why_not`: why native code does not launch it, if known."""
    kernel = launcher.kernel
    arguments = tuple(for_package(kernel, info) for info in infos)
    device, streams = device_and_streams(kernel, infos)
    if launcher.configuration.stream is not None:
        streams = [launcher.configuration.stream]
    may_compile = why_not and not launcher.why_not  # for each value, or configuration
    on_device = contextlib.nullcontext() if device is None else kernel.target.on_device(device)
    with on_device:
        if not can_compile(kernel.dispatcher) and not kernel.why_not:
            check_declared(kernel, arguments)
        with in_order(launcher, kernel._default_device() if device is None else device, streams):
            configuration = launcher._configured(tuple(info.value for info in infos))
            own = own_launch(launcher.kernel, configuration, streams[0] if streams else None)
            try:
                with loading if may_compile else contextlib.nullcontext():
                    _call_with_callbacks(launcher, own, arguments)
            except Exception as error:
                is_types = isinstance(error, (TypeError, ValueError, LookupError, NotImplementedError, NumbaError))
                why = why_package_cannot(launcher, infos, why_not, True) if is_types else ""
                if why:
                    first = str(error).strip().partition("\n")[0]
                    raise TypeError(f"{why}: {type(error).__name__}: {first}") from error
                raise


def _call_with_callbacks(launcher, own: Any, arguments: tuple) -> None:
    """Call the package's own launcher with the launcher's callbacks. The package caches it for launches without them."""
    if not launcher._callbacks:
        own(*arguments)
        return
    before = own.pre_launch_callbacks[:]
    own.pre_launch_callbacks[:] = [*before, *launcher._callbacks]
    try:
        own(*arguments)
    finally:
        own.pre_launch_callbacks[:] = before


def check_declared(kernel, arguments: tuple) -> None:
    """Raise TypeError or OverflowError for arguments that fit no declared signature: the package does not check them."""
    given = tuple(kernel.target.type_of_value(kernel.dispatcher, value) for value in arguments)
    taken, _ = taken_for(kernel, given)
    for position, (value, each) in enumerate(zip(arguments, taken, strict=True)):
        check_range(kernel, position, value, each)


def own_launch(kernel, configuration, stream: int | None) -> Any:
    """The package's own launcher, for a ``Configuration`` without a notation."""
    grid, block, _, shared, cluster, tasks, _ = configuration
    if tasks >= 0:
        return kernel.target.own_forall(kernel.dispatcher, tasks, block[0], stream, shared)
    return kernel.target.own_launch(kernel.dispatcher, (grid, block, stream, shared, cluster))


def why_package_cannot(launcher, infos: list[ArgumentInfo], why_not: str, has_failed: bool) -> str:
    """Why the package cannot make a launch that native code cannot make either; "" if no reason is known."""
    kernel = launcher.kernel
    only = only_for_package(infos)
    if has_failed and only and type(only[0].value).__module__ == "builtins":
        what = type_name(type(only[0].value))
        return f"{argument(kernel, only[0].position)}: no kernel for CUDA takes an argument of type {what}"
    unknown = unknown_to_package(kernel, infos)
    if unknown is None:
        return ""
    reason = why_package(kernel, infos) if only else why_not
    return (
        f"{argument(kernel, unknown.position)}: {kernel.target.name} cannot take {a_type_name(type(unknown.value))}, and has to "
        f"make this launch itself{reason and ': '}{reason}"
    )


def why_package(kernel, infos: list[ArgumentInfo]) -> str:
    """Why the package makes the launch: which argument only the package can read."""
    info = only_for_package(infos)[0]
    return f"only it takes {argument(kernel, info.position).partition(': ')[2]}, {a_type_name(type(info.value))}"

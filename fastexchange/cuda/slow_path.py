"""What a launcher does with a launch that native code does not know, and with those that it does not make."""

import contextlib
from typing import Any, NoReturn

import numpy as np
from numba.core.errors import NumbaError

from ..discovery import learn
from ..dispatch import layout
from ..dispatch.signature import UnknownDtype, numba_types
from ..dispatch.walk import FLAG_LOOK, FLAG_TRUSTED
from ..explanation import CallExplanation, explained, fate_of
from ..naming import type_name
from ..native import address_of
from ..refusal import advice, argument, check_tensors, dtype_name, refuse, refuse_device, refused, wording
from ..slow_path import MAX_LOOKS, Report, attempt, leaves
from . import views
from .context import Launchable, Unconvertible, conversions, words_of_all
from .driver import CudaError, driver
from .streams import order

__all__ = ["call", "call_otherwise", "explain_launch", "own_launch"]

_OTHERWISE = (layout.STATUS_NUMBA, layout.STATUS_STREAM, layout.STATUS_STREAMS)
"""Launches that native code leaves to :func:`call_otherwise`."""


def call(launcher, bound: tuple) -> None:
    """Make a launch that native code could not make."""
    if not launcher.why_not:
        with naming(launcher):
            report = settle(launcher, bound, launcher._native)
        if report.status == layout.STATUS_OK:
            return
    call_otherwise(launcher, bound)


@contextlib.contextmanager
def naming(launcher):
    """Errors of the driver meanwhile say which launch was not made."""
    try:
        yield
    except CudaError as error:
        name = f"{launcher.kernel.__qualname__}()"
        if not str(error).startswith(name):
            error.args = (f"{name} was not launched ({launcher.configuration}): {error}",)
        raise


def settle(launcher, bound: tuple, native, flags: int = 0, function=None) -> Report:
    """Learn, compile, load and ask, until native code has made the launch, with the ``fx_launcher`` `native`.

    The report's status is STATUS_OK; or one of ``_OTHERWISE``. Raises what a launch raises.
    """
    kernel = launcher.kernel
    report = Report()
    report.native.launcher = address_of(native)
    given = {} if function is None else {"function": function}
    for _ in range(MAX_LOOKS + 2 * leaves(bound)):
        status = attempt(kernel, bound, flags, report, **given)
        if status in (layout.STATUS_UNKNOWN_SHAPE, layout.STATUS_UNBOUND):
            check_device(kernel, device_of(kernel, report), bound)
        if status == layout.STATUS_OK or status in _OTHERWISE:
            return report
        if status == layout.STATUS_UNKNOWN_SHAPE and flags & FLAG_LOOK:
            return report
        if status in (layout.STATUS_UNKNOWN_TYPE, layout.STATUS_UNKNOWN_DTYPE):
            try:
                learn(report.stopped_at)
            except Exception as error:  # a type whose attributes cannot even be asked for
                refused(kernel, report.position, error)
        elif status == layout.STATUS_UNKNOWN_SHAPE:
            if not specialise(kernel, report, bound):
                report.native.status = layout.STATUS_NUMBA
                return report
        elif status == layout.STATUS_UNBOUND:
            load(kernel, kernel._native.overload_for(report.keys), device_of(kernel, report), native)
        elif status == layout.STATUS_CHECK:
            for position, value in enumerate(bound):
                check_tensors(kernel, position, value)
            flags |= FLAG_TRUSTED
        elif status == layout.STATUS_DRIVER:
            launcher._driver_error(report.native.code)
        else:
            raise_for(kernel, report, bound, status)
    raise BufferError(f"{kernel.__qualname__}(): what it met was different at each of {MAX_LOOKS} looks")


def raise_for(kernel, report: Report, bound: tuple, status: int) -> None:
    """Raise what a status means that ends a launch."""
    bound = views.originals(bound)
    if status == layout.STATUS_DEVICES:
        position = report.position
        refuse_device(kernel, position, bound[position], report.tensor.device.device_id, report.native.device)
    if report.position < 0 and status == layout.STATUS_NO_ERROR_SET:
        raise BufferError(f"{argument(kernel, -1)} is not known: that failed and did not say why")
    if status == layout.STATUS_RANGE:
        raise_out_of_range(kernel, bound, kernel._native.types_taken(kernel._native.overload_for(report.keys)))
    if status == layout.STATUS_BIG_INT:
        raise OverflowError(f"{argument(kernel, report.position)}: an int that neither int64 nor uint64 holds")
    refuse(kernel, report.position, bound, wording(status, report.tensor, is_for_cuda=True))


def raise_out_of_range(kernel, bound: tuple, taken: tuple) -> NoReturn:
    """Raise OverflowError for the number, among these arguments, that is beyond what the types `taken` hold."""
    for position, (value, each) in enumerate(zip(bound, taken, strict=False)):
        _check_range(kernel, position, value, each)
    raise OverflowError(f"{kernel.__qualname__}(): a number does not fit into the signature {taken}")


def device_of(kernel, report: Report) -> int:
    """The device of a launch at which native code has looked."""
    device = report.native.device
    if device < 0:
        device = report.native.managed_device
    return device if device >= 0 else kernel.default_device()


# ---- compiling and loading -------------------------------------------------------------------------------------------


def specialise(kernel, report: Report, bound: tuple) -> bool:
    """Compile the kernel for a launch with these keys, and file it.

    False if all such launches are the package's own.
    """
    native, keys, target = kernel._native, report.keys, kernel.target
    edition = native.edition
    try:
        seen = numba_types(keys, kernel._parameters.defaults, native.runtime.serials)
        given = tuple(map(target.type_of, numba_types(keys, {}, native.runtime.serials, target.element_of)))
    except UnknownDtype as error:
        code, bits = error.field & 0xFF, error.field >> 8 & 0xFF
        why = f"its element type, {dtype_name(code, bits)}, has no NumPy dtype; {advice(code, bits)}"
        refuse(kernel, error.position, views.originals(bound), why)
    device = device_of(kernel, report)
    driver().context(device)
    with driver().as_before(), target.on_device(device):
        compiled, changes = compiled_for(kernel, given)
        parameters = compiled.parameters()
        why_not = compiled.why_not()
        if changes is None:
            why_not = "a declared signature has an argument in a type that only the package makes of it"
        elif not why_not and not is_as_driver_says(compiled, parameters):
            why_not = "the driver's account of its parameters is another than was expected, or there is none (before CUDA 12.4)"
        if why_not or changes is None:
            native.why_own[keys] = why_not
            native.add_numba_only(keys, edition)
            return False
        native.add_launchable(keys, seen, Launchable(compiled, parameters, changes), edition)
    return True


def compiled_for(kernel, given: tuple):
    """What is launched for arguments of these types, of the package's, and ``context.conversions`` for it.

    Raises TypeError where a declared signature has no place for one of them.
    """
    compiled = kernel.target.compile(kernel.dispatcher, given)
    if compiled is None:
        declared = ", ".join(str(types) for types in kernel.target.signatures(kernel.dispatcher))
        raise TypeError(f"{kernel.__qualname__}(): no signature for arguments of types {given}; it has {declared}")
    try:
        return compiled, conversions(given, compiled.taken)
    except Unconvertible as error:
        raise TypeError(
            f"{argument(kernel, position_of(error.index, given))}: {error.given} does not become {error.taken} without being "
            f"changed: the signature is {compiled.taken}, given {given}"
        ) from None


def position_of(word: int, given: tuple) -> int:
    """The argument, of these types, that has the word with this number."""
    for position in range(len(given)):
        if word < words_of_all(given[: position + 1]):
            return position
    return len(given) - 1


def is_as_driver_says(compiled, parameters) -> bool:
    """Whether the driver's account of a loaded kernel has just these parameters."""
    found = driver().parameters_of(compiled.function())
    return found is not None and [size for _, size in found] == [parameter.size for parameter in parameters]


def load(kernel, overload: int, device: int, native) -> None:
    """Load the kernel on a device, for launches like that of the ``fx_launcher`` `native`."""
    driver().context(device)
    with driver().as_before(), kernel.target.on_device(device):
        kernel._native.load(overload, device, native)


def check_device(kernel, device: int, bound: tuple) -> None:
    """Raise BufferError for the argument that is on this device, if there is no such one."""
    if not driver().has(device):
        views.whereabouts(kernel, views.look_at(kernel, views.originals(bound)))


# ---- launches that are not native from end to end --------------------------------------------------------------------


def call_otherwise(launcher, bound: tuple) -> None:
    """A launch with tensors that Python has to export, or on several streams; or one that is the package's own."""
    kernel = launcher.kernel
    why_not = launcher.why_not
    with naming(launcher):
        looks = views.look_at(kernel, bound)
        if not why_not and not views.is_for_package(looks):
            with views.exported(launcher, looks) as (arguments, device, streams):
                with in_order(launcher, device, streams):
                    report = settle(launcher, arguments, launcher.on_stream(streams[0]))
                if report.status == layout.STATUS_OK:
                    return
            why_not = kernel._native.why_own.get(report.keys, "")
        call_own(launcher, looks, why_not)


def call_own(launcher, looks: list[views.Look], why_not: str) -> None:
    """Have the package launch the kernel, after the checks that it does not make. `why_not`: why it has to, if that is known."""
    kernel = launcher.kernel
    arguments = tuple(views.for_package(look) for look in looks)
    device, streams = views.whereabouts(kernel, looks)
    if launcher.configuration.stream is not None:
        streams = [launcher.configuration.stream]
    on_device = contextlib.nullcontext() if device is None else kernel.target.on_device(device)
    with on_device:
        if not kernel.dispatcher._can_compile and not kernel.why_not:
            check_declared(kernel, arguments)
        with in_order(launcher, kernel.default_device() if device is None else device, streams):
            own = own_launch(launcher, streams[0] if streams else None)
            try:
                _call_with_callbacks(launcher, own, arguments)
            except Exception as error:
                is_types = isinstance(error, (TypeError, ValueError, LookupError, NotImplementedError, NumbaError))
                why = why_not_even_own(launcher, looks, why_not, True) if is_types else ""
                if why:
                    first = str(error).strip().partition("\n")[0]
                    raise TypeError(f"{why}: {type(error).__name__}: {first}") from error
                raise


def why_not_even_own(launcher, looks: list[views.Look], why_not: str, has_failed: bool) -> str:
    """Why the package cannot make a launch that only it could make, as far as that is known; nothing if it is not."""
    kernel = launcher.kernel
    only = views.only_for_package(looks)
    if has_failed and only and type(only[0].value).__module__ == "builtins":
        what = type_name(type(only[0].value))
        return f"{argument(kernel, only[0].position)}: no kernel for CUDA takes an argument of type {what}"
    unknown = views.unknown_to_package(kernel, looks)
    if unknown is None:
        return ""
    reason = why_not
    if only:
        reason = f"only it takes {argument(kernel, only[0].position).partition(': ')[2]}, a {type_name(type(only[0].value))}"
    return (
        f"{argument(kernel, unknown.position)}: {kernel.target.name} cannot take a {type_name(type(unknown.value))}, and has to "
        f"make this launch itself{reason and ': '}{reason}"
    )


def _call_with_callbacks(launcher, own: Any, arguments: tuple) -> None:
    """Call the package's own launcher, which remembers it for its own launches like this one: they have other callbacks."""
    if not launcher._callbacks:
        own(*arguments)
        return
    before = own.pre_launch_callbacks[:]
    own.pre_launch_callbacks[:] = [*before, *launcher._callbacks]
    try:
        own(*arguments)
    finally:
        own.pre_launch_callbacks[:] = before


@contextlib.contextmanager
def in_order(launcher, device: int, streams: list[int]):
    """Meanwhile the first stream of a launch waits for the others, and they wait for it at the end.

    Raises CudaError; if that is at the end, it says that the launch has been made.
    """
    if len(streams) < 2:
        yield
        return
    what = f"{launcher.kernel.__qualname__}() was not launched ({launcher.configuration}), for it could not be ordered"
    try:
        for other in streams[1:]:
            order(device, streams[0], other)
    except CudaError as error:
        error.args = (f"{what} after its tensors' other streams: {error}",)
        raise
    yield
    what = what.replace("was not launched", "was launched").replace(", for it could", ", but its tensors' other streams could")
    try:
        for other in streams[1:]:
            order(device, other, streams[0])
    except CudaError as error:
        error.args = (f"{what} after it: {error}",)
        raise


def check_declared(kernel, arguments: tuple) -> None:
    """Raise TypeError, or OverflowError, for arguments that a declared signature has no place for: the package looks at none."""
    given = tuple(kernel.target.type_of_value(kernel.dispatcher, value) for value in arguments)
    compiled, _ = compiled_for(kernel, given)
    for position, (value, taken) in enumerate(zip(arguments, compiled.taken, strict=True)):
        _check_range(kernel, position, value, taken)


def _check_range(kernel, position: int, value, taken) -> None:
    if isinstance(value, tuple):
        for item, item_taken in zip(value, taken.types, strict=True):
            _check_range(kernel, position, item, item_taken)
    elif type(taken).__name__ == "Integer":
        number, bits = int(value), taken.bitwidth - taken.signed
        if not -(taken.signed << bits) <= number < 1 << bits:
            raise OverflowError(f"{argument(kernel, position)}: {number} does not fit into {taken}")


def own_launch(launcher, stream: int | None) -> Any:
    """The package's own launcher."""
    grid, block, _, shared, cluster, tasks = launcher.configuration
    dispatcher = launcher.kernel.dispatcher
    if tasks >= 0:
        return launcher.kernel.target.own_forall(dispatcher, tasks, block[0], stream, shared)
    return launcher.kernel.target.own_launch(dispatcher, (grid, block, stream, shared, cluster))


# ---- explaining ----------------------------------------------------------------------------------------------------


def explain_launch(launcher, bound: tuple) -> CallExplanation:
    """See :meth:`CudaLauncher.explain`."""
    kernel = launcher.kernel
    outcome, names = "", ["?"] * len(bound)
    looks: list[views.Look] = []
    try:
        looks = views.look_at(kernel, bound)
        if launcher.why_not or views.is_for_package(looks):
            outcome = f"{kernel.target.name}'s own launch: {launcher.why_not or whose(kernel, looks)}"
            refusal = why_not_even_own(launcher, looks, launcher.why_not, False)
            if refusal:
                outcome = f"refused with TypeError: {refusal}"
        else:
            with views.exported(launcher, looks) as (arguments, _, streams):
                with naming(launcher):
                    report = settle(launcher, arguments, launcher.on_stream(streams[0]), FLAG_LOOK)
                if report.status == layout.STATUS_UNKNOWN_SHAPE:
                    outcome, names = fate_of(kernel, report.keys)
                    why_own = kernel._native.why_own.get(report.keys, "")
                    if why_own:
                        outcome = f"{kernel.target.name}'s own launch: {why_own}"
                        refusal = why_not_even_own(launcher, looks, why_own, False)
                        outcome = f"refused with TypeError: {refusal}" if refusal else outcome
                    if views.are_exported_by_python(looks):
                        outcome += "; but an argument is exported by Python code in every launch"
                    if len(streams) > 1:
                        outcome += "; the producers work on different streams, which events order in every launch"
    except Exception as error:
        outcome = f"refused with {type(error).__name__}: {error}"
        looks = looks or views.looks_without_errors(kernel, bound)
    return explained(kernel, bound, outcome, names, views.paths(looks))


def whose(kernel, looks: list[views.Look]) -> str:
    """Why a launch with an argument that only the package understands is the package's own."""
    look = views.only_for_package(looks)[0]
    text = f"only it takes {argument(kernel, look.position).partition(': ')[2]}, a {type_name(type(look.value))}"
    return f"{text}; arrays of the host are copied to the device and back" if isinstance(look.value, np.ndarray) else text

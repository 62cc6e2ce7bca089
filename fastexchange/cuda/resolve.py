"""What a launcher does with a launch that native code does not know, and with those that it does not make."""

import contextlib

from ..calls.resolve import MAX_LOOKS, Report, attempt, leaf_count
from ..dispatch import structs
from ..dispatch.read_arguments import DRY_RUN, FLAG_ASKED
from ..exchange.discovery import learn
from ..exchange.errors import argument, check_tensors, refuse, refuse_device, refused, wording
from ..ground.native import address_of
from . import python_exports
from .classify import classify_arguments, is_for_package, whereabouts
from .driver import CudaError, driver
from .own_launch import call_own
from .specialising import load, raise_out_of_range, specialise
from .streams import in_order

__all__ = ["call", "call_otherwise", "check_device", "device_of", "naming", "resolve"]

_OTHERWISE = (structs.STATUS_NUMBA, structs.STATUS_STREAM, structs.STATUS_STREAMS)
"""Launches that native code leaves to :func:`call_otherwise`."""


def call(launcher, bound: tuple) -> None:
    """Make a launch that native code could not make."""
    if not launcher.why_not:
        with naming(launcher):
            report = resolve(launcher, bound, launcher._native)
        if report.status == structs.STATUS_OK:
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


def resolve(launcher, bound: tuple, native, flags: int = 0, function=None) -> Report:
    """Learn, compile, load and ask, until native code has made the launch, with the ``fx_launcher`` `native`.

    The report's status is STATUS_OK; or one of ``_OTHERWISE``. Raises what a launch raises.
    """
    kernel = launcher.kernel
    report = Report()
    report.native.launcher = address_of(native)
    given = {} if function is None else {"function": function}
    for _ in range(MAX_LOOKS + 2 * leaf_count(bound)):
        status = attempt(kernel, bound, flags, report, **given)
        if status == structs.STATUS_OK or status in _OTHERWISE:
            return report
        if status in (structs.STATUS_UNKNOWN_SHAPE, structs.STATUS_UNBOUND):
            check_device(kernel, device_of(kernel, report), bound)
        if status == structs.STATUS_UNKNOWN_SHAPE and flags & DRY_RUN:
            return report
        if status in (structs.STATUS_UNKNOWN_TYPE, structs.STATUS_UNKNOWN_DTYPE):
            try:
                learn(report.stopped_at)
            except Exception as error:  # a type whose attributes cannot even be asked for
                refused(kernel, report.position, error)
        elif status == structs.STATUS_UNKNOWN_SHAPE:
            if not specialise(kernel, report.keys, device_of(kernel, report), python_exports.originals(bound)):
                report.native.status = structs.STATUS_NUMBA
                return report
        elif status == structs.STATUS_UNBOUND:
            load(kernel, kernel._native.overload_for(report.keys), device_of(kernel, report), native)
        elif status == structs.STATUS_CHECK:
            for position, value in enumerate(bound):
                check_tensors(kernel, position, value)
            flags |= FLAG_ASKED
        elif status == structs.STATUS_DRIVER:
            launcher._driver_error(report.native.code)
        else:
            raise_for(kernel, report, bound, status)
    raise BufferError(f"{kernel.__qualname__}(): what it met was different at each of {MAX_LOOKS} looks")


def raise_for(kernel, report: Report, bound: tuple, status: int) -> None:
    """Raise what a status means that ends a launch."""
    bound = python_exports.originals(bound)
    if status == structs.STATUS_DEVICES:
        position = report.position
        refuse_device(kernel, position, bound[position], report.tensor.device.device_id, report.native.device)
    if report.position < 0 and status == structs.STATUS_NO_ERROR_SET:
        raise BufferError(f"{argument(kernel, -1)} is not known: that failed and did not say why")
    if status == structs.STATUS_RANGE:
        raise_out_of_range(kernel, bound, kernel._native.types_taken(kernel._native.overload_for(report.keys)))
    if status == structs.STATUS_BIG_INT:
        raise OverflowError(f"{argument(kernel, report.position)}: an int that neither int64 nor uint64 holds")
    refuse(kernel, report.place(bound), bound, wording(status, report.tensor, is_for_cuda=True))


def device_of(kernel, report: Report) -> int:
    """The device of a launch at which native code has looked."""
    device = report.native.device
    if device < 0:
        device = report.native.managed_device
    return device if device >= 0 else kernel.default_device()


def check_device(kernel, device: int, bound: tuple) -> None:
    """Raise BufferError for the argument that is on this device, if there is no such one."""
    if not driver().has(device):
        whereabouts(kernel, classify_arguments(kernel, python_exports.originals(bound)))


# ---- launches that are not native from end to end --------------------------------------------------------------------


def call_otherwise(launcher, bound: tuple) -> None:
    """A launch with tensors that Python has to export, or on several streams; or one that is the package's own."""
    kernel = launcher.kernel
    why_not = launcher.why_not
    with naming(launcher):
        infos = classify_arguments(kernel, bound)
        if not why_not and not is_for_package(infos):
            with python_exports.exported(launcher, infos) as (arguments, device, streams):
                with in_order(launcher, device, streams):
                    report = resolve(launcher, arguments, launcher.on_stream(streams[0]))
                if report.status == structs.STATUS_OK:
                    return
            why_not = kernel._native.why_own.get(report.keys, "")
        call_own(launcher, infos, why_not)

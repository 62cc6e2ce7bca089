"""The slow path of launches: those that native code does not know yet, and those that it cannot make."""

import contextlib

from ..calls.resolve import Report, Resolver
from ..dispatch import structs
from ..dispatch.overloads import Overload
from ..exchange.errors import argument, refuse, refuse_device, wording
from ..ground.native import address_of
from . import python_exports
from .classify import classify_arguments, device_and_streams, is_for_package, is_pinned
from .driver import CudaError, driver
from .own_launch import call_own
from .specialising import load, raise_out_of_range, specialise
from .streams import in_order

__all__ = ["LaunchResolver", "call", "call_otherwise", "check_device", "device_of", "naming"]


def call(launcher, bound: tuple) -> None:
    """Make a launch that native code does not know."""
    if not launcher.why_not:
        with naming(launcher):
            report = LaunchResolver(launcher, bound, launcher._native).run()
        if report.status == structs.STATUS_OK:
            return
    call_otherwise(launcher, bound)


@contextlib.contextmanager
def naming(launcher):
    """Context manager: errors of the driver get the name of the launch that was not made."""
    try:
        yield
    except CudaError as error:
        error._add_launch(launcher._not_launched)
        raise


class LaunchResolver(Resolver):
    """Resolves a launch, with the ``fx_launcher`` `native`."""

    ends = frozenset((structs.STATUS_OK, structs.STATUS_NUMBA, structs.STATUS_STREAM, structs.STATUS_STREAMS))
    """The final statuses: with STATUS_OK native code has made the launch, with the others :func:`call_otherwise` makes it.

    Also STATUS_DEVICE, of a tensor in pinned memory.
    """

    def __init__(self, launcher, bound: tuple, native):
        super().__init__(launcher.kernel, bound)
        self._launcher, self._launcher_address = launcher, native
        self.report.native.launcher = address_of(native)

    def run(self, flags: int = 0) -> Report:
        report = super().run(flags)
        if report.status == structs.STATUS_UNKNOWN_SHAPE:
            check_device(self.kernel, device_of(self.kernel, report), self.bound)
        return report

    def specialise(self) -> Overload | None:
        device = device_of(self.kernel, self.report)
        check_device(self.kernel, device, self.bound)
        return specialise(self.kernel, self.report.keys, device, python_exports.originals(self.bound))

    def handle(self, status: int) -> None:
        kernel, report = self.kernel, self.report
        if status == structs.STATUS_UNBOUND:
            device = device_of(kernel, report)
            check_device(kernel, device, self.bound)
            load(kernel, report.keys, device, self._launcher_address)
            return
        if status == structs.STATUS_DRIVER:
            self._launcher._driver_error(report.native.code)
            return
        if status == structs.STATUS_CONFIGURATION:
            self._launcher._configured(python_exports.originals(self.bound))  # raises, unless native code has no room for it
            raise ValueError(f"{self._launcher._not_launched}: its tensors have too many dimensions for launch=")
        if status == structs.STATUS_DEVICE and is_pinned(report.stopped_at):
            self.ends |= {status}  # Python code exports it
            return
        bound = python_exports.originals(self.bound)
        if status == structs.STATUS_DEVICES:
            position = report.position
            refuse_device(kernel, position, bound[position], report.tensor.device.device_id, report.native.device)
        if report.position < 0 and status == structs.STATUS_NO_ERROR_SET:
            raise BufferError(f"{argument(kernel, -1)} is not known: that failed and did not say why")
        if status == structs.STATUS_RANGE:
            overload = kernel._native.find(report.keys)
            raise_out_of_range(kernel, bound, () if overload is None else overload.taken)
        if status == structs.STATUS_BIG_INT:
            raise OverflowError(f"{argument(kernel, report.position)}: an int that neither int64 nor uint64 holds")
        refuse(kernel, report.place(bound), bound, wording(status, report.tensor, is_for_cuda=True))


def device_of(kernel, report: Report) -> int:
    """The device of a launch whose arguments native code has read."""
    device = report.native.device
    if device < 0:
        device = report.native.managed_device
    return device if device >= 0 else kernel._default_device()


def check_device(kernel, device: int, bound: tuple) -> None:
    """Raise BufferError for the argument on this device if the device does not exist."""
    if not driver().has(device):
        device_and_streams(kernel, classify_arguments(kernel, python_exports.originals(bound)))


# ---- launches that Python makes ----------------------------------------------------------------------------------------


def call_otherwise(launcher, bound: tuple) -> None:
    """Make a launch with tensors that Python exports, a launch on several streams, or a launch for the package."""
    kernel = launcher.kernel
    why_not = launcher.why_not
    with naming(launcher):
        infos = classify_arguments(kernel, bound)
        if not why_not and not is_for_package(infos):
            with python_exports.exported(launcher, infos) as (arguments, device, streams):
                with in_order(launcher, device, streams):
                    report = LaunchResolver(launcher, arguments, launcher._on_stream(streams[0])).run()
                if report.status == structs.STATUS_OK:
                    return
            why_not = kernel._native.why_own.get(report.keys, "")
        call_own(launcher, infos, why_not)

"""``launcher.bind``: a launch whose parameters are packed once."""

import contextlib
import ctypes
import sys

from .._abi import ffi
from ..calls.bound_launch import BoundLaunchBase
from ..dispatch import structs as dispatch
from ..dispatch.bound_launch import let_go, pin_arguments
from ..dispatch.runtime import runtime
from ..ground.cpython import enable_vectorcall
from ..ground.native import address_of
from . import native_launch, python_exports, resets
from .classify import are_exported, classify_arguments, is_for_package
from .driver import driver
from .own_launch import why_package
from .resolve import LaunchResolver, call, check_device, device_of, naming
from .specialising import load, raise_out_of_range

__all__ = ["BoundCudaLaunch"]

_PACK = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_void_p] * 4)


class BoundCudaLaunch(BoundLaunchBase):
    """A launch with fixed arguments, made by ``kernel[grid, block].bind(...)``. Calling it without any launches the kernel.

    Ownership: it holds the arguments and an owning export of every tensor, so their memory lives as long as the launch. After a
    reset of a device's context, which destroys memory, a call raises :class:`~fastexchange.CudaError`.

    Each call checks that the storages of PyTorch tensors have neither moved nor become copy-on-write. If one has (``resize_()``,
    ``torch._lazy_clone()``), this and all later calls are ordinary launches. Other changes of a tensor have no effect: after
    ``set_()`` the launch uses the old memory. Scalars keep their values. A tensor's state (for example requiring grad) is checked
    only when it is bound. The launch uses the code that the kernel had when it was bound, even after a recompilation.

    Attributes
    ----------
    kernel : the kernel.
    launcher : the :class:`~fastexchange.cuda.launcher.CudaLauncher`.
    arguments : the arguments, in the order of the kernel's parameters, as they were bound.
    """

    __slots__ = ()

    def __init__(self, launcher, bound: tuple):
        self.launcher = launcher
        self.kernel = launcher.kernel
        self._alive: list[_PinnedLaunch] = []
        self._replace(None, self._pin(bound))
        self._vectorcall = native_launch.vectorcall_bound.address

    @property
    def _pinned(self) -> "_PinnedLaunch":
        while True:  # another thread may rebind at the same time
            for each in self._alive:
                if address_of(each.launch) == self._context:
                    return each

    _caller = property(lambda self: self.launcher)

    def _pin(self, bound: tuple) -> "_PinnedLaunch":
        with naming(self.launcher):
            return _PinnedLaunch(self.launcher, bound)

    def _replace(self, before: "_PinnedLaunch | None", pinned: "_PinnedLaunch") -> bool:
        self._alive = [*self._alive, pinned]  # Ctrl-C may come at any step: both have to live until it is done
        self._context = address_of(pinned.launch)  # in one step: other threads may launch
        # `running` counts the launches that have begun with other arguments and wait for the driver without the GIL.
        self._alive = [each for each in self._alive if each is pinned or each.launch.running]
        return True

    def _call_slowly(self, /, *args, **kwargs) -> None:
        self._check(args, kwargs)
        self.launcher._check()
        if self._pinned.resets != resets.count():
            raise driver().reset_since(f"{self._what} was not launched", "bind the launch anew, with arguments that have memory")
        call(self.launcher, self.arguments)

    def _driver_error(self, code: int):
        self.launcher._driver_error(code)


enable_vectorcall(BoundCudaLaunch)


class _PinnedLaunch:
    """Owns the frame of a bound launch, the exports of its tensors, and its parameters."""

    def __init__(self, launcher, bound: tuple):
        self.bound = bound
        self.kernel = kernel = launcher.kernel
        self.native = launcher._native
        self.resets = resets.count()
        self._stack = contextlib.ExitStack()
        infos = classify_arguments(kernel, bound)
        if launcher.why_not or is_for_package(infos):
            raise TypeError(
                f"{kernel.__qualname__}(): this launch cannot be bound, {kernel.target.name} makes it itself: "
                f"{launcher.why_not or why_package(kernel, infos)}"
            )
        has_stream = launcher.configuration.stream is not None
        self.arguments, _, streams = self._stack.enter_context(python_exports.exported(launcher, infos))
        is_exported = are_exported(infos)
        if is_exported and not has_stream:
            self.native = launcher.on_stream(streams[0])
        runtime().add(let_go)
        report = LaunchResolver(launcher, self.arguments, self.native, function=pin_arguments).run()
        if report.status != dispatch.STATUS_OK:
            raise TypeError(f"{kernel.__qualname__}(): this launch cannot be bound, {kernel.target.name} makes it itself")
        self._capsule, (self.frame, self.overload) = report.result, report.pinned
        self.types = kernel._native.types_of(self.overload)
        frame = ffi.cast("fx_frame *", self.frame)
        launchable = ffi.cast("fx_launchable *", ffi.cast("fx_overload *", self.overload).launchable)
        self.device = frame.device if frame.device >= 0 else frame.managed_device
        self.stream = frame.stream
        if len(streams) > 1 or (not has_stream and (frame.other_stream or (is_exported and frame.stream))):
            # Only an ordinary launch reads the streams, which may be others each time.
            if has_stream:
                raise TypeError(
                    f"{kernel.__qualname__}(): an array's interface names another stream than the one that the launch is given; "
                    "bind the launch on that stream"
                )
            raise TypeError(
                f"{kernel.__qualname__}(): the tensors' producers may work on different streams, so the launch cannot "
                "be bound without one: kernel[grid, block, stream].bind(...)"
            )
        check_device(kernel, device_of(kernel, report), bound)
        load(kernel, self.overload, device_of(kernel, report), self.native)
        self.pointers = ffi.new("intptr_t[]", launchable.parameter_count + 1)
        self._zero = ffi.new("int64_t *")
        if _PACK(native_launch.pack.address)(self.frame, self.overload, address_of(self.pointers), address_of(self._zero)):
            raise_out_of_range(kernel, bound, kernel._native.types_taken(self.overload))
        words = ffi.cast("int64_t *", frame.watched)
        resets_word = resets.address_of_count(), self.resets  # twice: a watch list has an even number of pairs
        self.watched = ffi.new("int64_t[]", [words[0] + 2, *resets_word, *resets_word, *words[1 : 1 + 2 * words[0]]])
        self._name = sys.intern("_call_slowly")
        native = self.launch = ffi.new("fx_bound_launch *")
        native.launcher, native.overload, native.slow_name = address_of(self.native), self.overload, id(self._name)
        native.device, native.stream = self.device, self.stream
        native.pointers, native.watched = address_of(self.pointers), address_of(self.watched)

    def __del__(self):
        self._capsule = None  # first: it holds what the stack has exported
        self._stack.close()

"""A CUDA kernel's native structs: those of ``dispatch.overloads``, and the parameters, conversions and functions of launches."""

import itertools
from typing import NamedTuple

from .._abi import ffi
from ..dispatch import overloads as dispatch
from ..dispatch.structs import MAX_DEVICES, is_tuple, words_of
from ..ground.dlpack import CUDA
from ..ground.native import address_of
from ..interpreter import DISABLED
from . import launch_structs, native_launch, resets
from .driver import driver
from .targets import Compiled, Parameter

__all__ = ["CudaContext", "Launchable"]


class Launchable(NamedTuple):
    """The Python objects of one signature, besides its ``fx_overload``."""

    compiled: Compiled
    parameters: list[Parameter]
    conversions: list[int]


class CudaContext(dispatch.KernelContext):
    """See ``dispatch.overloads.KernelContext``.

    An omitted argument is passed as its default: CUDA's dispatchers have no ``types.Omitted``.
    """

    def __init__(self, parameters, name: str, allows: int):
        super().__init__(parameters, name, False, allows)
        self.why_own: dict[tuple[int, ...], str] = {}
        """By keys: why the package makes the launch."""
        self._places = itertools.cycle(range(launch_structs.MAX_BEST_BLOCKS))
        self._values = parameters.defaults
        for index, value in parameters.defaults.items():
            self._defaults[index] = id(value)
        resets.unload_at_reset(self)

    def _prepare(self) -> None:
        self.native.device_type = CUDA
        if DISABLED:
            return
        self.native.vectorcall_any, self.native.run = native_launch.vectorcall_any.address, native_launch.run.address
        self.native.begin_row, self.native.launch_row = native_launch.begin_row.address, native_launch.launch_row.address

    def add_launchable(self, keys: tuple[int, ...], given: tuple, launchable: Launchable, generation: object):
        """File the compiled kernel for calls with these keys. Returns the overload."""
        code = dispatch._Code(trampoline=1, given=given, taken=launchable.compiled.taken, compiled=launchable)
        return self._file(keys, code, generation)

    def _made(self, keys: tuple[int, ...], code) -> dispatch.Overload:
        made = super()._made(keys, code)
        if not code.trampoline:
            return made
        overload, _, kept = made
        loaded = ffi.new("fx_loaded[]", MAX_DEVICES)
        parameters = ffi.new("int64_t[]", [parameter.code for parameter in code.compiled.parameters] or [0])
        changes = ffi.new("int64_t[]", code.compiled.conversions or [0])
        launchable = ffi.new("fx_launchable *")
        launchable.loaded, launchable.parameters, launchable.conversions = map(address_of, (loaded, parameters, changes))
        launchable.parameter_count, launchable.conversion_count = len(code.compiled.parameters), len(code.compiled.conversions)
        launchable.is_cooperative = code.compiled.compiled.is_cooperative
        places = ffi.new("int64_t[]", self._places_of(keys) or [0])
        launchable.places = address_of(places)
        kept += [loaded, parameters, changes, launchable, places]
        overload.launchable = address_of(launchable)
        return made

    def _places_of(self, keys: tuple[int, ...]) -> list[int]:
        """See ``fx_launchable``. The key of a tuple is followed by those of its items."""
        places: list[int] = []
        word = items = 0
        for index, key in enumerate(keys):
            if items:
                items -= 1
            else:
                places.append(index | word << launch_structs.PLACE_WORD_SHIFT)
            items += self._length(key) if is_tuple.py_func(key) else 0
            word += words_of.py_func(key)
        return places

    def load(self, keys: tuple[int, ...], device: int, launcher) -> None:
        """Load what is filed for these keys on a device, which is the package's current device.

        `launcher`: an ``fx_launcher``, for whose launches it is loaded.
        """
        overload = self.find(keys)
        if overload is None or not overload.is_native:  # forgotten by another thread: the next attempt compiles it again
            return
        launchable, loaded = overload.code.compiled, _loaded_of(overload.native)[device]
        cuda = driver()
        function = loaded.function or launchable.compiled.function()
        shared = cuda.attribute(function, "SHARED_SIZE_BYTES")
        loaded.shared_limit = max(loaded.shared_limit, launch_structs.SHARED_WITHOUT_ASKING - shared)
        if launcher.shared > loaded.shared_limit:
            cuda.set_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", launcher.shared)
            loaded.shared_limit = launcher.shared
        if launcher.tasks >= 0 and not launcher.block[0]:
            best = cuda.best_block(function, launcher.shared)
            with self._lock:
                free = [i for i, block in enumerate(loaded.blocks) if not block]
                place = free[0] if free else next(self._places)
                loaded.blocks[place] = 0  # other threads may launch between any two of these stores
                loaded.blocks_shared[place] = launcher.shared
                loaded.blocks[place] = best
        loaded.function = function  # last: native code may read at any moment

    def loaded_on(self, device: int) -> list[tuple[Launchable, int]]:
        """What is loaded on a device: the objects of a signature, and its ``CUfunction``."""
        filed = [each for each in list(self._overloads.values()) if each.native.launchable]
        found = [(each.code.compiled, _loaded_of(each.native)[device].function) for each in filed]
        return [(launchable, function) for launchable, function in found if function]

    def unload(self) -> None:
        """Forget the loaded functions of all devices: launches load them anew."""
        for filed in list(self._overloads.values()):
            if filed.native.launchable:
                loaded = _loaded_of(filed.native)
                for device in range(MAX_DEVICES):
                    loaded[device].function = loaded[device].shared_limit = 0
                    loaded[device].blocks = [0] * launch_structs.MAX_BEST_BLOCKS


def _loaded_of(overload):
    """The ``fx_loaded[MAX_DEVICES]`` of an ``fx_overload *``."""
    return ffi.cast("fx_loaded *", ffi.cast("fx_launchable *", overload.launchable).loaded)

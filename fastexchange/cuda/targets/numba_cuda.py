"""numba-cuda: ``numba.cuda``.

A kernel's parameters are 8 bytes each for an array (memory block and parent, both 0; number of items, item size, data,
extents, strides in bytes), scalars have their own size, a complex number is two floats, tuples are their items.

Source: numba-cuda 0.30, ``numba.cuda.dispatcher``. When a kernel is loaded, its parameters are compared with the driver's.
"""

import copy
import functools

from numba.core import types

from ...dispatch.structs import ARRAY_HEAD_WORDS
from ...ground.numba_internals import overloads_of
from .. import launch_structs, resets
from ..streams import explicit_handle
from . import DEPENDS_ON_LAUNCH, Parameter, TargetBase, compiled_ahead

__all__ = ["NumbaCuda", "target"]


class NumbaCuda(TargetBase):
    """See :class:`~fastexchange.cuda.targets.Target`."""

    name = "numba-cuda"

    def __init__(self):
        from numba import cuda

        if not hasattr(cuda, "HAS_NUMBA"):  # numba-cuda's own numba.cuda has it
            raise TypeError(
                "fast_args(): this @cuda.jit is the one in Numba itself, which is no longer developed; install numba-cuda, which "
                "replaces numba.cuda, or numba-cuda-mlir, and write `from numba_cuda_mlir import cuda`"
            )
        from numba.cuda.typing.typeof import typeof_impl

        self.cuda = cuda
        self.use_own_halves(typeof_impl, {"bfloat16": cuda.types.bfloat16, "float16": types.float16})

    def type_of(self, numba_type):
        return numba_type

    def why_not(self, dispatcher) -> str:
        options = dispatcher.targetoptions
        if options.get("debug"):
            return "it is compiled with debug=True: errors of the kernel are read back after each launch"
        if options.get("extensions"):
            return "it has extensions, which see its arguments in each launch"
        return ""

    def type_of_value(self, dispatcher, value):
        return dispatcher.typeof_pyval(value)

    def signature_for(self, dispatcher, given: tuple) -> tuple | None:
        return given if dispatcher._can_compile else self._declared(dispatcher, given)

    def compile(self, dispatcher, taken: tuple) -> "CompiledKernel":
        kernel = dispatcher.overloads.get(taken) or compiled_ahead(dispatcher, taken, "No launch config")
        _renew(kernel.library)
        kernel.bind()
        return CompiledKernel(kernel, taken)

    def _declared(self, dispatcher, given: tuple) -> tuple | None:
        if given in dispatcher.overloads:
            return given
        cases = [kernel.signature for _, kernel in overloads_of(dispatcher)]
        chosen = dispatcher.typingctx.resolve_overload(
            dispatcher.py_func, cases, given, {}, allow_ambiguous=False, unsafe_casting=True
        )
        return tuple(chosen.args) if chosen is not None else None

    def own_launch(self, dispatcher, configuration):
        grid, block, stream, shared, cluster = configuration
        if cluster is not None:
            raise TypeError(f"{self.name} launches no clusters; numba-cuda-mlir does")
        return dispatcher[grid, block, self._stream(stream), shared]

    def own_forall(self, dispatcher, tasks: int, threads: int, stream: int | None, shared: int):
        return dispatcher.forall(tasks, threads, self._stream(stream), shared)

    def _stream(self, handle: int | None):
        return self.cuda.external_stream(explicit_handle(handle)) if handle is not None and explicit_handle(handle) else 0


class CompiledKernel:
    """See :class:`~fastexchange.cuda.targets.Compiled`."""

    def __init__(self, kernel, taken: tuple):
        self._kernel = kernel
        self.taken = taken
        self.is_cooperative = bool(kernel.cooperative)

    def why_not(self) -> str:
        if self._kernel.debug:
            return "it is compiled with debug=True: errors of the kernel are read back after each launch"
        if self._kernel.extensions:
            return "it has extensions, which see its arguments in each launch"
        if getattr(self._kernel, "launch_config_sensitive", False):
            return DEPENDS_ON_LAUNCH
        return ""

    def function(self) -> int:
        from ..driver import driver

        _renew(self._kernel.library)
        self._kernel.bind()
        bindings = driver().bindings
        kernel = bindings.CUkernel(int(self._kernel.library.get_cufunc().handle))
        return int(driver().call("cuKernelGetFunction", kernel))

    def parameters(self) -> list[Parameter]:
        found: list[Parameter] = []
        word = 0
        for each in self.taken:
            word = _add(each, word, found)
        return found


def _renew(library) -> None:
    """Make the package load a kernel again that it has loaded before a reset: otherwise it uses the old one."""
    if resets.is_stale(library):
        library._cufunc_cache.clear()
        for capability, code in list(library._cubin_cache.items()):
            library._cubin_cache[capability] = copy.copy(code)  # the copy is not loaded yet


def _add(numba_type, word: int, found: list[Parameter]) -> int:
    """Add the parameters of an argument whose words begin at `word`. Returns where the next argument's begin."""
    if isinstance(numba_type, types.Array):
        words = ARRAY_HEAD_WORDS + 2 * numba_type.ndim
        found += [Parameter(launch_structs.parameter(launch_structs.ZERO), 8)] * 2
        found += [Parameter(launch_structs.parameter(launch_structs.WORD, word + i), 8) for i in range(2, words)]
        return word + words
    if isinstance(numba_type, types.BaseTuple):
        for item in numba_type.types:  # type: ignore[attr-defined]
            word = _add(item, word, found)
        return word
    if isinstance(numba_type, types.Complex):
        size = numba_type.bitwidth // 16
        found += [Parameter(launch_structs.parameter(launch_structs.WORD, word + i), size) for i in range(2)]
        return word + 2
    size = 1 if isinstance(numba_type, types.Boolean) else numba_type.bitwidth // 8
    found.append(Parameter(launch_structs.parameter(launch_structs.WORD, word), size))
    return word + 1


@functools.cache
def target() -> NumbaCuda:
    """The process's only object."""
    return NumbaCuda()

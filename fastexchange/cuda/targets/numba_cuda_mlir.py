"""numba-cuda-mlir: ``numba_cuda_mlir.cuda``, which has types and a launcher of its own.

A kernel's parameters are 8 bytes each for an array (pointer, pointer, offset, extents, strides in elements), scalars
have their own size, a complex number is one of two floats, tuples are their items.

Source: numba-cuda-mlir 0.6, ``numba_cuda_mlir.descriptor``. When a kernel is loaded, its parameters are compared with the
driver's.
"""

import contextlib
import functools
from typing import Any

import numpy as np
from numba.core import types

from ...dispatch.structs import ARRAY_HEAD_WORDS
from .. import launch_structs, resets
from ..streams import default_stream, explicit_handle
from . import DEPENDS_ON_LAUNCH, OnlyItsLaunch, Parameter, TargetBase, compiled_ahead

__all__ = ["NumbaCudaMlir", "target"]


class NumbaCudaMlir(TargetBase):
    """See :class:`~fastexchange.cuda.targets.Target`."""

    name = "numba-cuda-mlir"

    def __init__(self):
        from numba_cuda_mlir import cuda
        from numba_cuda_mlir import types as own_types
        from numba_cuda_mlir.numba_cuda.typing.typeof import typeof_impl

        self.cuda = cuda
        self.types: Any = own_types
        self.use_own_halves(typeof_impl, {"bfloat16": cuda.types.bfloat16, "float16": own_types.float16})

    def type_of(self, numba_type):
        if isinstance(numba_type, types.Array):
            dtype, readonly = self.type_of(numba_type.dtype), not numba_type.mutable
            return self.types.Array(dtype, numba_type.ndim, numba_type.layout, readonly=readonly, aligned=numba_type.aligned)
        if isinstance(numba_type, types.BaseTuple):
            items = [self.type_of(item) for item in numba_type.types]
            return self.types.BaseTuple.from_types(items, getattr(numba_type, "instance_class", None))
        if isinstance(numba_type, types.Boolean):
            return self.types.boolean
        return getattr(self.types, str(numba_type)) if isinstance(numba_type, types.Number) else numba_type

    def why_not(self, dispatcher) -> str:
        if dispatcher.targetoptions.get("debug"):
            return "it is compiled with debug=True: errors of the kernel are read back after each launch"
        if dispatcher.extensions:
            return "it has extensions, which see its arguments in each launch"
        if dispatcher._module_setup_callbacks or dispatcher._module_teardown_callbacks:
            return "it links code with callbacks for loading and unloading"
        return ""

    def type_of_value(self, dispatcher, value):
        from numba_cuda_mlir.descriptor import typeof

        return typeof(value)

    def readable(self, value):
        """A launch of the package's own raises TypeError, once the kernel runs, for a tensor whose dtype is none of NumPy's."""
        try:
            np.dtype(getattr(value, "dtype", None))
        except TypeError:
            with contextlib.suppress(Exception):  # a tensor of a kind that has no interface
                return _OnlyInterface(value)
        return value

    def signature_for(self, dispatcher, given: tuple) -> tuple | None:
        if given in dispatcher.overloads or dispatcher._can_compile:
            return given
        found = self._declared(dispatcher, given)
        return None if found is None else tuple(found)

    def compile(self, dispatcher, taken: tuple) -> "CompiledKernel":
        from numba_cuda_mlir.numba_cuda.core.errors import ForceLiteralArg

        try:
            return CompiledKernel(dispatcher, compiled_ahead(dispatcher, taken, "launch metadata"), taken)
        except ForceLiteralArg:
            raise OnlyItsLaunch("its code depends on the value of an argument") from None

    def _declared(self, dispatcher, given: tuple) -> tuple | None:
        """The signature for arguments of these types, rated as the package does.

        Unlike the package, this refuses arrays of another layout than declared, and readonly ones for writable ones, and converts
        booleans.
        """
        rated = []
        for taken in dispatcher.overloads:
            if len(taken) == len(given) and all(map(_fits, taken, given)):
                pairs = zip(taken, given, strict=True)
                numbers = tuple(self.types.int8 if _is_flag(each) and not _is_flag(wanted) else each for wanted, each in pairs)
                rating = dispatcher._rate_overload(taken, numbers)
                if rating is not None:
                    rated.append((rating, taken))
        best = min((rating for rating, _ in rated), default=None)
        tied = [taken for rating, taken in rated if rating == best]
        if len(tied) > 1:
            dispatcher._raise_ambiguous(given, tied)
        return tied[0] if tied else None

    def own_launch(self, dispatcher, configuration):
        grid, block, stream, shared, cluster = configuration
        given = (grid, block, _stream(stream), shared)
        return dispatcher[given if cluster is None else (*given, cluster)]

    def own_forall(self, dispatcher, tasks: int, threads: int, stream: int | None, shared: int):
        return dispatcher.forall(tasks, threads, _stream(stream), shared)


class _OnlyInterface:
    """The array interface of a tensor, which it keeps alive."""

    def __init__(self, tensor):
        self.tensor, self.__cuda_array_interface__ = tensor, tensor.__cuda_array_interface__


def _stream(handle: int | None) -> int:
    return explicit_handle(default_stream() if handle is None else handle)  # the package's launcher takes 0 for the legacy stream


def _is_flag(own_type) -> bool:
    return type(own_type).__name__ == "Boolean"


def _fits(taken: Any, given: Any) -> bool:
    """Whether arrays, also in tuples, have the declared layout, and are writable if declared so."""
    if type(taken).__name__ == type(given).__name__ == "Array":
        return taken.layout in ("A", given.layout) and (given.mutable or not taken.mutable)
    if hasattr(taken, "types") and hasattr(given, "types"):
        return len(taken.types) == len(given.types) and all(map(_fits, taken.types, given.types))
    return True


class CompiledKernel:
    """See :class:`~fastexchange.cuda.targets.Compiled`."""

    def __init__(self, dispatcher, result, taken: tuple):
        self._dispatcher, self._result = dispatcher, result
        self.taken = taken
        self.is_cooperative = bool(result.metadata.get("use_cooperative", False))

    def why_not(self) -> str:
        if self._dispatcher._requires_launch_config:
            return DEPENDS_ON_LAUNCH
        if self._result.metadata.get("required_dynamic_shared_memory", 0):
            return "its code asks for dynamic shared memory of its own"
        return NumbaCudaMlir.why_not(target(), self._dispatcher)  # what it links may have brought a callback

    def function(self) -> int:
        library = self._result._codelibrary
        if resets.is_stale(library):  # the package would use the old one
            library._cufunc_cache.clear()
        self._dispatcher._apply_shared_memory_carveout(self._result)
        return int(library.get_cufunc().handle)

    def parameters(self) -> list[Parameter]:
        found: list[Parameter] = []
        word = 0
        for each in self.taken:
            word = _add(each, word, found)
        return found


def _add(own_type: Any, word: int, found: list[Parameter]) -> int:
    """Add the parameters of an argument whose words begin at `word`. Returns where the next argument's begin."""
    kind = type(own_type).__name__
    if kind == "Array":
        ndim, size = own_type.ndim, getattr(own_type.dtype, "bitwidth", 8) // 8  # booleans have no bitwidth
        extents = word + ARRAY_HEAD_WORDS
        found += [Parameter(launch_structs.parameter(launch_structs.WORD, word + 4), 8)] * 2
        found.append(Parameter(launch_structs.parameter(launch_structs.ZERO), 8))
        found += [Parameter(launch_structs.parameter(launch_structs.WORD, extents + i), 8) for i in range(ndim)]
        found += [Parameter(launch_structs.parameter(launch_structs.ELEMENTS, extents + ndim + i, size), 8) for i in range(ndim)]
        return extents + 2 * ndim
    if hasattr(own_type, "types") and hasattr(own_type, "__len__"):
        for item in own_type.types:
            word = _add(item, word, found)
        return word
    if kind == "Complex":
        how = launch_structs.JOINED if own_type.bitwidth == 64 else launch_structs.WORD
        found.append(Parameter(launch_structs.parameter(how, word), own_type.bitwidth // 8))
        return word + 2
    size = 1 if kind == "Boolean" else own_type.bitwidth // 8
    found.append(Parameter(launch_structs.parameter(launch_structs.WORD, word), size))
    return word + 1


@functools.cache
def target() -> NumbaCudaMlir:
    """The process's only object."""
    return NumbaCudaMlir()

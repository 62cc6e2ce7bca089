"""Calls of kernels that JAX traces: the function that it compiles calls the kernel by XLA's handler (``xla``), or by Python.

A kernel that declares its outputs, or what it writes to, is a *function of XLA* then: its results are new arrays, and so is each
argument that it writes to.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np

from .._abi import ffi
from ..arguments.decoding import field_of
from ..calls.fallback import call_numba
from ..calls.options import declaring
from ..calls.precompile import compiled_natively
from ..calls.resolve import Report
from ..dispatch import batches, structs
from ..ground import dtype_registry
from ..ground.dlpack_types import DLDataType
from ..ground.dtypes import field_to_dtype
from ..ground.numba_code import RUNS_THREADS, runs_python
from ..ground.numba_internals import compiles_as_numba, is_object_mode, overloads_of
from ..ground.omitted import OMITTED
from ..ground.once import for_ever, forkable_lock, once
from ..ground.parameters import flatten
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_New
from ..ground.safe_repr import type_name
from ..ground.shape_notation import extents_of, shape_of
from . import xla
from .gradients import differentiable

__all__ = ["PYTHON_SIDE", "TARGET", "Traced", "name_of", "register_xla_target"]

TARGET = "fastexchange"
"""The name of the handler for XLA."""
_PYTHONS = bool, int, float, complex
_lock = forkable_lock()


def is_traced(values) -> bool:
    """Whether JAX traces a function by one of these values, or of their items."""
    import jax

    leaves = (each for position, value in enumerate(values) for _, each in flatten(position, value))
    return any(isinstance(each, jax.core.Tracer) for each in leaves)


def check_changed(kernel, bound: tuple) -> None:
    """Raise BufferError if a kernel would write to an array of JAX."""
    import jax

    for position, value in enumerate(bound):
        name = kernel._parameters.name_of(position)
        if name in kernel.mutates and any(isinstance(each, jax.Array) for _, each in flatten(position, value)):
            raise BufferError(
                f"{kernel.__qualname__}(): argument {name!r} (position {position}) is written to, and JAX's arrays are "
                "immutable: call it in a function that jax.jit compiles, where it returns the new value"
            )


class Traced:
    """A call with values by which JAX traces. `bound`: its arguments, in parameter order.

    Raises TypeError for arguments that JAX cannot pass, and for a kernel that declares nothing.
    """

    def __init__(self, kernel, bound: tuple):
        self.kernel, self.bound, self.name = kernel, bound, kernel.__qualname__
        self._pattern = kernel._pattern
        self._changed = kernel.mutates or ()
        if self._pattern is None and not self._changed:
            raise TypeError(_undeclared(kernel, bound))
        self._declared = [each.name for each in self._pattern.inputs] if self._pattern is not None else []
        self.operands: list[Any] = []
        """The arrays among the arguments, and among their items."""
        self.places: list[tuple[int, tuple[int, ...]]] = []
        """For each operand, the position of its argument, and the indices by which it is found in that."""
        self._sources: list[tuple[int, Any]] = []
        self._changes: list[int] = []
        """The operands that the kernel writes to."""
        self._are_numbers: list[bool] = []
        """For each operand, whether the kernel gets a number."""
        self.is_native = True
        """Whether XLA's handler can have all values."""
        first = len(bound) - len(self._pattern.outputs) if self._pattern is not None else len(bound)
        samples = [self._read(value, position) for position, value in enumerate(bound[:first])]
        self.results = self._results(bound[:first])
        for position, result in enumerate(self.results[: len(bound) - first], first):
            if bound[position] is not None and bound[position] is not OMITTED:
                raise TypeError(f"{self.argument(position)} is an output: JAX's arrays are immutable, leave it out")
            self._sources.append((batches.RESULT, _xla_dtype(result.dtype, self.argument(position))))
            samples.append(_sample_array(result.dtype, len(result.shape), is_writeable=True))
        self._samples = tuple(samples)

    def argument(self, position: int) -> str:
        """An argument's name and position, for errors."""
        return f"{self.name}(): argument {self.kernel._parameters.name_of(position)!r} (position {int(position)})"

    # ---- arguments -----------------------------------------------------------------------------------------------------

    def _read(self, value, position: int, path: tuple[int, ...] = ()) -> Any:
        """Note where a value, an argument or an item of one, comes from. Returns a sample of what the kernel gets."""
        import jax

        if isinstance(value, tuple):
            self._sources.append((batches.NOWHERE, None))
            items = [self._read(each, position, (*path, i)) for i, each in enumerate(value)]
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, list):
            self.is_native = False
            return [self._read(each, position, (*path, i)) for i, each in enumerate(value)]
        if isinstance(value, (jax.core.Tracer, jax.Array, np.ndarray)):
            self.operands.append(value)
            self.places.append((position, path))
            return self._read_array(value, position)
        if value is None or value is OMITTED:
            self._sources.append((batches.NOWHERE, None))
        elif type(value) in _PYTHONS or isinstance(value, np.generic):
            self._sources.append((batches.NUMBER, value))
        elif hasattr(value, "__dlpack__"):
            kind = type_name(type(value))
            raise TypeError(f"{self.argument(position)} is a {kind}, and JAX traces this call: pass an array of JAX or NumPy")
        else:
            self.is_native = False
        return value

    def _read_array(self, value, position: int):
        name = self.kernel._parameters.name_of(position)
        dtype, where = value.dtype, self.argument(position)
        if isinstance(value, np.ndarray):
            import jax

            dtype = jax.dtypes.canonicalize_dtype(dtype)
        number = _xla_dtype(dtype, where)
        if name in self._changed:
            self._changes.append(len(self.operands) - 1)
            self._sources.append((batches.CHANGED, number))
        else:
            self._sources.append((batches.OPERAND, number))
        is_array = value.shape != () or name in self._declared or name in self._changed or isinstance(value, np.ndarray)
        self._are_numbers.append(not is_array)
        if is_array:
            return _sample_array(dtype, len(value.shape), is_writeable=name in self._changed)
        is_pythons = getattr(value, "weak_type", False)
        return type(np.zeros((), dtype).item())(0) if is_pythons else np.dtype(dtype).type(0)

    # ---- results -------------------------------------------------------------------------------------------------------

    def _results(self, given: tuple) -> list:
        """The shapes and dtypes of the outputs, then those of the arguments that the kernel writes to."""
        import jax

        made = []
        if self._pattern is not None:
            dtypes = {each.position: self._dtype_of(given[each.position], each.position) for each in self._pattern.inputs}
            for output, shape in zip(self._pattern.outputs, self._shapes(given), strict=True):
                wanted = self._pattern.dtype_of(output, dtypes, self.name)
                dtype = dtype_registry.dtype_of(wanted.code, wanted.bits)
                made.append(jax.ShapeDtypeStruct(shape, dtype))
        return made + [jax.ShapeDtypeStruct(self.operands[i].shape, self.operands[i].dtype) for i in self._changes]

    def _dtype_of(self, value, position: int) -> DLDataType | None:
        if not hasattr(value, "dtype"):
            raise TypeError(f"{self.argument(position)} is a tensor in {str(self._pattern)!r}, not {type_name(type(value))}")
        return DLDataType.from_dtype(value.dtype) if dtype_registry.key_of(value.dtype) is not None else None

    def _shapes(self, given: tuple) -> list:
        pattern, defaults = self._pattern, self.kernel._parameters.defaults
        for position in pattern.numbers.values():
            number = defaults.get(position) if given[position] is OMITTED else given[position]
            if is_traced([number]):
                raise TypeError(
                    f"{self.argument(position)} is an extent in {str(pattern)!r}, so it has to be known when JAX traces: "
                    "jax.jit(..., static_argnames=...)"
                )
        shapes = [tuple(given[each.position].shape) for each in pattern.inputs]
        if all(type(extent) is int for shape in shapes for extent in shape):
            numbers = [defaults[at] if given[at] is OMITTED else given[at] for at in pattern.numbers.values()]
            return pattern.shapes_of(list(map(int, numbers)), shapes, self.name)
        extents, rest = extents_of(pattern, given, defaults, self.name, _check)
        return [tuple(shape_of(output, extents, rest)) for output in pattern.outputs]

    def with_operands(self, operands) -> list:
        """The arguments with other operands, and the defaults of those that are omitted."""
        given, defaults = iter(operands), self.kernel._parameters.defaults
        return [defaults.get(at) if each is OMITTED else _with_items(each, given) for at, each in enumerate(self.bound)]

    # ---- the call ------------------------------------------------------------------------------------------------------

    def make(self):
        """Make the call: return JAX's values for its results."""
        import jax

        function = self._by_python if self.why_not_native() else self._by_xla()
        with jax.named_scope(self.kernel.py_func.__name__):
            made = differentiable(function, self)(*self.operands)
        outputs = list(made[: len(self.results) - len(self._changes)])
        changed = iter(made[len(outputs) :])
        for position, value in enumerate(self.bound):
            if self.kernel._parameters.name_of(position) in self._changed:
                outputs.append(_with_items(value, changed))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def why_not_native(self) -> str:
        """Why Python has to make the call; "" if XLA's handler does."""
        kernel = self.kernel
        if kernel._is_interpreted:
            return "NUMBA_DISABLE_JIT is set"
        if is_object_mode(kernel) or not compiles_as_numba(kernel) or not kernel._native.runtime.is_native:
            return kernel._native.runtime.why_not_native or "Numba compiles the kernel in another way"
        keys = self._keys
        if (why := _why_no_handler()) or not self.is_native:
            return why or "an argument is neither an array, a number, None nor a tuple of such"
        return "" if keys else "native code cannot pass an argument, or the result"

    @functools.cached_property
    def _keys(self) -> tuple[int, ...]:
        """The key sequence of the call, for which the kernel is compiled; () if XLA's handler cannot make it.

        Raises what the compiler says of the kernel.
        """
        report = _compiled(self.kernel, self._samples)
        if report.status != structs.STATUS_UNKNOWN_SHAPE:
            call_numba(self.kernel, self._samples, is_made=False)
            return ()
        keys = report.keys
        return keys if len(keys) == len(self._sources) and all(key & 0xFF in _PASSED for key in keys) else ()

    def _by_xla(self) -> Callable:
        """The function of XLA, of the operands."""
        import jax

        outputs = len(self.results) - len(self._changes)
        numbers = [len(self.results[0].shape)]
        sources, operands, results, changed = [], 0, 0, outputs
        for key, (kind, what) in zip(self._keys, self._sources, strict=True):
            source = kind
            if kind == batches.NUMBER:
                source |= len(numbers) << batches.INDEX_AT
                numbers += _words_of(what, key)
            elif kind == batches.RESULT:
                source |= what << batches.DTYPE_AT | results << batches.INDEX_AT
                results += 1
            elif kind != batches.NOWHERE:
                size = np.dtype(self.operands[operands].dtype).itemsize
                source |= what << batches.DTYPE_AT | operands << batches.INDEX_AT | size << batches.SIZE_AT
                operands += 1
                if kind == batches.CHANGED:
                    source |= changed << batches.RESULT_AT
                    changed += 1
            sources.append(source)
        name = name_of(self.kernel)
        attributes = {
            "id": np.int64(_id_of(name)), "kernel": name, "keys": np.array(self._keys, np.int64),
            "numbers": np.array(numbers, np.int64), "sources": np.array(sources, np.int64),
        }  # fmt: skip
        call = jax.ffi.ffi_call(
            TARGET,
            self.results,
            vmap_method="broadcast_all" if self._changes else "expand_dims",
            input_output_aliases={operand: outputs + i for i, operand in enumerate(self._changes)},
        )
        return lambda *operands: call(*operands, **attributes)

    def _by_python(self, *operands):
        """The call by Python, with NumPy's arrays. JAX makes it from a thread of its own."""
        import jax

        def make(*arrays):
            given = [np.array(each) if i in self._changes else np.asarray(each) for i, each in enumerate(arrays)]
            pairs = zip(given, self._are_numbers, strict=True)
            bound = self.with_operands(each[()].item() if is_number else each for each, is_number in pairs)
            changed = [bound[position] for position in range(len(bound)) if self._is_changed(position)]
            made = self.kernel(*bound)
            outputs = [] if self._pattern is None else made if isinstance(made, tuple) else [made]
            return [*outputs, *_arrays_in(changed)]

        return jax.pure_callback(make, self.results, *operands, vmap_method="sequential")

    def _is_changed(self, position: int) -> bool:
        return self.kernel._parameters.name_of(position) in self._changed


def _compiled(kernel, samples: tuple) -> Report:
    """Compile for a call by XLA with arguments like these. Raises RuntimeError if XLA's threads cannot run it at once."""
    report = compiled_natively(kernel, samples)
    loops = any(runs_python(compiled.library) == RUNS_THREADS for _, compiled in overloads_of(kernel))
    if loops and numba.threading_layer() == "workqueue":
        raise RuntimeError(
            f"{kernel.__qualname__}(): XLA runs kernels in several threads at once, and Numba's threading layer 'workqueue' ends "
            "the process if two of them have parallel loops: set NUMBA_THREADING_LAYER to omp or tbb"
        )
    return report


_PASSED = structs.KEY_ARRAY, structs.KEY_SCALAR, structs.KEY_NONE, structs.KEY_OMITTED, structs.KEY_TUPLE
"""What the handler passes to kernels."""


def _undeclared(kernel, bound: tuple) -> str:
    """The message for a kernel of which JAX cannot know what it returns."""
    name = kernel.__qualname__
    names = ", ".join(kernel._parameters.name_of(i) for i, value in enumerate(bound) if value is not OMITTED)
    return (
        f"{name}(): JAX traces this call, and has to know what it returns: declare the outputs, "
        f'fast_args(out="x[n] -> y[n]"), or the arguments that it writes to, fast_args(mutates=(...)); or let Python make the '
        f"call: jax.pure_callback({name}, jax.ShapeDtypeStruct(shape, dtype), {names})"
    )


def _xla_dtype(dtype, where: str) -> int:
    """XLA's number of a dtype. Raises TypeError for those that have no elements of whole bytes."""
    name = str(dtype)
    number = xla.DTYPES.get("PRED" if name == "bool" else _xla_name(name))
    if number is None:
        advice = "; pass jax.random.key_data() of it" if name.startswith("key<") else ""
        raise TypeError(f"{where}: a kernel cannot read elements of the type {name}{advice}")
    return number


def _xla_name(name: str) -> str:
    for prefix, short in (("bfloat", "BF"), ("float8_", "F8"), ("float", "F"), ("complex", "C"), ("uint", "U"), ("int", "S")):
        if name.startswith(prefix):
            return short + name[len(prefix) :].upper()
    return name


def _sample_array(dtype, ndim: int, is_writeable: bool) -> np.ndarray:
    """An array as the kernel gets one: in C order, and not in Fortran's as well if it has two dimensions."""
    made = np.zeros((2, 2, *[1] * ndim)[:ndim], dtype)
    made.flags.writeable = is_writeable
    return made


def _check(is_equal, message: Callable[[], str]) -> None:
    if not is_equal:
        raise ValueError(message())


def _words_of(value, key: int) -> list[int]:
    """The words of a constant with this key."""
    data = np.asarray(value, field_to_dtype(field_of(key))).tobytes()
    parts = [data] if structs.words_of.py_func(key) == 1 else [data[: len(data) // 2], data[len(data) // 2 :]]
    return [int.from_bytes(part.ljust(8, b"\0"), "little", signed=True) for part in parts]


def _with_items(value, arrays: Iterator):
    """An argument with other arrays in place of its own."""
    if isinstance(value, (tuple, list)):
        items = [_with_items(each, arrays) for each in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if not hasattr(value, "shape") or isinstance(value, np.generic):
        return value
    return next(arrays)


def _arrays_in(values) -> list:
    """The arrays among values, and in their tuples and lists."""
    found: list[np.ndarray] = []
    for each in values:
        found += _arrays_in(each) if isinstance(each, (tuple, list)) else [each] if isinstance(each, np.ndarray) else []
    return found


# ---- names -----------------------------------------------------------------------------------------------------------------

_named: dict[str, Any] = {}
"""By name, the kernels that compiled functions may call. They live as long as the process."""


def _base_name(kernel) -> str:
    """A kernel's name without a number: its function's, and a digest of what it declares."""
    function = kernel.py_func
    declared = list(inspect.signature(function).parameters), kernel.out, kernel.mutates, kernel.storage
    digest = hashlib.sha256(repr(declared).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{function.__module__}.{function.__qualname__}#{digest}"


def _id_of(name: str) -> int:
    """The number by which the handler finds a name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "little", signed=True)


def name_of(kernel) -> str:
    """The name of a kernel in compiled functions. A second one of the same name, as in a notebook, has a number."""
    with _lock:
        known = vars(kernel).get("_xla_name")
        if known is None:
            base = known = _base_name(kernel)
            number = 2
            while known in _named:
                known = f"{base}_{number}"
                number += 1
            kernel._xla_name = known
            _named[known] = for_ever(kernel)
            xla.know_kernel(_id_of(known), kernel._native.address)
        return known


@once
def _why_no_handler() -> str:
    """Register the handler. Why there is none; "" if there is."""
    try:
        import jax

        jax.ffi.register_ffi_target(TARGET, PyCapsule_New(xla.handler(), None, None), platform="cpu")
    except Exception as error:  # a JAX with another API
        reraise_passing(error)
        return f"XLA does not take the handler: {type(error).__name__}: {error}"
    return ""


def register_xla_target() -> str:
    """Let XLA find the kernels that functions of JAX call. Returns the name under which it does, ``"fastexchange"``.

    A process that traces a call does this itself. One that runs an exported function has to call this first, and to import the
    modules with its kernels; they are compiled for its calls when they come. Who exports names it:
    ``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(register_xla_target())]``.

    Raises ImportError without JAX, and RuntimeError if this one does not take the handler.

    Source: ``jax.ffi``, ``jax.export``.
    """
    import jax  # noqa: F401

    if why := _why_no_handler():
        raise RuntimeError(f"register_xla_target(): {why}")
    return TARGET


# ---- what native code calls ------------------------------------------------------------------------------------------------


def _describe(error: BaseException) -> str:
    """The text of a kernel's exception in JAX's error."""
    return f"{type(error).__name__}: {error}".replace("\0", "\\0")


def _learn(address: int) -> None:
    """Compile for a call by XLA that this process has not traced: by an exported function, or after a kernel was recompiled.

    `address`: of the ``fx_xla_attributes``. Raises LookupError if there is no kernel of this name.
    """
    attributes = ffi.cast("fx_xla_attributes *", address)
    name = bytes(ffi.buffer(attributes.kernel.ptr, attributes.kernel.len)).decode("utf-8", "surrogatepass")
    kernel = _named.get(name)
    if kernel is None:
        kernel = next((each for each in reversed(list(declaring.values())) if _base_name(each) == name), None)
        if kernel is None or vars(kernel).get("_xla_name"):
            raise LookupError(f"this process has no kernel {name}, declared as when the call was traced: import its module")
        name_of(kernel)
    words = ffi.cast("int64_t *", attributes.keys.data)
    keys = iter(words[i] for i in range(attributes.keys.size))
    _compiled(kernel, tuple(_sample(key, keys) for key in keys))


def _sample(key: int, keys: Iterator[int]):
    """A value with this key. `keys`: those that follow."""
    kind = key & 0xFF
    if kind == structs.KEY_TUPLE:
        return tuple(_sample(next(keys), keys) for _ in range(key >> structs.SERIAL_SHIFT))
    if kind in (structs.KEY_NONE, structs.KEY_OMITTED):
        return None if kind == structs.KEY_NONE else OMITTED
    dtype = field_to_dtype(field_of(key))
    if kind == structs.KEY_ARRAY:
        return _sample_array(dtype, key >> structs.NDIM_SHIFT & 0xFF, bool(key >> structs.FLAGS_SHIFT & structs.WRITEABLE))
    return dtype.type(0)


PYTHON_SIDE = _describe, _learn

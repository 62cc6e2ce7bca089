"""Calls of kernels that JAX traces: the function that it compiles calls the kernel by XLA's handler (``xla``), or by Python.

A kernel that declares its outputs, or what it writes to, is a *function of XLA* then: its results are new arrays, and so is each
argument that it writes to.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numba
import numpy as np

from ..calls.compile_ahead import precompile
from ..dispatch import batches, structs
from ..ground import dtype_registry
from ..ground.dlpack_types import DLDataType
from ..ground.numba_internals import compiles_as_numba, is_object_mode
from ..ground.omitted import OMITTED
from ..ground.once import once
from ..ground.parameters import flatten, with_items
from ..ground.safe_repr import a_type_name, type_name
from ..ground.shape_notation import extents_of, shape_of
from . import xla
from .gradients import differentiable
from .layout import array_type, is_traced_type
from .mesh_axes import as_varying, axes_of, distributed_as, distributed_over, sharding_of, with_axes_of
from .xla_target import TARGET, compiled_for, id_of, name_of, sample_array, why_no_handler

__all__ = ["Traced", "check_changed", "is_functional", "is_traced"]

_PYTHONS = bool, int, float, complex
_WEAK = "bool", "int32", "int64", "float32", "float64", "complex64", "complex128"
"""The dtypes of traced values that Python's numbers become: a kernel gets these as Python's."""


def is_traced(values) -> bool:
    """Whether JAX traces a function by one of these values, or of their items."""
    return any(is_traced_type(type(each)) for position, value in enumerate(values) for _, each in flatten(position, value))


def is_functional() -> bool:
    """Whether JAX compiles a function, or runs one without that (``jax.disable_jit``): calls return what they write to."""
    import jax

    return getattr(jax.config, "jax_disable_jit", False) or isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def check_changed(kernel, bound: tuple) -> None:
    """Raise BufferError if a kernel would write to an array of JAX."""
    for position, value in enumerate(bound):
        name = kernel._parameters.name_of(position)
        if name in (kernel.mutates or ()) and any(type(each) is array_type() for _, each in flatten(position, value)):
            raise BufferError(
                f"{kernel.__qualname__}(): argument {name!r} (position {position}) is written to, and JAX's arrays are "
                "immutable: call it in a function that jax.jit compiles, where it returns the new value"
            )


class _Operand:
    """Stands for an array among the arguments. JAX keeps what knows of a call as long as the function that it has compiled."""

    def __init__(self, shape: tuple, dtype, sharding):
        self.shape, self.dtype, self.sharding = shape, dtype, sharding


class Traced:
    """A call with values by which JAX traces. `bound`: its arguments, in parameter order.

    Raises TypeError for arguments that JAX cannot pass, and for a kernel that declares nothing.
    """

    def __init__(self, kernel, bound: tuple):
        self.kernel, self.name = kernel, kernel.__qualname__
        self._launches = kernel._by_xla
        if self._launches is not None:  # CUDA's kernels have no types for omitted arguments
            defaults = kernel._parameters.defaults
            bound = tuple(defaults.get(i, each) if each is OMITTED else each for i, each in enumerate(bound))
        self._pattern = kernel._pattern
        self._changed = kernel.mutates or ()
        if self._pattern is None and not self._changed:
            raise TypeError(_undeclared(kernel, bound))
        self._declared = [each.name for each in self._pattern.inputs] if self._pattern is not None else []
        self._given: list[Any] = []
        self.operands: list[_Operand] = []
        """The arrays among the arguments, and among their items."""
        self.places: list[tuple[int, tuple[int, ...]]] = []
        """For each operand, the position of its argument, and the indices by which it is found in that."""
        self._sources: list[tuple[int, Any]] = []
        self._changes: list[int] = []
        """The operands that the kernel writes to."""
        self._numbers: list[Callable] = []
        """For each operand, what makes of an array of NumPy what Python passes to the kernel."""
        self.is_native = True
        """Whether XLA's handler can have all values."""
        first = len(bound) - len(self._pattern.outputs) if self._pattern is not None else len(bound)
        read = [self._read(value, position) for position, value in enumerate(bound[:first])]
        samples = [sample for sample, _ in read]
        self._bound = [template for _, template in read] + [None] * (len(bound) - first)
        self._check_changed()
        self.results = self._results(self._bound[:first])
        for position, result in enumerate(self.results[: len(bound) - first], first):
            if bound[position] is not None and bound[position] is not OMITTED:
                raise TypeError(f"{self.argument(position)} is an output: JAX's arrays are immutable, leave it out")
            self._sources.append((batches.RESULT, (_xla_dtype(result.dtype, self.argument(position)), 0)))
            samples.append(sample_array(result.dtype, len(result.shape), is_writeable=True))
        self._samples = tuple(samples)

    def argument(self, position: int) -> str:
        """An argument's name and position, for errors."""
        return f"{self.name}(): argument {self.kernel._parameters.name_of(position)!r} (position {int(position)})"

    # ---- arguments -----------------------------------------------------------------------------------------------------

    def _read(self, value, position: int, path: tuple[int, ...] = ()) -> tuple[Any, Any]:
        """Note where a value, an argument or an item of one, comes from.

        Returns a sample of what the kernel gets, and the value with :class:`_Operand` in place of arrays.
        """
        import jax

        if isinstance(value, (tuple, list)):
            self._sources.append((batches.NOWHERE, None))
            self.is_native = self.is_native and isinstance(value, tuple)
            items = [self._read(each, position, (*path, i)) for i, each in enumerate(value)]
            return tuple(with_items(value, each) for each in (list(zip(*items, strict=True)) or [(), ()]))
        if is_traced_type(type(value)) or type(value) is array_type() or isinstance(value, np.ndarray):
            if type(value) is array_type() and cast(Any, value).is_deleted():
                raise RuntimeError(f"{self.argument(position)} has been deleted, or donated to another function")
            if isinstance(value, np.ndarray):
                value = np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
            self._given.append(value)
            self.operands.append(_Operand(value.shape, value.dtype, sharding_of(value)))
            self.places.append((position, path))
            return self._sample_of(value, position), self.operands[-1]
        if type(value).__module__.startswith("jax.") and hasattr(value, "dtype"):  # a constant of JAX's, before version 0.9
            return self._read(np.asarray(value), position, path)
        if value is None or value is OMITTED:
            self._sources.append((batches.NOWHERE, None))
        elif type(value) in _PYTHONS or isinstance(value, np.generic):
            self._sources.append((batches.NUMBER, value))
        elif hasattr(value, "__dlpack__"):
            kind = a_type_name(type(value))
            raise TypeError(f"{self.argument(position)} is {kind}, and JAX traces this call: pass an array of JAX or NumPy")
        else:
            self.is_native = False
        return value, value

    def _sample_of(self, value, position: int):
        """A sample of what the kernel gets for an array: an array, or a number."""
        name, dtype = self.kernel._parameters.name_of(position), value.dtype
        buffer = _xla_dtype(dtype, self.argument(position)), np.dtype(dtype).itemsize
        if name in self._changed:
            self._changes.append(len(self.operands) - 1)
        self._sources.append((batches.CHANGED if name in self._changed else batches.OPERAND, buffer))
        if value.shape != () or name in self._declared or name in self._changed or isinstance(value, np.ndarray):
            self._numbers.append(np.array if name in self._changed else np.asarray)
            return sample_array(dtype, len(value.shape), is_writeable=name in self._changed)
        if self._launches is not None:
            raise TypeError(
                f"{self.argument(position)} is a number that JAX computes, in the device's memory, and a launch needs it on the "
                f"host: make it static (static_argnames=), or declare an array without dimensions, {name}[]"
            )
        is_pythons = getattr(value, "weak_type", False) and str(dtype) in _WEAK
        self._numbers.append((lambda array: np.asarray(array).item()) if is_pythons else (lambda array: np.asarray(array)[()]))
        return type(np.zeros((), dtype).item())(0) if is_pythons else np.dtype(dtype).type(0)

    def _check_changed(self) -> None:
        """Raise TypeError if an argument that the kernel writes to has no array."""
        written = {self.kernel._parameters.name_of(self.places[i][0]) for i in self._changes}
        for position, value in enumerate(self._bound):
            if (name := self.kernel._parameters.name_of(position)) in self._changed and name not in written:
                raise TypeError(f"{self.argument(position)} is written to, and is no array but {type_name(type(value))}")

    # ---- results -------------------------------------------------------------------------------------------------------

    def _results(self, given: list) -> list:
        """The shapes and dtypes of the outputs, then those of the arguments that the kernel writes to."""
        import jax

        made = []
        if self._pattern is not None:
            dtypes = {each.position: self._dtype_of(given[each.position], each.position) for each in self._pattern.inputs}
            for output, shape in zip(self._pattern.outputs, self._shapes(given), strict=True):
                wanted = self._pattern.dtype_of(output, dtypes, self.name)
                dtype = dtype_registry.dtype_of(wanted.code, wanted.bits)
                if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != dtype and not _has_wide_results():
                    dtype = narrow
                made.append(jax.ShapeDtypeStruct(shape, dtype))
        return made + [jax.ShapeDtypeStruct(self.operands[i].shape, self.operands[i].dtype) for i in self._changes]

    def _dtype_of(self, value, position: int) -> DLDataType | None:
        if not hasattr(value, "dtype"):
            raise TypeError(f"{self.argument(position)} is a tensor in {str(self._pattern)!r}, not {type_name(type(value))}")
        return DLDataType.from_dtype(value.dtype) if dtype_registry.key_of(value.dtype) is not None else None

    def _shapes(self, given: list) -> list:
        pattern, defaults = self._pattern, self.kernel._parameters.defaults
        for position in pattern.numbers.values():
            number = defaults.get(position) if given[position] is OMITTED else given[position]
            where = f"{self.argument(position)} is an extent in {str(pattern)!r}"
            if isinstance(number, _Operand):
                raise TypeError(f"{where}, so it has to be an int when JAX traces: jax.jit(..., static_argnames=...)")
            if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
                raise TypeError(f"{where}: an int, not {type_name(type(number))}")
        shapes = [tuple(given[each.position].shape) for each in pattern.inputs]
        if all(type(extent) is int for shape in shapes for extent in shape):
            numbers = [defaults[at] if given[at] is OMITTED else given[at] for at in pattern.numbers.values()]
            return pattern.shapes_of(list(map(int, numbers)), shapes, self.name)
        extents, rest = extents_of(pattern, tuple(given), defaults, self.name, _check)
        return [tuple(shape_of(output, extents, rest)) for output in pattern.outputs]

    def kernel_types(self) -> list[str]:
        """The names of the Numba types that the kernel gets."""
        return ["its default" if each is OMITTED else str(numba.typeof(each)) for each in self._samples]

    def with_operands(self, operands) -> list:
        """The arguments with other operands, and the defaults of those that are omitted."""
        given, defaults = iter(operands), self.kernel._parameters.defaults
        return [defaults.get(at) if each is OMITTED else _with_arrays(each, given) for at, each in enumerate(self._bound)]

    def _shardings(self) -> list:
        """How the results are distributed over a mesh with explicit axes: see ``mesh_axes``.

        An output with the dimensions of an input is distributed as that is; else each dimension as one of the same name.
        """
        changed = [self.operands[i].sharding for i in self._changes]
        if self._pattern is None or not any(each.sharding for each in self.operands):
            return [None] * (len(self.results) - len(changed)) + changed
        axes: dict[Any, Any] = {}
        whole: dict[tuple, Any] = {}
        inputs = {each.position: each.dims for each in self._pattern.inputs}
        for operand, (position, path) in zip(self.operands, self.places, strict=True):
            dims = inputs.get(position, ())
            if operand.sharding is not None and not path and dims:
                whole.setdefault(dims, operand.sharding)
                if ... not in dims:
                    pairs = zip(dims, operand.sharding.spec, strict=True)
                    axes = {name: (operand.sharding.mesh, axis) for name, axis in pairs if axis is not None} | axes
        outputs = [tuple(getattr(dim, "id", dim) for dim in output.dims) for output in self._pattern.outputs]
        return [whole.get(dims) or distributed_over([axes.get(dim) for dim in dims]) for dims in outputs] + changed

    # ---- the call ------------------------------------------------------------------------------------------------------

    def make(self):
        """Make the call, once: return JAX's values for its results."""
        import jax

        axes = axes_of(self._given)
        given = [as_varying(each, axes) for each in self._given]
        self._given = []  # JAX keeps this object, and would keep the traced values by it
        if axes:
            self.results = [with_axes_of(given[0], each) for each in self.results]
        function = self._by_python if self.why_not_native() else self._by_xla()
        with jax.named_scope(self.kernel.py_func.__name__):
            made = differentiable(function, self, axes)(*given)
            # Without numbers of 64 bits an output that is declared so is another, as it is of an eager call.
            made = [each.astype(jax.dtypes.canonicalize_dtype(each.dtype)) for each in made]
            made = list(map(distributed_as, made, self._shardings()))
        outputs = made[: len(self.results) - len(self._changes)]
        changed = iter(made[len(outputs) :])
        for position, value in enumerate(self._bound):
            if self.kernel._parameters.name_of(position) in self._changed:
                outputs.append(_with_arrays(value, changed))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def why_not_native(self) -> str:
        """Why Python has to make the call; "" if XLA's handler does."""
        kernel = self.kernel
        if self._launches is not None:
            if not self.is_native:
                raise TypeError(f"{self.name}(): JAX traces this call, and an argument is neither array, number, None nor tuple")
            self._launches.check(kernel)
            return ""
        if kernel._is_interpreted:
            return "NUMBA_DISABLE_JIT is set"
        if kernel._outputs is not None and kernel._outputs.is_debugging:
            return "FASTEXCHANGE_DEBUG is set, so what is left of the outputs is looked at"
        if is_object_mode(kernel) or not compiles_as_numba(kernel) or not kernel._native.runtime.is_native:
            return kernel._native.runtime.why_not_native or "Numba compiles the kernel in another way"
        keys = self._keys
        if (why := why_no_handler()) or not self.is_native:
            return why or "an argument is neither an array, a number, None nor a tuple of such"
        return "" if keys else "native code cannot pass an argument, or the result"

    @functools.cached_property
    def _keys(self) -> tuple[int, ...]:
        """The key sequence of the call, for which the kernel is compiled; () if XLA's handler cannot make it.

        Raises what the compiler says of the kernel.
        """
        if self._launches is not None:
            return self._launches.compiled(self.kernel, self._samples)
        report = compiled_for(self.kernel, self._samples)
        if report.overload is None:
            precompile(self.kernel, (self._samples,))
            return ()
        keys = report.keys
        return keys if len(keys) == len(self._sources) and all(key & 0xFF in _PASSED for key in keys) else ()

    def _by_xla(self) -> Callable:
        """The function of XLA, of the operands."""
        import jax

        outputs = len(self.results) - len(self._changes)
        sources, numbers = batches.sources_of(self._keys, self._sources, len(self.results[0].shape), outputs)
        name = name_of(self.kernel)
        attributes = {
            "id": np.int64(id_of(name)), "kernel": name, "keys": np.array(self._keys, np.int64),
            "numbers": np.array(numbers, np.int64), "sources": np.array(sources, np.int64),
        }  # fmt: skip
        call = jax.ffi.ffi_call(
            TARGET if self._launches is None else self._launches.TARGET,
            self.results,
            vmap_method="broadcast_all" if self._changes else "expand_dims",
            input_output_aliases={operand: outputs + i for i, operand in enumerate(self._changes)},
        )
        return lambda *operands: call(*operands, **attributes)

    def _by_python(self, *operands):
        """The call by Python, with NumPy's arrays. JAX makes it from a thread of its own."""
        import jax

        def make(*arrays):
            bound = self.with_operands(number(each) for number, each in zip(self._numbers, arrays, strict=True))
            names = enumerate(map(self.kernel._parameters.name_of, range(len(bound))))
            changed = [bound[position] for position, name in names if name in self._changed]
            made = self.kernel(*bound)
            outputs = [] if self._pattern is None else made if isinstance(made, tuple) else [made]
            return [*outputs, *(each for _, each in flatten(0, changed) if isinstance(each, np.ndarray))]

        return jax.pure_callback(make, self.results, *operands, vmap_method="sequential")


_PASSED = structs.KEY_ARRAY, structs.KEY_SCALAR, structs.KEY_NONE, structs.KEY_OMITTED, structs.KEY_TUPLE
"""What the handler passes to kernels."""


@once
def _has_wide_results() -> bool:
    """Whether functions of XLA have results of 64 bits while JAX has none, as now: not before JAX 0.9."""
    import jax

    return jax.eval_shape(jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), np.float64))).dtype == np.float64


def _undeclared(kernel, bound: tuple) -> str:
    """The message for a kernel of which JAX cannot know what it returns."""
    name, function = kernel.__qualname__, kernel.py_func.__name__
    names = ", ".join(kernel._parameters.name_of(i) for i, value in enumerate(bound) if value is not OMITTED)
    return (
        f"{name}(): JAX traces this call, and has to know what it returns: declare the outputs, the last of its parameters, "
        f'which it writes to, fast_args(out="x[n] -> y[n]"), or the arguments that it changes, fast_args(mutates=(...)); or, if '
        f"it returns a new array, let Python make the call: jax.pure_callback({function}, "
        f"jax.ShapeDtypeStruct(shape, dtype), {names})"
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


def _check(is_equal, message: Callable[[], str]) -> None:
    if not is_equal:
        raise ValueError(message())


def _with_arrays(value, arrays: Iterator):
    """An argument with arrays in place of what stands for them."""
    if isinstance(value, (tuple, list)):
        return with_items(value, [_with_arrays(each, arrays) for each in value])
    return next(arrays) if isinstance(value, _Operand) else value

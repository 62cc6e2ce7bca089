"""Declared outputs, ``fast_args(out=…)``, that native code (``dispatch.allocation``) leaves to Python.

This module raises the errors for inputs that do not fit, reads tensors of any kind, and makes outputs for frameworks that cannot
allocate: the kernel gets a NumPy array, which becomes a tensor after the call, as results do (``results.as_target``).
"""

import ctypes
from typing import Any

import numpy as np

from .._abi import ffi
from ..arguments.buffer import is_buffer_type
from ..arguments.discovery import learn
from ..arguments.ndarrays import is_masked_array
from ..arguments.others import advice_for
from ..dispatch import allocation as native
from ..dispatch.boxed_results import NEW
from ..dispatch.runtime import runtime
from ..exchange.export import export_of, is_exportable, known
from ..ground import dtype_registry
from ..ground.dlpack import DLDeviceType
from ..ground.dlpack_types import DLDataType
from ..ground.native import address_of
from ..ground.omitted import Omitted
from ..ground.parameters import Parameters
from ..ground.safe_repr import a_type_name, type_name
from ..ground.shape_notation import Output, Pattern
from ..interpreter import DISABLED
from ..producers.framework import PLAIN, Framework, framework_of
from .filled import fill, is_debugging, report
from .results import as_target, tensor_type

__all__ = ["Outputs", "shape_and_dtype"]


class Outputs:
    """A kernel's declared outputs. `pattern`: of :func:`~fastexchange.ground.shape_notation.pattern_of`. `name`: the kernel's."""

    def __init__(self, pattern: Pattern, parameters: Parameters, name: str):
        self.pattern, self._parameters, self._name = pattern, parameters, name
        self.first = len(parameters.names) - len(self.pattern.outputs)
        """The position of the first output."""
        self.is_debugging = is_debugging()
        self.program = None if self.is_debugging else native.words_of(self.pattern)
        if runtime().is_native:
            known(np.ndarray)  # files its allocator

    def __len__(self) -> int:
        return len(self.pattern.outputs)

    def of(self, arguments: tuple) -> Any:
        """The result of a call: its output, or a tuple of them."""
        found = tuple(arguments[self.first :])
        return found[0] if len(found) == 1 else found

    def call(self, arguments: tuple, returns: "type | str | None", make_call) -> Any:
        """Make a call with `arguments`, in parameter order. ``make_call`` gets all arguments, and returns None."""
        completed, borrowed = self._complete(arguments, returns)
        result = make_call(completed)
        for output in self.pattern.outputs if self.is_debugging else ():
            if self._is_omitted(arguments[output.position]):
                report(completed[output.position], self._name, output.name)
        if result is not None:
            raise TypeError(
                f"{self._name}(): a kernel that declares outputs, fast_args(out={str(self.pattern)!r}), returns None, not "
                f"{type_name(type(result))}"
            )
        if borrowed:
            like = self._like(arguments, returns)
            completed = tuple(
                as_target(value, like, self._name, NEW) if position in borrowed else value
                for position, value in enumerate(completed)
            )
        return self.of(completed)

    def complete(self, arguments: tuple, returns: "type | str | None") -> tuple:
        """`arguments` with the omitted outputs, tensors or NumPy arrays."""
        return self._complete(arguments, returns)[0]

    def _complete(self, arguments: tuple, returns) -> tuple[tuple, set[int]]:
        """Return all arguments, and the positions of arrays that become tensors after the call.

        Raises ValueError for inputs that do not fit the notation, TypeError for an argument that is no tensor or no int, and for
        inputs whose types determine no output's, and the allocator's exceptions.
        """
        shapes, dtypes = self._read(arguments)
        like = self._like(arguments, returns)
        target = tensor_type(like if isinstance(returns, type) else type(like))
        completed = list(arguments)
        borrowed = set()
        for output, shape in zip(self.pattern.outputs, shapes, strict=True):
            if not self._is_omitted(arguments[output.position]):
                self._check(output, arguments[output.position], shape)
                continue
            dtype = self.pattern.dtype_of(output, dtypes, self._name)
            made = self._allocated(output, target, shape, dtype)
            if made is None:
                made = self._array(output, shape, dtype)
                if target is not np.ndarray:
                    borrowed.add(output.position)
            self._check(output, made, shape)
            if self.is_debugging:
                fill(made)
            completed[output.position] = made
        return tuple(completed), borrowed

    @staticmethod
    def _is_omitted(value) -> bool:
        return isinstance(value, (Omitted, type(None)))

    def _check(self, output: Output, value, shape: tuple[int, ...]) -> None:
        """Raise ValueError for an output with a wrong shape."""
        given, _ = shape_and_dtype(value, self._argument(output.position))
        if given != shape:
            raise ValueError(f"{self._argument(output.position)}: its shape is {given}, and must be {shape} ({self.pattern})")

    def _like(self, arguments: tuple, returns):
        """The tensor, or the type, that says what outputs are allocated."""
        if isinstance(returns, type):
            return returns
        at = self.pattern.inputs[0].position if returns is None else self._parameters.names.index(returns)
        return arguments[at]

    # ---- reading the inputs ------------------------------------------------------------------------------------------

    def _argument(self, position: int) -> str:
        return f"{self._name}(): argument {self._parameters.names[position]!r} (position {position})"

    def _read(self, arguments: tuple) -> tuple[list[tuple[int, ...]], dict[int, DLDataType | None]]:
        """The shapes of the outputs, and the element types of the inputs by position."""
        numbers = self.pattern.values_of(arguments, self._parameters.defaults, self._name)
        positions = [each.position for each in self.pattern.inputs]
        read = [self._read_input(position, arguments[position]) for position in positions]
        shapes = self.pattern.shapes_of(numbers, [shape for shape, _ in read], self._name)
        return shapes, dict(zip(positions, (dtype for _, dtype in read), strict=True))

    def _read_input(self, position: int, value) -> tuple[tuple[int, ...], DLDataType | None]:
        """:func:`shape_and_dtype` of an input. Raises TypeError with what to do if it is no tensor."""
        try:
            return shape_and_dtype(value, self._argument(position))
        except TypeError:
            if _is_tensor(value) or is_masked_array(type(value)):
                raise
        name = self._parameters.names[position]
        given = self._parameters.defaults.get(position) if isinstance(value, Omitted) else value
        leave_out = f", or take {name} out of out=" if len(self.pattern.inputs) > 1 else ""
        raise TypeError(
            f"{self._argument(position)}: an object of type {type_name(type(given))} is no tensor, and {str(self.pattern)!r} "
            f"says that {name} is one; {advice_for(given, name, is_one=True) or f'pass one{leave_out}'}"
        )

    # ---- allocating --------------------------------------------------------------------------------------------------

    def _allocated(self, output: Output, target: type, shape: tuple[int, ...], dtype: DLDataType):
        """Make a tensor by the allocator in the exchange table of `target`. Returns None if there is none."""
        if not runtime().is_native:
            return None
        fields = known(target)  # also files NumPy's allocator for native code
        if target is np.ndarray or not fields.get("allocator") or not fields.get("to_object"):
            return None
        extents = ffi.new("int64_t[]", shape or (0,))
        prototype, error = ffi.new("DLTensor *"), ffi.new("char[]", native.ERROR_BYTES)
        prototype.device.device_type, prototype.ndim, prototype.shape = int(DLDeviceType.kDLCPU), len(shape), extents
        prototype.dtype.code, prototype.dtype.bits, prototype.dtype.lanes = dtype
        what = f"{self._name}(): its output {output.name!r}, {dtype} of shape {shape}, cannot be allocated by {type_name(target)}"
        try:
            made = _ALLOCATE(native.allocate.address)(
                fields["allocator"], fields["to_object"], address_of(prototype), native.note_error.address, address_of(error)
            )
        except MemoryError:
            raise
        except Exception as failure:
            raise BufferError(f"{what}: {failure}") from failure
        if made is None:
            said = bytes(ffi.buffer(error)).partition(b"\0")[0].decode(errors="replace")
            raise BufferError(f"{what}: {said or 'it does not say why'}")
        return made

    def _array(self, output: Output, shape: tuple[int, ...], dtype: DLDataType) -> np.ndarray:
        known_dtype = dtype_registry.dtype_of(dtype.code, dtype.bits) if dtype.lanes == 1 else None
        if known_dtype is None:
            raise BufferError(f"{self._name}(): its output {output.name!r}, of {dtype}, has no NumPy dtype")
        try:
            return np.empty(shape, known_dtype)
        except (ValueError, MemoryError) as error:  # too large, too many dimensions
            kind = MemoryError if isinstance(error, MemoryError) else ValueError
            raise kind(f"{self._name}(): its output {output.name!r} of shape {shape}: {error}") from None


_ALLOCATE = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 5)


def _is_tensor(value) -> bool:
    """Whether something exports a value, or is to be asked."""
    return hasattr(value, "__dlpack__") or is_buffer_type(type(value)) if DISABLED else is_exportable(value)


def shape_and_dtype(value, what: str) -> tuple[tuple[int, ...], DLDataType | None]:
    """A tensor's shape and element type; None for a type that DLPack lacks.

    Raises TypeError if it is no tensor, and its framework's exceptions.
    """
    framework = framework_of(value)
    if DISABLED:
        if not _is_tensor(value):
            raise TypeError(f"{what}: an object of type {type_name(type(value))} is no tensor")
        array = framework.as_numpy(framework.elements_of(value)) if not isinstance(value, np.ndarray) else value
        key = dtype_registry.key_of(array.dtype)
        return _shape_of(framework, value, what), DLDataType(*key) if key is not None else None
    if framework is not PLAIN:
        learn(value)
        with export_of(framework.elements_of(value), what) as export:
            return _shape_of(framework, value, what), _dtype_of(export)
    if isinstance(value, np.ndarray):
        learn(value)
        return value.shape, DLDataType.from_dtype(value.dtype) if dtype_registry.key_of(value.dtype) is not None else None
    with export_of(value, what) as export:
        return tuple(export.tensor.shape[i] for i in range(export.tensor.ndim)), _dtype_of(export)


def _shape_of(framework: Framework, tensor, what: str) -> tuple[int, ...]:
    """The shape of a tensor. Raises BufferError for kinds that have none, as PyTorch's nested ones."""
    try:
        return framework.shape_of(tensor)
    except Exception as error:
        if (why := framework.why_no_memory(tensor)) is None:
            raise
        raise BufferError(f"{what}: {a_type_name(type(tensor))} cannot be exported: {why}") from error


def _dtype_of(export) -> DLDataType:
    dtype = export.tensor.dtype
    return DLDataType(dtype.code, dtype.bits, dtype.lanes)

"""Call frames of XLA's made by hand, with buffers on the driver stub's devices: for the handler of kernels for CUDA."""

import ctypes
import math

import numpy as np

from fastexchange._abi import ffi
from fastexchange.dispatch import batches
from fastexchange.ground.native import address_of
from fastexchange.jax import xla, xla_cuda, xla_launches, xla_target

_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_KIND = xla.DTYPES["F32"], 4
_VALUES = [(batches.NUMBER, 2.0), (batches.OPERAND, _KIND), (batches.OPERAND, _KIND), (batches.RESULT, _KIND)]


class Calls:
    """Calls by the handler, and what XLA's side of the interface does in them.

    `stream`: that of all calls; `errors`: the texts of the errors made; `fails`: whether there is no stream; `data`: where the
    buffers of the last call are.
    """

    def __init__(self, stub, stream):
        self.stub, self.stream, self.errors, self.fails = stub, int(getattr(stream.handle, "value", stream.handle)), [], False
        self._functions = _HANDLER(self._error_create), _HANDLER(self._stream_get)
        self._api = ffi.new("XLA_FFI_Api *")
        self._api.XLA_FFI_Error_Create, self._api.XLA_FFI_Stream_Get = (
            ffi.cast("void *", ctypes.cast(each, ctypes.c_void_p).value) for each in self._functions
        )
        self._handler = _HANDLER(xla_cuda.handler())

    def _error_create(self, address):
        given = ffi.cast("XLA_FFI_Error_Create_Args *", address)
        self.errors.append(ffi.string(given.message).decode())
        return len(self.errors)

    def _stream_get(self, address):
        given = ffi.cast("XLA_FFI_Stream_Get_Args *", address)
        if self.fails:
            return 77
        given.stream = ffi.cast("void *", self.stream)
        return None

    def metadata(self):
        """What the handler answers to XLA's first question."""
        found = ffi.new("XLA_FFI_Metadata *")
        extension = ffi.new("XLA_FFI_Metadata_Extension *")
        extension.extension_base.type, extension.metadata = xla.METADATA, found
        frame = ffi.new("XLA_FFI_CallFrame *")
        frame.extension_start = ffi.cast("XLA_FFI_Extension_Base *", extension)
        assert self._handler(address_of(frame)) is None
        return found

    def __call__(self, kernel, *shapes):
        """Call a kernel with 2.0, two operands and a result of these shapes, or of (5,). Returns the error's text, or None."""
        kept = []

        def new(kind, *initial):
            kept.append(ffi.new(kind, *initial))
            return kept[-1]

        def buffer(shape, data):
            made = new("fx_array_buffer *")
            made.dtype, made.data, made.rank = xla.DTYPES["F32"], data, len(shape)
            made.dims = address_of(new("int64_t[]", list(shape) or [0]))
            return ffi.cast("void *", address_of(made))

        shapes = shapes or [(5,)] * 3
        self.data = [self.stub.allocate(4 * math.prod(shape)) for shape in shapes]
        buffers = [buffer(*each) for each in zip(shapes, self.data, strict=True)]
        frame = ffi.new("XLA_FFI_CallFrame *")
        frame.struct_size, frame.api = ffi.sizeof("XLA_FFI_CallFrame"), self._api
        frame.args.args, frame.args.size = new("void *[]", buffers[:-1]), len(shapes) - 1
        frame.rets.rets, frame.rets.size = new("void *[]", buffers[-1:]), 1

        rank = len(kernel._pattern.outputs[0].dims)
        array = np.zeros((2, 2, *[1] * rank)[:rank], np.float32)
        readonly = array.copy()
        readonly.flags.writeable = False
        keys = tuple(key for each in (2.0, readonly, readonly, array) for key in xla_launches.keys_of(each))
        sources, numbers = batches.sources_of(keys, _VALUES, rank, len(kernel._pattern.outputs))
        name = xla_target.name_of(kernel).encode()
        span = new("XLA_FFI_ByteSpan *", {"ptr": new("char[]", name), "len": len(name)})
        scalar = new("XLA_FFI_Scalar *", {"value": new("int64_t *", xla_target.id_of(name.decode()))})
        arrays = [new("XLA_FFI_Array *", {"size": len(words), "data": new("int64_t[]", list(words))})
                  for words in (keys, numbers, sources)]  # fmt: skip
        frame.attrs.size = 5
        frame.attrs.types = ffi.cast("int *", new("fx_xla_types *", (xla.ATTR_SCALAR, xla.ATTR_STRING, *[xla.ATTR_ARRAY] * 3)))
        frame.attrs.attrs = ffi.cast("void **", new("fx_xla_attributes *", (scalar, span, *arrays)))
        count = len(self.errors)
        returned = self._handler(address_of(frame))
        assert (returned is None) == (len(self.errors) == count) or self.fails
        return self.errors[-1] if len(self.errors) > count else returned

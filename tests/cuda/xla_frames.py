"""Call frames of XLA's made by hand, with buffers on the driver stub's devices: for the handler of kernels for CUDA."""

import ctypes

from fastexchange._abi import ffi
from fastexchange.dispatch import batches
from fastexchange.ground.native import address_of
from fastexchange.jax import xla, xla_cuda, xla_target

_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Xla:
    """What XLA's side of the interface does. `stream`: that of all calls; `errors`: the texts of the errors made."""

    def __init__(self, stream: int):
        self.stream, self.errors, self.fails = stream, [], False
        self._create = _HANDLER(self._error_create)
        self._get = _HANDLER(self._stream_get)
        self._api = ffi.new("XLA_FFI_Api *")
        self._api.XLA_FFI_Error_Create = ffi.cast("void *", ctypes.cast(self._create, ctypes.c_void_p).value)
        self._api.XLA_FFI_Stream_Get = ffi.cast("void *", ctypes.cast(self._get, ctypes.c_void_p).value)
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

    def call(self, kernel, keys, values, operands, results):
        """Call the handler. `operands`, `results`: (shape, dtype, address). Returns the text of the error, or None."""
        kept = []

        def buffer(each):
            shape, dtype, data = each
            made, dims = ffi.new("fx_array_buffer *"), ffi.new("int64_t[]", list(shape) or [0])
            made.dtype, made.data, made.rank, made.dims = xla.DTYPES[dtype], data, len(shape), address_of(dims)
            kept.extend((made, dims))
            return address_of(made)

        frame = ffi.new("XLA_FFI_CallFrame *")
        frame.struct_size, frame.api = ffi.sizeof("XLA_FFI_CallFrame"), self._api
        given, made = ([ffi.cast("void *", buffer(each)) for each in part] for part in (operands, results))
        frame.args.args, frame.args.size = (operands_at := ffi.new("void *[]", given or 1)), len(given)
        frame.rets.rets, frame.rets.size = (results_at := ffi.new("void *[]", made or 1)), len(made)
        kept.extend((operands_at, results_at))
        sources, numbers = batches.sources_of(keys, values, len(kernel._pattern.outputs[0].dims), len(kernel._pattern.outputs))
        name = xla_target.name_of(kernel).encode()
        texts = ffi.new("char[]", name)
        span = ffi.new("XLA_FFI_ByteSpan *", {"ptr": texts, "len": len(name)})
        number = ffi.new("int64_t *", xla_target.id_of(name.decode()))
        scalar = ffi.new("XLA_FFI_Scalar *", {"value": number})
        arrays = []
        for words in (keys, numbers, sources):
            data = ffi.new("int64_t[]", list(words))
            arrays.append(ffi.new("XLA_FFI_Array *", {"size": len(words), "data": data}))
            kept.append(data)
        attributes = ffi.new("fx_xla_attributes *", (scalar, span, *arrays))
        kinds = ffi.new("fx_xla_types *", (xla.ATTR_SCALAR, xla.ATTR_STRING, *[xla.ATTR_ARRAY] * 3))
        frame.attrs.size, frame.attrs.types = 5, ffi.cast("int *", kinds)
        frame.attrs.attrs = ffi.cast("void **", attributes)
        count = len(self.errors)
        returned = self._handler(address_of(frame))
        assert (returned is None) == (len(self.errors) == count) or self.fails
        return self.errors[-1] if len(self.errors) > count else returned

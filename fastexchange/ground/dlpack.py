"""The DLPack 1.3 C ABI, written once.

:data:`CDEF` is the only place in the project where a DLPack struct, enum or function type is typed in. Offsets,
NumPy dtypes, Numba records and the Python enums below are all derived from it, so none of them can disagree with it.
(`tests/exchange/test_dlpack.py` holds it against real ``dlpack.h`` files, compiled.)

Parsing C takes 30 ms, so it is done ahead of time: ``_abi.py`` is cffi's out-of-line form of the text below, made by
``python -m fastexchange._abi_build`` and compared with it by a test.

Source: https://dmlc.github.io/dlpack/latest/c_api.html, version 1.3.
"""

from enum import IntEnum, IntFlag

from .._abi import ffi

__all__ = [
    "CDEF", "VERSION", "DLDataTypeCode", "DLDeviceType", "DLPackFlag", "ffi", "field_of_type", "is_readable_by_cpu",
    "type_of_field",
]  # fmt: skip

CDEF = """
typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;

typedef enum {
    kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLOpenCL = 4, kDLVulkan = 7, kDLMetal = 8, kDLVPI = 9, kDLROCM = 10,
    kDLROCMHost = 11, kDLExtDev = 12, kDLCUDAManaged = 13, kDLOneAPI = 14, kDLWebGPU = 15, kDLHexagon = 16,
    kDLMAIA = 17, kDLTrn = 18
} DLDeviceType;

typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;

typedef enum {
    kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLOpaqueHandle = 3, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6,
    kDLFloat8_e3m4 = 7, kDLFloat8_e4m3 = 8, kDLFloat8_e4m3b11fnuz = 9, kDLFloat8_e4m3fn = 10,
    kDLFloat8_e4m3fnuz = 11, kDLFloat8_e5m2 = 12, kDLFloat8_e5m2fnuz = 13, kDLFloat8_e8m0fnu = 14,
    kDLFloat6_e2m3fn = 15, kDLFloat6_e3m2fn = 16, kDLFloat4_e2m1fn = 17
} DLDataTypeCode;

typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;       /* in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef enum {
    DLPACK_FLAG_BITMASK_READ_ONLY = 1, DLPACK_FLAG_BITMASK_IS_COPIED = 2,
    DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED = 4
} DLPackFlag;

typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef int (*DLPackManagedTensorAllocator)(
    DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
    void (*SetError)(void *error_ctx, const char *kind, const char *message));
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(void *py_object, DLManagedTensorVersioned **out);
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void *py_object, DLTensor *out);
typedef int (*DLPackCurrentWorkStream)(DLDeviceType device_type, int32_t device_id, void **out_current_stream);
typedef int (*DLPackManagedTensorToPyObjectNoSync)(DLManagedTensorVersioned *tensor, void **out_py_object);

typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;

typedef struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    DLPackManagedTensorAllocator managed_tensor_allocator;
    DLPackManagedTensorFromPyObjectNoSync managed_tensor_from_py_object_no_sync;
    DLPackManagedTensorToPyObjectNoSync managed_tensor_to_py_object_no_sync;
    DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync;
    DLPackCurrentWorkStream current_work_stream;
} DLPackExchangeAPI;
"""

VERSION = (1, 3)
"""The DLPack version (major, minor) that this package implements, as producer and as consumer."""


def _enum(base, name: str, doc: str):
    members = {member: value for value, member in ffi.typeof(name).elements.items()}
    enum = base(name, members, module=__name__)
    enum.__doc__ = doc
    return enum


DLDeviceType = _enum(IntEnum, "DLDeviceType", "Where a tensor's memory lives (DLPack 1.3, ``DLDeviceType``).")
DLDataTypeCode = _enum(IntEnum, "DLDataTypeCode", "The kind of a tensor's elements (DLPack 1.3, ``DLDataTypeCode``).")
INT, UINT, FLOAT, COMPLEX, BOOL = (int(DLDataTypeCode[f"kDL{kind}"]) for kind in ("Int", "UInt", "Float", "Complex", "Bool"))
"""Codes as native code takes constants."""
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = (int(DLDeviceType[f"kDL{kind}"]) for kind in ("CPU", "CUDA", "CUDAHost", "CUDAManaged"))
"""Device types as native code takes constants."""
DLPackFlag = _enum(IntFlag, "DLPackFlag", "Bits of ``DLManagedTensorVersioned.flags`` (DLPack 1.3).")



def field_of_type(code: int, bits: int) -> int:
    """The *dtype field* of a DLPack type with one lane: the number by which keys, cache entries and tables name it.

    In native code ``dltensor.element_field`` computes it. ``field >> 11`` is the item size in bytes.
    """
    return code | bits << 8


def type_of_field(field: int) -> tuple[int, int]:
    """The ``(code, bits)`` of a :func:`field_of_type`."""
    return field & 0xFF, field >> 8


_CPU_READABLE = frozenset(
    (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLROCMHost, DLDeviceType.kDLCUDAManaged)
)

CPU_READABLE_MASK = sum(1 << int(device) for device in _CPU_READABLE)
"""Bit ``d`` is set when a CPU may read memory of device type ``d``: plain, pinned and managed memory."""


def is_readable_by_cpu(device_type: int) -> bool:
    """Whether a CPU may read memory of this ``DLDeviceType``."""
    return device_type in _CPU_READABLE

"""What PyTorch exports of a lazily negated tensor: ``python torch_negated.py``. Needs PyTorch and NumPy.

``z.conj().imag`` is a view whose *negative bit* is set: its memory holds the values before the negation. An export passes the
memory, so the consumer reads the wrong sign. Tensors whose *conjugate bit* is set are refused.
"""

import ctypes
import platform

import numpy as np
import torch


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def by_table(x):
    """The elements by ``dltensor_from_py_object_no_sync`` of the type's exchange table: its fourth function."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = get(type(x).__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    address = (ctypes.c_void_p * 7).from_address(table)[5]  # behind two words: version, older table
    tensor = Tensor()
    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))(address)(x, tensor)
    kind = np.dtype(np.float32 if tensor.dtype[0] == 2 else np.complex64)
    base = tensor.data + tensor.byte_offset
    step = tensor.strides[0] * kind.itemsize
    return [kind.type(np.frombuffer(ctypes.string_at(base + i * step, kind.itemsize), kind)[0]) for i in range(tensor.shape[0])]


CONSUMERS = {
    "x.tolist()": lambda x: x.tolist(),
    "x.numpy()": lambda x: x.numpy(),
    "np.from_dlpack(x)": np.from_dlpack,
    "np.from_dlpack(x), by max_version=(1, 3)": lambda x: np.from_dlpack(Versioned(x)),
    "torch.from_dlpack(x)": torch.from_dlpack,
    "torch.utils.dlpack.to_dlpack(x)": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "by the exchange table": by_table,
}


class Versioned:
    """Asks for DLPack 1.3, whatever the consumer asks for."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **_):
        return self.x.__dlpack__(max_version=(1, 3))

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def main() -> None:
    print(f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}")
    z = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "z.conj().imag": z.conj().imag,
        "torch._neg_view of [1, 2]": torch._neg_view(torch.tensor([1.0, 2.0])),
        "z.conj()": z.conj(),
    }
    for name, x in tensors.items():
        right = x.tolist()
        print(f"\n{name}, which is {right}; is_neg() {x.is_neg()}, is_conj() {x.is_conj()}")
        for consumer, read in CONSUMERS.items():
            try:
                found = [complex(each) if isinstance(right[0], complex) else float(each) for each in read(x)]
                said = f"{found} {'right' if found == right else 'WRONG'}"
            except Exception as error:
                said = type(error).__name__
            print(f"  {consumer:42} {said}")


if __name__ == "__main__":
    main()

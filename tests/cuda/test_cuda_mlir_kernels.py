"""Who is right where numba-cuda-mlir's own launch and ours differ: what its compiled kernels do with the parameters of both.

A GPU runs them. On the driver stub, which has recorded the parameters, a kernel's PTX, of straight lines, is run here for one
thread on integers; what is asked of it is which addresses it reads, and what it does with a number.
"""

import re

import numpy as np
import pytest
from cuda_checks import is_refused, launched
from cuda_tensors import DeviceTensor
from launches import Interface, data_of

from fastexchange import fast_args

cuda = pytest.importorskip("numba_cuda_mlir.cuda")
from numba_cuda_mlir import types  # noqa: E402

_MASK = 2**64 - 1

_OPERATIONS = {
    **dict.fromkeys(("mov", "cvt", "cvta"), lambda v: v[1]), "add": lambda v: v[1] + v[2], "mul": lambda v: v[1] * v[2],
    "mad": lambda v: v[1] * v[2] + v[3], "shl": lambda v: v[1] << v[2], "setp.lt": lambda v: v[1] < v[2],
    "selp": lambda v: v[1] if v[3] else v[2],
}  # fmt: skip


def reads(ptx: str, parameters: list[int], thread: tuple[int, int]) -> list[int]:
    """The addresses from which one thread, of a grid of one block, loads."""
    registers = {"%tid.x": thread[0], "%tid.y": thread[1], "%ntid.x": 8, "%ntid.y": 8, "%ctaid.x": 0, "%ctaid.y": 0}
    body, found = ptx[ptx.index("{\n", ptx.index(".entry")) :], []
    for line in re.findall(r"^\t*([a-z][\w.:]*)\s+(.*);", body, re.M):
        name, operands = line[0].split("."), re.split(r",\s*", line[1])
        if name[0] in ("st", "ret") or (name[-1] in ("f32", "f64", "b16") and name[:2] != ["ld", "global"]):
            continue
        if name[:2] == ["ld", "param"]:
            result = parameters[int(re.search(r"_param_(\d+)\]", operands[1])[1])]
        elif name[:2] == ["ld", "global"]:
            base, _, offset = operands[1].strip("[]").partition("+")
            found.append((registers[base] + int(offset or 0)) & _MASK)
            result = 0
        else:
            values = [registers.get(each, int(each) if re.fullmatch(r"-?\d+", each) else None) for each in operands]
            result = _OPERATIONS[".".join(name[: 1 + (name[0] == "setp")])](values)
        registers[operands[0]] = result
    return found


def one(x, out):
    i = cuda.grid(1)
    out[i] = x[i]


def two(x, out):
    i, j = cuda.grid(2)
    out[i, j] = x[i, j]


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "its own"])
@pytest.mark.parametrize("dtype, shape, strides", [
    ("c8", (5,), (2,)), ("c16", (5,), (3,)), ("c8", (4, 5), (0, 1)), ("f4", (4, 5), (0, 1)), ("f4", (5,), (3,)),
])  # fmt: skip
def test_which_elements_a_kernel_reads(stub_or_none, dtype, shape, strides, is_ours):
    """Ours are the array's. Its own launch doubles the strides of complex arrays, and takes a broadcast array for contiguous."""
    dtype, function = np.dtype(dtype), one if len(shape) == 1 else two
    numbers = np.arange(1024, dtype=np.float32)
    memory = cuda.to_device(numbers)
    x = DeviceTensor(shape, dtype, strides, data=data_of(memory) + 2048)
    value = x
    if not is_ours:
        value = Interface(x)
        if 0 in strides:  # as cuda.to_device makes them
            value = cuda.as_cuda_array(value)
            assert value.strides == tuple(dtype.itemsize * stride for stride in strides)
    out = cuda.device_array(shape, dtype)
    dispatcher = cuda.jit(function)
    (fast_args(dispatcher) if is_ours else dispatcher)[1, shape](value, out)
    is_right = is_ours or (dtype.kind != "c" and 0 not in strides)
    if stub_or_none is None:
        steps = [dtype.itemsize * stride for stride in strides]
        wanted = np.lib.stride_tricks.as_strided(numbers.view(np.uint8)[2048:].view(dtype), shape, steps)
        assert np.array_equal(out.copy_to_host(), wanted) == is_right
        return
    parameters = [int.from_bytes(word, "little", signed=True) for word in stub_or_none.launches[-1].parameters]
    element = types.complex64 if dtype == "c8" else types.complex128 if dtype == "c16" else types.float32
    arrays = [types.Array(element, len(shape), layout) for layout in "AC"]
    ptx, _ = cuda.compile_ptx(function, tuple(arrays), device=False, cc=(9, 0))
    wrong = 0
    for thread in [(i, 0) if len(shape) == 1 else (i, j) for i in range(shape[0]) for j in range(shape[-1])]:
        place = x.data + dtype.itemsize * sum(i * stride for i, stride in zip(thread, strides, strict=False))
        wrong += reads(ptx, parameters, thread)[0] != place
    assert (wrong == 0) == is_right, wrong


def test_a_kernel_takes_uint64_as_it_is(record, stub_or_none):
    """It reads 64 bits without a sign, as we pass them; its own launch refuses ints beyond int64, or takes another kernel."""

    def kernel(out, n):
        out[0] = n * 0.5

    big = 2**63 + 2**62 + 5
    ptx, _ = cuda.compile_ptx(kernel, (types.Array(types.float64, 1, "C"), types.uint64), device=False, cc=(9, 0))
    assert "cvt.rn.f64.u64" in ptx and "cvt.rn.f64.s64" not in ptx
    out = cuda.device_array(1, np.float64)
    ours = fast_args(cuda.jit(kernel))
    for value in [5, big, np.uint64(big), 2**64 - 1] * 6:
        assert launched(record, ours[1, 1], out, value).parameters[-1] == int(value).to_bytes(8, "little")
        assert stub_or_none is not None or out.copy_to_host()[0] == float(value) * 0.5
    assert {str(signature[1]) for signature in ours.signatures} == {"int64", "uint64"}
    dispatcher = cuda.jit(lambda n: None)
    dispatcher[1, 1](5)
    is_refused(lambda: dispatcher[1, 1](big), OverflowError)
    dispatcher[1, 1](np.uint64(big))  # by the kernel for int64: to that it is negative
    assert [str(*signature) for signature in dispatcher.overloads] == ["int64"]

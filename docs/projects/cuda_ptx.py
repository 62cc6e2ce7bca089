"""What numba-cuda and numba-cuda-mlir make of an index and of a conversion to bfloat16: ``python cuda_ptx.py``.

Nothing runs on a device: the kernels' PTX is read. numba-cuda compiles without a GPU. numba-cuda-mlir 0.6 asks for a driver even
if ``cc=`` is given, so its part needs a machine with one, and NVRTC.
"""

import importlib.metadata
import re


def row_sums(cuda):
    """A block sums up a row."""

    def kernel(x, y):
        i, j = cuda.blockIdx.x, cuda.threadIdx.x
        total = y[i]
        while j < x.shape[1]:
            total += x[i, j]
            j += 256
        y[i] = total

    return kernel


def ptx_of(cuda, function, *arguments) -> str:
    return cuda.compile_ptx(function, arguments, device=False, cc=(9, 0))[0]


def loop_of(ptx: str) -> list[str]:
    """The instructions of the last loop, which the compiler has unrolled: from its label to the jump back."""
    lines = [line.strip() for line in ptx.splitlines() if line.strip() and not line.strip().startswith((".", "//"))]
    labels = {line.rstrip(":"): place for place, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for place, line in enumerate(lines):
        jump = re.search(r"bra\S*\s+(\S+);", line)
        if jump and labels.get(jump[1], place) < place:
            loops.append(lines[labels[jump[1]] + 1 : place + 1])
    return loops[-1]


def index_arithmetic(name, cuda, types) -> None:
    arrays = types.Array(types.float32, 2, "C"), types.Array(types.float32, 1, "C")
    loop = loop_of(ptx_of(cuda, row_sums(cuda), *arrays))
    loads, multiplications = (sum(each.startswith(what) for each in loop) for what in ("ld.global", "mul"))
    print(f"{name}: a loop that reads {loads} elements in C order: {len(loop)} instructions, {multiplications} multiplications")


def to_bfloat16(cuda, types) -> None:
    bfloat16 = types.bf16

    def kernel(x, y):
        y[0] = bfloat16(x[0])

    ptx = ptx_of(cuda, kernel, types.Array(types.float32, 1, "C"), types.Array(bfloat16, 1, "C"))
    if "cvt.rn.bf16" in ptx:
        print("float32 to bfloat16: by the device's own conversion, cvt.rn.bf16")
        return
    steps = [line.strip() for line in ptx.splitlines() if re.search(r"(shr|and|add|setp|selp)\.[bsu]32|f32", line)]
    print("float32 to bfloat16, by these steps:", *steps, sep="\n    ")
    for bits in (0x7FFFFFFF, 0x7FC00000, 0x7F800001):  # the NaN of the device's arithmetic, that of NumPy, a signalling one
        rounded = (bits + (bits >> 16 & 1) + 32767) >> 16 & 0xFFFF
        is_nan = (rounded & 0x7FFF) > 0x7F80
        print(f"    which make of the NaN 0x{bits:08x} the bits 0x{rounded:04x}, {'a NaN' if is_nan else 'NOT a NaN'}")


def main() -> None:
    for name in ("numba-cuda", "numba-cuda-mlir"):
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "is not installed")
    try:
        from numba import cuda, types

        index_arithmetic("numba-cuda" if "numba_cuda" in cuda.__file__ else "numba.cuda of Numba itself", cuda, types)
    except Exception as error:
        print(f"numba-cuda: {type(error).__name__}")
    try:
        from numba_cuda_mlir import cuda, types

        index_arithmetic("numba-cuda-mlir", cuda, types)
        to_bfloat16(cuda, types)
    except Exception as error:
        print(f"numba-cuda-mlir: {type(error).__name__}: no driver, or no NVRTC")


if __name__ == "__main__":
    main()

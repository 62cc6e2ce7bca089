"""``python perf/numba_cuda_launches.py``: what a launch of numba-cuda's costs on the host; needs no fastexchange.

For NVIDIA/numba-cuda#98 (PyTorch's tensors), NVIDIA/numba-cuda#477 and numba/numba#3003 (arguments): it prints a paragraph that
can be posted there, and a table. It uses released packages alone: numba-cuda, NumPy, and PyTorch for the rows with its tensors.
Kernels are empty. All rows take turns, a batch of launches each; the device is waited for before each batch, so that no launch
waits for room in the queue.
"""

import argparse
import cProfile
import ctypes
import importlib.metadata
import math
import platform
import pstats
import statistics
import sys
import time
import warnings

import numpy as np
from numba import cuda, float32, void

_COUNTS = 0, 1, 3, 26
_BATCH = 100
_GRID, _BLOCK, _SIZE = 4, 32, 128


class Interface:
    """An array with ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def kernel_of(count: int, is_declared: bool):
    """An empty kernel of so many parameters, configured."""
    namespace: dict = {}
    exec(f"def kernel({', '.join(f'x{i}' for i in range(count))}): pass", namespace)
    jit = cuda.jit(void(*[float32[:]] * count)) if is_declared else cuda.jit
    return jit(namespace["kernel"])[_GRID, _BLOCK]


def driver_alone():
    """``cuLaunchKernel`` of a kernel without parameters, called through ctypes."""
    configured = kernel_of(0, True)
    (compiled,) = configured.dispatcher.overloads.values()
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    words = int(compiled._codelibrary.get_cufunc().handle), _GRID, 1, 1, _BLOCK, 1, 1, 0, None, None, None
    if launch(*words):
        raise SystemExit("cuLaunchKernel fails")
    return launch, words


def rows(torch) -> dict:
    """By label and number of arguments what is called, and with which arguments."""
    found = {("cuLaunchKernel, through ctypes", 0): driver_alone()}
    for count in _COUNTS:
        arrays = [cuda.device_array(_SIZE, np.float32) for _ in range(count)]
        found["device arrays, signature declared", count] = kernel_of(count, True), tuple(arrays)
        found["device arrays", count] = kernel_of(count, False), tuple(arrays)
        if count:
            found["objects with `__cuda_array_interface__`", count] = kernel_of(count, False), tuple(map(Interface, arrays))
        if count and torch is not None:
            tensors = tuple(torch.zeros(_SIZE, device="cuda") for _ in range(count))
            found["PyTorch's tensors", count] = kernel_of(count, False), tensors
            if count == 3:
                found["`torch.add(x, y, out=z)`", count] = lambda x, y, z: torch.add(x, y, out=z), tensors
    return found


def measured(found: dict, rounds: int) -> dict:
    """By row the microseconds of a call: the median over the rounds, and their interquartile range."""
    samples: dict = {key: [] for key in found}
    batches = range(_BATCH)
    for function, arguments in found.values():
        for _ in range(3):
            function(*arguments)
    for _ in range(rounds):
        for key, (function, arguments) in found.items():
            cuda.synchronize()
            begin = time.perf_counter()
            for _ in batches:
                function(*arguments)
            samples[key].append((time.perf_counter() - begin) / _BATCH * 1e6)
    cuda.synchronize()
    quartiles = {key: statistics.quantiles(each, n=4) for key, each in samples.items()}
    return {key: (middle, high - low) for key, (low, middle, high) in quartiles.items()}


def costliest(function, arguments, most: int = 5) -> str:
    """The functions in which a launch spends the most time itself, as cProfile, which slows Python code down, sees it."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(300):
            function(*arguments)
    cuda.synchronize()
    statistics_ = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(each[2] for each in statistics_.values())
    first = sorted(statistics_.items(), key=lambda item: -item[1][2])[:most]
    return ", ".join(f"`{name.strip('<>')}` {100 * each[2] / total:.0f} %" for (_, _, name), each in first)


def table(times: dict) -> str:
    lines = [f"| µs a launch (interquartile range) | {' | '.join(f'arguments: {count}' for count in _COUNTS)} |"]
    lines.append("|---" * (1 + len(_COUNTS)) + "|")
    for label in dict.fromkeys(label for label, _ in times):
        cells = [times.get((label, count)) for count in _COUNTS]
        lines.append(f"| {label} | {' | '.join('-' if each is None else f'{each[0]:.1f} ({each[1]:.1f})' for each in cells)} |")
    return "\n".join(lines)


def paragraph(times: dict, where: str, found: dict) -> str:
    """What can be posted, above the table."""
    us = {key: median for key, (median, _) in times.items()}

    def each(label: str) -> float:
        return (us[label, 26] - us[label, 1]) / 25

    declared, array, tensor = "device arrays, signature declared", "device arrays", "PyTorch's tensors"
    raw = us["cuLaunchKernel, through ctypes", 0]
    said = (
        f"{where}. The host's time for a launch of an empty kernel: with 3 device arrays {us[array, 3]:.0f} µs, "
        f"{us[declared, 3]:.0f} µs with a declared signature; `cuLaunchKernel` without parameters, called through ctypes, "
        f"takes {raw:.1f} µs. So {100 - 100 * raw / us[array, 3]:.0f} % of a launch with 3 device arrays are not the driver's; "
        f"each further device array costs {each(array):.1f} µs. "
    )
    shown = array, 3
    if (tensor, 3) in us:
        shown = tensor, 3
        said += (
            f"With 3 of PyTorch's tensors it takes {us[tensor, 3]:.0f} µs, {us[tensor, 3] / us[array, 3]:.1f} times as long, "
            f"each further tensor {each(tensor):.0f} µs; with 26 {us[tensor, 26]:.0f} µs against {us[array, 26]:.0f} µs with "
            f"device arrays. "
            f"`torch.add(x, y, out=z)`, with all of PyTorch's dispatch, takes {us['`torch.add(x, y, out=z)`', 3]:.1f} µs. "
        )
    what = f"3 {array}" if shown[0] == array else f"3 of {tensor}"
    return said + f"With {what} the most is spent in {costliest(*found[shown])} (own time, by cProfile)."


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="how often each row's batch of launches is timed (25)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # a grid so small
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and not torch.cuda.is_available():
        torch = None
    names = ["numba-cuda", "numba", "cuda-bindings", "cuda-core", "numpy", *(["torch"] if torch is not None else [])]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    device = cuda.get_current_device().name
    device = device.decode() if isinstance(device, bytes) else device
    where = f"{versions}; Python {platform.python_version()}, {platform.machine()}; {device}; medians of {options.rounds} rounds"
    begin = time.perf_counter()
    found = rows(torch)
    times = measured(found, options.rounds)
    assert all(math.isfinite(median) for median, _ in times.values())
    print(paragraph(times, where, found), table(times), f"{time.perf_counter() - begin:.0f} s", sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

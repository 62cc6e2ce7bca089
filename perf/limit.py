"""``python perf/limit.py``: three arguments against the limit, in a few seconds. ``run.py`` measures everything."""

import sys
from pathlib import Path

import numba
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import floor

from fastexchange import fast_args
from fastexchange.measuring import figures
from fastexchange.measuring.timing import Statement, time_statements


def main() -> None:
    """Print the shim's calls beside the same calls of hand-written C."""
    limit = floor.load()
    kernel, torch_kernel = (fast_args(numba.njit(lambda x, y, z: None)) for _ in range(2))
    scalar_kernel = fast_args(numba.njit(lambda a, b, c: None))
    x, y, z = (np.ones(1, np.float32) for _ in range(3))
    arrays = {"x": x, "y": y, "z": z}
    pairs = {"numpy": (limit.numpy, kernel, arrays)}
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed: its rows are left out")
    else:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        pairs["torch"] = (limit.torch, torch_kernel, tensors)
        if (torch_limit := floor.load_torch()) is not None:
            pairs["torch, C in memory"] = (torch_limit.memory, torch_kernel, tensors)
            pairs["torch, C by the C ABI"] = (torch_limit.abi, torch_kernel, tensors)
        pairs["torch, managed"] = (limit.torch_managed, torch_kernel, tensors)
    pairs["float, int, bool"] = (limit.scalars, scalar_kernel, {"x": 2.0, "y": 3, "z": True})
    pairs["A/A (numpy)"] = (kernel, kernel, arrays)
    rows = {"empty builtin": Statement("f(x, y, z)", {"f": limit.empty, **arrays})}
    for name, (reference, function, names) in pairs.items():
        rows[f"{name}: C"] = Statement("f(x, y, z)", {"f": reference, **names})
        rows[f"{name}: fastexchange"] = Statement("f(x, y, z)", {"f": function, **names})
    times, loop = time_statements(rows, rounds=41)
    for name, samples in times.items():
        print(f"{name:<32}{figures.figure(samples, '{:8.1f} ns'.format)}  ± {samples.spread:4.1f}")
    print(f"{'the loop itself, subtracted':<32}{loop.median:8.1f} ns  ± {loop.spread:4.1f}")
    empty = times["empty builtin"]
    for name in pairs:
        quick, reference = times[f"{name}: fastexchange"], times[f"{name}: C"]
        ratios = f"{figures.ratio(quick / reference)} x C, {figures.ratio(quick / empty)} x empty builtin"
        print(f"{name:<20} {ratios} ({figures.ratio((quick + loop) / (empty + loop))} with the loop)")


if __name__ == "__main__":
    main()

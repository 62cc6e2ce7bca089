"""The process of the row without an exchange table: ``without_table.py ROUNDS``. Prints JSON, nanoseconds of each round.

PyTorch's table is taken away before anybody has seen it, as PyTorch before 2.10 has none.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import numba
import torch

for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"):
    if name in vars(torch.Tensor):
        delattr(torch.Tensor, name)

from fastexchange import fast_args  # noqa: E402
from fastexchange.measuring.timing import Statement, time_statements  # noqa: E402

tensors = {f"x{i}": torch.ones(1) for i in range(3)}
others = {f"x{i}": torch.ones(1) for i in range(3)}  # .numpy() marks their storages
kernel, njit_kernel = fast_args(lambda x0, x1, x2: None), numba.njit(lambda x0, x1, x2: None)
rows = {
    "tableless/fast": Statement("f(x0, x1, x2)", {"f": kernel, **tensors}),
    "tableless/views": Statement("f(x0.numpy(), x1.numpy(), x2.numpy())", {"f": njit_kernel, **others}),
}
times, _ = time_statements(rows, rounds=int(sys.argv[1]))
assert kernel.counts().slow <= 2, kernel.counts()
print(json.dumps({key: list(samples.values) for key, samples in times.items()}))

"""The process of the rows in which PyTorch is asked: ``asked.py ROUNDS``. Prints JSON, nanoseconds of each round.

The layout of PyTorch's tensors is declared unknown, as it would be with another version, before it is looked for.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import floor
import torch

from fastexchange import fast_args
from fastexchange.measuring.timing import Statement, time_statements
from fastexchange.torch import offsets as producer

producer.Guard._find_keys = lambda self: False
assert producer.guard().native.asks

limit = floor.load()
floats = {f"x{i}": torch.ones(1) for i in range(3)}
numbers = {f"x{i}": torch.ones(1, dtype=torch.complex64) for i in range(3)}
kernel = fast_args(lambda x0, x1, x2: None)
code = "f(x0, x1, x2)"
rows = {
    "asked/c": Statement(code, {"f": limit.torch, **floats}),
    "asked/fast": Statement(code, {"f": kernel, **floats}),
    "asked/complex": Statement(code, {"f": kernel, **numbers}),
}
times, _ = time_statements(rows, rounds=int(sys.argv[1]))
assert kernel.counts().slow <= 2, kernel.counts()
print(json.dumps({key: list(samples.values) for key, samples in times.items()}))

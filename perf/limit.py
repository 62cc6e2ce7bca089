import sys, gc
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter_ns
sys.path.insert(0, str(Path(__file__).resolve().parents[1])); sys.path.insert(0, str(Path(__file__).resolve().parent))
import numpy as np, torch, floor
f = floor.load()
for n in (1, 3, 32):
    x = [np.ones(1, np.float32)] * n; t = [torch.ones(1)] * n; s = [1.0, 2, True] * n
    print(f.numpy(*x), f.torch(*t), f.torch_managed(*t), f.scalars(*s))

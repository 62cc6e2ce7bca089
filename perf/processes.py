"""Rows that need new processes: importing the package, and a kernel's first call with a warm disk cache."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fastexchange.measuring.timing import Samples

_HERE = Path(__file__).resolve().parent


def _run(*arguments: str) -> str:
    path = os.pathsep.join(filter(None, (str(_HERE.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _import_time(statement: str) -> int:
    clock = "from time import perf_counter_ns as clock; start = clock()"
    return int(_run("-c", f"{clock}; {statement}; print(clock() - start)"))


def imports(rounds: int) -> dict[str, Samples]:
    """Nanoseconds to import Numba, and this package, each alone in new processes; and this one after Numba."""
    after = "import numba; start = clock(); import fastexchange"
    statements = {"numba": "import numba", "fastexchange": "import fastexchange", "after": after}
    times: dict[str, list[int]] = {name: [] for name in statements}
    for turn in range(-1, rounds):
        for name, statement in statements.items():
            elapsed = _import_time(statement)
            if turn >= 0:  # the first one fills the caches of the file system
                times[name].append(elapsed)
    return {f"import/{name}": Samples(np.array(values, float)) for name, values in times.items()}


def asked(rounds: int) -> dict[str, Samples]:
    """Nanoseconds of calls with three tensors where PyTorch is asked about each, and of hand-written C in the same process."""
    if not find_spec("torch"):
        return {}
    found = json.loads(_run(str(_HERE / "asked.py"), str(rounds)))
    return {key: Samples(np.array(values)) for key, values in found.items()}


def first_calls(rounds: int) -> dict[str, Samples]:
    """Nanoseconds of a kernel's first call, alone and with the decoration before it (``both``), in new processes.

    They find everything that they need in the disk cache.
    """
    kinds = [("njit", "numpy"), ("fast", "numpy")]
    if find_spec("torch"):
        kinds.append(("fast", "torch"))
    times: dict[str, list[int]] = {}
    for turn in range(-1, rounds):
        found = {kind: json.loads(_run(str(_HERE / "first_call.py"), *kind)) for kind in kinds}
        if turn < 0:  # this one fills the disk cache
            continue
        if any(measured["compiled"] for measured in found.values()):
            # As it does when the package's source is edited during the run. Such a call is not what is measured here.
            print("A first call compiled although its disk cache was warm: its round is left out.", file=sys.stderr)
            continue
        for (who, framework), measured in found.items():
            key = f"start/{framework}/{who}/"
            times.setdefault(key + "first", []).append(measured["first"])
            times.setdefault(key + "both", []).append(measured["decorate"] + measured["first"])
    return {name: Samples(np.array(values, float)) for name, values in times.items()}

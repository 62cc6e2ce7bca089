"""Rows that need new processes: importing the package, a kernel's first call, warm and cold, memory, PyTorch asked."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fastexchange.measuring.timing import Samples

_HERE = Path(__file__).resolve().parent

LABELS = {
    "import/numba": "import numba",
    "import/fastexchange": "import fastexchange",
    "import/after": "import fastexchange, after numba",
    "start/numpy/njit/first": "warm: njit(cache=True), NumPy: the call",
    "start/numpy/njit/both": "warm: njit(cache=True), NumPy: decoration and call",
    "start/numpy/fast/first": "warm: fastexchange, NumPy: the call",
    "start/numpy/fast/both": "warm: fastexchange, NumPy: decoration and call",
    "start/torch/njit/first": "warm: njit(cache=True) of x.numpy(), PyTorch: the call",
    "start/torch/njit/both": "warm: njit(cache=True) of x.numpy(), PyTorch: decoration and call",
    "start/torch/fast/first": "warm: fastexchange, PyTorch: the call",
    "start/torch/fast/both": "warm: fastexchange, PyTorch: decoration and call",
    "cold/njit/first": "cold: njit(cache=True): the call",
    "cold/njit/both": "cold: njit(cache=True): decoration and call",
    "cold/installed/first": "cold: fastexchange, a new kernel: the call",
    "cold/installed/both": "cold: fastexchange, a new kernel: decoration and call",
    "cold/fast/first": "cold: fastexchange, newly installed: the call",
    "cold/fast/both": "cold: fastexchange, newly installed: decoration and call",
    "new/numpy/njit/both": "new installation: njit, NumPy: decoration and call",
    "new/numpy/call/both": "new installation: fastexchange, NumPy: decoration and call",
    "new/torch/call/both": "new installation: fastexchange, PyTorch: decoration and call",
    "new/torch/out/both": "new installation: fastexchange, PyTorch: the same with out=",
    "new/torch/bind/both": "new installation: fastexchange, PyTorch: the same with bind()",
    "new/torch/list/both": "new installation: fastexchange, PyTorch: the same with a list",
    "new/cuda/njit/both": "new installation: numba-cuda, driver stub: decoration and launch",
    "new/cuda/call/both": "new installation: fastexchange over numba-cuda, driver stub: the same",
    "new/torch/convert/both": "new installation: fastexchange, PyTorch: the same, convert()",
    "memory/kernels/njit": "a kernel: njit",
    "memory/kernels/fast": "a kernel: fastexchange",
    "memory/signatures/njit": "a signature of a kernel: njit",
    "memory/signatures/fast": "a signature of a kernel: fastexchange",
    "asked/c": "hand-written C",
    "asked/fast": "fastexchange",
    "asked/complex": "fastexchange, complex64",
    "tableless/fast": "fastexchange",
    "tableless/views": "njit_kernel(x.numpy(), ...)",
}
"""The rows: their keys, and what they are called."""


def _run(*arguments: str, root: Path = _HERE.parent, **variables: str) -> str:
    """What Python prints with these arguments. `variables` are added to the environment. The package is that in `root`.

    Bytecode is written, as it is for whoever does not forbid it: else every process would compile this package's source.
    """
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, cwd=root)
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
    return _rows_of("asked.py", rounds)


def without_table(rounds: int) -> dict[str, Samples]:
    """Nanoseconds of calls with three tensors of a PyTorch without an exchange table, and of ``.numpy()`` in the same process."""
    return _rows_of("without_table.py", rounds) if find_spec("torch") else {}


def _rows_of(program: str, rounds: int) -> dict[str, Samples]:
    found = json.loads(_run(str(_HERE / program), str(rounds)))
    return {key: Samples(np.array(values)) for key, values in found.items()}


_OBJECTS_OF_A_COLLECTION = 84_000
"""New objects from one full collection to the next, when a process has as many as Numba's import makes."""


def first_calls(rounds: int) -> dict[str, Samples]:
    """Nanoseconds of a kernel's first call, alone and with the decoration before it (``both``), in new processes.

    They find everything that they need in the disk cache. Each time is the mean of two processes in which the garbage collector's
    full collections come half a collection apart: one takes a tenth of the time, and whether there is one is chance.
    """
    kinds = [("njit", "numpy"), ("fast", "numpy")]
    if find_spec("torch"):
        kinds += [("njit", "torch"), ("fast", "torch")]
    times: dict[str, list[float]] = {}
    for turn in range(-1, rounds):
        objects = _OBJECTS_OF_A_COLLECTION * max(turn, 0) // (2 * rounds)
        program = str(_HERE / "first_call.py")
        found = {
            kind: [
                json.loads(_run(program, *kind, "call", str(number)))
                for number in (objects, objects + _OBJECTS_OF_A_COLLECTION // 2)
            ]
            for kind in kinds
        }
        if turn < 0:  # this one fills the disk cache
            continue
        if any(measured["compiled"] for both in found.values() for measured in both):
            # As it does when the package's source is edited during the run. Such a call is not what is measured here.
            print("A first call compiled although its disk cache was warm: its round is left out.", file=sys.stderr)
            continue
        for (who, framework), both in found.items():
            key = f"start/{framework}/{who}/"
            first, decorate = (statistics.mean(measured[part] for measured in both) for part in ("first", "decorate"))
            times.setdefault(key + "first", []).append(first)
            times.setdefault(key + "both", []).append(decorate + first)
    return {name: Samples(np.array(values, float)) for name, values in times.items()}


def cold_calls(rounds: int) -> dict[str, Samples]:
    """Nanoseconds of a kernel's first call where nothing is cached on disk, alone and with the decoration (``both``).

    ``njit`` is the plain kernel; ``installed`` this package's, when some other kernel was called before on this machine, so
    that only the kernel itself is compiled; ``fast`` its very first call after the installation, which compiles both.
    """
    times: dict[str, list[int]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            for name, who in (("njit", "njit"), ("fast", "fast"), ("installed", "fast")):
                cache = Path(scratch, who)
                kernels = list(cache.rglob("first_call.axpy-*"))
                assert bool(kernels) == (name == "installed"), f"Numba keeps a kernel's code elsewhere: {kernels}"
                for file in kernels:
                    file.unlink()
                found = json.loads(_run(str(_HERE / "first_call.py"), who, "numpy", NUMBA_CACHE_DIR=str(cache)))
                assert found["compiled"], f"{name}: the cache was not empty"
                times.setdefault(f"cold/{name}/first", []).append(found["first"])
                times.setdefault(f"cold/{name}/both", []).append(found["decorate"] + found["first"])
    return {name: Samples(np.array(values, float)) for name, values in times.items()}


def new_installations(rounds: int) -> dict[str, Samples]:
    """Nanoseconds until the first result of a new installation from a wheel, which has native code, with an empty disk cache.

    From the decoration on; ``njit`` is the plain kernel, in rows with ``cuda`` numba-cuda's.
    """
    kinds = [("njit", "numpy", "call"), ("fast", "numpy", "call")]
    if find_spec("torch"):
        kinds += [("fast", "torch", kind) for kind in ("call", "out", "bind", "list", "convert")]
    if find_spec("numba_cuda"):
        kinds += [("njit", "cuda", "call"), ("fast", "cuda", "call")]
    times: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "installed")
        ignored = shutil.ignore_patterns("__pycache__", "_native")
        shutil.copytree(_HERE.parent / "fastexchange", root / "fastexchange", ignore=ignored)
        _run("-m", "fastexchange._native_build", root=root)
        for turn in range(-1, rounds):
            for who, framework, kind in kinds:
                program = str(_HERE / "first_call.py"), who, framework, kind
                cache = str(Path(scratch, f"{turn} {who} {framework} {kind}"))
                found = json.loads(_run(*program, root=root, NUMBA_CACHE_DIR=cache))
                if turn >= 0:  # the first one compiles the package's Python code
                    key = f"new/{framework}/{who if who == 'njit' else kind}/both"
                    times.setdefault(key, []).append(found["decorate"] + found["first"])
    return {name: Samples(np.array(values, float)) for name, values in times.items()}


def memory(batches: int) -> dict[str, Samples]:
    """Bytes of private memory that a kernel takes, and a signature of a kernel; nothing where the system does not say."""
    if not Path("/proc/self/smaps_rollup").exists():
        return {}
    found = {}
    for what in ("kernels", "signatures"):
        for who in ("njit", "fast"):
            grown = json.loads(_run(str(_HERE / "memory.py"), who, what, str(batches)))
            found[f"memory/{what}/{who}"] = Samples(np.array(grown))
    return found

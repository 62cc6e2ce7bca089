"""``python perf/cuda_check.py``: prove launches of CUDA kernels on a GPU; what it found goes into ``perf/results/``.

Results against PyTorch, streams, graphs, dynamic shared memory, threads, errors, a soak; then the tests that need a
device, and a subset under ``compute-sanitizer`` where that is installed. What cannot be checked is skipped with the
reason. ``--stub`` makes what needs no results run against the tests' driver stub.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
import traceback
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # the checkout that this file stands in

import cuda_launches  # noqa: E402
import cuda_places  # noqa: E402
from cuda_places import PACKAGES, SIZE  # noqa: E402

SHARED_BYTES = 64 * 1024
SOAK_LAUNCHES = 100_000


class Skipped(Exception):
    """The check cannot be made here; the message says why."""


def _torch(place):
    if not place.is_gpu:
        raise Skipped("it looks at what kernels compute, and the driver stub runs none")
    import torch

    return torch


# ---- the checks: each gets the place and the package's module, and returns what is worth noting ------------------------


def results(place, cuda) -> dict[str, Any]:
    """The kernels of ``kernels/gpu`` against PyTorch's operators: dtypes, layouts, sizes that are no multiple of a block."""
    torch = _torch(place)
    from kernels.gpu import axpy, heat, histogram, rms_norm, softmax

    close, compared = torch.testing.assert_close, 0
    torch.manual_seed(0)
    run_axpy, run_heat, run_histogram = axpy.make(cuda), heat.make(cuda), histogram.make(cuda)
    run_rms_norm, run_softmax = rms_norm.make(cuda), softmax.make(cuda)
    for dtype in (torch.float32, torch.float64):
        for count in (1, 127, 4097):
            for step in (1, 3):
                x, y = (torch.randn(count * step, device="cuda", dtype=dtype)[::step] for _ in range(2))
                out = torch.full_like(x, 7)
                run_axpy(2.5, x, y, out)
                close(out, 2.5 * x + y)
                compared += 1
        for shape in ((1, 1), (33, 257), (257, 1031)):
            for is_transposed in (False, True):
                x = torch.randn(shape, device="cuda", dtype=dtype)
                x = x.T if is_transposed else x
                out, weight = torch.empty_like(x), torch.rand(x.shape[1], device="cuda", dtype=dtype)
                run_softmax(x, out)
                close(out, torch.softmax(x, -1))
                run_rms_norm(x, weight, 1e-6, out)
                close(out, torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-6))
                run_heat(x, 0.1, out)
                around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]
                close(out[1:-1, 1:-1], x[1:-1, 1:-1] + 0.1 * around)
                compared += 3
        bins = torch.randint(0, 50, (100_003,), device="cuda")
        counts = torch.zeros(50, device="cuda", dtype=torch.int32)
        run_histogram((bins + 0.5).to(dtype), 0.0, 50.0, counts)
        close(counts, torch.bincount(bins, minlength=50).to(torch.int32))
        compared += 1
    return {"compared": compared}


def _copy_kernel(cuda):
    from fastexchange import fast_args

    def copy(x, out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = x[i]

    return fast_args(cuda.jit(copy))


def streams(place, cuda) -> dict[str, Any]:
    """Launches without a stream are on PyTorch's current one, and others on the stream that they name."""
    torch = _torch(place)
    copy, side, other = _copy_kernel(cuda), torch.cuda.Stream(), torch.cuda.Stream()
    x, out = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for number in range(1, 60):  # by then through the fast entry
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            x.fill_(number)
            copy[256, 256](x, out)  # anywhere else it would be too early
        side.synchronize()
        assert bool((out == number).all()), f"launch {number} was not on PyTorch's current stream"
    for number in range(60, 120):
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000)
            x.fill_(number)
        copy[256, 256, other](x, out)  # though another one is current
        other.synchronize()
        assert bool((out == number).all()), f"launch {number} was not on the stream that it names"
    return {"launches": 119}


def graphs(place, cuda) -> dict[str, Any]:
    """Launches, and bound ones, are captured by ``torch.cuda.graph`` and replayed."""
    torch = _torch(place)
    copy = _copy_kernel(cuda)
    x, between, out = (torch.zeros(1000, device="cuda") for _ in range(3))
    launcher = copy[8, 128]
    for _ in range(40):
        launcher(x, between)
    bound = launcher.bind(between, out)
    bound()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(x, between)
        bound()
    for number in range(1, 6):
        x.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out == number).all()), f"replay {number}"
    return {"replays": 5}


def shared_memory(place, cuda) -> dict[str, Any]:
    """More than 48 KB of dynamic shared memory for a block."""
    import numpy as np

    from fastexchange import fast_args

    float32 = np.float32

    def backwards(out):
        shared = cuda.shared.array(0, float32)
        count = out.shape[0]
        i = cuda.threadIdx.x
        while i < count:
            shared[i] = i
            i += cuda.blockDim.x
        cuda.syncthreads()
        i = cuda.threadIdx.x
        while i < count:
            out[i] = shared[count - 1 - i]
            i += cuda.blockDim.x

    kernel = fast_args(cuda.jit(backwards))
    if not place.is_gpu:
        place.begin()
        for _ in range(40):
            kernel[1, 256, None, SHARED_BYTES](place.tensor())
        return {"bytes": SHARED_BYTES}
    import torch

    out = torch.zeros(SHARED_BYTES // 4, device="cuda")
    for _ in range(40):
        out.zero_()
        kernel[1, 256, None, SHARED_BYTES](out)
    expected = torch.arange(out.shape[0] - 1, -1, -1, device="cuda", dtype=torch.float32)
    torch.testing.assert_close(out, expected)
    return {"bytes": SHARED_BYTES}


def threads(place, cuda) -> dict[str, Any]:
    """Launches from new threads, which have no context: one that warms up nothing, then several at once."""
    copy = _copy_kernel(cuda)
    count, launches = 4, 2000
    failures: list[BaseException] = []

    def work(tensors) -> None:
        try:
            for _ in range(launches):
                copy[1, SIZE](*tensors)
        except BaseException as error:
            failures.append(error)

    for number in (1, count):
        pairs = [(place.tensor(), place.tensor()) for _ in range(number)]
        if place.is_gpu:
            for x, out in pairs:
                x.fill_(3)
                out.zero_()
            place.prepare()
        else:
            place.begin()
        workers = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        if place.is_gpu:
            place.prepare()
            assert all(bool((out == 3).all()) for _, out in pairs)
    return {"threads": count, "launches": launches * (1 + count)}


def errors(place, cuda) -> dict[str, Any]:
    """A launch that the driver refuses is an error that says so, and the next launch works."""
    from fastexchange import CudaError

    copy, (x, out) = _copy_kernel(cuda), (place.tensor(), place.tensor())
    if place.stub is not None:
        place.stub.set_fast(False)
    copy[1, SIZE](x, out)
    try:
        copy[1, 4096](x, out)
    except CudaError as error:
        message, code = str(error), error.code
    else:
        raise AssertionError("a block of 4096 threads was launched")
    assert code == 1 and "4096" in message and "sticky" not in message, message
    copy[1, SIZE](x, out)
    return {"message": message}


def soak(place, cuda) -> dict[str, Any]:
    """Many launches of changing kinds: each runs once and in order, and neither references nor memory grow."""
    from fastexchange import fast_args

    def count(total, x, scalar):
        if cuda.grid(1) == 0:
            total[0] += 1

    def count_bound(total):
        if cuda.grid(1) == 0:
            total[0] += 1

    kernel, other = fast_args(cuda.jit(count)), fast_args(cuda.jit(count_bound))
    total, tensors = place.tensor(), [place.tensor() for _ in range(4)]
    if place.is_gpu:
        total.zero_()
        place.prepare()
    else:
        place.begin()
        begun = place.stub.fast_count
    bound = other[1, 32].bind(total)
    launchers = kernel[1, 32], kernel[2, 32], kernel.forall(64)

    def some(number: int) -> None:
        for i in range(number // 4):
            launchers[i % 3](total, tensors[i % 4], i)
            launchers[i % 3](total, tensors[i % 4], 0.5)
            kernel[1, 64](total, scalar=i, x=tensors[-1])
            bound()
            if i % 100 == 0 and place.is_gpu:
                place.prepare()

    some(SOAK_LAUNCHES // 10)
    references, memory = [sys.getrefcount(tensor) for tensor in (total, *tensors)], _memory()
    some(SOAK_LAUNCHES)
    assert [sys.getrefcount(tensor) for tensor in (total, *tensors)] == references
    grown = _memory() - memory
    assert grown < 8 << 20, f"{grown} bytes more"
    launches = SOAK_LAUNCHES + SOAK_LAUNCHES // 10
    if place.is_gpu:
        place.prepare()
        found = int(total[0])
    else:
        found = place.stub.fast_count - begun
    assert found == launches, f"{found} of {launches} launches"
    return {"launches": launches, "grown_bytes": grown}


def _memory() -> int:
    """This process's resident bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise Skipped("this system does not say how much memory a process has")


CHECKS = {check.__name__: check for check in (results, streams, graphs, shared_memory, threads, errors, soak)}
SANITIZED = ("results", "shared_memory", "threads")


# ---- in processes of their own ---------------------------------------------------------------------------------------


def device_tests(place) -> dict[str, Any]:
    """``tests/cuda`` and ``tests/test_kernels_gpu.py`` against the device, those marked ``gpu`` among them."""
    if not place.is_gpu:
        raise Skipped("the suite runs against the driver stub as it is")
    paths = [path for path in ("tests/cuda", "tests/test_kernels_gpu.py") if (ROOT / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1:] or [done.stderr[-500:]]
    assert done.returncode == 0, f"{summary[0]}\n{done.stdout[-4000:]}"
    return {"command": " ".join(command[1:]), "summary": summary[0]}


def sanitizer(place) -> dict[str, Any]:
    """Some of the checks under ``compute-sanitizer``, which looks at every access of a kernel."""
    if not place.is_gpu:
        raise Skipped("the driver stub runs no kernel")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise Skipped("compute-sanitizer is not installed")
    only = [word for name in SANITIZED for word in ("--only", name)]
    command = [tool, "--error-exitcode", "9", sys.executable, str(Path(__file__).resolve()), *only, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return {"checks": list(SANITIZED)}


PROCESSES = {check.__name__: check for check in (device_tests, sanitizer)}


# ---- the command -----------------------------------------------------------------------------------------------------


def _made(name: str, package: str, check, *args) -> dict[str, Any]:
    """A check's outcome: "passed", "skipped" or "FAILED", with what it noted, or why."""
    start = time.perf_counter()
    try:
        noted = {"outcome": "passed", **check(*args)}
    except Skipped as reason:
        noted = {"outcome": "skipped", "why": str(reason)}
    except Exception as error:
        noted = {"outcome": "FAILED", "why": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"check": name, "package": package, **noted, "seconds": round(time.perf_counter() - start, 2)}


def _line(row: dict[str, Any]) -> str:
    known = ("check", "package", "outcome", "seconds", "traceback", "why")
    noted = row.get("why") or ", ".join(f"{name} {value}" for name, value in row.items() if name not in known)
    return f"{row['package']:<16} {row['check']:<14} {row['outcome']:<8} {row['seconds']:7.1f} s  {noted}"


def main() -> int:
    """Run the checks. The exit code is 1 when one has failed."""
    every = (*CHECKS, *PROCESSES)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stub", action="store_true", help="against the driver stub: what needs no results")
    parser.add_argument("--only", action="append", choices=every, help="only this check; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="where to write; on a GPU by default perf/results/DATE-cuda-check.json")
    options = parser.parse_args()
    place = cuda_places.place(options.stub)
    if not place.is_gpu and not options.stub:
        raise SystemExit("There is no GPU here: nothing is proved. --stub makes what needs no results run.")
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of grids that are small
        for package, module in PACKAGES.items():
            try:
                cuda = importlib.import_module(module)
                cuda.current_context()
            except ImportError as error:
                rows.append({"check": "import", "package": package, "outcome": "skipped", "why": str(error), "seconds": 0.0})
                print(_line(rows[-1]))
                continue
            for name, check in CHECKS.items():
                if name in (options.only or every):
                    rows.append(_made(name, package, check, place, cuda))
                    print(_line(rows[-1]), flush=True)
    for name, check in PROCESSES.items():
        if name in (options.only or every):
            rows.append(_made(name, "both", check, place))
            print(_line(rows[-1]), flush=True)
    for row in rows:
        if "traceback" in row:
            print(f"\n{row['package']}, {row['check']}\n{row['traceback']}")
    machine = cuda_launches.described(place)
    path = options.json
    if path is None and place.is_gpu:
        path = ROOT / "perf" / "results" / f"{datetime.now(timezone.utc):%Y-%m-%d}-cuda-check.json"
    if path not in (None, "-"):
        Path(path).write_text(json.dumps({"machine": machine, "checks": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return int(any(row["outcome"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

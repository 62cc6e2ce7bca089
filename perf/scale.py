"""``python perf/scale.py``: kernels in other processes, and what is promised of them; some minutes, ``--quick`` one or two.

1. A task of a microsecond in Dask and in Ray, over the engine's own task that does nothing.
2. The first call in a new process of a kernel that came with its machine code.
3. Workers that start at once with no kernel in the disk cache: how often each kernel is compiled.
4. A module of many kernels, precompiled: their first calls in a new process.
5. Dask's ``map_blocks`` over many chunks: memory, and whether kernels read the chunks where they are.

The README in this folder says how each is measured.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import processes
import report
import scale_process
from book import Book, Target

from fastexchange.ground.cfunction import code_cache
from fastexchange.ground.disk_cache import FOLDER
from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, Statement, time_statements

_HERE = Path(__file__).resolve().parent
PROCESS = str(_HERE / "scale_process.py")
WORKERS = 16
LABELS = {
    "task/dask/own": "Dask, what is ours in a task: pickling, unpickling, the call, less those of a function that does nothing",
    "task/dask/njit": "Dask, the same of a kernel of njit, which travels without its code",
    "task/ray/own": "Ray, what is ours in a task: the call, less that of a function that does nothing",
    "task/ray/njit": "Ray, the same of a kernel of njit",
    "task/dask/nothing": "Dask: a task that does nothing",
    "task/dask/again": "Dask: the same again",
    "task/dask/kernel": "Dask: a task of a kernel of 1 µs",
    "task/ray/nothing": "Ray: a task that does nothing",
    "task/ray/again": "Ray: the same again",
    "task/ray/kernel": "Ray: a task of a kernel of 1 µs",
    "first/nothing": "a new process: unpickling and first call of a function that does nothing",
    "first/kernel": "the same of a kernel, all modules imported before",
    "first/kernel/elapsed": "the same by the clock",
    "first/imports": "the same of a kernel, only numba and fastexchange imported before",
    "first/imports/elapsed": "the same by the clock",
    "many/ours": "each of the module's kernels: the first call",
    "many/ours/elapsed": "the same by the clock",
    "many/loading": "of it, Numba's loading of the machine code",
    "many/njit": "each of the module's kernels, njit(cache=True): the first call",
    "many/njit/elapsed": "the same by the clock",
}
SECTIONS = "task", "first", "start", "many", "chunks"


def _process(*arguments: str, **variables: str) -> dict:
    return json.loads(processes._run(PROCESS, *arguments, **variables).splitlines()[-1])


# ---- a task of an engine ---------------------------------------------------------------------------------------------


def _iterations() -> int:
    """How many iterations of the kernel take a microsecond."""
    names = {"f": scale_process.kernel, "x": np.ones(4)}
    times = time_statements({n: Statement("f(x, n)", names | {"n": n}) for n in (1000, 2000)}, rounds=9).calls
    return round(1e6 / (times[2000] - times[1000]).median)


def _own(task: str, names: dict, rounds: int) -> dict[str, Samples]:
    """Nanoseconds of what is ours, and what is Numba's, in a task, which the engine does by this expression."""
    scale_process.kernel.precompile((np.ones(4), 0))
    functions = {"nothing": scale_process.nothing, "own": scale_process.kernel, "njit": scale_process.by_numba}
    statements = {name: Statement(task, names | {"f": each, "x": np.ones(4)}) for name, each in functions.items()}
    times = time_statements(statements, rounds=rounds).calls
    return {name: times[name] - times["nothing"] for name in ("own", "njit")}


def _tasks(run: Callable, functions: dict[str, Callable], rounds: int, batches: int, count: int) -> dict[str, Samples]:
    """Nanoseconds of a task, in each round the median over interleaved batches of `count` tasks."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        run(function, count)
    for _ in range(rounds):
        found: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(batches):
            for name in random.sample(list(functions), len(functions)):
                start = time.perf_counter_ns()
                run(functions[name], count)
                found[name].append((time.perf_counter_ns() - start) / count)
        for name, values in found.items():
            times[name].append(float(np.median(values)))
    return {name: Samples(np.array(values)) for name, values in times.items()}


def _dask(n: int, rounds: int, batches: int) -> dict[str, Samples]:
    from dask.distributed import Client, LocalCluster
    from distributed.protocol.pickle import dumps, loads

    x = np.ones(4)
    own = _own("loads(dumps(f))(x, 0)", {"dumps": dumps, "loads": loads}, rounds)  # the scheduler pickles it with each task
    with LocalCluster(1, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:

        def run(function: Callable, count: int) -> None:
            client.gather(client.map(function, [x] * count, [n] * count, pure=False))

        functions = {"nothing": scale_process.nothing, "again": scale_process.nothing, "kernel": scale_process.kernel}
        return own | _tasks(run, functions, rounds, batches, 100)


def _ray(n: int, rounds: int, batches: int) -> dict[str, Samples]:
    import ray

    kernel, nothing, x = scale_process.kernel, scale_process.nothing, np.ones(4)
    own = _own("f(x, 0)", {}, rounds)  # a worker gets the function once
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        of_kernel, of_nothing = ray.remote(lambda x, n: kernel(x, n)), ray.remote(lambda x, n: nothing(x, n))

        def run(function, count: int) -> None:
            ray.get([function.remote(x, n) for _ in range(count)])

        return own | _tasks(run, {"nothing": of_nothing, "again": of_nothing, "kernel": of_kernel}, rounds, batches, 100)
    finally:
        ray.shutdown()


def tasks(rounds: int, batches: int) -> tuple[dict[str, Samples], list[Target]]:
    """The rows of an engine's tasks."""
    n = _iterations()
    times: dict[str, Samples] = {}
    for name, module, measure in (("dask", "distributed", _dask), ("ray", "ray", _ray)):
        if find_spec(module):
            times |= {f"task/{name}/{kind}": each for kind, each in measure(n, rounds, batches).items()}
        else:
            print(f"{module} is not installed: no tasks of it.")
    book = Book(times)
    for name, title in (("dask", "Dask"), ("ray", "Ray")):
        nothing, kernel, own = (f"task/{name}/{kind}" for kind in ("nothing", "kernel", "own"))
        more = lambda t, k=kernel, e=nothing: (t[k] - t[e] + Samples(np.full(rounds, -1000.0))) / t[e] * 100  # noqa: E731
        book.add(f"{title}, a task of 1 µs", "≤ 2 % over a no-op", more, 2, "%")
        part = lambda t, o=own, e=nothing: Samples(t[o].values / t[e].median * 100)  # noqa: E731
        book.add(f"{title}, what is ours in it", "≤ 2 % of a no-op", part, 2, "%")
    return times, book.targets


# ---- a new process ---------------------------------------------------------------------------------------------------


def first(rounds: int) -> tuple[dict[str, Samples], list[Target]]:
    """The rows of the first call in a new process."""
    times: dict[str, list[int]] = {key.removeprefix("first/"): [] for key in LABELS if key.startswith("first/")}
    with tempfile.TemporaryDirectory() as folder:
        pickles, modules = f"{folder}/pickles", Path(folder, "modules.json")
        _process("send", pickles)
        modules.write_text(json.dumps(_process("receive", pickles, "-")["modules"]))
        for _ in range(rounds):
            for name, imported in (("imports", "-"), ("kernel", str(modules))):
                found = _process("receive", pickles, imported)
                if found["compiled"]:
                    raise SystemExit("a kernel that came with its machine code has been compiled")
                times[name].append(found["kernel"])
                times[f"{name}/elapsed"].append(found["kernel/elapsed"])
            times["nothing"].append(found["nothing"])
    measured = {f"first/{name}": Samples(np.array(values, float)) for name, values in times.items()}
    book = Book(measured)
    over = lambda t: (t["first/kernel"] - t["first/nothing"]) / 1e6  # noqa: E731
    book.add("first call in a new process", "≤ 30 ms over a no-op, after imports", over, 30, "ms")
    imports = (measured["first/imports"] - measured["first/nothing"]) / 1e6
    book.targets.append(Target("the same, the imports in it", "-", f"{imports.median:.1f} ms ± {imports.spread:.1f}", None))
    return measured, book.targets


@contextmanager
def _cold_cache():
    """A NUMBA_CACHE_DIR with this package's own native code, as installed wheels have it, and no kernels."""
    scale_process.kernel(np.ones(4), 0)
    made_for_kernels = "box", "trampoline", "casting-trampoline", "raise"
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(*(f"{name}-*" for name in made_for_kernels))
        shutil.copytree(str(code_cache.directory), Path(folder, FOLDER), ignore=ignored)
        yield folder


def starts(rounds: int) -> tuple[dict, list[Target]]:
    """Compilations of workers that start at once."""
    found: list[dict[str, int]] = []
    for _ in range(rounds):
        with _cold_cache() as folder:
            path = os.pathsep.join(filter(None, (str(_HERE.parent), os.environ.get("PYTHONPATH"))))
            environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": folder}
            command = [sys.executable, PROCESS, "start", "scale_kernels"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(WORKERS)]
            for worker in workers:
                worker.stdout.readline()
            for worker in workers:
                worker.stdin.write("go\n")
                worker.stdin.flush()
            said = [json.loads(worker.communicate()[0]) for worker in workers]
            found.append({name: sum(each[name] for each in said) for name in said[0]})
    kernels = [counts[name] for counts in found for name in counts if name != "native"]
    native = [counts["native"] for counts in found]
    shown = f"{min(kernels)} to {max(kernels)} of {rounds} starts of {len(found[0]) - 1} kernels"
    targets = [Target(f"{WORKERS} workers at once, cold cache", "1 compilation of a kernel", shown, set(kernels) == {1})]
    targets.append(Target("the same, code around kernels", "-", f"{min(native)} to {max(native)} in all workers", None))
    return {"compilations": found}, targets


_MANY = {
    "ours": "from fastexchange import fast_args\nimport numba\nKERNELS = []\ndecorate = fast_args(cache=True)\n",
    "njit": "import numba\nKERNELS = []\ndecorate = numba.njit(cache=True)\n",
}
_ONE = """
@decorate
def kernel_{0}(x, k):
    total = {0}.5
    for i in range(len(x)):
        total += x[i] * k
    return total
KERNELS.append(kernel_{0})
"""


def many(rounds: int, count: int) -> tuple[dict[str, Samples], list[Target]]:
    """The rows of a module with many kernels."""
    times: dict[str, list[float]] = {key.removeprefix("many/"): [] for key in LABELS if key.startswith("many/")}
    with _cold_cache() as folder:
        place = {"NUMBA_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
        for name, head in _MANY.items():
            module = head + "".join(_ONE.format(number) for number in range(count))
            if name == "ours":
                module += '__precompile__ = [(each, "(float64[::1], int64)") for each in KERNELS]\n'
            Path(folder, f"many_{name}.py").write_text(module)
        subprocess.run(
            [sys.executable, "-m", "fastexchange", "precompile", "many_ours"],
            env={**os.environ, **place, "PYTHONPATH": f"{_HERE.parent}{os.pathsep}{place['PYTHONPATH']}"},
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for turn in range(-1, rounds):
            for name in _MANY:
                found = json.loads(_run_with(place, "load", f"many_{name}"))
                if turn < 0:  # what is compiled for Numba's dispatchers
                    continue
                if found["compiled"]:
                    raise SystemExit(f"{found['compiled']} kernels of many_{name} have been compiled, though they are on disk")
                times[name].append(found["calls"] / count)
                times[f"{name}/elapsed"].append(found["elapsed"] / count)
                if name == "ours":
                    times["loading"].append(found["loading"] / count)
    measured = {f"many/{name}": Samples(np.array(values)) for name, values in times.items()}
    book = Book(measured)
    more = lambda t: (t["many/ours"] - t["many/loading"]) / 1e6  # noqa: E731
    book.add(f"{count} kernels in a module, precompiled", "≤ 2 ms each over loading", more, 2, "ms")
    return measured, book.targets


def _run_with(place: dict[str, str], *arguments: str) -> str:
    path = f"{_HERE.parent}{os.pathsep}{place['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, PROCESS, *arguments], env={**os.environ, **place, "PYTHONPATH": path}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


# ---- chunks ----------------------------------------------------------------------------------------------------------


def chunks(count: int) -> tuple[dict, list[Target]]:
    """Memory and addresses of ``map_blocks``."""
    if not find_spec("distributed"):
        print("distributed is not installed: no chunks.")
        return {}, []
    found, targets = {}, []
    passed = count * scale_process.CHUNK * 8
    for scheduler in ("threads", "processes"):
        both = {name: _process("chunks", scheduler, name, str(count)) for name in ("by_kernel", "by_numpy")}
        found[scheduler] = both
        ours, theirs = both["by_kernel"], both["by_numpy"]
        call = f"map_blocks, {count} chunks, {scheduler}"
        shown = f"{ours['own memory']} read where they are, {ours['right']} right"
        targets.append(Target(call, "each chunk zero copy", shown, ours["own memory"] == ours["right"] == count))
        more = ours["grown"] - theirs["grown"]
        shown = f"{more / 1e6:.1f} MB more than with NumPy's sum ({ours['grown'] / 1e6:.1f}), of {passed / 1e6:.0f} MB"
        targets.append(Target(call, "memory flat: ≤ 1 % of the data", shown, more <= passed / 100))
    return {"chunks": found}, targets


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the promises beside what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and chunks: noisier")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this part; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args(arguments)
    quick = options.quick
    parts: dict[str, Callable] = {
        "task": lambda: tasks(*(3, 3) if quick else (11, 8)),
        "first": lambda: first(3 if quick else 15),
        "start": lambda: starts(1 if quick else 3),
        "many": lambda: many(2 if quick else 7, 100),
        "chunks": lambda: chunks(1000 if quick else 10_000),
    }
    described = files.machine()
    print(files.headline(described))
    times: dict[str, Samples] = {}
    counted: dict[str, object] = {}
    targets: list[Target] = []
    seconds: dict[str, float] = {}
    for name in options.only or SECTIONS:
        start = time.perf_counter()
        found, promised = parts[name]()
        (times if name in ("task", "first", "many") else counted).update(found)
        targets += promised
        seconds[name] = round(time.perf_counter() - start, 1)
    print(report.rows_table("Microseconds, median and interquartile range", LABELS, times, "µs", 1e3))
    verdict = {True: "met", False: "MISSED", None: "-"}
    lines = [(target.call, target.must_be, target.measured, verdict[target.met]) for target in targets]
    print(report.table(("what", "must be", "measured", "met?"), lines, left=(0, 1, 2, 3)))
    print(f"Seconds: {', '.join(f'{name} {took:.0f}' for name, took in seconds.items())}.")
    if options.json:
        results = [files.result(key, samples, LABELS[key]) for key, samples in times.items()]
        more = {"targets": [vars(target) for target in targets], "seconds": seconds, **counted}
        files.write(options.json, described, max((each.rounds for each in times.values()), default=1), results, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())

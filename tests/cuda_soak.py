"""Endurance of launches for CUDA, on the driver stub: every path in turn, with errors and refusals between. Memory stays flat.

    python tests/cuda_soak.py 20000       # launches with each of the packages installed; without a number 100,000

Not part of the suite. The paths are the rows of ``test_cuda_places.WHERE``, ``test_cuda_refusals.REFUSED``, and some more.
After a warm-up nothing may grow beyond the bounds of ``soak``: resident memory, the memory blocks of CPython's allocator,
references to the arguments; each export is given back once, each event destroyed. Ends with exit code 1 if anything grew
or was not given back.
"""

import collections
import gc
import importlib
import random
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "cuda"), str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cuda_stub  # noqa: E402
from soak import bounds, measured  # noqa: E402
from stub_processes import PACKAGES, is_installed  # noqa: E402

ROUNDS, WARM_ROUNDS = 40, 8
EVENTS = ("cuEventCreate", "cuEventDestroy")


def paths(stub, package) -> tuple[dict, list, list]:
    """By name: functions that make one launch, of changing kinds; what they hold; the ledgers of their exports."""
    import numpy as np
    from cuda_checks import is_refused
    from launches import kernel_of
    from test_cuda_places import WHERE, World
    from test_cuda_refusals import REFUSED, Maker

    from fastexchange import CudaError

    random.seed(7)
    kernels = [kernel_of(package, parameters) for parameters in ("", "x", "x, y", "x, y, z")]
    world, maker = World(stub, package), Maker(stub, package, is_new=False)
    x, known, dates = world.mine(), package.to_device(np.zeros(5, np.float32)), package.to_device(np.zeros(3, "M8[s]"))
    held = [x, known, dates]

    def failing(function, code, arguments, after=0):
        stub.fail(function, code, after=after)
        is_refused(partial(kernels[len(arguments)][1, 32], *arguments), CudaError)

    ways = {
        "keywords": lambda: kernels[2][1, 32](y=2.5, x=x),
        "changing types": lambda: kernels[2][1, 32](random.choice([x, known, 1, 2.5]), random.choice([x, 1, 2.5])),
        "forall": lambda: kernels[1].forall(random.randrange(1, 50))(x),
        "device arrays": lambda: kernels[1][1, 32](random.choice([known, known[:3], known[::2]])),
        "the package's own": lambda: kernels[1][1, 32](dates),
        "bound": kernels[2][1, 32].bind(x, 2.5),
        "bound each time": lambda: kernels[2][1, 32].bind(world.exports(), 1.5)(),
        "refused by the driver": lambda: failing("cuLaunchKernel", 1, [x]),
    }
    for event in ("cuEventRecord", "cuStreamWaitEvent"):
        ways[f"{event} fails"] = lambda event=event: failing(event, 2, [x, world.other()], random.randrange(2))
    for name, (make, given, *_) in WHERE.items():
        arguments = make(world)
        held += arguments
        launcher = kernels[len(arguments)][1, 32, given and world.streams[given, 0]]
        ways[name] = partial(launcher, *arguments)
    for name, (make, kind, _) in REFUSED.items():
        held.append(make(maker))
        ways[name] = partial(is_refused, partial(kernels[1][1, 32], held[-1]), kind)
    return ways, [each for each in held if not isinstance(each, int | float | str | None)], [world.ledger, maker.ledger]


def soak(stub, name: str, launches: int) -> bool:
    """Whether all is flat and given back for the package `name`."""
    package = importlib.import_module(name)
    package.current_context()
    ways, held, ledgers = paths(stub, package)
    each = -(-launches // (ROUNDS * len(ways)))
    events, began = collections.Counter(), time.perf_counter()
    for round_ in range(ROUNDS):
        for launch in ways.values():
            stub.set_trace(True)
            for _ in range(each):
                launch()
            stub.set_trace(False)
            events.update(call for call in stub.trace if call in EVENTS)
            stub.reset()
            stub.clear()
        if round_ == WARM_ROUNDS:
            gc.collect()
            before, references = measured(), [sys.getrefcount(thing) for thing in held]
    gc.collect()
    now = [sys.getrefcount(thing) for thing in held]
    resident, blocks, _ = (later - earlier for later, earlier in zip(measured(), before, strict=True))
    tensors = [thing.exported - thing.deleted for thing in held if hasattr(thing, "deleted")]
    most = bounds(each * ROUNDS * len(ways))
    checks = {
        "memory has grown": resident > most["resident bytes"] or blocks > most["memory blocks"],
        f"references to the arguments were {references} and are {now}": now != references,
        "exports were not given back once": any(ledger.out or ledger.made != ledger.deleted for ledger in ledgers),
        "events were not destroyed once": events[EVENTS[0]] != events[EVENTS[1]],
        f"exports of the tensors that are out: {tensors}": any(tensors),
        "another context is current": stub.current_context() not in (0, stub.primary_context(0)),
    }
    wrong = [what for what, is_wrong in checks.items() if is_wrong]
    print(f"{name}: {each * ROUNDS * len(ways):,} launches of {len(ways)} kinds in {time.perf_counter() - began:.0f} s; memory")
    print(f"  {resident / 2**20:+.1f} MiB, blocks {blocks:+,}; {[ledger.made for ledger in ledgers]} exports, {dict(events)}")
    print(*(f"  WRONG: {what}" for what in wrong), sep="\n")
    return not wrong


def main() -> int:
    launches = int(sys.argv[1]) if sys.argv[1:] else 100_000
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        stub = cuda_stub.load(directory, force=True)
        stub.set_devices(3)
        is_good = [soak(stub, name, launches) for name in filter(is_installed, PACKAGES)]
    return 0 if is_good and all(is_good) else 1


if __name__ == "__main__":
    raise SystemExit(main())

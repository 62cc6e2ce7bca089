"""Endurance of launches for CUDA, on the driver stub: every path in turn, with errors and refusals between. Memory stays flat.

    python tests/cuda_soak.py                         # 100,000 launches with each of the packages installed
    python tests/cuda_soak.py --launches 5000

Not part of the suite. After a warm-up nothing may grow beyond the bounds of ``soak``: resident memory, the memory blocks of
CPython's allocator, references to the tensors; each export is given back once, each event destroyed. Ends with exit code
1 if anything grew or was not given back.
"""

import argparse
import collections
import gc
import importlib
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "cuda"), str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cuda_stub  # noqa: E402

PACKAGES = ("numba.cuda", "numba_cuda_mlir.cuda")
ROUNDS, WARM_ROUNDS = 40, 8
EVENTS = ("cuEventCreate", "cuEventDestroy")


def paths(stub, package) -> dict:
    """By name: a function that makes one launch, of changing kinds."""
    import numpy as np
    from cuda_producers import ArrayInterface, Exports, ExportsLegacy, Wrapper, kernels_of, new_stream
    from cuda_tensors import DeviceTensor, OtherTensor
    from made_producers import Ledger

    from fastexchange import CudaError

    random.seed(7)
    kernels = kernels_of(package)
    ledger = Ledger()
    x, y, there, other = DeviceTensor((4,)), DeviceTensor((2, 3), "float64"), DeviceTensor((4,), device=1), OtherTensor((4,))
    exports, legacy, array = Exports(ledger), ExportsLegacy(ledger), ArrayInterface(stub)
    kernels[1][1, 32](x)
    OtherTensor.streams[0] = new_stream()
    known = package.to_device(np.zeros(5, np.float32))
    views = [known[:3], known[::2], known]
    wrapper, dates = Wrapper(x), package.to_device(np.zeros(3, "M8[s]"))
    bound = kernels[2][1, 32].bind(x, 2.5)

    def refused(launch, error=BufferError):
        try:
            launch()
        except error:
            return
        raise AssertionError("it was not refused")

    def failing():
        stub.fail("cuLaunchKernel", 1)
        refused(lambda: kernels[1][1, 32](x), CudaError)

    def failing_event():
        stub.fail(random.choice(["cuEventRecord", "cuStreamWaitEvent"]), 2, after=random.randrange(2))
        refused(lambda: kernels[2][1, 32](x, other), CudaError)

    def rebound():
        kernels[2][1, 32].bind(exports, 1.5)()

    return {
        "one tensor": lambda: kernels[1][1, 32](x),
        "keywords": lambda: kernels[2][1, 32](y=2.5, x=x),
        "changing types": lambda: kernels[2][1, 32](random.choice([x, y, 1, 2.5]), random.choice([x, y, 1, 2.5])),
        "tuples": lambda: kernels[1][1, 32]((x, (y, 3))),
        "another device": lambda: kernels[1][1, 32](there),
        "no tensors": lambda: kernels[0][1, 32](),
        "forall": lambda: kernels[1].forall(random.randrange(1, 50))(x),
        "a stream": lambda: kernels[1][1, 32, random.choice([0, 1, 2])](x),
        "two producers": lambda: kernels[2][1, 32](x, other),
        "__dlpack__": lambda: kernels[2][1, 32](exports, x),
        "legacy __dlpack__": lambda: kernels[1][1, 32](legacy),
        "__cuda_array_interface__": lambda: kernels[1][1, 32](array),
        "device arrays": lambda: kernels[1][1, 32](random.choice(views)),
        "new device arrays": lambda: kernels[1][1, 32](known[random.randrange(4):]),
        "a wrapper": lambda: kernels[1][1, 32](wrapper),
        "the package's own": lambda: kernels[1][1, 32](dates),
        "bound": bound,
        "bound each time": rebound,
        "refused by the driver": failing,
        "refused: another device": lambda: refused(lambda: kernels[2][1, 32](x, there)),
        "refused: exported, another device": lambda: refused(lambda: kernels[2][1, 32](exports, there)),
        "refused: events": failing_event,
        "held": (x, y, there, other, exports, legacy, array, known, wrapper, dates),
        "ledger": ledger,
    }


def soak(stub, name: str, launches: int) -> bool:
    """Whether all is flat and given back for the package `name`."""
    from soak import BLOCKS_BOUND, RESIDENT_BOUND, measured

    package = importlib.import_module(name)
    package.current_context()
    ways = paths(stub, package)
    held, ledger = ways.pop("held"), ways.pop("ledger")
    each = -(-launches // (ROUNDS * len(ways)))
    counted, events = collections.Counter(), collections.Counter()
    before = references = None
    began = time.perf_counter()
    for round_ in range(ROUNDS):
        for way, launch in ways.items():
            is_traced = way in ("two producers", "refused: events")
            stub.set_trace(is_traced)
            for _ in range(each):
                launch()
            counted[way] += each
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
    for way, count in counted.items():
        print(f"  {count:9,}  {way}")
    seconds = time.perf_counter() - began
    print(f"  {sum(counted.values()):9,}  in {seconds:.0f} s; resident memory {resident / 2**20:+.1f} MiB, blocks {blocks:+,}; "
          f"{ledger.made:,} exports, {ledger.deleted:,} given back; {events[EVENTS[0]]:,} events, "
          f"{events[EVENTS[1]]:,} destroyed")  # fmt: skip
    out = [thing.exported - thing.deleted for thing in held if hasattr(thing, "deleted")]
    checks = {
        "memory has grown": resident > RESIDENT_BOUND or blocks > BLOCKS_BOUND,
        f"references to the arguments were {references} and are {now}": now != references,
        "exports were not given back once": ledger.out or ledger.made != ledger.deleted,
        "events were not destroyed once": events[EVENTS[0]] != events[EVENTS[1]],
        f"exports of the tensors that are out: {out}": sum(out) != 1 or out[0] != 1,  # the bound launch of the first holds one
        "another context is current": stub.current_context() not in (0, stub.primary_context(0)),
    }
    wrong = [what for what, is_wrong in checks.items() if is_wrong]
    for what in wrong:
        print(f"  WRONG: {what}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--launches", type=int, default=100_000)
    launches = parser.parse_args().launches
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        stub = cuda_stub.load(directory, force=True)
        good = True
        for name in PACKAGES:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(f"{name}: not installed: {error}")
                continue
            print(name)
            good &= soak(stub, name, launches)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

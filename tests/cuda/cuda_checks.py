"""How tests launch: both ways, traced; and what has to hold then: it is refused in these words, all is given back."""

import contextlib
import gc
import sys

from fastexchange._abi import ffi
from fastexchange.dispatch.runtime import runtime


def is_refused(function, kind, *texts: str) -> str:
    """What an exception says, with its notes, that has to be of this very type; `texts` are in it."""
    try:
        function()
    except BaseException as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        for text in texts:
            assert text in said, said
        return said
    raise AssertionError("nothing was raised")


def is_for_tasks(launch, count: int) -> bool:
    """Whether a launch has the least grid for so many tasks, of blocks that the driver has chosen."""
    return launch.grid == (-(-count // launch.block[0]), 1, 1) and launch.block[1:] == (1, 1)


def free_frames() -> int:
    """How many frames wait for a call."""
    count, at = 0, runtime().native.frames
    while at:
        count, at = count + 1, ffi.cast("fx_frame *", at).next
    return count


@contextlib.contextmanager
def all_given_back(*things):
    """After the block each of `things` has as many references as before, and no export of one is out."""
    things = [each for each in things if each is not None]
    tensors = [each for each in things if hasattr(each, "exported")]
    ledgers = [each.ledger for each in things if hasattr(each, "ledger")]
    gc.collect()
    before, frames = [sys.getrefcount(each) for each in things], free_frames()
    yield
    gc.collect()
    assert [sys.getrefcount(each) for each in things] == before
    assert free_frames() >= frames, "fewer than before: one is lost"
    assert [each.exported - each.deleted for each in tensors] == [0] * len(tensors)
    assert [(each.made - each.deleted, each.out) for each in ledgers] == [(0, 0)] * len(ledgers)


def new_stream(device: int = 0) -> int:
    """The handle of a new stream of a device, in its primary context, that does not block."""
    from fastexchange.cuda.driver import driver  # which needs cuda.bindings

    with driver().on(device):
        return int(driver().call("cuStreamCreate", 1))


def both_ways(launch) -> None:
    """Launch so often that the last ones are made by the cache entry, where there is one."""
    for _ in range(4):
        launch()


def launched(record, call, *arguments, **named):
    """The launch that a call makes: this one, and no more."""
    before = len(record.launches)
    call(*arguments, **named)
    (made,) = record.launches[before:]
    return made


def ordered(own: int, others: list[int]) -> list[tuple[str, int]]:
    """The log of a launch on stream `own` that is ordered before and after the work on the others."""
    before = [entry for other in others for entry in (("cuEventRecord", other), ("cuStreamWaitEvent", own))]
    after = [entry for other in others for entry in (("cuEventRecord", own), ("cuStreamWaitEvent", other))]
    return [*before, ("cuLaunchKernel", own), *after]


def check_order(stub, own: int, others: list[int]) -> None:
    """The log is that of one such launch."""
    assert [(each.api, each.stream) for each in stub.log] == ordered(own, others)
    events = [each.event for each in stub.log if each.event]
    assert events[::2] == events[1::2], "each wait is for the event recorded just before"


@contextlib.contextmanager
def traced(stub):
    """The names of the driver's functions that are called meanwhile; filled at the end."""
    names: list[str] = []
    stub.clear()
    stub.set_trace(True)
    try:
        yield names
    finally:
        stub.set_trace(False)
        names += stub.trace

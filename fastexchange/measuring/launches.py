"""``measure`` of a launch: what it takes on the host, beside the driver's function alone and the package's own launch.

All launches are of kernels that do nothing. So no argument is written to, and the device keeps up.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..cuda.classify import classify_arguments, device_and_streams, flatten, for_package
from ..cuda.cuda_kernel import CudaKernel, cuda_kernel_of
from ..cuda.driver import driver
from ..cuda.driver_launches import DriverLaunches
from ..cuda.launcher import CudaLauncher
from ..cuda.own_launch import own_launch
from ..cuda.streams import default_stream
from ..cuda.targets import is_of_package
from ..ground.numba_internals import can_compile
from ..ground.parameters import with_items
from . import files
from .argument_costs import argument_costs, argument_statements
from .judgement import Notes, judge, name_what_is_lost, say_how_many
from .null_kernels import function_of, null_function
from .progress import progress_bar
from .report import Alternative, OverheadReport
from .timing import Statement, time_statements
from .trial import Call

__all__ = ["measured_launch"]

_IN_A_ROW = 400
"""The most launches before the device is waited for: its queue holds about a thousand, and a launch that finds it full waits."""
_BUDGET_NS = 10_000_000_000
_DRIVER = "cuLaunchKernel"


class _Launch:
    """The launch to measure, of a kernel that does nothing, on the stream and the device that it would be on.

    `empty`: its launcher, whose grid is one block, or one cluster. It has been called: what that raises, the launch raises.
    """

    def __init__(self, launcher: CudaLauncher, args: tuple, kwargs: dict):
        kernel = launcher.kernel
        launcher._check()
        self.call = Call(kernel, args, kwargs)
        given = launcher._configured(kernel._bound_arguments(args, kwargs))
        if given.tasks < 0 and min(given.grid) < 1:
            raise ValueError(f"measure(): no device takes a grid of {given.grid} blocks")
        self._configuration = given._replace(grid=given.cluster or (1, 1, 1), tasks=min(given.tasks, 1))
        self._stream, self._options = launcher._stream, kernel._kernel_options
        self._target = kernel.target
        declared = [] if can_compile(kernel.dispatcher) else [kernel.target.signatures(kernel.dispatcher)]
        function = null_function(kernel.py_func)
        function.__qualname__ = kernel.__qualname__  # it is named in errors
        self.empty = self._launching(cuda_kernel_of(kernel.target.cuda.jit(*declared)(function), self._options))
        kind, why = self.call.explanation.kind, self.call.explanation.outcome
        if kind != "package":
            self.call.make(self.empty)
            why = next(iter(self.empty.kernel._native.why_own.values()), why if kind == "refused" else "")
        if why:
            raise TypeError(f"measure(): fastexchange does not make this launch of {kernel.__qualname__}(): {why}")
        self.infos = classify_arguments(kernel, kernel._bound_arguments(args, kwargs))
        found = device_and_streams(kernel, self.infos)
        self.device = kernel._default_device() if found.device is None else found.device
        self.stream = given.stream if given.stream is not None else [*found.streams, default_stream()][0]

    def _launching(self, kernel: CudaKernel) -> CudaLauncher:
        return CudaLauncher(kernel, self._configuration, self._stream)

    def empty_of(self, types: tuple[str, ...]) -> CudaLauncher:
        """A launcher for arguments of these types, by position."""
        return self._launching(_empty_kernel(self._target, types, self._options))

    def wait(self) -> None:
        """Wait for the device, so that its queue is empty."""
        with driver().on(self.device):
            driver().call("cuCtxSynchronize")

    def statements(self) -> dict[Any, Statement]:
        call, empty = self.call, self.empty
        alone = DriverLaunches(empty, self.device, self.stream)
        found = {
            "empty": call.of(empty), "control": call.of(empty), **argument_statements(call, self.empty_of),
            _DRIVER: Statement("f(n)", {"f": alone, "n": _IN_A_ROW}, _IN_A_ROW),
        }  # fmt: skip
        if call.has_keywords:
            is_positional = len(call.bound) == len(call.read) == call.kernel._parameters.positional
            found["by position"] = call.by_position(empty if is_positional else self.empty_of(call.types))
        return found

    def prepared(self, statement: Statement) -> Statement:
        return replace(statement, prepare=self.wait, most_calls=_IN_A_ROW)

    def own(self) -> list[tuple[str, Statement | None, str]]:
        """The launches by the package itself: (label, statement, why there is none). Each has been made."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*under-utilization.*")  # of a grid of one block
            return self._own()

    def _own(self) -> list[tuple[str, Statement | None, str]]:
        found: list[tuple[str, Statement | None, str]] = []
        name, cuda = self._target.name, self._target.cuda
        launch = own_launch(self.empty.kernel, self._configuration, self.stream)
        values = [for_package(self.empty.kernel, info) for info in self.infos]

        def device_array(value):
            if isinstance(value, tuple):
                return with_items(value, [device_array(item) for item in value])
            return cuda.as_cuda_array(value) if _can_be_device_array(value) else value

        ways: list[tuple[str, Callable[[], list]]] = [(f"{name}'s own launch", lambda: values)]
        if any(_can_be_device_array(info.value) for info in flatten(self.infos)):
            ways.append((f"{name}'s own launch, its device arrays made beforehand", lambda: [*map(device_array, values)]))
        for label, make in ways:
            try:
                names = {f"a{i}": value for i, value in enumerate(make())}
                made = Statement(f"f({', '.join(names)})", {"f": launch, **names})
                for _ in range(2):  # numba-cuda-mlir 0.6 takes a tensor of PyTorch once
                    exec(made.code, dict(made.names))
            except Exception as error:
                found.append((label, None, f"{type(error).__name__}: {error}".splitlines()[0]))
            else:
                found.append((label, made, ""))
        return found


def _can_be_device_array(value) -> bool:
    return hasattr(value, "__cuda_array_interface__") and not is_of_package(type(value))


@functools.lru_cache(maxsize=256)
def _empty_kernel(target, types: tuple[str, ...], options) -> CudaKernel:
    return cuda_kernel_of(target.cuda.jit(function_of(len(types))), options)


def measured_launch(launcher: CudaLauncher, args: tuple, kwargs: dict, rounds: int, with_alternatives: bool) -> OverheadReport:
    """Do the work of ``measure``."""
    notes, interrupts = Notes(), []
    launch = _Launch(launcher, args, kwargs)
    call = launch.call
    name = call.kernel.__qualname__
    ways = launch.own() if with_alternatives else []
    statements = launch.statements() | {("way", label): statement for label, statement, _ in ways if statement is not None}
    with progress_bar(f"measuring launches of {name}()") as progress:
        timings = time_statements(
            {key: launch.prepared(statement) for key, statement in statements.items()}, rounds=rounds, progress=progress.step,
            most_ns=_BUDGET_NS, on_interrupt=lambda: interrupts.append(True),
        )  # fmt: skip
    launch.wait()
    say_how_many(timings, rounds, "", bool(interrupts), _BUDGET_NS, notes)
    judge(timings, notes)
    times = timings.calls
    alone = times[_DRIVER]
    passing = times["empty"] - alone
    found = {argument: explanation for argument, explanation, _ in call.explanation.arguments}
    costs = argument_costs(call, times, {i: found[call.kernel._parameters.name_of(i)] for i, _ in call.read})
    keywords = times["empty"] - times["by position"] if "by position" in times else None
    nothing = alone * 0
    itself = passing - (keywords or nothing) - sum((cost.total for cost in costs), nothing)
    others = [(label, times.get(("way", label)), why) for label, _, why in ways]
    parts = {repr(cost.name): cost.total for cost in costs}
    name_what_is_lost(parts | {"the call itself": itself, "keywords": keywords}, times["empty"], notes)
    return OverheadReport(
        kernel=name, arguments=tuple(costs), call=itself, keywords=keywords, result=None, result_type=None, passing=passing,
        overhead=passing, alone=alone, total=times["empty"], noise=times["control"] / times["empty"],
        alternatives=tuple(Alternative(label, took and took - alone, why) for label, took, why in others),
        warnings=tuple(notes.said), machine=files.machine(), callee=_DRIVER,
        notes=("This is the host's time for launches of a kernel that does nothing, in a grid of one block.",),
    )  # fmt: skip

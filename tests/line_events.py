"""Something happens at a line of the package: what a signal's handler, or another thread, does in the middle of a call.

The interpreter looks after signals and switches threads between instructions, so whatever can happen there is made to happen
at each line in turn, by a trace function.
"""

import os
import sys
from collections.abc import Callable, Iterator

import fastexchange

ROOT = os.path.dirname(fastexchange.__file__)
Line = tuple[str, int]


def _name(line: Line) -> str:
    return f"{os.path.relpath(line[0], ROOT)}:{line[1]}"


def lines_of(work: Callable[[], object]) -> list[Line]:
    """The lines of the package that `work` executes, in the order of their first time."""
    seen: dict[Line, None] = {}

    def local(frame, event, argument):
        if event == "line":
            seen.setdefault((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(ROOT) else None

    _traced(trace, work)
    return list(seen)


def at_line(line: Line, act: Callable[[], object], work: Callable[[], object]) -> bool:
    """Do `work`, and `act` when it first comes to `line`; what either raises is raised. Whether it came there."""
    acted = []

    def local(frame, event, argument):
        if event == "line" and frame.f_lineno == line[1] and not acted:
            acted.append(True)
            sys.settrace(None)
            act()
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename == line[0] and not acted else None

    _traced(trace, work)
    return bool(acted)


def instructions_of(name: str, work: Callable[[], object]) -> list[tuple]:
    """The instructions of a file of the package that `work` executes, in the order of their first time."""
    seen: dict[tuple, None] = {}
    _traced(_tracer_of_instructions(name, lambda place: seen.setdefault(place)), work)
    return list(seen)


def at_instruction(name: str, place: tuple, act: Callable[[], object], work: Callable[[], object]) -> bool:
    """Do `work`, and `act` before it first executes this instruction of a file; what either raises is raised. Whether it did."""
    acted = []

    def note(met):
        if met == place and not acted:
            acted.append(True)
            sys.settrace(None)
            act()

    _traced(_tracer_of_instructions(name, note), work)
    return bool(acted)


def _tracer_of_instructions(name: str, note: Callable[[tuple], object]):
    file = os.path.join(ROOT, name)

    def local(frame, event, argument):
        if event == "opcode":
            note((frame.f_code.co_name, frame.f_lineno, frame.f_lasti))
        return local

    def trace(frame, event, argument):
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        return local

    return trace


def _traced(trace, work) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def at_each_line(scene: Callable[[], tuple]) -> Iterator[tuple[str, Callable, tuple]]:
    """For each line: its name, a function that does the scene's work with something happening there, and the scene.

    `scene` sets the stage and returns ``(work, ...)``: it is called once for each line, so every line meets the same.
    """
    work, *_ = scene()
    lines = lines_of(work)
    del work, _
    assert len(lines) > 10, f"only {len(lines)} lines of the package were executed: nothing is tested"
    for line in lines:
        stage = scene()
        yield _name(line), lambda act, line=line, work=stage[0]: at_line(line, act, work), stage


def at_each_instruction(name: str, scene: Callable[[], tuple]) -> Iterator[tuple[str, Callable, tuple]]:
    """As :func:`at_each_line`, at each instruction of one file of the package: a line may have several steps."""
    for _ in range(2):  # CPython 3.13 may show the instructions of a function only from its second call on
        work, *_ = scene()
        places = instructions_of(name, work)
        del work, _
    assert len(places) > 10, f"only {len(places)} instructions of {name} were executed: nothing is tested"
    for place in places:
        stage = scene()
        yield f"{name} {place}", lambda act, place=place, work=stage[0]: at_instruction(name, place, act, work), stage

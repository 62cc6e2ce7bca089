"""Something happens at a line of the package: what a signal's handler, or another thread, does in the middle of a call.

The interpreter looks after signals and switches threads between instructions, so whatever can happen there is made to happen
at each line in turn, or at each instruction, by a trace function.
"""

import os
import sys
from collections.abc import Callable, Iterator

import fastexchange

ROOT = os.path.dirname(fastexchange.__file__)


Work = Callable[[], object]


def nothing() -> None: ...


def traced(prefix: str, event_of_interest: str, note: Callable[[tuple], object], work: Work, rehearse: Work = nothing) -> None:
    """Do `work`, and ``note(place)`` before each line, or instruction, of files of the package whose path begins so.

    `rehearse` is done before: CPython 3.13 and later show most of a function's instructions only from its second call on.
    Lines need none.
    """
    is_noted = False

    def local(frame, event, argument):
        if event == event_of_interest and is_noted:
            code = frame.f_code
            step = (code.co_name, frame.f_lasti) if event == "opcode" else ()
            note((code.co_filename, frame.f_lineno, *step))
        return local

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(prefix):
            return None
        frame.f_trace_opcodes = event_of_interest == "opcode"
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        rehearse()
        is_noted = True
        work()
    finally:
        sys.settrace(before)


def _at(place: tuple, event: str, act: Work, work: Work, rehearse: Work) -> None:
    """Do `work`, and `act` when it first comes to the place; what either raises is raised."""
    acted = []

    def note(met):
        if met == place and not acted:
            acted.append(True)
            sys.settrace(None)
            act()

    traced(place[0], event, note, work, rehearse)


def _at_each(scene: Callable[[], tuple], event: str, name: str, step: int) -> Iterator[tuple[str, Callable, tuple]]:
    def rehearsal() -> Work:
        return scene()[0] if event == "opcode" else nothing

    places: dict[tuple, None] = {}
    for _ in range(2 if event == "opcode" else 1):  # CPython 3.12 shows no instruction when it is asked for the first time
        places.clear()
        traced(os.path.join(ROOT, name), event, places.setdefault, scene()[0], rehearsal())
    assert len(places) > 10, f"only {len(places)} places of the package were met: nothing is tested"
    for place in list(places)[::step]:
        stage = scene()
        named = f"{os.path.relpath(place[0], ROOT)}:{':'.join(map(str, place[1:]))}"
        rehearse = rehearsal()
        yield named, lambda act, place=place, work=stage[0], rehearse=rehearse: _at(place, event, act, work, rehearse), stage


def at_each_line(scene: Callable[[], tuple], step: int = 1) -> Iterator[tuple[str, Callable, tuple]]:
    """For each line, or each `step`-th: its name, a function that does the work with something happening there, and the scene.

    `scene` sets the stage and returns ``(work, ...)``: it is called once for each line, so every line meets the same.
    """
    return _at_each(scene, "line", "", step)


def at_each_instruction(name: str, scene: Callable[[], tuple]) -> Iterator[tuple[str, Callable, tuple]]:
    """As :func:`at_each_line`, at each instruction of one file of the package: a line may have several steps."""
    return _at_each(scene, "opcode", name, 1)

"""The parts of a fast entry around the kernel's call: enter a cached call, run the kernel without the GIL, leave.

An overload that is called often has an inline cache: an entry for each combination of argument types. An entry has a record for
each argument and each item of a tuple: its type, dtype and flags. An argument that agrees with its record has the record's key,
so nothing is looked up.

``fast_entry.fast_entry`` compiles the parts into one function: :data:`enter`, a part for each argument (``fast_readers``,
``fast_exports``), the kernel's call, and :data:`leave`. The words between them become registers.

The addresses in a cache entry stay valid: the overload holds the dtypes, and a type that dies clears its records
(``type_table.TypeTable``). A part reads its data in the record; only the rank is compiled in.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import part
from ..ground.cpython import PyErr_Occurred
from ..ground.native import call_word
from . import structs
from .boxing import BOXES_ARRAYS, BOXES_NONE, box_or_raise
from .frame import is_anything_kept, note_leaks, put_back, release_exports

_WORD = types.intp


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def enter(context_address, nargsf, kwnames, count):
    """Take a free frame for a call with `count` positional arguments. Returns 0 for any other call, or if no frame is free."""
    if kwnames != 0 or nargsf & c.NARGS_MASK != count:
        return 0
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    at = runtime.frames
    if at != 0:
        runtime.frames = structs.frame_at(at).next
    return at


@part(_WORD(_WORD))
def arrays_of(frame_address):
    """The ``fx_array[]`` of a frame."""
    return structs.frame_at(frame_address).arrays


@part(_WORD(_WORD))
def result_of(frame_address):
    """The address to which the kernel writes its result."""
    return structs.frame_at(frame_address).result


@part(_WORD(_WORD))
def expected_of(overload_address):
    """The ``fx_expected[]`` of an overload."""
    return structs.overload_at(overload_address).expected


@part(_WORD(_WORD))
def kernel_of(overload_address):
    """The address of an overload's compiled kernel."""
    return structs.overload_at(overload_address).kernel


@part(_WORD(_WORD))
def leave_gil(context_address):
    """Give up the GIL if the kernel runs without. Returns the thread's state for :data:`take_gil`, or 0."""
    return c.PyEval_SaveThread() if structs.context_at(context_address).release_gil != 0 else 0


@part(_WORD(_WORD))
def take_gil(thread):
    """Take the GIL again, if :data:`leave_gil` has given it up."""
    if thread != 0:
        c.PyEval_RestoreThread(thread)
    return 0


@part(_WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
def leave(context_address, overload_address, frame_address, args, code, result, excinfo, boxing, array_count, export_count):
    """End a call whose kernel has returned `code`. Returns the result of vectorcall.

    `boxing`: one of ``boxing.BOXES_*``. `array_count` and `export_count`: of the call.
    """
    context = structs.context_at(context_address)
    overload = structs.overload_at(overload_address)
    runtime = structs.runtime_at(context.runtime)
    if boxing == BOXES_ARRAYS and code == 0:
        value = call_word(runtime.box_cached_result, (context_address, overload_address, frame_address, args))
    else:
        value = box_or_raise(context, overload, code, result, excinfo, boxing != BOXES_NONE)
    context.calls += 1
    if is_anything_kept(structs.frame_at(frame_address), array_count):
        note_leaks(structs.frame_at(frame_address), overload, code)
        call_word(runtime.release_cached, (context.runtime, frame_address, args, overload_address))
    else:
        if export_count:
            release_exports(structs.frame_at(frame_address))
        put_back(runtime, frame_address)
    return value


@part(_WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
def differ(context_address, frame_address, callable_, args, nargsf, kwnames):
    """Make a call that differs from the cache entry by the general path. `frame_address`: 0 if no frame has been taken."""
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    if frame_address != 0:
        release_exports(structs.frame_at(frame_address))
        put_back(runtime, frame_address)
        if PyErr_Occurred() != 0:
            c.PyErr_Clear()
    return call_word(structs.context_at(context_address).vectorcall_any, (callable_, args, nargsf, kwnames))


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def fail(context_address, frame_address, callable_, position):
    """End the call: the producer of the argument at `position` has set an exception."""
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    release_exports(structs.frame_at(frame_address))
    put_back(runtime, frame_address)
    return call_word(runtime.refuse_argument, (context_address, callable_, position))

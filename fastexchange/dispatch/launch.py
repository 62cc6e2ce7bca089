"""The call of a kernel with the words in a frame, and its result."""

from ..ground import cpython as c
from ..ground.native import call_int, call_word, native, stack, store
from . import structs
from .boxing import box_or_raise
from .frame import is_anything_kept, note_leaks
from .lists import drop_unchanged, reflect_changes


@native
def launch(context_address, frame_address, overload_address, args, launcher):
    """Call a CPU kernel with the words in a frame, as ``vectorcall.run_by`` says. `launcher`: 0.

    Returns: STATUS_OK, and a new reference to the result, or 0 with an exception set.
    """
    context = structs.context_at(context_address)
    frame = structs.frame_at(frame_address)
    overload = structs.overload_at(overload_address)
    excinfo = stack(1)
    store(excinfo, 0)
    if context.release_gil != 0:
        thread = c.PyEval_SaveThread()
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
        c.PyEval_RestoreThread(thread)
    else:
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
    if overload.keeps != 0 and is_anything_kept(frame, frame.array_count):
        note_leaks(frame, overload, code)
    if frame.list_count != 0:
        drop_unchanged(frame)
    if code == 0 and overload.boxes_arrays != 0:
        box_result = structs.runtime_at(context.runtime).box_result
        result = call_word(box_result, (context_address, overload_address, frame_address, args))
    else:
        result = box_or_raise(context, overload, code, frame.result, excinfo, overload.box)
    if frame.list_count != 0:
        result = reflect_changes(context_address, overload_address, frame_address, args, result)
    return structs.STATUS_OK, result

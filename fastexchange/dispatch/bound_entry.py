"""Bound entries: the generated vectorcalls of bound launches.

A bound entry consists of the parts here and the kernel's call. The launch's frame has the arguments' words (``bound_launch``).
"""

import functools

from llvmlite import ir
from numba import types

from ..ground import cpython as c
from ..ground.cfunction import CodeUnit, code_cache, part
from ..ground.cpython import CALLABLE_CONTEXT
from ..ground.disk_cache import claiming
from ..ground.native import call_word, load
from ..ground.numba_code import can_be_linked, may_keep_arguments
from ..ground.numba_internals import global_compiler_lock, runtime_library, target_context_with_references
from . import structs
from .bound_launch import with_outputs
from .boxing import BOXES_ARRAYS, BOXES_NONE, box_or_raise
from .frame import is_anything_kept, note_leaks
from .python_calls import call_method
from .trampoline import call_kernel, clear_excinfo, word_types_of
from .watching import is_unmoved

_VOID_POINTER = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)


# ---- parts -----------------------------------------------------------------------------------------------------------


@part(types.intp(types.intp, types.intp, types.intp, types.intp))
def enter(callable_, nargsf, kwnames, is_alone):
    """Return the launch's ``fx_bound``; 0 if the call has arguments, another call is in progress, or memory has moved.

    `is_alone`: no other code can run during the kernel, so the state needs no check.
    """
    at = load(callable_ + CALLABLE_CONTEXT)
    bound = structs.bound_at(at)
    if nargsf & c.NARGS_MASK != 0 or kwnames != 0:
        return 0
    if (is_alone == 0 and bound.state != structs.BOUND_FREE) or not is_unmoved(bound.watched):
        return 0
    if is_alone == 0:
        bound.state = structs.BOUND_RUNNING
    return at


@part(types.intp(types.intp, types.intp, types.intp, types.intp))
def refuse(callable_, args, nargsf, kwnames):
    """Make a call that :func:`enter` has refused by the slow path's method."""
    bound = structs.bound_at(load(callable_ + CALLABLE_CONTEXT))
    return call_method(bound.slow_name, callable_, args, nargsf, kwnames)


@part(types.intp(types.intp))
def words_of(bound_address):
    """The address of the arguments' words."""
    return structs.bound_at(bound_address).words


@part(types.intp(types.intp))
def result_of(bound_address):
    """The address to which the kernel writes its result."""
    return structs.frame_at(structs.bound_at(bound_address).frame).result


@part(types.intp(types.intp))
def kernel_of(bound_address):
    """The address of the compiled kernel."""
    return structs.overload_at(structs.bound_at(bound_address).overload).kernel


@part(types.intp(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp))
def leave(bound_address, code, excinfo, boxing, may_keep, is_alone, has_outputs):
    """End a launch whose kernel has returned `code`. Returns a new reference, or 0 with an exception set."""
    bound = structs.bound_at(bound_address)
    context = structs.context_at(bound.context)
    runtime = structs.runtime_at(context.runtime)
    overload = structs.overload_at(bound.overload)
    frame = structs.frame_at(bound.frame)
    if boxing == BOXES_ARRAYS and code == 0:
        value = call_word(runtime.box_result, (bound.context, bound.overload, bound.frame, bound.args))
    else:
        value = box_or_raise(context, overload, code, frame.result, excinfo, boxing != BOXES_NONE)
    if may_keep != 0 and is_anything_kept(frame, frame.array_count):
        note_leaks(frame, overload, code)
        call_word(runtime.let_kept_escape, (context.runtime, bound.frame))
    if has_outputs != 0:
        value = with_outputs(bound, value)
    if is_alone == 0:
        bound.state = structs.BOUND_FREE
    context.calls += 1
    return value


# ---- the entry -------------------------------------------------------------------------------------------------------


@claiming
@global_compiler_lock
def bound_entry(given: tuple, taken: tuple, compiled, boxing: int, has_outputs: bool) -> int:
    """Return the address of the vectorcall of a launch that is bound to arguments of these types. Its frame has their words.

    If possible, the kernel is linked into it, so that only the words that it uses are loaded.
    """
    # The library by identity: symbols of a kernel from the disk cache may belong to another process's kernel.
    key = ("bound-entry", compiled.library, boxing, has_outputs, () if given == taken else (given, taken))
    build = functools.partial(_build_bound_entry, given, taken, compiled, boxing, has_outputs)
    return code_cache.get(key, build, __name__, persist=False)[0]


def _build_bound_entry(given, taken, compiled, boxing, has_outputs):
    context = target_context_with_references()
    word_types = word_types_of(given)
    unit = CodeUnit(context, "bound_entry", ir.FunctionType(_WORD, [_WORD] * 4))
    builder = unit.builder
    callable_, args, nargsf, kwnames = unit.function.args
    unused_result, excinfo = unit.stack_slot(_WORD), clear_excinfo(unit, unit.stack_slot(_WORD))
    is_linked = can_be_linked(compiled.library)
    may_keep = not is_linked or may_keep_arguments(compiled.library)
    # If so, no Python code runs between enter and leave: not in the kernel, and no result is boxed, no array escapes.
    is_alone = _WORD(int(is_linked and not may_keep and boxing == BOXES_NONE))
    # 1. Enter, or leave the call to Python.
    bound = enter.call(unit, [callable_, nargsf, kwnames, is_alone])
    with builder.if_then(builder.icmp_signed("==", bound, _WORD(0)), likely=False):
        builder.ret(refuse.call(unit, [callable_, args, nargsf, kwnames]))
    # 2. Call the kernel.
    words = builder.inttoptr(words_of.call(unit, [bound]), _WORD.as_pointer())
    if is_linked:
        unit.linked.append(compiled.library)
        function_type = context.call_conv.get_function_type(compiled.signature.return_type, compiled.signature.args)
        kernel = ir.Function(unit.module, function_type, compiled.fndesc.llvm_func_name)
    else:
        kernel = builder.inttoptr(kernel_of.call(unit, [bound]), _VOID_POINTER)
    result = builder.inttoptr(result_of.call(unit, [bound]), _VOID_POINTER)
    pointers = [result if boxing else builder.bitcast(unused_result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    code = builder.sext(call_kernel(context, unit, kernel, pointers, words, word_types, given, taken), _WORD)
    # 3. Leave.
    ending = [bound, code, builder.ptrtoint(excinfo, _WORD), _WORD(boxing), _WORD(int(may_keep)), is_alone]
    builder.ret(leave.call(unit, [*ending, _WORD(int(has_outputs))]))
    unit.linked.append(runtime_library())  # a cast may call it, and parts from a wheel do not bring it
    return unit.finish()

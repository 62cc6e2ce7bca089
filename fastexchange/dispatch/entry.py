"""The machine code between flat words and a compiled kernel: trampolines, boxes and the raising of errors.

A *trampoline* loads a kernel's arguments from 8-byte words, one per leaf of Numba's argument list, and calls the kernel
through its address. It knows types only as LLVM sees them, so one trampoline serves every kernel with the same list.
A *box* makes a Python object of what a kernel returned; one per Numba return type. Both are cached on disk.

The calling convention is Numba's own (``numba.core.callconv.CPUCallConv``): its function type, its argument order, its
return codes and its error values are taken from it, not restated here.
"""

import enum
import functools
import platform

from llvmlite import ir
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.pythonapi import EnvironmentManager
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.np.numpy_support import as_dtype

from ..compiled import CodeUnit, can_be_linked, code_cache, may_keep_arguments
from ..dtypes import dtype_field
from ..native import offset_of
from . import launch, layout, plan, results
from .frame import ARRAY_BYTES
from .layout import RESULT_BYTES

_VOID_POINTER = ir.IntType(8).as_pointer()
_INT32, _WORD = ir.IntType(32), ir.IntType(64)


class UnsupportedEntry(Exception):
    """A signature that only Numba's own dispatcher can call: an argument wider than a word, a result it cannot box."""


def _context():
    """A target context that can box: one taken from a cache-loaded kernel would have reference counting disabled."""
    target = cpu_target.target_context
    target.refresh()
    rtsys.initialize(target)
    return target.subtarget(enable_nrt=True)


def _as_word_sized(llvm_type):
    """The type as a trampoline loads it: all pointers alike, so that more signatures share one trampoline."""
    if isinstance(llvm_type, ir.PointerType):
        return _VOID_POINTER
    if isinstance(llvm_type, (ir.FloatType, ir.DoubleType, ir.HalfType)):
        return llvm_type
    if isinstance(llvm_type, ir.IntType) and llvm_type.width <= 64:
        return llvm_type
    raise UnsupportedEntry(f"an argument of LLVM type {llvm_type} is wider than a word")


@global_compiler_lock
def trampoline(given: tuple, taken: tuple) -> int:
    """The address of ``int (*)(kernel, result, excinfo, words)`` for a kernel with argument types `taken`.

    `given` are the Numba types of the words. Where they differ (an explicit signature that takes float64 and is given
    an int), the value is cast as Numba's dispatcher casts it. The result is Numba's return code.
    """
    context = _context()
    leaves = [_as_word_sized(t) for t in context.call_conv._get_arg_packer(given).argument_types]
    if given == taken:
        key: tuple = ("trampoline", tuple(str(leaf) for leaf in leaves))
    else:
        key = ("casting-trampoline", repr(given), repr(taken))
    return code_cache.get(key, lambda: _build_trampoline(context, leaves, given, taken))[0]


def _build_trampoline(context, leaves, given, taken):
    unit = CodeUnit(context, "trampoline", ir.FunctionType(_INT32, [_VOID_POINTER] * 4))
    kernel, result, excinfo, words = unit.function.args
    builder = unit.builder
    words = builder.bitcast(words, _WORD.as_pointer())
    loaded = _load_leaves(builder, words, leaves)
    builder.ret(_call_kernel(context, unit, kernel, [result, excinfo], loaded, given, taken))
    unit.linked.append(rtsys.library)
    return unit.finish()


def _call_kernel(context, unit, kernel, pointers, loaded, given, taken):
    """Emit the call of the kernel with leaves as loaded from words, cast where `given` and `taken` differ. Returns its code."""
    builder = unit.builder
    if given != taken:
        packer = context.call_conv._get_arg_packer(given)
        loaded = [
            builder.bitcast(value, wanted) if isinstance(wanted, ir.PointerType) else value
            for value, wanted in zip(loaded, packer.argument_types, strict=True)
        ]
        values = packer.from_arguments(builder, loaded)
        values = [
            context.cast(builder, value, source, target) if source != target else value
            for value, source, target in zip(values, given, taken, strict=True)
        ]
        loaded = list(context.call_conv._get_arg_packer(taken).as_arguments(builder, values))
    signature = ir.FunctionType(_INT32, [_VOID_POINTER, _VOID_POINTER, *(value.type for value in loaded)])
    return builder.call(builder.bitcast(kernel, signature.as_pointer()), [*pointers, *loaded])


def _load_leaves(builder, words, leaves):
    """Load a leaf of each LLVM type from its word."""
    loaded = []
    for index, leaf in enumerate(leaves):
        word = builder.gep(words, [ir.Constant(_INT32, index)])
        loaded.append(builder.load(builder.bitcast(word, leaf.as_pointer())))
    return loaded


MAX_INLINED_VIEWS = 6
"""Beyond so many, one function reads all views of a rank: a copy for each would no longer fit the instruction cache."""

READER_CONVENTION = "preserve_nonecc" if platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64") else "fastcc"
"""LLVM's calling convention of that function: saving registers that its caller does not use would cost time with each view."""

@global_compiler_lock
def fast_entry(given: tuple, taken: tuple, kinds: tuple[int, ...], guards: tuple, boxing: int) -> int:
    """The address of a vectorcall function with two more arguments, the ``fx_context`` and the ``fx_overload`` of a plan.

    It makes the calls that follow the plan, all in one function, and leaves others to ``shim.vectorcall_any``. `kinds`: of
    each argument that is given, the kind of its entry; all have parts in ``plan.PARTS``. `guards`: of each, the offsets
    ``plan.GUARD_OFFSETS`` of its type's guard, or (). `boxing`: one of ``plan.BOXES_*``.
    """
    context = _context()
    leaves = [_as_word_sized(t) for t in context.call_conv._get_arg_packer(given).argument_types]
    ranks = tuple(getattr(t, "ndim", 0) for t in given[: len(kinds)])
    casts = () if given == taken else (repr(given), repr(taken))
    key = ("fast-entry", tuple(str(leaf) for leaf in leaves), kinds, guards, ranks, boxing, casts)
    build = functools.partial(_build_fast_entry, context, leaves, given, taken, kinds, guards, ranks, boxing)
    return code_cache.get(key, build)[0]


def _build_fast_entry(context, leaves, given, taken, kinds, guards, ranks, boxing):
    unit = CodeUnit(context, "fast_entry", ir.FunctionType(_WORD, [_WORD] * 6))
    callable_, args, nargsf, kwnames, own, overload = unit.function.args
    builder = unit.builder
    words, own_result, excinfo = (unit.stack_slot(ir.ArrayType(_WORD, count)) for count in (len(leaves) + 1, 1, 1))
    first = builder.bitcast(words, _WORD.as_pointer())
    frame = plan.enter.call(unit, [own, nargsf, kwnames, _WORD(len(kinds))])
    differs = unit.function.append_basic_block("differs")
    entered = unit.function.append_basic_block("entered")
    builder.cbranch(builder.icmp_signed("!=", frame, _WORD(0)), entered, differs)
    builder.position_at_end(entered)
    arrays, records = plan.arrays_of.call(unit, [frame]), plan.plan_of.call(unit, [overload])
    used_words = used_arrays = 0
    for position, (numba_type, kind, guard, rank) in enumerate(zip(given, kinds, guards, ranks, strict=False)):
        ob = builder.load(builder.inttoptr(builder.add(args, _WORD(8 * position)), _WORD.as_pointer()))
        record = builder.add(records, _WORD(layout.PLAN_SIZE * position))
        array = builder.add(arrays, _WORD(ARRAY_BYTES * used_arrays))
        word = builder.gep(first, [_INT32(used_words)])
        values = [ob, record, array, word]
        if kind == layout.KIND_EXCHANGE and kinds.count(kind) > MAX_INLINED_VIEWS:
            outcome = builder.call(_view_reader(unit, rank, guard), values, cconv=READER_CONVENTION)
        else:
            outcome = _read(unit, kind, values, rank, guard)
        agrees = unit.function.append_basic_block("agrees")
        if kind == layout.KIND_EXCHANGE:
            with builder.if_then(builder.icmp_signed("<", outcome, _WORD(0)), likely=False):
                builder.ret(plan.fail.call(unit, [own, frame, callable_, _WORD(position)]))
        builder.cbranch(builder.icmp_signed(">", outcome, _WORD(0)), agrees, differs)
        builder.position_at_end(agrees)
        used_words += len(context.call_conv._get_arg_packer((numba_type,)).argument_types)
        used_arrays += kind in (layout.KIND_NDARRAY, layout.KIND_EXCHANGE)
    if any(guards):
        unset = unit.function.append_basic_block("unset")
        builder.cbranch(builder.icmp_signed("!=", plan.was_error_set.call(unit, []), _WORD(0)), differs, unset)
        builder.position_at_end(unset)
    loaded = _load_leaves(builder, first, leaves)
    kernel = builder.inttoptr(plan.kernel_of.call(unit, [overload]), _VOID_POINTER)
    result = plan.result_of.call(unit, [frame]) if boxing else builder.ptrtoint(own_result, _WORD)
    pointers = [builder.inttoptr(result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    code = builder.sext(_call_kernel(context, unit, kernel, pointers, loaded, given, taken), _WORD)
    ending = [own, overload, frame, args, code, result, builder.ptrtoint(excinfo, _WORD)]
    builder.ret(plan.leave.call(unit, [*ending, _WORD(boxing), _WORD(used_arrays)]))
    builder.position_at_end(differs)
    builder.ret(plan.differ.call(unit, [own, frame, callable_, args, nargsf, kwnames]))
    unit.linked.append(rtsys.library)
    return unit.finish()


@global_compiler_lock
def bound_entry(given: tuple, taken: tuple, compiled, boxing: int) -> int:
    """The address of the vectorcall of a launch that is bound to arguments of these types, which are in its frame's words.

    The kernel's own code goes into it, where it is at hand, so that only those words are loaded that it uses.
    """
    name = compiled.fndesc.llvm_func_name
    key = ("bound-entry", name, boxing, () if given == taken else (repr(given), repr(taken)))
    return code_cache.get(key, lambda: _build_bound_entry(given, taken, compiled, boxing), persist=False)[0]


def _build_bound_entry(given, taken, compiled, boxing):
    context = _context()
    leaves = [_as_word_sized(t) for t in context.call_conv._get_arg_packer(given).argument_types]
    unit = CodeUnit(context, "bound_entry", ir.FunctionType(_WORD, [_WORD] * 4))
    builder = unit.builder
    callable_, args, nargsf, kwnames = unit.function.args
    own_result, excinfo = (unit.stack_slot(_WORD) for _ in range(2))
    bound = launch.enter.call(unit, [callable_, nargsf, kwnames])
    with builder.if_then(builder.icmp_signed("==", bound, _WORD(0)), likely=False):
        builder.ret(launch.refuse.call(unit, [callable_, args, nargsf, kwnames]))
    words = builder.inttoptr(launch.words_of.call(unit, [bound]), _WORD.as_pointer())
    loaded = _load_leaves(builder, words, leaves)
    if can_be_linked(compiled.library):
        unit.linked.append(compiled.library)
        function_type = context.call_conv.get_function_type(compiled.signature.return_type, compiled.signature.args)
        kernel = ir.Function(unit.module, function_type, compiled.fndesc.llvm_func_name)
        may_keep = may_keep_arguments(compiled.library)
    else:
        kernel, may_keep = builder.inttoptr(launch.kernel_of.call(unit, [bound]), _VOID_POINTER), True
    result = builder.inttoptr(launch.result_of.call(unit, [bound]), _VOID_POINTER)
    pointers = [result if boxing else builder.bitcast(own_result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    code = builder.sext(_call_kernel(context, unit, kernel, pointers, loaded, given, taken), _WORD)
    ending = [bound, code, builder.ptrtoint(excinfo, _WORD), _WORD(boxing), _WORD(int(may_keep))]
    builder.ret(launch.leave.call(unit, ending))
    unit.linked.append(rtsys.library)
    return unit.finish()


def _read(unit, kind: int, values: list, rank: int, guard: tuple):
    """Emit the part that reads an argument of this kind. Returns its result."""
    if guard:
        return plan.read_guarded_view.call(unit, [*values, _WORD(rank), *map(_WORD, guard)])
    return plan.PARTS[kind].call(unit, [*values, _WORD(rank)])


def _view_reader(unit, rank: int, guard: tuple):
    """The part for views of this rank as a function of its own."""
    name = f"{unit.symbol}.view{rank}.{'guarded' if guard else 'plain'}"  # there is one guard in a process
    if name not in unit.module.globals:
        function = ir.Function(unit.module, ir.FunctionType(_WORD, [_WORD, _WORD, _WORD, _WORD.as_pointer()]), name)
        function.linkage = "internal"
        function.calling_convention = READER_CONVENTION
        for attribute in ("noinline", "noimplicitfloat"):
            function.attributes.add(attribute)
        outer, unit.builder = unit.builder, ir.IRBuilder(function.append_basic_block("entry"))
        unit.builder.ret(_read(unit, layout.KIND_EXCHANGE, list(function.args), rank, guard))
        unit.builder = outer
    return unit.module.globals[name]


class _Constants(EnvironmentManager):
    """The Python objects that boxing code refers to: a plain list, and at run time an array of pointers to them."""

    def __init__(self, pyapi, pointers):
        self.pyapi = pyapi
        self.pointers = pointers
        self.objects: list[object] = []
        self.enums: list[object] = []

    def add_const(self, const):
        for index, known in enumerate(self.objects):
            if known is const:
                return index
        self.objects.append(const)
        return len(self.objects) - 1

    def read_const(self, index):
        builder = self.pyapi.builder
        return builder.load(builder.gep(self.pointers, [ir.Constant(_INT32, index)]))


@global_compiler_lock
def box(return_type) -> tuple[int, tuple]:
    """The address of ``PyObject *(*)(result, constants, frame)`` for a Numba return type, and the constants, Python objects.

    The native value is consumed; the object is a new reference, or NULL with an exception set. (0, ()) for ``none``. Only for
    a type that holds arrays (:func:`holds_array`) the ``fx_frame`` of the call is needed.
    """
    if return_type == types.none:
        return 0, ()
    if _holds_buffer(return_type):  # Numba's boxer sets TypeError and drops nothing of what it was given
        raise UnsupportedEntry(f"a result of type {return_type}")
    context = _context()
    size = context.get_abi_sizeof(context.call_conv.get_return_type(return_type).pointee)
    if size > RESULT_BYTES:
        raise UnsupportedEntry(f"a result of {size} bytes")
    key = ("box", return_type)
    return code_cache.get(key, lambda: _build_box(context, return_type), persist=_is_plain(return_type))


def _holds_buffer(numba_type) -> bool:
    """Whether values of a type are, or hold, buffers that are no arrays, such as a bytearray's: they have no way to Python."""
    if isinstance(numba_type, (types.Tuple, types.UniTuple, types.NamedTuple, types.NamedUniTuple)):
        return any(map(_holds_buffer, numba_type.types))
    if isinstance(numba_type, types.Optional):
        return _holds_buffer(numba_type.type)
    return isinstance(numba_type, types.Buffer) and not isinstance(numba_type, types.Array)


def holds_array(numba_type) -> bool:
    """Whether values of a type are arrays, or hold some."""
    if isinstance(numba_type, types.Array):
        return True
    if isinstance(numba_type, (types.Tuple, types.UniTuple, types.NamedTuple, types.NamedUniTuple)):
        return any(map(holds_array, numba_type.types))
    if isinstance(numba_type, types.Optional):
        return holds_array(numba_type.type)
    return isinstance(numba_type, (types.List, types.Set)) and holds_array(numba_type.dtype)


def _is_plain(numba_type) -> bool:
    """Whether the type's name says all about it, in any process."""
    if isinstance(numba_type, types.Optional):
        return _is_plain(numba_type.type)
    if isinstance(numba_type, types.Array):
        return _is_plain(numba_type.dtype)
    if isinstance(numba_type, (types.Tuple, types.UniTuple)):
        return all(map(_is_plain, numba_type.types))
    plain = (types.NoneType, types.Number, types.Boolean, types.NPDatetime, types.NPTimedelta, types.UnicodeType)
    return isinstance(numba_type, plain)


def _new_reference(api, manager: _Constants, thing):
    """Emit a new reference to a constant, which is what boxing code expects of an object that it unserializes."""
    constant = manager.read_const(manager.add_const(thing))
    api.incref(constant)
    if isinstance(thing, enum.EnumMeta):
        manager.enums.append(constant)
    return constant


def _box_array(unit, api, manager: _Constants, frame, adapt, array_type, array, dtype):
    """Emit what makes an object of an array in a result: ``results.box_array``, or Numba's own `adapt`, which makes ndarrays."""
    builder = unit.builder
    slot = unit.stack_slot(array.type)
    builder.store(array, slot)
    field = dtype_field(as_dtype(array_type.dtype)) or 0
    shape_and_type = [_WORD(array_type.ndim), _WORD(field if field < results.PARAMETRIC else 0), _WORD(int(array_type.mutable))]
    made = _call_result_function(unit, "box_array", [frame, builder.ptrtoint(slot, _WORD), *shape_and_type])
    object_slot = unit.stack_slot(_WORD)
    builder.store(made, object_slot)
    with builder.if_then(builder.icmp_signed("==", made, _WORD(results.BY_NUMBA))):
        adapted = adapt(array_type, array, dtype)
        api.decref(manager.read_const(manager.add_const(array_type.box_type)))  # Numba never gives this one back
        finished = _call_result_function(unit, "finish_array", [frame, builder.ptrtoint(adapted, _WORD)])
        builder.store(finished, object_slot)
    return builder.inttoptr(builder.load(object_slot), api.pyobj)


def _call_result_function(unit, name: str, values: list):
    """Emit a call of a function of ``dispatch.results``, by its field in the ``fx_runtime`` of the frame's call."""
    builder = unit.builder

    def load(address, struct: str, field: str):
        return builder.load(builder.inttoptr(builder.add(address, _WORD(offset_of(struct, field))), _WORD.as_pointer()))

    address = load(load(load(values[0], "fx_frame", "context"), "fx_context", "runtime"), "fx_runtime", name)
    function_type = ir.FunctionType(_WORD, [_WORD] * len(values))
    return builder.call(builder.inttoptr(address, function_type.as_pointer()), values)


def _build_box(context, return_type):
    unit = CodeUnit(context, "box", ir.FunctionType(_VOID_POINTER, [_VOID_POINTER, _VOID_POINTER.as_pointer(), _WORD]))
    result, constants, frame = unit.function.args
    builder = unit.builder
    api = context.get_python_api(builder)
    manager = _Constants(api, constants)
    # Numba would call Python to find a result's type again, each time: a pending signal's handler could run there, raise, and
    # make the boxer drop what it was given without releasing it.
    api.serialize_object = lambda thing: thing
    api.unserialize = lambda thing: _new_reference(api, manager, thing)
    call = api.call_function_objargs

    def call_and_release(callee, arguments):  # of boxing code that is for members of enums: it gives neither back
        made = call(callee, arguments)
        for given in (callee, *arguments) if callee in manager.enums else ():
            api.decref(given)
        return made

    api.call_function_objargs = call_and_release
    api.nrt_adapt_ndarray_to_python = functools.partial(_box_array, unit, api, manager, frame, api.nrt_adapt_ndarray_to_python)
    pointer = builder.bitcast(result, context.call_conv.get_return_type(return_type))
    with context.push_code_library(unit.library):
        value = context.get_returned_value(builder, return_type, builder.load(pointer))
        boxed_type = return_type.type if isinstance(return_type, types.Optional) else return_type
        try:
            builder.ret(api.from_native_return(boxed_type, value, manager))
        except Exception as error:  # Numba's boxers raise anything for what they cannot box without a kernel around
            raise UnsupportedEntry(f"a result of type {return_type}: {error}") from error
    unit.linked.append(rtsys.library)
    return unit.finish(tuple(manager.objects))


@global_compiler_lock
def raise_error() -> int:
    """The address of ``void (*)(code, excinfo)``: sets the Python exception that a kernel's return code stands for."""
    context = _context()
    key = ("raise",)
    return code_cache.get(key, lambda: _build_raise_error(context))[0]


def _build_raise_error(context):
    from numba.core.callconv import excinfo_ptr_t

    unit = CodeUnit(context, "raise", ir.FunctionType(ir.VoidType(), [_WORD, _VOID_POINTER]))
    code, excinfo = unit.function.args
    builder = unit.builder
    api = context.get_python_api(builder)
    convention = context.call_conv
    status = convention._get_return_status(
        builder, builder.trunc(code, _INT32), builder.bitcast(excinfo, excinfo_ptr_t)
    )
    with context.push_code_library(unit.library):
        convention.raise_error(builder, api, status)
    builder.ret_void()
    unit.linked.append(rtsys.library)
    return unit.finish()



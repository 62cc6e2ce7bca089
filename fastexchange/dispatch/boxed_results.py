"""The arrays of a kernel's result as tensors of the caller's framework.

Boxing code (``boxing.box``) calls :func:`box_array` for each array of a result:

1. An array that equals an argument becomes that argument's object.
2. Any other array becomes the *target*: the type of the call's first tensor, or the type that the kernel's ``returns`` names.
   PyTorch gets a managed tensor that owns Numba's memory block.
3. Otherwise Numba's own boxing code makes an ndarray. :func:`finish_array` returns it for NumPy, and passes it to Python
   (``results.as_target``) for other frameworks and unusual cases.

Ownership: a managed tensor made here holds a reference to the array's ``NRT_MemInfo``; its deleter drops the reference. If a
result shows an argument's memory, the argument's block gets an owner before other code may run (``frame.give_owner``).
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    MANAGED_BYTES,
    MAX_NDIM,
    delete_managed,
    describe,
    dl_tensor_at,
    element_field,
    in_elements,
    is_plain,
    managed_at,
    new_managed,
)  # fmt: skip
from ..ground.dtypes import FIRST_PARAMETRIC, FIRST_STORABLE
from ..ground.native import (
    as_words,
    atomic_add,
    call_int,
    call_word,
    global_address,
    load,
    native,
    smaller,
    stack,
    store,
)
from ..producers.ndarray import ndarray_at
from . import structs
from .frame import (
    ARRAY_BYTES,
    MEMINFO_REFCOUNT,
    NRT_MemInfo_release,
    export_of_array,
    give_owner,
    let_owned_escape,
)  # fmt: skip
from .pack import dtype_entry, pack_ndarray, pack_tensor
from .type_table import find

ARRAY_WORDS = structs.ARRAY_HEAD_WORDS + 2 * MAX_NDIM
BY_NUMBA = 1  # box_array(): let Numba's own boxing code make an ndarray
PLAIN_CODES = sum(1 << code for code in (INT, UINT, FLOAT, COMPLEX, BOOL))  # DLPack codes for which Numba has types
NEW = -1  # in place of a dtype field: the array is an output, which nobody else has
ONE, SEVERAL = 1, 2  # of fx_overload.boxes_arrays: the result is an array, or contains arrays


@native
def index_of_argument(frame, meminfo):
    """The index of the call's array argument with this memory block; -1: none."""
    for i in range(frame.array_count):
        if structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo == meminfo:
            return i
    return -1


@native
def is_stored_as(field, stored):
    """Whether a kernel that stores sees elements of the dtype `field` as those of the dtype `stored`."""
    if field >= FIRST_STORABLE:  # the size in bytes is in bits 16 to 22
        return stored == UINT | (field >> 16 & 0x7F) << 11
    code, bits = field & 0xFF, field >> 8
    is_half_complex = code == COMPLEX and bits < 64
    is_half = code == FLOAT and bits < 32
    is_plain = code <= 6 and PLAIN_CODES >> code & 1 != 0 and not is_half_complex and not is_half
    return field < FIRST_PARAMETRIC and not is_plain and stored == UINT | bits << 8


@native
def read_tensor(tensor, ndim, words):
    """Write an array's words from word 2 on for a DLTensor of this rank. Returns its dtype's field; 0: it has another rank."""
    dl_tensor = dl_tensor_at(tensor)
    if not is_plain(dl_tensor) or dl_tensor.ndim != ndim:
        return 0
    field = element_field(dl_tensor)
    _, status = pack_tensor(dl_tensor, ndim, field, as_words(words))
    return field if status == structs.STATUS_OK else 0


@native
def read_argument(runtime, frame, i, ndim, words):
    """Read the i-th array argument again, as :func:`read_tensor`. Returns its dtype's field; 0: it cannot be compared.

    GIL: held; an export may run Python code.
    """
    array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
    ob = array.origin & -4
    origin = array.origin & 3
    if origin == structs.ORIGIN_NDARRAY:
        key, itemsize = dtype_entry(runtime, ndarray_at(ob).descr)
        if key == 0 or types.intp(ndarray_at(ob).nd) != ndim:
            return 0
        pack_ndarray(ob, ndim, itemsize, as_words(words))
        return key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
    if origin == structs.ORIGIN_EXPORT:
        managed = structs.export_at(export_of_array(frame, i)).managed
        if managed != 0:
            return read_tensor(managed + DL_TENSOR, ndim, words)
    entry = find(runtime, Py_TYPE(ob))
    if entry == 0 or origin == structs.ORIGIN_STRING:
        return 0
    borrow = structs.entry_at(entry).borrow
    tensor = stack(DL_TENSOR_WORDS)
    out = stack(1)
    store(out, 0)
    failed = call_int(borrow, (ob, tensor)) if borrow != 0 else call_int(structs.entry_at(entry).managed, (ob, out))
    field = 0
    if failed == 0 and PyErr_Occurred() == 0:
        if borrow != 0:
            field = read_tensor(tensor, ndim, words)
        elif load(out) != 0 and managed_at(load(out)).version.major == 1:
            field = read_tensor(load(out) + DL_TENSOR, ndim, words)
    if failed == 0 and load(out) != 0:
        delete_managed(load(out))
    c.PyErr_Clear()
    return field


@native
def is_same(words, at, ndim, is_exact):
    """Whether two arrays of one rank show the same elements: all words from word 2 on are equal.

    Without `is_exact` strides that lead to no element are not compared: PyTorch 2.8 exports others than a tensor has where an
    extent is 0 or 1. An ndarray of other strides is another one, as for Numba.
    """
    extents = structs.ARRAY_HEAD_WORDS
    difference = 0
    for i in range(2, extents + ndim):
        difference |= load(words + 8 * i) ^ load(at + 8 * i)
    for i in range(extents, extents + ndim):
        if is_exact or (load(at + 8 * i) > 1 and load(at + 16) != 0):
            difference |= load(words + 8 * (i + ndim)) ^ load(at + 8 * (i + ndim))
    return difference == 0


@native
def target_of(frame):
    """The type that the result's arrays become, 0 for NumPy's, and the argument that has it, or again the type."""
    context = structs.context_at(frame.context)
    if context.returns_type != 0:
        return context.returns_type, context.returns_type
    if context.returns_position >= 0:
        like = load(frame.args + 8 * context.returns_position)
        return Py_TYPE(like), like
    for i in range(frame.array_count):
        origin = structs.array_at(frame.arrays + ARRAY_BYTES * i).origin
        if origin & 3 != structs.ORIGIN_STRING:
            return Py_TYPE(origin & -4), origin & -4
    return 0, 0


@native
def note_failure(frame):
    """Move the first pending exception to the frame until the whole result is boxed. Returns a new reference to None."""
    if frame.error[0] == 0:
        error = stack(3)
        c.save_error(error)
        for i in range(3):
            frame.error[i] = load(error + 8 * i)
    else:
        c.PyErr_Clear()
    return c.new_none()


@cfunction(types.void, types.intp)
def delete_result(managed):
    """Deleter of a managed tensor that owns a reference to the memory block in its ``manager_ctx``.

    GIL: not needed; any thread may call.
    """
    is_deleted = load(managed + MANAGED_BYTES)  # the address of a word, or 0: `make_tensor`
    if is_deleted != 0:
        store(is_deleted, 1)
    NRT_MemInfo_release(managed_at(managed).manager_ctx)
    c.PyMem_RawFree(managed)


@native
def make_tensor(runtime, entry, at, ndim, field):
    """Make a tensor of the array at `at` by its type's ``managed_tensor_to_py_object_no_sync``.

    Returns: a new reference; 0, without an exception, if Python has to make the tensor.
    Owns: the tensor holds a reference to the array's memory block.
    """
    itemsize = load(at + 24)
    block = new_managed(ndim, 8)
    if block == 0:
        return 0
    shape = block + MANAGED_BYTES + 8
    strides = shape + 8 * ndim
    odd = False
    for i in range(ndim):
        stride = load(at + 8 * (structs.ARRAY_HEAD_WORDS + ndim + i))
        elements = in_elements(stride, itemsize)
        store(shape + 8 * i, load(at + 8 * (structs.ARRAY_HEAD_WORDS + i)))
        store(strides + 8 * i, elements)
        odd |= (elements < 0 or elements * itemsize != stride) and load(shape + 8 * i) > 1
    if odd:
        c.PyMem_RawFree(block)
        return 0
    managed = managed_at(block)
    managed.manager_ctx = load(at)
    managed.deleter = runtime.delete_result
    describe(dl_tensor_at(block + DL_TENSOR), load(at + 32), ndim, field, shape, strides)
    made = stack(1)
    is_deleted = stack(1)
    store(made, 0)
    store(is_deleted, 0)
    store(block + MANAGED_BYTES, is_deleted)
    atomic_add(load(at) + MEMINFO_REFCOUNT, 1)
    failed = call_int(structs.entry_at(entry).to_object, (block, made)) != 0
    if load(is_deleted) == 0:  # later calls of the deleter must not write to this function's stack
        store(block + MANAGED_BYTES, 0)
        if load(made) == 0:
            NRT_MemInfo_release(load(at))
            c.PyMem_RawFree(block)
    if not failed and load(made) != 0 and PyErr_Occurred() == 0:
        return load(made)
    c.PyErr_Clear()
    if load(made) != 0:
        c.Py_DecRef(load(made))
    return 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def box_array(frame_address, at, ndim, field, is_mutable):
    """Box an array in a result; `at`: Numba's array struct.

    `field`: of its dtype; 0 for a dtype whose field depends on the process.

    Returns: a new reference, or BY_NUMBA. Owns: the caller keeps the array's reference to its block.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    meminfo = load(at)
    i = index_of_argument(frame, meminfo)
    frame.elements = 0
    if i >= 0 and field != 0:
        words = stack(ARRAY_WORDS)
        given = read_argument(runtime, frame, i, ndim, words)
        if given != 0 and (field == given or (context.stores and is_stored_as(given, field))):
            origin = structs.array_at(frame.arrays + ARRAY_BYTES * i).origin
            is_taken_so = is_mutable != 0 or frame.readonly_arrays >> smaller(i, 62) & 1 != 0
            # A readonly view of a writable ndarray has to be a new ndarray; other frameworks have no readonly tensors.
            is_ndarray = origin & 3 == structs.ORIGIN_NDARRAY
            if (is_taken_so or not is_ndarray) and is_same(words, at, ndim, is_ndarray):
                c.incref(origin & -4)
                return origin & -4
            if field != given:  # a view of an argument has elements of the argument's type
                frame.elements = given
            field = given
    if i >= 0:
        give_owner(runtime, frame, i)  # code from here on may free the argument
    target, _ = target_of(frame)
    entry = find(runtime, target) if target != 0 else 0
    if entry == 0 or structs.entry_at(entry).to_object == 0:
        return BY_NUMBA
    kind = structs.kind_at(structs.entry_at(entry).kind)
    if kind.makes_tensors == 0 or kind.form == structs.FORM_ARRAY:  # Numba's own code makes ndarrays
        return BY_NUMBA
    if field == 0 or field >= FIRST_PARAMETRIC or is_mutable == 0 or meminfo == 0 or frame.error[0] != 0:
        return BY_NUMBA
    made = make_tensor(runtime, entry, at, ndim, field)
    return made if made != 0 else BY_NUMBA


@native
def as_target(context, runtime, array, like, elements):
    """Convert an ndarray to a tensor by ``calls.results.as_target``. Consumes the array.

    `like`: a tensor, or a type, of its framework; 0: NumPy's. `elements`: the elements' dtype field, if the kernel had their
    bits; NEW for an output; else 0. Returns a new reference; 0 with an exception set.
    """
    made = 0
    field = c.PyLong_FromSsize_t(elements)
    if field != 0:
        arguments = stack(5)
        store(arguments, runtime.results)
        store(arguments + 8, array)
        store(arguments + 16, like if like != 0 else global_address("_Py_NoneStruct"))
        store(arguments + 24, context.name)
        store(arguments + 32, field)
        made = c.PyObject_VectorcallMethod(runtime.as_target, arguments, 5, 0)
        c.Py_DecRef(field)
    c.Py_DecRef(array)
    return made


@cfunction(types.intp, types.intp, types.intp)
def finish_array(frame_address, array):
    """Convert `array`, the ndarray that Numba made of an array in a result, to the target. Consumes `array`.

    Returns: a new reference. After a failure (also for `array` 0 with an exception set) it is None, and the frame has the error.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    if array == 0:
        return note_failure(frame)
    if frame.error[0] != 0:
        return array
    target, like = target_of(frame)
    entry = find(runtime, target) if target != 0 else 0
    form = structs.kind_at(structs.entry_at(entry).kind).form if entry != 0 else 0
    if frame.elements == 0 and (target == 0 or form == structs.FORM_ARRAY):
        return array
    made = as_target(context, runtime, array, like, frame.elements)
    return made if made != 0 else note_failure(frame)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def box_result(context_address, overload_address, frame_address, args):
    """Box the frame's ``result``, which contains arrays. `args`: the call's arguments in parameter order.

    Returns: a new reference, or 0 with an exception set.
    Owns: the frame releases blocks that escape, but not in a call with lists: ``lists.reflect_changes`` needs them.
    """
    overload = structs.overload_at(overload_address)
    frame = structs.frame_at(frame_address)
    frame.args = args
    frame.error[0] = 0
    frame.readonly_arrays = overload.readonly_arrays
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    if overload.boxes_arrays == SEVERAL:  # boxing one array may free the memory that another shows
        for i in range(frame.array_count):
            if load(structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo + MEMINFO_REFCOUNT) != 1:
                give_owner(runtime, frame, i)
    made = call_word(overload.box, (frame.result, overload.box_constants, frame_address))
    if frame.list_count == 0:
        let_owned_escape(runtime, frame)
    if frame.error[0] == 0:
        return made
    if made != 0:
        c.Py_DecRef(made)
    else:
        c.PyErr_Clear()
    c.PyErr_Restore(frame.error[0], frame.error[1], frame.error[2])
    return 0


BOXING = box_result, box_array, finish_array, delete_result
"""The functions that the ``fx_runtime`` needs before a result with arrays is boxed."""

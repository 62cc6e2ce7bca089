"""Kernels for CUDA as functions of XLA: the handler that launches them on XLA's stream, without Python and the GIL.

It is as that for the CPU (``xla``), and finds the kernel, its key sequence and its values in the same attributes. A launch makes
no call that a capture forbids, so XLA may capture it in a command buffer. What needs other calls, loading a kernel and asking for
its best block, is done when JAX traces the call.

Source: ``xla/ffi/api/c_api.h``, API 0.1 to 0.3; CUDA Driver API 13, "Execution Control".
"""

from numba import types

from ..cuda import launch_structs
from ..cuda.computed import LAUNCHER_WORDS, configure
from ..cuda.converting import convert_words
from ..cuda.native_launch import (
    MAX_PARAMETERS,
    call_driver,
    device_of_context,
    launchable_of,
    point_at_parameters,
    size_of,
)
from ..dispatch import batches, structs
from ..dispatch.batches import BATCH_WORDS, batch_at, buffer_at
from ..dispatch.inline_cache import look_up
from ..dispatch.python_calls import refuse_launch
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT
from ..ground.native import call_int, call_word, cstring, global_address, load, native, sizeof, stack, store
from . import xla
from .xla import (
    FRAME_BYTES,
    LEARN_LAUNCH,
    MAX_WORDS,
    MAY_BE_CAPTURED,
    api_at,
    are_as_written,
    array_at,
    attributes_at,
    begin_python,
    end_python,
    failed,
    failed_with_exception,
    find_kernel,
    frame_at,
    scalar_at,
    stream_get_at,
    tells_metadata,
    xla_at,
)

STREAM_GET_WORDS = sizeof("XLA_FFI_Stream_Get_Args") // 8


@native
def ask_for_stream(frame, asked):
    """Ask XLA for the stream of a call: fill the ``XLA_FFI_Stream_Get_Args`` at `asked`. Returns 0, or an error of XLA's."""
    question = stream_get_at(asked)
    question.struct_size, question.extension_start, question.ctx, question.stream = 8 * STREAM_GET_WORDS, 0, frame.ctx, 0
    return call_word(api_at(frame.api).XLA_FFI_Stream_Get, (asked,))


@native
def find_launch(attributes):
    """The launcher that a call names, an object; the ``fx_overload`` of its kernel; the words of a call. 0: one is not known.

    The handler is for a kernel that has a launcher, ``cuda.launched_kernel``.
    """
    keys = array_at(attributes.keys)
    context = find_kernel(load(scalar_at(attributes.id).value))
    launcher = structs.context_at(context).device_kernel if context != 0 else 0
    if launcher == 0:
        return 0, 0
    kernel = launch_structs.launcher_at(load(launcher + CALLABLE_CONTEXT)).context
    at = look_up(structs.context_at(kernel), keys.data, types.intp(keys.size))
    return launcher, at if at != 0 and structs.overload_at(at).launchable != 0 else 0


@native
def are_on_device(batch):
    """Whether a launch can have all values: none is a number in the device's memory, and no result another's memory."""
    for i in range(batch.key_count):
        key, source = load(batch.keys + 8 * i), load(batch.sources + 8 * i)
        kind = source & 0xFF
        if kind != batches.NOWHERE and kind != batches.NUMBER and not structs.is_array(key):
            return False
        if kind == batches.CHANGED:  # XLA lets the result have the operand's memory
            operand = buffer_at(load(batch.operands + 8 * (source >> batches.INDEX_AT & batches.INDEX_MASK)))
            if operand.data != buffer_at(batches.buffer_of(batch, source)).data:
                return False
    return True


@native
def launch_item(cuda, launcher_address, overload, words, device, stream, code):
    """Launch a kernel with these words on a stream of the current context. Returns a STATUS_*. GIL: not needed.

    With STATUS_DRIVER the driver's code is stored at `code`.
    """
    launchable = launchable_of(overload)
    launcher = launch_structs.launcher_at(launcher_address)
    if launcher.program != 0:
        own = stack(LAUNCHER_WORDS)
        if not configure(launcher_address, launchable, structs.overload_at(overload), words, own):
            return structs.STATUS_CONFIGURATION
        launcher = launch_structs.launcher_at(own)
    if not convert_words(words, launchable):
        return structs.STATUS_RANGE
    loaded = launch_structs.loaded_at(launchable.loaded + launch_structs.LOADED_SIZE * device)
    is_loaded = loaded.function != 0 and launcher.shared <= loaded.shared_limit
    if not is_loaded or launchable.parameter_count > MAX_PARAMETERS:
        return structs.STATUS_UNBOUND
    status, blocks, threads = size_of(launcher, loaded, code)
    if status != structs.STATUS_OK or (blocks == 0 and launcher.tasks >= 0):
        return status
    pointers = stack(MAX_PARAMETERS)
    zero = stack(1)
    store(zero, 0)
    point_at_parameters(launchable, words, pointers, zero)
    result = call_driver(cuda, launcher, loaded.function, blocks, threads, stream, pointers, launchable.is_cooperative)
    store(code, result)
    return structs.STATUS_OK if result == 0 else structs.STATUS_DRIVER


@native
def launch_items(frame, batch, launcher, overload, words, stream, code):
    """Launch a kernel for each item of a batch. Returns a STATUS_*, STATUS_CHANGED if buffers are not as when it was traced."""
    first = buffer_at(load(batch.results))
    ranks = first.rank - load(batch.numbers)
    if ranks < 0 or not batches.are_as_described(batch, ranks) or not are_on_device(batch):
        return structs.STATUS_CHANGED
    launcher_address = load(launcher + CALLABLE_CONTEXT)
    context = structs.context_at(launch_structs.launcher_at(launcher_address).context)
    cuda = launch_structs.cuda_at(structs.runtime_at(context.runtime).cuda)
    current = stack(1)
    store(current, 0)
    store(code, call_int(cuda.get_current, (current,)))
    if load(code) != 0:
        return structs.STATUS_DRIVER
    device = device_of_context(cuda, load(current))
    if device < 0:
        return structs.STATUS_UNBOUND
    items = 1
    for d in range(ranks):
        items *= load(first.dims + 8 * d)
    for item in range(items):
        batches.write_words(batch, ranks, item, words)
        status = launch_item(cuda, launcher_address, overload, words, device, stream, code)
        if status != structs.STATUS_OK:
            return status
        context.calls += 1
    return structs.STATUS_OK


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fail_by_driver(frame_address, launcher, code):
    """The error for a launch that the driver has refused. `launcher`: the object. GIL: taken."""
    frame = frame_at(frame_address)
    if not begin_python():
        return failed(frame, cstring("the driver has refused a launch, and the program is ending"))
    state = c.PyGILState_Ensure()
    context = launch_structs.launcher_at(load(launcher + CALLABLE_CONTEXT)).context
    refuse_launch(structs.context_at(context), launcher, code)
    made = failed_with_exception(frame, global_address("_Py_NoneStruct"))
    c.PyGILState_Release(state)
    end_python()
    return made


@cfunction(types.intp, types.intp)
def launch_by_xla(frame_address):
    """``XLA_FFI_Error *(*XLA_FFI_Handler)(XLA_FFI_CallFrame *)`` on CUDA. GIL: not needed; any thread."""
    frame = frame_at(frame_address)
    if tells_metadata(frame, MAY_BE_CAPTURED):
        return 0
    if frame.struct_size < FRAME_BYTES or not are_as_written(frame.attrs) or frame.rets.size == 0:
        return failed(frame, cstring("fastexchange: XLA's call frame is not as expected"))
    attributes = attributes_at(frame.attrs.attrs)
    asked = stack(STREAM_GET_WORDS)
    error = ask_for_stream(frame, asked)
    if error != 0:
        return error
    stream = stream_get_at(asked).stream
    launcher, at = find_launch(attributes)
    batch = batch_at(stack(BATCH_WORDS))
    batch.operands, batch.results = frame.args.args, frame.rets.rets
    batch.key_count, batch.keys = types.intp(array_at(attributes.keys).size), array_at(attributes.keys).data
    batch.sources, batch.numbers = array_at(attributes.sources).data, array_at(attributes.numbers).data
    needed = batches.words_needed(batch.keys, batch.key_count)
    words, code, learnt = stack(MAX_WORDS), stack(1), stack(1)
    if needed > MAX_WORDS:
        words = c.PyMem_RawMalloc(8 * needed)
        if words == 0:
            return failed(frame, cstring("out of memory"))
    status = structs.STATUS_UNBOUND
    if at != 0:
        status = launch_items(frame, batch, launcher, at, words, stream, code)
    if status == structs.STATUS_UNBOUND:  # traced by another process, or for another device
        learn = xla_at(global_address("fastexchange_xla")).learn_kernel
        error = call_word(learn, (frame_address, frame.attrs.attrs, LEARN_LAUNCH, learnt))
        if error == 0:
            launcher, at = find_launch(attributes)
            status = launch_items(frame, batch, launcher, load(learnt), words, stream, code)
    if needed > MAX_WORDS:
        c.PyMem_RawFree(words)
    if error != 0 or status == structs.STATUS_OK:
        return error
    if status == structs.STATUS_DRIVER:
        return call_word(xla_at(global_address("fastexchange_xla")).fail_by_driver, (frame_address, launcher, load(code)))
    if status == structs.STATUS_CONFIGURATION:
        return failed(frame, cstring("a kernel was not launched: no device takes the sizes that launch= makes for its arrays"))
    if status == structs.STATUS_RANGE:
        return failed(frame, cstring("a kernel was not launched: a number does not fit into its signature"))
    if status == structs.STATUS_UNBOUND:
        return failed(frame, cstring("a kernel was not launched: it cannot be loaded on the device of XLA's stream"))
    return failed(frame, cstring("fastexchange: the buffers of a call are not as they were when it was traced"))


@cfunction(types.intp, types.intp)
def tell_stream(frame_address):
    """A handler that notes XLA's stream, and launches nothing."""
    frame = frame_at(frame_address)
    if tells_metadata(frame, 0):
        return 0
    asked = stack(STREAM_GET_WORDS)
    error = ask_for_stream(frame, asked)
    if error == 0:
        xla_at(global_address("fastexchange_xla")).stream = stream_get_at(asked).stream
    return error


def handler() -> int:
    """The address of the handler."""
    xla.handler()
    xla.state.fail_by_driver = fail_by_driver.address
    return launch_by_xla.address

"""Launch a kernel with the words of a call: find device and stream, point at the parameters, call the driver.

The driver gets pointers to the parameters (``kernelParams`` of ``cuLaunchKernel``). They point to the words that the reading of
the arguments has written. The driver copies the words before it returns.

The driver is called without the GIL, because it waits while the device's queue is full, perhaps for work that another thread
launches only when it gets the GIL. The call does not read the tensors' memory: the stream orders all accesses to it, as with
every launch.

Source: CUDA Driver API 13, "Execution Control"; DLPack 1.3, ``DLPackCurrentWorkStream``.
"""

from numba import types

from ..dispatch import structs as dispatch
from ..dispatch.frame import give_frame, release
from ..dispatch.python_calls import call_method, refuse_launch
from ..dispatch.reading import begin_reading
from ..dispatch.rows import begin_exports, leave, row_reader
from ..dispatch.vectorcall import call_any, run_by
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, PyErr_Occurred
from ..ground.dlpack import CUDA
from ..ground.native import call_int, call_word, global_address, load, native, stack, store
from ..interpreter import DISABLED
from . import launch_structs
from .computed import LAUNCHER_WORDS, configure
from .converting import convert_words

CONFIG_WORDS = launch_structs.CONFIG_WORDS
ATTRIBUTE_WORDS = 2 * launch_structs.ATTRIBUTE_SIZE // 8
MAX_PARAMETERS = launch_structs.MAX_PARAMETERS


@native
def device_of_context(cuda, context):
    """The device of the CUcontext `context` of a thread. 0, no context: the default device. -1: a device beyond MAX_DEVICES.

    A context need not be its device's primary one, in which the launch is made.
    """
    if context == 0:
        return cuda.default_device
    for i in range(dispatch.MAX_DEVICES):
        if cuda.contexts[i] == context:
            return i
    number = stack(1)
    store(number, 0)
    if call_int(cuda.get_device, (number,)) != 0:
        return cuda.default_device
    device = load(number) & 0xFFFFFFFF
    return device if device < dispatch.MAX_DEVICES else -1


@native
def block_for(launcher, loaded):
    """The number of threads in a block of a launch for tasks; 0: the best number is unknown, and Python has to ask the driver."""
    if launcher.block[0] != 0:
        return launcher.block[0]
    for i in range(launch_structs.MAX_BEST_BLOCKS):
        if loaded.blocks_shared[i] == launcher.shared and loaded.blocks[i] != 0:
            return loaded.blocks[i]
    return 0


@native
def size_of(launcher, loaded, code):
    """A STATUS_*, the blocks in a grid's first dimension, and the threads in a block's. No blocks for tasks: there are none.

    With STATUS_DRIVER the driver's code is stored at `code`.
    """
    blocks, threads = launcher.grid[0], launcher.block[0]
    if launcher.tasks >= 0:
        threads = block_for(launcher, loaded)
        if threads == 0:
            return dispatch.STATUS_UNBOUND, 0, 0
        blocks = (launcher.tasks + threads - 1) // threads
        if blocks > launch_structs.MAX_BLOCKS:  # the driver would get the lower 32 bits only
            store(code, launch_structs.INVALID_VALUE)
            return dispatch.STATUS_DRIVER, 0, 0
    return dispatch.STATUS_OK, blocks, threads


@native
def call_driver(cuda, launcher, function, blocks, threads, stream, pointers, is_cooperative):
    """Call ``cuLaunchKernel``, or ``cuLaunchKernelEx`` for cooperative launches and clusters. Returns the ``CUresult``."""
    if is_cooperative == 0 and launcher.cluster[0] == 0:
        grid, block = launcher.grid, launcher.block
        return call_int(
            cuda.launch,
            (function, blocks, grid[1], grid[2], threads, block[1], block[2], launcher.shared, stream, pointers, 0),
        )
    at = stack(CONFIG_WORDS)
    attributes = stack(ATTRIBUTE_WORDS)
    config = launch_structs.config_at(at)
    count = 0
    if is_cooperative != 0:
        attribute = launch_structs.attribute_at(attributes)
        attribute.id = launch_structs.COOPERATIVE
        attribute.value[0] = 1
        count += 1
    if launcher.cluster[0] != 0:
        attribute = launch_structs.attribute_at(attributes + launch_structs.ATTRIBUTE_SIZE * count)
        attribute.id = launch_structs.CLUSTER_DIMENSION
        for i in range(3):
            attribute.value[i] = launcher.cluster[i]
        count += 1
    for i in range(3):
        config.grid[i] = launcher.grid[i]
        config.block[i] = launcher.block[i]
    config.grid[0] = blocks
    config.block[0] = threads
    config.shared = launcher.shared
    config.stream = stream
    config.attributes = attributes
    config.attribute_count = count
    return call_int(cuda.launch_extended, (at, function, pointers, 0))


@native
def launchable_of(overload_address):
    """The ``fx_launchable`` of an overload."""
    return launch_structs.launchable_at(dispatch.overload_at(overload_address).launchable)


@native
def start(cuda, launcher, launchable, device, stream_of, own_stream, pointers, code):
    """Launch a kernel. `pointers`: to its parameters.

    `device`: the tensors' device, -1 for a launch without tensors. `stream_of`: the ``current_work_stream`` of their producers,
    or 0. `own_stream`: the ``CUstream`` in their interfaces, or 0.

    Returns: a STATUS_*; with STATUS_DRIVER the driver's code is stored at `code`.
    Raises: with STATUS_ERROR the exception of `stream_of`. GIL: held, and released during the driver's call.
    """
    current = stack(1)
    store(current, 0)
    status = 0
    is_known = device < 0
    if is_known:
        status = call_int(cuda.get_current, (current,))
        device = device_of_context(cuda, load(current))
    if device < 0 or cuda.contexts[device] == 0:
        return dispatch.STATUS_UNBOUND
    loaded = launch_structs.loaded_at(launchable.loaded + launch_structs.LOADED_SIZE * device)
    if loaded.function == 0 or launcher.shared > loaded.shared_limit:
        return dispatch.STATUS_UNBOUND
    status, blocks, threads = size_of(launcher, loaded, code)
    if status != dispatch.STATUS_OK or (blocks == 0 and launcher.tasks >= 0):  # a grid without blocks the driver refuses
        return status
    stream = launcher.stream
    if stream == launch_structs.LAUNCHER_STREAM_OF_PRODUCERS:
        stream = launcher.default_stream if own_stream == 0 else own_stream
        if stream_of != 0:
            word = stack(1)
            is_known = False
            store(word, 0)
            failed = call_int(stream_of, (CUDA, device, word)) != 0
            if PyErr_Occurred() != 0:
                return dispatch.STATUS_ERROR
            if failed:
                return dispatch.STATUS_NO_ERROR_SET
            stream = load(word)
            if own_stream != 0 and not launch_structs.is_same_stream(stream, own_stream):
                return dispatch.STATUS_STREAMS
    if not is_known:
        store(current, 0)
        status = call_int(cuda.get_current, (current,))
    context = cuda.contexts[device]
    is_other = load(current) != context
    if status == 0 and is_other:
        status = call_int(cuda.push_current, (context,))
    if status == 0:
        thread = c.PyEval_SaveThread()
        status = call_driver(cuda, launcher, loaded.function, blocks, threads, stream, pointers, launchable.is_cooperative)
        c.PyEval_RestoreThread(thread)
        if is_other:
            call_int(cuda.pop_current, (current,))
    if status == 0:
        return dispatch.STATUS_OK
    store(code, status)
    return dispatch.STATUS_DRIVER


# ---- the general path ----------------------------------------------------------------------------------------------


@native
def point_at_parameters(launchable, words, pointers, zero):
    """Store the address of each parameter of the kernel: of one of the words of a call, or `zero`, the address of a 0."""
    for i in range(launchable.parameter_count):
        code = load(launchable.parameters + 8 * i)
        kind = code & 255
        at = words + 8 * (code >> launch_structs.PARAMETER_WORD_SHIFT & 0xFFFFFF)
        if kind == launch_structs.ZERO:
            at = zero
        elif kind == launch_structs.ELEMENTS:
            store(at, load(at) // (code >> launch_structs.PARAMETER_SIZE_SHIFT))
        elif kind == launch_structs.JOINED:
            store(at, load(at) & 0xFFFFFFFF | load(at + 8) << 32)
        store(pointers + 8 * i, at)


@native
def launch_on_device(context_address, frame_address, overload_address, args, launcher_address):
    """:func:`launch_words` as ``vectorcall.run_by`` needs it. Returns (STATUS_*, a new reference to None or 0)."""
    status = launch_words(context_address, frame_address, overload_address, launcher_address)
    if status != dispatch.STATUS_OK:
        return status, 0
    return status, c.new_none()


@native
def is_on_own_stream(frame, launcher):
    """Whether the launch is, or may be, on the stream that its arrays' interfaces name: then no event has to order them."""
    if frame.own_streams_differ != 0:
        return False
    # `start` compares it with the other producers' stream
    is_ours = launcher.stream == launch_structs.LAUNCHER_STREAM_OF_PRODUCERS
    return is_ours or launch_structs.is_same_stream(launcher.stream, frame.own_stream)


@native
def launch_words(context_address, frame_address, overload_address, launcher_address):
    """Launch the kernel with the words in a call's frame. Returns a STATUS_*."""
    context = dispatch.context_at(context_address)
    frame = dispatch.frame_at(frame_address)
    launchable = launchable_of(overload_address)
    launcher = launch_structs.launcher_at(launcher_address)
    if launcher.stream == launch_structs.LAUNCHER_STREAM_OF_PRODUCERS and launcher.is_mixed == 0 and frame.other_stream != 0:
        return dispatch.STATUS_STREAMS
    if frame.own_stream != 0 and not is_on_own_stream(frame, launcher):
        return dispatch.STATUS_STREAMS
    if launcher.program != 0:
        own = stack(LAUNCHER_WORDS)
        if not configure(launcher_address, launchable, dispatch.overload_at(overload_address), frame.words, own):
            return dispatch.STATUS_CONFIGURATION
        launcher = launch_structs.launcher_at(own)
    if not convert_words(frame.words, launchable):
        return dispatch.STATUS_RANGE
    room = stack(MAX_PARAMETERS)
    zero = stack(1)
    result = stack(1)
    store(zero, 0)
    store(result, 0)
    pointers = room
    if launchable.parameter_count > MAX_PARAMETERS:
        pointers = c.PyMem_RawMalloc(8 * launchable.parameter_count)
        if pointers == 0:
            c.PyErr_SetNone(global_address("PyExc_MemoryError"))
            return dispatch.STATUS_ERROR
    point_at_parameters(launchable, frame.words, pointers, zero)
    device = frame.device if frame.device >= 0 else frame.managed_device
    cuda = launch_structs.cuda_at(dispatch.runtime_at(context.runtime).cuda)
    status = start(cuda, launcher, launchable, device, frame.stream, frame.own_stream, pointers, result)
    if pointers != room:
        c.PyMem_RawFree(pointers)
    frame.code = load(result)
    frame.position = -1  # if the stream has failed, no argument is to blame
    return status


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def run(context_address, args, nargs, flags, state):
    """``dispatch.vectorcall.run_by`` of a kernel for CUDA: ``fx_context.run``."""
    return run_by(launch_on_device, context_address, args, nargs, flags, state)


@row_reader
def begin_row(items, row, word, array, frame_address):
    """``dispatch.rows.begin_row`` of a launch, which also notes where its tensors are."""
    frame = dispatch.frame_at(frame_address)
    begin_reading(frame.context, frame, 0)
    return begin_exports(items, row, word, array, frame_address)


@row_reader
def launch_row(items, row, word, array, frame_address):
    """``dispatch.rows.launch_row`` of a launch."""
    frame = dispatch.frame_at(frame_address)
    context = dispatch.context_at(frame.context)
    runtime = dispatch.runtime_at(context.runtime)
    callable_ = frame.callable
    frame.array_count = 0
    status = dispatch.STATUS_CHANGED
    if frame.exports_used == frame.export_count:
        status = launch_words(frame.context, frame_address, frame.overload, load(callable_ + CALLABLE_CONTEXT))
    if status != dispatch.STATUS_OK and status != dispatch.STATUS_DRIVER:
        return leave(row, frame_address, status)
    code = frame.code
    release(runtime, frame)
    give_frame(runtime, frame_address)
    if status == dispatch.STATUS_DRIVER:
        return refuse_launch(context, callable_, code)
    context.calls += 1
    return c.new_none()


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_any(callable_, args, nargsf, kwnames):
    """``dispatch.vectorcall.call_any`` of a launcher."""
    launcher = load(callable_ + CALLABLE_CONTEXT)
    return call_any(launch_on_device, launch_structs.launcher_at(launcher).context, launcher, callable_, args, nargsf, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_own(callable_, args, nargsf, kwnames):
    """The vectorcall of a launcher whose launches the kernel's package makes."""
    context = dispatch.context_at(launch_structs.launcher_at(load(callable_ + CALLABLE_CONTEXT)).context)
    return call_method(context.numba_name, callable_, args, nargsf, kwnames)


def own_call() -> int:
    """The address of the vectorcall that leaves launches to Python; 0, for ``__call__``, where native code is switched off."""
    return 0 if DISABLED else vectorcall_own.address


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall(callable_, args, nargsf, kwnames):
    """The vectorcall of a launcher: calls the last cache entry, as ``dispatch.rows.vectorcall`` does."""
    context_address = launch_structs.launcher_at(load(callable_ + CALLABLE_CONTEXT)).context
    last = dispatch.context_at(context_address).last
    enter = dispatch.overload_at(last).enter
    return call_word(enter, (callable_, args, nargsf, kwnames, context_address, last))

"""The tests of ``doctor`` that may crash. Each runs in a process: ``python -m fastexchange.command.probe TOPIC``.

A topic is ``native`` (everything that needs no framework) or the name of a framework's module. Each finding is printed at once to
standard output, as a JSON list in one line. The output of frameworks goes to standard error.
"""

import errno
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..ground.safe_repr import one_line

__all__ = ["FRAMEWORKS", "NOTHING", "OK", "SLOW", "UNKNOWN", "WRONG", "Finding", "OnlyDunder"]

OK, SLOW, WRONG, UNKNOWN, NOTHING = "ok", "slow", "wrong", "unknown", "-"
FRAMEWORKS = {
    "torch": "PyTorch", "paddle": "PaddlePaddle", "jax": "JAX", "tvm_ffi": "apache-tvm-ffi", "pyarrow": "pyarrow",
    "ml_dtypes": "ml_dtypes", "numba_cuda": "numba-cuda", "numba_cuda_mlir": "numba-cuda-mlir",
}  # fmt: skip
"""The names of the frameworks, by module."""
CALLS = 4  # the first one makes the cache entry


class Finding(NamedTuple):
    """A line of ``doctor``."""

    section: str
    name: str
    status: str
    """One of :data:`OK`, :data:`SLOW`, :data:`WRONG`, :data:`UNKNOWN`, :data:`NOTHING`."""
    text: str
    advice: str = ""
    """What the user can do."""


_SHORTAGES = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


def failure(section: str, name: str, error: BaseException, what: str, advice: str) -> Finding:
    """Return the finding of a failure: UNKNOWN if memory, disk or file descriptors ran out, else WRONG.

    `what` is put before the exception's message.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES):
        text = f"{what}{one_line(error)}: this machine, or this process's limits, had no room for it; it could not be tested"
        return Finding(section, name, UNKNOWN, text, "free memory or disk (ulimit -a shows the limits), and run doctor again")
    return Finding(section, name, WRONG, f"{what}{one_line(error)}", advice)


# ---- native code ---------------------------------------------------------------------------------------------------

_LAYOUTS = {
    "object": ("CPython's objects", "Numba's own dispatcher makes all calls"),
    "tuple": ("CPython's tuples", "Numba's own dispatcher makes all calls"),
    "dispatcher": ("kernels, which extend Numba's dispatchers,", "Numba's own dispatcher makes all calls"),
    "meminfo": ("Numba's memory blocks", "Numba's own dispatcher makes all calls"),
    "float": ("CPython's floats", "Numba's own dispatcher makes the calls that have one"),
    "complex": ("CPython's complex numbers", "Numba's own dispatcher makes the calls that have one"),
    "ndarray": ("NumPy's arrays", "each call calls their __dlpack__"),
    "list": ("Numba's lists", "Numba's own dispatcher makes the calls that have one"),
}
_REPORT = "this package does not know this version: report it with the output of doctor --json"
_HAVE_VECTORCALL = 1 << 11  # of tp_flags


def _native() -> Iterator[Finding]:
    from ..arguments import buffer, strings
    from ..dispatch.runtime import runtime
    from ..ground.numba_internals import reports_calls
    from ..interpreter import is_free_threaded

    section = "native code"
    found = runtime()
    for name, why in found.numba_failures.items():
        text = f"this Numba is not as expected ({name}: {why}), so its own dispatcher makes all calls"
        yield Finding(section, "Numba", SLOW, text, f"install a Numba that this package requires; if it is one: {_REPORT}")
    if not found.numba_failures:
        yield Finding(section, "Numba", OK, "its private interfaces, and calls of kernels, are verified")
    for name, (what, otherwise) in _LAYOUTS.items():
        if name in found.unverified:
            text = f"the layout of {what} is not as expected: {otherwise}"
            yield Finding(section, name, SLOW, text, "see GIL, above" if is_free_threaded() else _REPORT)
        elif "object" in found.unverified:
            yield Finding(section, name, NOTHING, "not looked at, because no object is read")
        else:
            yield Finding(section, name, OK, f"the layout of {what} is verified")
    if reports_calls():
        yield Finding(section, "monitoring", SLOW, found.why_not_native, "unset NUMBA_ENABLE_SYS_MONITORING, unless you profile")
    if not found.is_native:
        yield from _examples("types", _plain_examples())
        return
    if strings.verify():
        yield Finding(section, "str", OK, "the layout of Numba's strings is verified")
    else:
        text = "the layout of Numba's strings is not as expected: Numba's own dispatcher makes the calls that have one"
        yield Finding(section, "str", SLOW, text, _REPORT)
    from ..calls.kernel import FastKernel

    if FastKernel.__flags__ & _HAVE_VECTORCALL:
        yield Finding(section, "vectorcall", OK, "calls of kernels go directly to native code")
    else:
        yield Finding(section, "vectorcall", SLOW, "the flag could not be set: calls make a tuple of their arguments", _REPORT)
    from ..producers import numpy_table

    if buffer.prepare():
        yield Finding(section, "buffers", OK, "the layout of Py_buffer is verified")
    else:
        yield Finding(section, "buffers", SLOW, "the layout of Py_buffer is not as expected: Numba takes such objects", _REPORT)
    if numpy_table.exchange_table() is not None:
        yield Finding(section, "exchange table", OK, "NumPy's arrays have this package's table: for convert, polyfill, results")
    else:
        yield Finding(section, "exchange table", SLOW, "none for NumPy's arrays: its C API is not as expected", _REPORT)
    yield from _examples("types", _plain_examples())
    yield from _origin()
    yield from _code_of_packages()
    yield from _pickles()
    yield from _disk_cache()


class OnlyDunder:
    """A producer with only ``__dlpack__`` and ``__dlpack_device__``."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


# ---- calls ---------------------------------------------------------------------------------------------------------


def _double(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x[i]


def _double_number(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x


def _double_all(x, out):
    for item in x:
        for i in range(out.shape[0]):
            out[i] = 2 * item[i]


class _Example(NamedTuple):
    name: str
    value: Any
    paths: tuple[str, ...]
    """The fast paths for this value. Any other path is slow."""
    kernel: Callable = _double
    expected: tuple = (0.0, 2.0, 4.0, 6.0)
    storage: bool = False


_OWN = ("c-exchange", "ndarray")
_ANY = (*_OWN, "buffer", "dunder")


def _plain_examples() -> Iterator[_Example]:
    import array

    import numpy as np

    x = np.arange(4.0)
    yield _Example("numpy.ndarray", x, _OWN)
    yield _Example("float", 1.5, ("scalar",), _double_number, (3.0,) * 4)
    yield _Example("int", 3, ("scalar",), _double_number, (6.0,) * 4)
    yield _Example("numpy.float32", np.float32(1.5), ("scalar",), _double_number, (3.0,) * 4)
    yield _Example("tuple of arrays", (x, x), ("tuple",), _double_all)
    yield _Example("list of arrays", [x, x], ("list",), _double_all)
    yield _Example("array.array", array.array("d", x), _ANY)
    yield _Example("only __dlpack__", OnlyDunder(x), _ANY)


def _examples(section: str, examples: Iterator[_Example]) -> Iterator[Finding]:
    """Yield a finding for each example: its path, and whether calls with it are right."""
    for example in examples:
        try:
            yield _tried(section, example)
        except Exception as error:
            yield failure(section, example.name, error, "", "passing it to a kernel fails: report it, with the versions above")


def _tried(section: str, example: _Example) -> Finding:
    import numpy as np

    from .. import explain, fast_args

    kernel = fast_args(example.kernel, storage=example.storage)
    for number in range(1, CALLS + 1):
        out = np.full(4, -1.0)
        kernel(example.value, out)
        if tuple(out) != example.expected:
            wrong = f"call {number} wrote {out.tolist()}, not {list(example.expected)}"
            return Finding(section, example.name, WRONG, wrong, "do not use it with kernels here; report it")
    explained = explain(example.value)
    reasons = "; ".join(explained.reasons)
    text = f"path {explained.path}, {CALLS} calls are right" + (f"; {reasons}" if reasons else "")
    if explained.path not in example.paths or (reasons and set(example.paths) == set(_OWN)):
        return Finding(section, example.name, SLOW, text)
    if kernel.counts().fast == 0:
        return Finding(section, example.name, SLOW, f"{text}, but none of them was native")
    return Finding(section, example.name, OK, text)


def _origin() -> Iterator[Finding]:
    """Say where native code comes from. Runs after the calls."""
    from ..ground.cfunction import code_cache
    from ..ground.shipped import own_path, shipped_code

    why = shipped_code().why_not
    if why:
        made = f"this run loaded {code_cache.hits} from the disk cache, and compiled {code_cache.misses}"
        advice = "install the package again, or what this file was made for" if own_path().exists() else ""
        yield Finding("native code", "from", SLOW if advice else OK, f"compiled on this machine: {why}; {made}", advice)
    else:
        functions = f"this run used {code_cache.shipped} of {len(shipped_code().functions)} functions"
        yield Finding("native code", "from", OK, f"shipped with the package; {functions}")


def _code_of_packages() -> Iterator[Finding]:
    """Say which installed packages have machine code for their kernels, and whether it is used."""
    from ..ground.package_code import best_of, installed

    for package, folders in sorted(installed().items()):
        found, why, advice = best_of(package, folders)
        if why:
            text = f"the machine code of its kernels is not used, they are compiled: {why}"
            if found is not None:
                text = f"machine code of its kernels for {found.level} is used: {found.path}; not {why}"
            yield Finding("native code", package, SLOW, text, advice or f"install {package} again, or one built for this")
        elif found is not None:
            yield Finding("native code", package, OK, f"machine code of its kernels for {found.level}: {found.path}")


def _pickles() -> Iterator[Finding]:
    """Say what pickles of kernels carry, and where it runs. A kernel is compiled for it."""
    import hashlib

    import numpy as np

    from ..api import fast_args
    from ..calls.kernel_cache import made_by
    from ..ground.numba_code import code_depends_on

    kernel = fast_args(_double)
    if not hasattr(kernel, "_packed"):  # NUMBA_DISABLE_JIT, which has a line of its own
        return
    kernel.precompile((np.ones(4), np.ones(4)))
    content = kernel._pickled()
    if not content.signatures:
        yield Finding("native code", "pickles", SLOW, f"of kernels carry {content}: each worker compiles", _REPORT)
        return
    digest = hashlib.sha256(repr((made_by(), code_depends_on())).encode()).hexdigest()[:12]
    text = f"of kernels carry their machine code, {content.size} bytes here; it runs on machines whose doctor says {digest}, too"
    yield Finding("native code", "pickles", OK, text)


# ---- disk cache ----------------------------------------------------------------------------------------------------


_PRECOMPILE = "`python -m fastexchange precompile`"


def _disk_cache() -> Iterator[Finding]:
    """Check the disk cache. Runs after the calls, whose code must be in the cache if it works."""
    from numba.core import config

    from ..ground.cfunction import code_cache
    from ..ground.shipped import shipped_code

    section = "disk cache"
    wanted = getattr(config, "CACHE_DIR", "")
    made = "native code" if shipped_code().why_not else "what is not shipped"
    costs = f"every process compiles {made} again, which takes {'seconds' if shipped_code().why_not else 'a part of a second'}"
    set_it = "set NUMBA_CACHE_DIR to a directory that only you can write to"
    *before, folder = code_cache.folders
    for each in before:
        if each.why_not_trusted:
            text = f"{each.path} is not used: {each.why_not_trusted}"
            yield Finding(section, "directory", SLOW, text, f"run: chmod -R go-w {each.path}, as its owner, or delete it")
    if code_cache.directory is None:
        if code_cache.hits and not code_cache.misses:  # filled by another user, such as root in an image
            where = ", ".join(str(each.path) for each in code_cache.folders if each.path.is_dir())
            text = f"{where} can be read, not written: this run loaded {code_cache.hits} from it, and compiled none"
            yield Finding(section, "directory", OK, text)
            return
        if not code_cache.misses and not shipped_code().why_not:
            text = "none can be written, and none is needed: this run took its native code from the package, and compiled none"
            yield Finding(section, "directory", OK, text)
            return
        why = folder.why_not_trusted
        text = f"{folder.path} is not used: {why}: {costs}" if why else f"none can be written: {costs}"
        advice = f"{set_it}; in an image run {_PRECOMPILE} as root, and leave its files to root"
        yield Finding(section, "directory", SLOW, text, advice)
        return
    if wanted and not folder.path.is_relative_to(Path(wanted)):
        text = f"{folder.path}, because NUMBA_CACHE_DIR={wanted} cannot be written"
        yield Finding(section, "directory", SLOW, text, "make that writable, or unset it")
    else:
        yield Finding(section, "directory", OK, f"{folder.path}" + (" (NUMBA_CACHE_DIR)" if wanted else ""))
    made = f"; this run loaded {code_cache.hits}, and compiled {code_cache.misses}"
    try:
        found = [each.contents() for each in code_cache.folders]
    except OSError as error:
        yield Finding(section, "entries", SLOW, f"cannot be read: {one_line(error)}")
        return
    refused = [why for contents in found for why in contents.refused]
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        text = f"refused: {refused[0]}{more}{made}"
        yield Finding(section, "damaged", SLOW, text, "these functions are compiled again, which replaces the files")
    entries = sum(contents.entries for contents in found)
    if not entries and code_cache.misses:
        failed = folder.why_not_saved
        why = one_line(failed) if failed is not None else code_cache.why_not_kept or "nothing tells why"
        yield Finding(section, "entries", SLOW, f"none could be kept, so {costs}: {why}", set_it)
    else:
        size = f"{sum(contents.size for contents in found) / 2**20:.1f} MiB"
        yield Finding(section, "entries", OK, f"{entries} functions, {size}{made}")


# ---- frameworks ----------------------------------------------------------------------------------------------------


def _torch(torch) -> Iterator[Finding]:
    from ..torch import offsets

    section = "frameworks"
    guard = offsets.guard()
    for what, knows, means in (
        ("keys", guard.knows_keys, "tensors whose memory is not their value"),
        ("storage", guard.knows_storage, "storages that were freed or shrunk"),
        ("autograd", guard.knows_autograd, "tensors that autograd tracks"),
        ("dtype", guard.knows_dtype, "integers of less than a byte"),
    ):
        name = f"torch: {what}"
        if knows:
            yield Finding(section, name, OK, f"verified: native code recognises {means}")
            continue
        who = "PyTorch is asked about each tensor" + ("" if guard.can_ask else ", from Python")
        why = guard.why.get(what, "it needs the keys")
        also = "" if guard.can_ask else f"; native code cannot ask either: {guard.why.get('queries')}"
        yield Finding(section, name, SLOW, f"not found, so {who}: {why}{also}", _REPORT)
    if guard.knows_all:
        name = "torch: source of views"
        if guard.knows_views:
            yield Finding(section, name, OK, "memory: its layout is verified")
        else:
            text = f"the exchange table, or without one __dlpack__; not memory: {guard.why_no_views}"
            yield Finding(section, name, NOTHING, text)
    yield from _torch_operators(section, guard.knows_all)
    yield from _examples(section, iter([_Example("torch.Tensor", torch.arange(4.0), _OWN)]))
    yield from _refused(section, "torch: requires grad", torch.ones(4, requires_grad=True))
    yield from _refused(section, "torch: lazily conjugated", torch.ones(4, dtype=torch.complex64).conj())
    cuda = "CUDA"
    if torch.version.cuda is None:
        yield Finding(cuda, "torch.cuda", NOTHING, "this PyTorch is built without CUDA")
    elif not torch.cuda.is_available():
        yield Finding(cuda, "torch.cuda", NOTHING, f"built for CUDA {torch.version.cuda}; no device is usable")
    else:
        text = f"{torch.cuda.device_count()} devices: kernels made by cuda.jit take their tensors, others refuse them"
        yield Finding(cuda, "torch.cuda", OK, text)


def _torch_operators(section: str, knows_layout: bool) -> Iterator[Finding]:
    from ..torch import dispatch_table, modes
    from ..torch.boxed_operator import why_by_python
    from ..torch.new_tensors import why_not_made

    if why := modes.why_no_modes():
        text = f"not told natively, so Python makes the calls of operators, and of kernels that declare outputs: {why}"
        yield Finding(section, "torch: modes", SLOW, text, _REPORT)
    else:
        yield Finding(section, "torch: modes", OK, "verified: native code knows when one sees a call")
    if why := dispatch_table.why_no_tables():
        text = f"not found, so PyTorch's dispatcher makes the calls of operators: {why}"
        yield Finding(section, "torch: dispatch tables", SLOW, text, _REPORT)
    else:
        yield Finding(section, "torch: dispatch tables", OK, "verified: native code knows whose implementation a call gets")
    if not knows_layout:
        return
    if why := modes.why_no_counts():
        text = f"not found, so PyTorch's dispatcher makes the calls of operators that write to arguments: {why}"
        yield Finding(section, "torch: version counters", SLOW, text, _REPORT)
    else:
        yield Finding(section, "torch: version counters", OK, "verified: native code counts what operators write")
    if why := why_by_python():  # as with PyTorch before 2.10
        yield Finding(section, "torch: operators", NOTHING, f"PyTorch's dispatcher calls them as Python functions: {why}")
    else:
        yield Finding(section, "torch: operators", OK, "PyTorch's dispatcher calls them natively")
    if why := why_not_made():
        yield Finding(section, "torch: outputs on a GPU", NOTHING, f"Python makes those of operators of kernels for CUDA: {why}")
    else:
        yield Finding(section, "torch: outputs on a GPU", OK, "verified: PyTorch makes those of operators natively")


def _refused(section: str, name: str, tensor) -> Iterator[Finding]:
    """Check that a kernel refuses this tensor."""
    import numpy as np

    from .. import fast_args

    try:
        fast_args(_double)(tensor, np.empty(4))
    except BufferError:
        yield Finding(section, name, OK, "such a tensor is refused")
    except Exception as error:
        yield failure(section, name, error, "such a tensor is not refused by a BufferError: ", _REPORT)
    else:
        yield Finding(section, name, WRONG, "such a tensor is not refused: a kernel reads a wrong value", _REPORT)


def _paddle(paddle) -> Iterator[Finding]:
    section = "frameworks"
    plain, watched = (paddle.to_tensor([0.0, 1.0, 2.0, 3.0], place="cpu", stop_gradient=not each) for each in (False, True))
    yield from _examples(section, iter([_Example("paddle.Tensor", plain, _OWN)]))
    yield from _refused(section, "paddle: requires grad", watched)


def _jax(jax) -> Iterator[Finding]:
    import numpy as np

    from .. import fast_args
    from ..jax.xla_target import why_no_handler

    section, name, x = "frameworks", "jax: jax.jit", jax.numpy.arange(4.0)
    yield from _examples(section, iter([_Example("jax.Array", x, ("jax",))]))
    try:
        made = np.asarray(jax.jit(fast_args(out="x[n] -> out[n]")(_double))(x))
    except Exception as error:
        yield failure(section, name, error, "a kernel cannot be called in a compiled function: ", _REPORT)
        return
    if not np.array_equal(made, np.arange(4.0) * 2):
        yield Finding(section, name, WRONG, f"a kernel in a compiled function makes {made}", _REPORT)
    elif why := why_no_handler():
        yield Finding(section, name, SLOW, f"Python makes the calls of kernels in compiled functions: {why}", _REPORT)
    else:
        yield Finding(section, name, OK, "XLA calls kernels natively")


def _tvm_ffi(tvm_ffi) -> Iterator[Finding]:
    import numpy as np

    yield from _examples("frameworks", iter([_Example("tvm_ffi.Tensor", tvm_ffi.from_dlpack(np.arange(4.0)), _ANY)]))


def _pyarrow(pyarrow) -> Iterator[Finding]:
    yield from _examples("frameworks", iter([_Example("pyarrow.Array", pyarrow.array([0.0, 1.0, 2.0, 3.0]), _ANY)]))


def _ml_dtypes(ml_dtypes) -> Iterator[Finding]:
    import numpy as np

    numbers = np.arange(4).astype(ml_dtypes.bfloat16)
    yield from _examples("frameworks", iter([_Example("array of bfloat16", numbers, _OWN)]))


def _numba_cuda(_package) -> Iterator[Finding]:
    yield from _cuda("numba.cuda")


def _numba_cuda_mlir(_package) -> Iterator[Finding]:
    yield from _cuda("numba_cuda_mlir.cuda")


def _cuda(module: str) -> Iterator[Finding]:
    """Launch a kernel for CUDA and check its result."""
    import numpy as np

    from .. import CudaError, fast_args
    from ..cuda.driver import driver

    section = "CUDA"
    cuda = import_module(module)
    try:
        devices = driver().device_count
    except CudaError as error:
        yield Finding(section, module, NOTHING, one_line(error))
        return

    @fast_args
    @cuda.jit
    def double(x, out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = 2 * x[i]

    x, out = cuda.to_device(np.arange(4.0)), cuda.to_device(np.empty(4))
    for _ in range(CALLS):
        double[1, 32](x, out)
    result = out.copy_to_host().tolist()
    if result != [0.0, 2.0, 4.0, 6.0]:
        yield Finding(section, module, WRONG, f"a kernel wrote {result}, not the doubles of 0 to 3", _REPORT)
    elif double.counts().fast == 0:
        yield Finding(section, module, SLOW, f"{devices} devices, {CALLS} launches are right, but none was native", _REPORT)
    else:
        yield Finding(section, module, OK, f"{devices} devices, {CALLS} launches are right")


_CHECKS = {
    "torch": _torch, "paddle": _paddle, "jax": _jax, "tvm_ffi": _tvm_ffi, "pyarrow": _pyarrow, "ml_dtypes": _ml_dtypes,
    "numba_cuda": _numba_cuda, "numba_cuda_mlir": _numba_cuda_mlir,
}  # fmt: skip


def _framework(module: str) -> Iterator[Finding]:
    section, called = "frameworks", FRAMEWORKS[module]
    if importlib.util.find_spec(module) is None:
        yield Finding(section, module, NOTHING, f"{called} is not installed")
        return
    try:
        imported = import_module(module)
    except (Exception, SystemExit) as error:
        advice = f"install {called} again, or remove it: its tensors cannot be passed"
        yield failure(section, module, error, f"{called} cannot be imported: ", advice)
        return
    found = getattr(imported, "__version__", None)
    if found is None:
        yield Finding(section, module, WRONG, f"{called} is imported, but is empty: {imported!r:.200}", f"install {called} again")
        return
    yield Finding(section, module, OK, f"{called} {found}")
    yield from _CHECKS[module](imported)


def _main(topic: str) -> None:
    findings = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of frameworks must not mix with the findings
    made: Iterator[Finding] = _native() if topic == "native" else _framework(topic)
    try:
        for finding in made:
            print(json.dumps(finding), file=findings, flush=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        section = "native code" if topic == "native" else "frameworks"
        print(json.dumps(failure(section, topic, error, "the check failed: ", _REPORT)), file=findings, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])

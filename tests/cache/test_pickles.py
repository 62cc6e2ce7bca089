"""Pickled kernels carry their machine code: a process that can run it compiles nothing, any other compiles."""

import contextlib
import ctypes
import importlib.util
import pickle
import signal
import sys
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType

import numba
import numpy as np
import pytest
from children import accelerating
from forked import fork_python
from frameworks import torch
from interpreter import run_python
from nights import at_night
from numba import cloudpickle, njit
from numba.core import event
from numba.core.errors import NumbaWarning
from numba.core.serialize import dumps, loads

from fastexchange import FastKernel, fast_args
from fastexchange.calls import carried_code, pickled
from fastexchange.calls.carried_code import CarriedCode, Content
from fastexchange.calls.dependencies import NotDescribable, dependencies
from fastexchange.ground import numba_code
from fastexchange.ground.disk_cache import framed, framed_key, unframed

if torch is not None:
    from torch.fx.experimental.proxy_tensor import make_fx


# ---- between processes -------------------------------------------------------------------------------------------------
SENDER = """
    import importlib, sys
    sys.path.insert(0, sys.argv[1])
    import numba, numpy as np
    from fastexchange import fast_args
    from module_of_the_test import total
    K, TABLE = 3.0, np.arange(4.0)

    inner = fast_args(lambda x: x[0] + K)
    helper = lambda value: value * K

    @fast_args(out="x[n] -> y[n]", fastmath=True)
    def doubled(x, y):
        for i in range(len(x)):
            y[i] = 2 * x[i]

    def closure(factor, shift=1):
        return fast_args(lambda x, n=2: x * factor * n + shift)

    def block():
        @fast_args
        def kernel(x):
            with numba.objmode(found="float64"):
                found = helper(float(x[0]))
            return found + 1
        return kernel

    kernels = [inner, fast_args(lambda x, y: inner(x) + TABLE[1] * y), closure(5.0), doubled, total, block(), block()]

    def calls(inner, named, closure, doubled, total, block, idle, x=np.ones(3), np=np):
        yield inner(x), inner(x.astype("f4")), named(x, 2), closure(2.0), closure(2), doubled(x).tolist(), total(x)
        yield block(x), idle(x)

    expected = list(calls(*kernels[:-1], kernels[-2]))
    for module in sys.argv[2:]:
        with open(f"{sys.argv[1]}/{module}", "wb") as file:
            importlib.import_module(module).dump((kernels, calls, expected), file)
    left_out = [each._pickled().left_out for each in kernels]
    assert not any(left_out), left_out
    """
RECEIVER = """
    import importlib, sys
    sys.path.insert(0, sys.argv[1])
    from numba.core import event

    class Noted(event.Listener):
        compiled = []
        def on_start(self, event): self.compiled.append(getattr(event.data["dispatcher"], "__name__", ""))
        def on_end(self, event): pass

    event.register("numba:compile", Noted())
    K, helper = 7.0, lambda value: -100.0  # its own, which no kernel sees
    for number in range(4):
        with open(f"{sys.argv[1]}/{sys.argv[2]}", "rb") as file:
            kernels, calls, expected = importlib.import_module(sys.argv[2]).load(file)
        assert list(calls(*kernels)) == expected
        doubled, names = kernels[3], {each.__name__ for each in kernels}
        assert type(doubled).__name__ == "FastKernel" and doubled.out == "x[n] -> y[n]" and doubled.targetoptions["fastmath"]
        if number % 2:  # or the next come while these are alive
            kernels[0]._recent.clear()
            del kernels, calls, doubled
    print(len([name for name in Noted.compiled if name in names]))
    """
MODULES = list(filter(importlib.util.find_spec, ("numba.cloudpickle", "cloudpickle", "dill")))

@pytest.fixture(scope="module")
def sent(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pickles")
    source = "from fastexchange import fast_args\ntotal = fast_args(lambda x: x.sum())\n"
    (folder / "module_of_the_test.py").write_text(source)
    fork_python(SENDER, str(folder), *MODULES)
    return str(folder)


@pytest.mark.parametrize("module", at_night(MODULES, "numba.cloudpickle"))
def test_the_receiver_compiles_nothing(sent, module):
    """Kernels of ``__main__``, of a module, a closure, calling each other, with blocks of Python; also when they arrive again.

    Each time it compiles the one that was never called.
    """
    assert fork_python(RECEIVER, sent, module).stdout == "2\n"


@pytest.mark.nightly
def test_a_receiver_with_another_processor_compiles(sent):
    other = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert run_python(RECEIVER, sent, MODULES[0], **other).stdout == "18\n"


# ---- in one process ----------------------------------------------------------------------------------------------------
def states_of(kernel) -> dict:
    return dict(kernel.__reduce__()[1][2]._arguments)


def received(kernel, **changed) -> FastKernel:
    """A kernel as another process would get it: not the same object, with the same code in its pickle."""
    states = states_of(kernel) | {"uuid": str(uuid.uuid4())} | changed
    return FastKernel._rebuild(**loads(dumps(states)))


def as_elsewhere(data: bytes, *kernels) -> bytes:
    """A pickle as of another process: with other names for its kernels."""
    for kernel in kernels:
        data = data.replace(str(kernel._uuid).encode(), str(uuid.uuid4()).encode())
    return data


def elsewhere(kernel, *others, pickler=pickle):
    """A kernel as it arrives in another process by a pickle; those that it names, too."""
    return pickle.loads(as_elsewhere(pickler.dumps(kernel), kernel, *others))


def read(entry: bytes) -> tuple:
    """The key and the value of an entry."""
    data = zlib.decompress(entry)
    return framed_key(data), unframed(data, None)


def misses(kernel) -> int:
    return sum(kernel.stats.cache_misses.values())


FACTOR = 2
DOUBLES, SINGLES = np.ones(2), np.ones(2, "f4")


def _scale(x):
    return x[0] * FACTOR


@pytest.fixture
def scale():
    """A function of one test: code that was compiled with several values is not carried."""
    return FunctionType(_scale.__code__, globals(), "scale")


@pytest.fixture
def scaled(scale):
    kernel = fast_args(scale)
    assert kernel(DOUBLES) == 2.0
    return kernel


def test_code_is_carried_and_goes_on(scaled):
    """With the next pickle goes what came, called or not, and what was compiled since."""
    first = received(scaled)
    second = received(first)
    assert first is not scaled and not first.overloads and "loads it" in first.explain(DOUBLES).outcome
    assert "compiles it" in first.explain(SINGLES).outcome and not first.overloads
    assert first(DOUBLES) == 2.0 and misses(first) == 0 and first.counts().compiled == 1
    with event.install_recorder("numba:compile") as recorder:  # by Numba's own event, profilers count compilations
        first(DOUBLES)
        assert not recorder.buffer
        assert first(SINGLES) == 2.0 and misses(first) == 1 and recorder.buffer
    for kernel, expected in ((second, 1), (received(first), 0)):
        assert kernel(DOUBLES) == kernel(SINGLES) == 2.0 and misses(kernel) == expected


def test_pickles_are_equal_while_no_code_is_new(scale):
    """Engines recognise a function by its pickle. At first there is nothing to carry."""
    kernel = fast_args(scale)
    assert not states_of(kernel)["carried"] and not states_of(received(kernel))["carried"]
    assert kernel._pickled() == Content(0, 0, {}) and "pickle" not in str(kernel.explain(DOUBLES))
    kernel(DOUBLES)
    before = pickle.dumps(kernel)
    assert pickle.dumps(kernel) == before
    kernel(np.zeros(2))
    assert pickle.dumps(kernel) == before


def test_another_value_is_compiled_in(scale, scaled, monkeypatch):
    """A receiver computes with the values that the function's pickle has. Code with others stays unused, and is not carried.

    That is told, and the code leaves the pickle with the next code.
    """
    unpacked = fast_args(FunctionType(_scale.__code__, globals(), "scale"))
    assert scaled._pickled().signatures == 1 and unpacked(DOUBLES) == 2.0
    monkeypatch.setitem(globals(), "FACTOR", 5)
    contents = [unpacked._pickled()]
    other = received(scaled)
    assert other(DOUBLES) == 5.0 and misses(other) == 1
    assert "no machine code; not that of (array(float64" in str(scaled.explain(DOUBLES))
    scaled.recompile()
    contents.append(scaled._pickled())
    assert scaled(DOUBLES) == 5.0 and not states_of(scaled)["carried"]
    for content, words in zip(contents, ("other values", "here or before"), strict=True):
        assert content.signatures == 0 and words in str(content), content


def test_ctrl_c_while_code_is_packed(scaled, monkeypatch):
    assert scaled._pickled().signatures == 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scaled._carried, "_why_not_packed", lambda *_: signal.raise_signal(signal.SIGINT))
        patch.setattr(scaled._carried._keys, "that_do_not_fit", lambda texts, _: list(texts))
        scaled.explain(DOUBLES)
    assert received(scaled)(DOUBLES) == 2.0 and len(states_of(scaled)["carried"]) == 1


def test_code_for_another_process_goes_no_further(scaled, monkeypatch):
    (entry,) = states_of(scaled)["carried"].values()
    key, value = read(entry)
    entry = zlib.compress(framed(key.replace("((", "(('another version', ", 1), value))
    other = received(scaled, carried={"0" * 64: entry})
    assert other(DOUBLES) == 2.0 and misses(other) == 1
    content = other._pickled()
    assert (content.signatures, content.unused) == (1, 1) and "for 1 signature is not used here" in str(content), content
    assert len(states_of(other)["carried"]) == 1
    monkeypatch.setattr(carried_code, "extensions", lambda: {"library": []})
    assert "for processes that have imported library, too" in str(scaled._pickled())


@pytest.mark.usefixtures("switching")
def test_threads_read_one_pickle_at_once():
    declared = fast_args(["float64(float64)", "int64(int64)"])(lambda x: x + 1)
    data = pickle.dumps(declared)

    def read(sent):
        kernel = pickle.loads(sent)
        assert not kernel._can_compile and len(kernel.overloads) == 2
        return kernel

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            kernels = list(pool.map(read, [as_elsewhere(data, declared)] * 8))
            assert all(kernel is kernels[0] for kernel in kernels)


def compiled_by_another_thread() -> float:
    return ThreadPoolExecutor(1).submit(njit("float64(float64)"), lambda x: x + 1).result(20)(1.0)


class Imported:
    """Stands for a module that compiles when it is imported, by another thread: who reads a pickle waits for its end."""

    __reduce__ = lambda self: (compiled_by_another_thread, ())  # noqa: E731


def test_a_pickle_is_read_without_numbas_lock():
    value = Imported()
    assert elsewhere(fast_args(lambda x: x + value))(1.0) == 3.0


def test_a_pickle_while_another_thread_compiles(scaled, monkeypatch):
    """Here it does so before the first code is packed."""
    pack, armed = CarriedCode._why_not_packed, []

    def compile_and_pack(*arguments):
        assert not armed or armed.pop()(SINGLES) == 2.0
        return pack(*arguments)

    monkeypatch.setattr(CarriedCode, "_why_not_packed", compile_and_pack)
    assert scaled(np.ones(2, "i4")) == 2.0
    armed.append(scaled)
    assert len(states_of(scaled)["carried"]) >= 1 and not armed
    assert len(states_of(scaled)["carried"]) >= 3


def test_a_kernel_that_cannot_be_completed_is_not_found(monkeypatch):
    """A second try fails as the first, and gets no kernel without its declared signatures."""
    declared, identity = fast_args(["float64(float64)"])(lambda x: x + FACTOR), str(uuid.uuid4())
    monkeypatch.setitem(globals(), "FACTOR", "no number")
    data = pickle.dumps(declared).replace(str(declared._uuid).encode(), identity.encode())
    for _ in range(2):
        with pytest.raises(numba.TypingError):
            pickle.loads(data)
    assert identity not in FastKernel._memo


def test_the_class_of_a_kernel_travels(scale):
    """By value if its name is not found elsewhere, as Numba's dispatchers of such classes do."""

    kernel = type("Own", (FastKernel,), {})(scale, {}, {"nopython": True})
    assert kernel(DOUBLES) == 2.0
    for other in (elsewhere(kernel), elsewhere(kernel, pickler=cloudpickle)):
        assert type(other).__name__ == "Own" and isinstance(other, FastKernel) and other is not kernel
        assert other(DOUBLES) == 2.0 and misses(other) == 0


LEFT_ALONE = {  # a receiver with another of these, or what has come to it in place of an entry
    "another Numba": (numba, "__version__", "0.68.0"), "another package": (carried_code, "made_by", lambda: "another version"),
    "another Python": (sys, "version", sys.version + "."), "another machine": (numba_code, "settings", lambda: "another"),
    "a truncated entry": lambda name, data: {"carried": {name: data[:-9]}},
    "no bytes": lambda name, data: {"carried": {name: "text"}},
    "one of another key": lambda name, data: {"carried": {name: zlib.compress(framed(read(data)[0] + " ", read(data)[1]))}},
    "one of another name": lambda name, data: {"carried": {"0" * 64: data}},
    "one in no dictionary": lambda name, data: {"carried": [data]},
    "one of a function elsewhere in its file, whose lines exceptions name":
        lambda *_: {"py_func": FunctionType(_scale.__code__.replace(co_firstlineno=1), globals())},
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_code_that_is_not_for_this_function_or_process_is_left_alone(scaled, what, monkeypatch):
    (entry,), how = states_of(scaled)["carried"].items(), LEFT_ALONE[what]
    other = received(scaled, **how(*entry)) if callable(how) else received(scaled)
    if not callable(how):
        monkeypatch.setattr(*how)
    assert other(DOUBLES) == 2.0 and misses(other) == 1


def test_what_does_not_fit_is_left_out(scaled, monkeypatch):
    monkeypatch.setattr(carried_code, "extensions", dict)  # those of other tests
    size = scaled._pickled().size
    monkeypatch.setattr(carried_code, "MOST_BYTES", size + 100)
    scaled(SINGLES)
    content = scaled._pickled()
    assert content.signatures == 1 and content.size == size and "bytes" in next(iter(content.left_out.values()))
    other = received(scaled)
    assert other(DOUBLES) == other(SINGLES) == 2.0 and misses(other) == 1
    told = str(scaled.explain(DOUBLES))
    assert f"carries the machine code of 1 signature, {size} bytes; not that of (array(float32" in told, told
    for dtype in ("i1", "i2", "i4", "i8"):
        scaled(np.ones(2, dtype))
    told = str(scaled.explain(DOUBLES))
    assert "(array(int16, 1d, C)) and 2 more: all code would be more than" in told, told


def test_code_that_cannot_be_carried():
    """Addresses of this process, what only this process knows, and functions that Numba's dispatchers have compiled."""

    Own = type("Own", (Exception,), {})

    def raising(x):
        if x < 0:
            raise Own
        return x

    adopted = njit(lambda x: x + 1)
    adopted(1)
    address = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(("cos", ctypes.CDLL(None)))
    for kernel, argument, expected, words in (
        (fast_args(lambda x: address(x)), 0.0, 1.0, ""), (fast_args(lambda f: f(1)), njit(lambda x: x + 1), 2, ""),
        (fast_args(raising), 1, 1, "Own"), (fast_args(adopted), 1, 2, ""),
    ):  # fmt: skip
        assert kernel(argument) == expected
        content = kernel._pickled()
        (why,) = content.left_out.values()
        assert content.signatures == 0 and words in why and not (words and "values" in why), content
        assert not states_of(kernel)["carried"]
    other = received(kernel)
    assert other(1) == 2 and misses(other) == 1


# ---- kernels that are kept on disk, too --------------------------------------------------------------------------------
def test_caching_on_disk_beside_received_code(scaled, cache):
    """There is none where the receiver has no source file."""
    other = received(scaled)
    other.enable_caching()
    assert other(DOUBLES) == other(SINGLES) == 2.0 and misses(other) == 1
    assert other._stored_on_disk(other.signatures[1]) is not None
    other = received(scaled, py_func=eval("lambda x: x[0] * 2"), is_cached=True)
    assert not other._is_cached and other(DOUBLES) == 2.0


def test_code_from_disk_is_carried(scale, cache):
    """The receiver keeps on disk what it compiles, as the sender does; its own kernels come before those on disk."""
    fast_args(scale, cache=True)(DOUBLES)
    loaded = fast_args(scale, cache=True)
    assert loaded(DOUBLES) == 2.0 and misses(loaded) == 0
    assert loaded._pickled().signatures == 1
    other = received(loaded)
    assert other._is_cached and other.stats.cache_path == loaded.stats.cache_path
    assert other(DOUBLES) == other(SINGLES) == 2.0 and misses(other) == 1
    assert received(loaded, carried=None)(SINGLES) == 2.0
    for file in cache.rglob("*.entry"):
        file.unlink()
    again = received(loaded)
    assert again(DOUBLES) == 2.0 and misses(again) == 0


def test_accelerated_functions_carry_what_is_on_disk_too(scale, cache):
    with accelerating():
        plain, cached = njit(scale), njit(cache=True)(scale)
    for kernel, expected in ((plain, 1), (cached, 0)):
        assert kernel(DOUBLES) == 2.0
        other = received(kernel)
        assert other(DOUBLES) == 2.0 and misses(other) == expected
        assert type(other).__mro__[:2] == type(kernel).__mro__[:2]


# ---- signatures, exceptions, and the values in a pickle ------------------------------------------------------------------
def test_declared_signatures_are_not_compiled_again():
    """A declared result is part of the code: one of another type is not taken."""
    kernel = fast_args(["float64(float32)", "int64(int64)"])(lambda x: x + x)
    other = received(kernel)
    assert misses(other) == 0 and set(other.overloads) == set(kernel.overloads)
    assert (other(np.float32(1)), other(2)) == (2.0, 4)
    with pytest.raises(TypeError):
        other("a")
    assert received(kernel, carried=None)(2) == 4
    kernel = fast_args(lambda x: x)
    kernel.compile("float64(float32)")
    other = received(kernel)
    other.compile("float32(float32)")
    assert misses(other) == 1 and type(other(np.float32(1))) is float


def test_a_pickle_has_the_values_of_now():
    inside = {"__name__": "inside", "A": np.ones(1), "H": 1.0, "module": ModuleType("module")}
    inside["module"].K = 1.0
    exec("def helper(x):\n    return x + H + module.K + A[0]\ndef kernel(x):\n    return helper(x)", inside)
    inside["helper"] = njit(inside["helper"])
    kernel = fast_args(inside["kernel"])
    assert kernel(1.0) == 4.0 and pickle.dumps(kernel)
    inside["H"], inside["A"][0] = 100.0, 1000.0
    assert elsewhere(kernel, inside["helper"])(1) == 1102.0 == kernel(1)


def test_a_recompiled_kernel_arrives_with_the_values_of_now(scaled, monkeypatch):
    """In a process that has it with other values, too. There Numba's dispatchers stay as they are."""
    before = str(scaled._uuid).encode()
    first = pickle.dumps(scaled).replace(before, b"as elsewhere" * 3)
    elsewhere = pickle.loads(first)
    assert elsewhere(DOUBLES) == 2.0
    monkeypatch.setitem(globals(), "FACTOR", 5)
    scaled.recompile()
    again = pickle.dumps(scaled)
    assert pickle.loads(again) is scaled
    other = pickle.loads(as_elsewhere(again.replace(before, b"as elsewhere" * 3), scaled))
    assert other is not elsewhere and other(DOUBLES) == 5.0 and elsewhere(DOUBLES) == 2.0
    assert pickle.loads(first) is elsewhere


def test_a_pickle_is_read_once(scaled, monkeypatch):
    read = []
    monkeypatch.setattr(pickled, "loads", lambda data: read.append(data) or loads(data))
    data = as_elsewhere(pickle.dumps(scaled), scaled)
    kernel = pickle.loads(data)
    assert kernel is not scaled and pickle.loads(data) is kernel and pickle.loads(pickle.dumps(kernel)) is kernel
    assert len(read) == 1
    scaled(SINGLES)
    further = pickle.dumps(scaled).replace(str(scaled._uuid).encode(), str(kernel._uuid).encode())
    assert pickle.loads(further) is kernel and len(read) == 2
    assert kernel(DOUBLES) == kernel(SINGLES) == 2.0 and misses(kernel) == 0


def test_a_kernel_within_code_is_named_and_carries_none():
    """What ``objmode`` names is pickled when it is compiled, and with each entry: code with its own code in it had no end."""
    values = [np.ones(2, dtype) for dtype in ("f4", "f8", "i4")]
    named = fast_args(lambda x: x.sum())

    @fast_args
    def kernel(x, depth):
        with numba.objmode(found="float64"):
            found = float(kernel(values[depth % 3], depth - 1) + named(x)) if depth else 0.0
        return x[0] + found

    carried = []
    for value in values:
        assert kernel(value, 2) == 7.0
        carried.append(kernel._pickled())
    one, two, three = [content.size for content in carried]
    assert carried[-1].signatures == 3 and not carried[-1].left_out and three - two < 1.5 * one and two < 2.5 * one
    other = elsewhere(kernel)
    assert other is not kernel and [other(value, 2) for value in values] == [7.0] * 3 and misses(other) == 0


def test_kernels_that_name_themselves_and_each_other_arrive():
    @fast_args
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    @fast_args
    def even(n):
        return True if n == 0 else odd(n - 1)

    @fast_args
    def odd(n):
        return False if n == 0 else even(n - 1)

    @fast_args(["int64(int64)"])
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    kernels = [fibonacci, even, odd, factorial]
    assert fibonacci(6) == 8 and even(4) and odd(3)
    for pickler in (pickle, cloudpickle):
        data = pickler.dumps(kernels)
        assert pickler.loads(data) == kernels
        one, two, three, four = pickle.loads(as_elsewhere(data, *kernels))
        assert four(5) == 120 and not four._can_compile
        assert one is not fibonacci and (one(6), two(4), three(3), two(3), three(4)) == (8, True, True, False, False)
        assert misses(one) == 0


SUM = "def kernel(x, y):\n    for i in range(x.shape[0]): y[i] = 2 * x[i]"
BLOCK = "def helper(v): return v + 1\ndef kernel(x):\n with numba.objmode(y='float64'):\n  y = helper(x)\n return y"


@pytest.mark.parametrize("name", [None, "no.module_of_the_test"])
def test_functions_of_no_module(name, cache):
    """What has no module works: cached, it says why not; pickled, it arrives; it has blocks of Python, and is traced."""

    def made(source, file="<string>"):
        names = {"numba": numba, "np": np, "__builtins__": __builtins__} | ({"__name__": name} if name else {})
        exec(compile(source, file, "exec"), names)
        return names["kernel"]

    called = njit(made(SUM))
    for function, words in (
        (made(SUM), rf"'kernel' belongs to no module .* its `__name__` is {name!r}"),
        (lambda x, y: called(x, y), r"'called', named by .* belongs to no module"),
    ):
        with pytest.raises(NotDescribable, match=words):
            dependencies(function, {})
    (cache / "source.py").write_text(SUM)
    kernel = fast_args(out="x[n] -> y[n]", cache=True)(made(SUM, str(cache / "source.py")))
    for each in (lambda: kernel, lambda: elsewhere(kernel)):
        with pytest.warns(NumbaWarning, match="kernel is compiled by each process: 'kernel' belongs to no module"):
            assert each()(np.ones(2)).tolist() == [2.0, 2.0]
    assert "belongs to no module" in str(kernel._pickled())
    assert fast_args(made(BLOCK))(1.0) == 2.0
    if torch is not None:
        kernel = fast_args(out="x[n] -> y[n]")(made(SUM))
        assert make_fx(lambda x: kernel(x) + 1)(torch.ones(3))(torch.ones(3)).tolist() == [3.0] * 3


def test_dasks_token_of_a_kernel_that_has_compiled_since_is_the_same(scaled):
    """Its pickle is another. Dask makes its token of these two, for all that is Numba's; other kernels have others."""

    def token_of(kernel):
        return dumps((kernel._reduce_class(), kernel._reduce_states()))

    with contextlib.suppress(ImportError):
        from dask.base import tokenize as token_of
    token, data = token_of(scaled), pickle.dumps(scaled)
    scaled(SINGLES)
    assert token_of(scaled) == token and pickle.dumps(scaled) != data
    assert len({token, *(token_of(fast_args(_scale, **options)) for options in ({}, {"grad": "allow"}))}) == 3
    assert token_of(received(scaled)) != token

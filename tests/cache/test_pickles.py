"""Pickled kernels carry their machine code: a process that can run it compiles nothing, any other compiles."""

import ctypes
import pickle
import sys
import threading
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType

import numba
import numpy as np
import pytest
from interpreter import run_python
from numba import cloudpickle, njit
from numba.core import event
from numba.core.serialize import dumps, loads

from fastexchange import FastKernel, fast_args
from fastexchange.calls import carried_code, pickled
from fastexchange.calls.carried_code import Content
from fastexchange.ground.disk_cache import framed, framed_key, unframed

SENT = """
    import importlib, os, sys
    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    import numpy as np
    from fastexchange import fast_args
    from module_of_the_test import total
    K, TABLE = 3.0, np.arange(4.0)

    @fast_args
    def inner(x):
        return x[0] + K

    @fast_args
    def named(x, y):
        return inner(x) + TABLE[1] * y

    def closure(factor, shift=1):
        return fast_args(lambda x, n=2: x * factor * n + shift)

    @fast_args(["float64(float32)", "int64(int64)"])
    def declared(x):
        return x / 2

    @fast_args(out="x[n] -> y[n]", fastmath=True)
    def doubled(x, y):
        for i in range(len(x)):
            y[i] = 2 * x[i]

    @fast_args
    def refuses(x):
        if x < 0:
            raise ValueError("negative", x)
        return [x, x]

    @fast_args(parallel=True)
    def summed(x):
        return x.sum()

    idle = fast_args(lambda x: x + 1)
    x, kernels = np.ones(3), [inner, named, closure(5.0), declared, doubled, refuses, total, summed, idle]

    def calls(inner, named, closure, declared, doubled, refuses, total, summed, idle, x=np.ones(3), np=np):
        yield inner(x), inner(x.astype("f4")), inner([2.0, 3.0][:1] and x[::-1]), named(x, 2), named(x, 2.5)
        yield closure(2.0), closure(2.0, 3), closure(2), declared(np.float32(3)), declared(3), doubled(x).tolist()
        yield refuses(3), total(x), total(np.ones((2, 2)).T[:1]), summed(x)
        try:
            refuses(-3)
        except ValueError as error:
            yield error.args

    """
MODULE = """
from fastexchange import fast_args
@fast_args
def total(x):
    return x.sum()
"""
SENDER = (
    SENT
    + """
    expected = list(calls(*kernels))
    with open(sys.argv[1], "wb") as file:
        importlib.import_module(sys.argv[2]).dump((kernels, calls, expected), file)
    left_out = [each._pickled().left_out for each in kernels]
    assert not any(left_out), left_out
    """
)
RECEIVER = """
    import importlib, os, sys
    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    from numba.core import event

    class Noted(event.Listener):
        compiled = []
        def on_start(self, event): self.compiled.append(event.data["dispatcher"].__name__)
        def on_end(self, event): pass

    event.register("numba:compile", Noted())
    exec(sys.argv[3])
    with open(sys.argv[1], "rb") as file:
        kernels, calls, expected = importlib.import_module(sys.argv[2]).load(file)
    found = list(calls(*kernels))
    assert found == expected, (found, expected)
    print(len([name for name in Noted.compiled if name in {each.__name__ for each in kernels}]))
    """


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The file with the kernels that another process has pickled by a module."""
    folder, made = tmp_path_factory.mktemp("pickles"), {}
    (folder / "module_of_the_test.py").write_text(MODULE)

    def file(module: str):
        if module not in made:
            made[module] = folder / module
            run_python(SENDER, str(made[module]), module)
        return str(made[module])

    return file


def compiled_by_receiver(file, module: str, first: str = "", **environment) -> int:
    """Unpickle and call the kernels in a new process, after it has executed `first`. Returns how often it compiles."""
    return int(run_python(RECEIVER, file, module, first, **environment).stdout)


ALL = 15
"""The signatures that the calls need."""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["numba.cloudpickle", "cloudpickle", "dill"])
def test_the_receiver_compiles_nothing(sent, module):
    """Kernels of ``__main__``, of a module, a closure, calling each other, with declared types: by each way of pickling."""
    pytest.importorskip(module)
    assert compiled_by_receiver(sent(module), module) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "environment"),
    [
        pytest.param("", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, marks=pytest.mark.nightly),
        ("import numba; import fastexchange; numba.__version__ = '0.68.0'", {}),
        ("from fastexchange.calls import carried_code as c; c.made_by = lambda: 'another version'", {}),
        ("import sys, fastexchange.ground.numba_code; sys.version += '.'", {}),
        ("from fastexchange.ground import numba_code as c; c.machine_depends_on = lambda: 'another processor'", {}),
    ],
    ids=["processor", "Numba", "package", "Python", "machine"],
)
def test_a_receiver_that_cannot_run_the_code_compiles(sent, first, environment):
    module = "numba.cloudpickle"
    assert compiled_by_receiver(sent(module), module, first, **environment) == ALL


@pytest.mark.slow
def test_kernels_that_arrive_again(sent):
    """By the same pickle, while the first are alive and after they are gone, and with kernels of another process."""
    module = "numba.cloudpickle"
    first = """
import gc, pickle
for _ in range(3):
    for name in [sys.argv[1]] * 2:
        with open(name, "rb") as file:
            kernels, calls, expected = pickle.load(file)
        assert list(calls(*kernels)) == expected
        kernels[0]._recent.clear()
    del kernels, calls
    gc.collect()
"""
    assert compiled_by_receiver(sent(module), module, first) == 0


# ---- in one process --------------------------------------------------------------------------------------------------


def states_of(kernel) -> dict:
    return dict(kernel.__reduce__()[1][2]._arguments)


def received(kernel, **changed) -> FastKernel:
    """A kernel as another process would get it: not the same object, with the same code in its pickle."""
    states = states_of(kernel) | {"uuid": str(uuid.uuid4())} | changed
    return FastKernel._rebuild(**loads(dumps(states)))


def read(entry: bytes) -> tuple:
    """The key and the value of an entry."""
    data = zlib.decompress(entry)
    return framed_key(data), unframed(data, None)


def misses(kernel) -> int:
    return sum(kernel.stats.cache_misses.values())


FACTOR = 2


def _scale(x):
    return x[0] * FACTOR


@pytest.fixture
def scale():
    """A function of one test: code that was compiled with several values is not carried."""
    return FunctionType(_scale.__code__, globals(), "scale")


@pytest.fixture
def scaled(scale):
    kernel = fast_args(scale)
    assert kernel(np.ones(2)) == 2.0
    return kernel


def test_code_is_carried(scaled):
    other = received(scaled)
    assert other is not scaled and not other.overloads
    assert other(np.ones(2)) == 2.0 and misses(other) == 0 and other.counts().compiled == 1
    assert other(np.ones(2, "f4")) == 2.0 and misses(other) == 1


def test_received_code_goes_on(scaled):
    """With the next pickle goes what came, called or not, and what was compiled since."""
    first = received(scaled)
    second = received(first)
    first(np.ones(2, "f4"))
    third = received(first)
    for kernel, expected in ((second, 1), (third, 0)):
        assert kernel(np.ones(2)) == kernel(np.ones(2, "f4")) == 2.0 and misses(kernel) == expected


def test_a_known_kernel_gets_further_code(scaled):
    states = states_of(scaled)
    other = received(scaled)
    scaled(np.ones(2, "f4"))
    again = FastKernel._rebuild(**states_of(scaled) | {"uuid": str(other._uuid)})
    assert again is other and other(np.ones(2)) == other(np.ones(2, "f4")) == 2.0 and misses(other) == 0
    assert FastKernel._rebuild(**states) is scaled


def test_nothing_to_carry(scale):
    kernel = fast_args(scale)
    assert not states_of(kernel)["carried"] and not states_of(received(kernel))["carried"]
    assert kernel._pickled() == Content(0, 0, {}) and "pickle" not in str(kernel.explain(np.ones(2)))


def test_pickles_are_equal_while_no_code_is_new(scaled):
    """Engines recognise a function by its pickle."""
    assert pickle.dumps(scaled) == pickle.dumps(scaled)
    before = pickle.dumps(scaled)
    scaled(np.zeros(2))
    assert pickle.dumps(scaled) == before


def test_another_value_is_compiled_in(scaled, monkeypatch):
    """A receiver computes with the values that the function's pickle has; code with others stays unused."""
    assert scaled._pickled().signatures == 1
    monkeypatch.setitem(globals(), "FACTOR", 5)
    other = received(scaled)
    assert other(np.ones(2)) == 5.0 and misses(other) == 1


def test_a_value_that_has_changed_since_compilation(monkeypatch):
    kernel = fast_args(lambda x: x[0] * FACTOR)
    assert kernel(np.ones(2)) == 2.0
    monkeypatch.setitem(globals(), "FACTOR", 7)
    content = kernel._pickled()
    assert content.signatures == 0 and "other values" in str(content), content
    assert received(kernel)(np.ones(2)) == 7.0


def test_code_of_other_values_is_not_carried(scaled, monkeypatch):
    """It is told, and leaves the pickle with the next code."""
    assert scaled._pickled().signatures == 1
    monkeypatch.setitem(globals(), "FACTOR", 5)
    assert "no machine code; not that of (array(float64" in str(scaled.explain(np.ones(2)))
    scaled.recompile()
    content = scaled._pickled()
    assert scaled(np.ones(2)) == 5.0 and content.signatures == 0 and "here or before" in str(content), content
    assert not states_of(scaled)["carried"]


def test_ctrl_c_while_code_is_packed(scaled, monkeypatch):
    """The next pickle packs it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    assert scaled._pickled().signatures == 1
    carried = scaled._carried
    with monkeypatch.context() as patch:
        patch.setattr(carried, "_why_not_packed", interrupted)
        patch.setattr(carried._keys, "that_do_not_fit", lambda texts, _: list(texts))
        with pytest.raises(KeyboardInterrupt):
            scaled.explain(np.ones(2))
    assert received(scaled)(np.ones(2)) == 2.0 and len(states_of(scaled)["carried"]) == 1


def test_code_for_another_process_goes_no_further(scaled):
    (entry,) = states_of(scaled)["carried"].values()
    key, value = read(entry)
    entry = zlib.compress(framed(key.replace("((", "(('another version', ", 1), value))
    other = received(scaled, carried={"0" * 64: entry})
    assert other(np.ones(2)) == 2.0 and misses(other) == 1
    content = other._pickled()
    assert (content.signatures, content.unused) == (1, 1) and "for 1 signature is not used here" in str(content), content
    assert len(states_of(other)["carried"]) == 1


def test_why_code_is_not_carried():
    class Own(Exception):
        pass

    @fast_args
    def raising(x):
        if x < 0:
            raise Own
        return x

    assert raising(1) == 1
    (why,) = raising._pickled().left_out.values()
    assert "Own" in why and "values" not in why


def test_libraries_that_extend_numba_are_named(scaled, monkeypatch):
    monkeypatch.setattr(carried_code, "extensions", lambda: {"library": []})
    assert "for processes that have imported library, too" in str(scaled._pickled())


def test_threads_read_one_pickle_at_once():
    """One makes the kernel, and the others get it when it is whole."""
    declared = fast_args(["float64(float64)", "int64(int64)"])(lambda x: x + 1)
    data = pickle.dumps(declared)

    def read(sent):
        kernel = pickle.loads(sent)
        assert not kernel._can_compile and len(kernel.overloads) == 2
        return kernel

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                sent = data.replace(str(declared._uuid).encode(), str(uuid.uuid4()).encode())
                kernels = list(pool.map(read, [sent] * 8))
                assert all(kernel is kernels[0] for kernel in kernels)
    finally:
        sys.setswitchinterval(interval)


def compiled_by_another_thread() -> float:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(njit("float64(float64)")(lambda x: x + 1)(1.0)), daemon=True)
    thread.start()
    thread.join(20)
    return results[0]


class Imported:
    """Stands for a module that compiles when it is imported, by another thread: who reads a pickle waits for its end."""

    def __reduce__(self):
        return compiled_by_another_thread, ()


def test_a_pickle_while_another_thread_compiles(scaled):
    """As soon as Python code runs in between, that of hashing a Numba type."""
    armed = []

    class Hashed(numba.types.Opaque):
        def __hash__(self):
            if armed:
                armed.clear()
                assert scaled(np.ones(2, "f4")) == 2.0
            return hash(self.name)

    scaled.overloads[(Hashed("hashed"),)] = next(iter(scaled.overloads.values()))
    assert scaled(np.ones(2, "i4")) == 2.0
    armed.append(True)
    assert len(states_of(scaled)["carried"]) >= 2 and not armed


def test_a_pickle_is_read_without_numbas_lock():
    value = Imported()
    kernel = fast_args(lambda x: x + value)
    data = pickle.dumps(kernel).replace(str(kernel._uuid).encode(), str(uuid.uuid4()).encode())
    assert pickle.loads(data)(1.0) == 3.0


def test_a_kernel_that_cannot_be_completed_is_not_found(monkeypatch):
    """A second try fails as the first, and gets no kernel without its declared signatures."""
    declared = fast_args(["float64(float64)"])(lambda x: x + FACTOR)
    identity = str(uuid.uuid4())
    monkeypatch.setitem(globals(), "FACTOR", "no number")
    data = pickle.dumps(declared).replace(str(declared._uuid).encode(), identity.encode())
    for _ in range(2):
        with pytest.raises(numba.TypingError):
            pickle.loads(data)
    assert identity not in FastKernel._memo


def test_the_class_of_a_kernel_travels(scale):
    """By value if its name is not found elsewhere, as Numba's dispatchers of such classes do."""

    class Own(FastKernel):
        pass

    kernel = Own(scale, {}, {"nopython": True})
    assert kernel(np.ones(2)) == 2.0
    for pickler in (pickle, cloudpickle):
        data = pickler.dumps(kernel)
        other = pickle.loads(data.replace(str(kernel._uuid).encode(), str(uuid.uuid4()).encode()))
        assert type(other).__name__ == "Own" and isinstance(other, FastKernel) and other is not kernel
        assert other(np.ones(2)) == 2.0 and misses(other) == 0


def test_caching_on_disk_beside_received_code(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kernel = fast_args(scale)
    assert kernel(np.ones(2)) == 2.0
    other = received(kernel)
    other.enable_caching()
    assert other(np.ones(2)) == 2.0 and misses(other) == 0
    assert other(np.ones(2, "f4")) == 2.0 and misses(other) == 1
    assert other._stored_on_disk(other.signatures[1]) is not None


def test_a_moved_function_is_compiled(scaled):
    """Its exceptions name lines of the source."""
    moved = FunctionType(_scale.__code__.replace(co_firstlineno=1), globals())
    other = received(scaled, py_func=moved)
    assert other(np.ones(2)) == 2.0 and misses(other) == 1


def spoilt(entries: dict, how: str) -> object:
    ((name, data),) = entries.items()
    key, value = read(data)
    return {
        "truncated": {name: data[:-9]},
        "empty": {name: b""},
        "no bytes": {name: "text"},
        "changed": {name: zlib.compress(zlib.decompress(data)[:-1] + b"!")},
        "another key": {name: zlib.compress(framed(key + " ", value))},
        "another name": {"0" * 64: data},
        "no dictionary": [data],
    }[how]


@pytest.mark.parametrize("how", ["truncated", "empty", "no bytes", "changed", "another key", "another name", "no dictionary"])
def test_entries_that_are_no_code_are_left_alone(scaled, how):
    other = received(scaled, carried=spoilt(states_of(scaled)["carried"], how))
    assert other(np.ones(2)) == 2.0 and misses(other) == 1


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_pickle_is_refused(scaled, cut):
    data = pickle.dumps(scaled)
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        pickle.loads(data[: int(cut * len(data))])


def test_what_does_not_fit_is_left_out(scaled, monkeypatch):
    monkeypatch.setattr(carried_code, "extensions", dict)  # those of other tests
    size = scaled._pickled().size
    monkeypatch.setattr(carried_code, "MOST_BYTES", size + 100)
    scaled(np.ones(2, "f4"))
    content = scaled._pickled()
    assert content.signatures == 1 and content.size == size and "bytes" in next(iter(content.left_out.values()))
    other = received(scaled)
    assert other(np.ones(2)) == other(np.ones(2, "f4")) == 2.0 and misses(other) == 1
    told = str(scaled.explain(np.ones(2)))
    assert f"carries the machine code of 1 signature, {size} bytes; not that of (array(float32" in told, told
    for dtype in ("i1", "i2", "i4", "i8"):
        scaled(np.ones(2, dtype))
    told = str(scaled.explain(np.ones(2)))
    assert "(array(int16, 1d, C)) and 2 more: all code would be more than" in told, told


def test_code_that_cannot_be_carried():
    """Addresses of this process, types that only this process knows, functions that Numba's dispatchers have compiled."""
    adopted = njit(lambda x: x + 1)
    adopted(1)
    address = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(("cos", ctypes.CDLL(None)))
    kernels = [
        (fast_args(lambda x: address(x)), 0.0, 1.0),
        (fast_args(lambda f: f(1)), njit(lambda x: x + 1), 2),
        (fast_args(adopted), 1, 2),
    ]
    for kernel, argument, expected in kernels:
        assert kernel(argument) == expected
        content = kernel._pickled()
        assert content.signatures == 0 and len(content.left_out) == 1, content
        assert not states_of(kernel)["carried"]
    other = received(kernels[2][0])
    assert other(1) == 2 and misses(other) == 1


def test_accelerated_functions_carry_what_is_on_disk_too(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    from fastexchange import accelerate, decelerate

    accelerate()
    try:
        plain, cached = njit(scale), njit(cache=True)(scale)
    finally:
        decelerate()
    for kernel, expected in ((plain, 1), (cached, 0)):
        assert kernel(np.ones(2)) == 2.0
        other = received(kernel)
        assert other(np.ones(2)) == 2.0 and misses(other) == expected
        assert type(other).__mro__[:2] == type(kernel).__mro__[:2]


def test_code_from_disk_is_carried(scale, tmp_path, monkeypatch):
    """The receiver keeps on disk what it compiles, as the sender does; its own kernels come before those on disk."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    fast_args(scale, cache=True)(np.ones(2))
    loaded = fast_args(scale, cache=True)
    assert loaded(np.ones(2)) == 2.0 and misses(loaded) == 0
    assert loaded._pickled().signatures == 1
    other = received(loaded)
    assert other._is_cached and other.stats.cache_path == loaded.stats.cache_path
    assert other(np.ones(2)) == other(np.ones(2, "f4")) == 2.0 and misses(other) == 1
    assert received(loaded, carried=None)(np.ones(2, "f4")) == 2.0
    for file in tmp_path.rglob("*.entry"):
        file.unlink()
    again = received(loaded)
    assert again(np.ones(2)) == 2.0 and misses(again) == 0


def test_a_receiver_without_the_source_file_has_no_cache(scaled, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    names: dict = {"FACTOR": 2}
    exec(compile("def made(x):\n    return x[0] * FACTOR\n", "nowhere.py", "exec"), names)
    other = received(scaled, py_func=names["made"], is_cached=True)
    assert not other._is_cached and other(np.ones(2)) == 2.0


def test_exceptions_of_received_code():
    kernel = fast_args(lambda x: 1 // x)

    @fast_args
    def refusing(x):
        if x > 1:
            raise ValueError("too large", x)
        return kernel(x)

    assert refusing(1) == 1
    other = received(refusing)
    with pytest.raises(ValueError, match="too large") as raised:
        other(2)
    assert raised.value.args == ("too large", 2)
    with pytest.raises(ZeroDivisionError):
        other(0)
    assert misses(other) == 0


def test_compiled_events_are_those_of_signatures_without_code(scaled):
    """Numba's own event, by which profilers count compilations."""
    other = received(scaled)
    with event.install_recorder("numba:compile") as recorder:
        other(np.ones(2))
        assert not recorder.buffer
        other(np.ones(2, "f4"))
        assert recorder.buffer


def test_declared_signatures_are_not_compiled_again():
    kernel = fast_args(["float64(float32)", "int64(int64)"])(lambda x: x + x)
    other = received(kernel)
    assert misses(other) == 0 and set(other.overloads) == set(kernel.overloads)
    assert (other(np.float32(1)), other(2)) == (2.0, 4)
    with pytest.raises(TypeError):
        other("a")
    assert received(kernel, carried=None)(2) == 4


def test_a_result_of_another_type_is_not_taken():
    """A declared result is part of the code."""
    kernel = fast_args(lambda x: x)
    kernel.compile("float64(float32)")
    other = received(kernel)
    other.compile("float32(float32)")
    assert misses(other) == 1 and type(other(np.float32(1))) is float


# ---- what a pickle costs ---------------------------------------------------------------------------------------------


def test_a_pickle_has_the_values_of_now():
    """Also those that are reached by other functions, by attributes, or changed in place."""
    inside = {"__name__": "inside", "A": np.ones(1), "H": 1.0, "module": ModuleType("module")}
    inside["module"].K = 1.0
    exec("def helper(x):\n    return x + H + module.K + A[0]", inside)
    inside["helper"] = njit(inside["helper"])
    exec("def kernel(x):\n    return helper(x)", inside)
    kernel = fast_args(inside["kernel"])
    assert kernel(1.0) == 4.0 and pickle.dumps(kernel)
    inside["H"], inside["A"][0] = 100.0, 1000.0
    data = pickle.dumps(kernel)
    for each in (kernel, inside["helper"]):  # as in another process
        data = data.replace(str(each._uuid).encode(), str(uuid.uuid4()).encode())
    assert pickle.loads(data)(1) == 1102.0 == kernel(1)


def test_a_recompiled_kernel_arrives_with_the_values_of_now(scaled, monkeypatch):
    """In a process that has it with other values, too. There Numba's dispatchers stay as they are."""
    first = pickle.dumps(scaled).replace(str(scaled._uuid).encode(), b"as elsewhere" * 3)
    elsewhere = pickle.loads(first)
    assert elsewhere(np.ones(2)) == 2.0
    before = str(scaled._uuid)
    monkeypatch.setitem(globals(), "FACTOR", 5)
    scaled.recompile()
    again = pickle.dumps(scaled)
    assert pickle.loads(again) is scaled
    again = again.replace(before.encode(), b"as elsewhere" * 3).replace(str(scaled._uuid).encode(), b"another one!" * 3)
    other = pickle.loads(again)
    assert other is not elsewhere and other(np.ones(2)) == 5.0 and elsewhere(np.ones(2)) == 2.0
    assert pickle.loads(first) is elsewhere


def test_a_pickle_is_read_once(scaled, monkeypatch):
    read = []
    monkeypatch.setattr(pickled, "loads", lambda data: read.append(data) or loads(data))
    data = pickle.dumps(scaled).replace(str(scaled._uuid).encode(), str(uuid.uuid4()).encode())
    kernel = pickle.loads(data)
    assert kernel is not scaled and pickle.loads(data) is kernel and pickle.loads(pickle.dumps(kernel)) is kernel
    assert len(read) == 1
    scaled(np.ones(2, "f4"))
    further = pickle.dumps(scaled).replace(str(scaled._uuid).encode(), str(kernel._uuid).encode())
    assert pickle.loads(further) is kernel and len(read) == 2
    assert kernel(np.ones(2)) == kernel(np.ones(2, "f4")) == 2.0 and misses(kernel) == 0


def test_a_kernel_within_code_is_named_and_carries_none():
    """What ``objmode`` names is pickled when it is compiled, and with each entry: code with its own code in it had no end."""
    values = [np.ones(2, dtype) for dtype in ("f4", "f8", "i4")]

    @fast_args
    def named(x):
        return x.sum()

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
    other = pickle.loads(pickle.dumps(kernel).replace(str(kernel._uuid).encode(), str(uuid.uuid4()).encode()))
    assert other is not kernel and [other(value, 2) for value in values] == [7.0] * 3 and misses(other) == 0


def test_kernels_that_name_themselves_arrive():
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

    assert fibonacci(6) == 8 and even(4) and odd(3)
    for pickler in (pickle, cloudpickle):
        data = pickler.dumps([fibonacci, even, odd, factorial])
        for kernel in (fibonacci, even, odd, factorial):  # as in another process
            data = data.replace(str(kernel._uuid).encode(), str(uuid.uuid4()).encode())
        one, two, three, four = pickle.loads(data)
        assert four(5) == 120 and not four._can_compile
        assert one is not fibonacci and (one(6), two(4), three(3), two(3), three(4)) == (8, True, True, False, False)
        assert misses(one) == 0


def test_kernels_that_name_each_other():
    @fast_args
    def even(n):
        return True if n == 0 else odd(n - 1)

    @fast_args
    def odd(n):
        return False if n == 0 else even(n - 1)

    pair = [even, odd]
    assert even(4)
    for pickler in (pickle, cloudpickle):
        assert pickler.loads(pickler.dumps(pair)) == pair


def test_dask_recognises_a_kernel_that_has_compiled_since(scaled):
    tokenize = pytest.importorskip("dask.base").tokenize
    before = tokenize(scaled)
    scaled(np.ones(2, "f4"))
    assert tokenize(scaled) == before and tokenize(received(scaled)) != before


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_bound_launches_do_not_travel(scaled, pickler):
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        pickler.dumps(scaled.bind(np.ones(2)))


def test_functions_in_place_of_kernels_travel():
    """``NUMBA_DISABLE_JIT=1``."""
    run_python(
        """
        import numpy as np
        from numba import cloudpickle
        from fastexchange import fast_args

        FACTOR = 2

        @fast_args(out="x[n] -> y[n]")
        def scaled(x, y):
            y[:] = FACTOR * x

        assert cloudpickle.loads(cloudpickle.dumps(scaled))(np.ones(3)).tolist() == [2.0] * 3
        """,
        NUMBA_DISABLE_JIT="1",
    )

"""How kernels for CUDA are called: arguments, declared signatures, configurations, bound launches."""

import functools
import math
import pickle
import struct

import numpy as np
import pytest
from cuda_checks import all_given_back, is_refused, launched
from cuda_tensors import DeviceTensor
from interoperability import optional
from launches import ExportedTensor, Interface, address, device_array, dispatcher_of, kernel_of, launch_cached, tensor
from numba import types
from stub_processes import run_package

from fastexchange import BoundCudaLaunch, CudaError, bfloat16, fast_args, float8_e5m2, float16
from fastexchange.cuda.driver import driver
from fastexchange.cuda.targets import BFLOAT16, target_of
from fastexchange.ground.dtypes import dtype_field

pytestmark = pytest.mark.both_packages
INT_MAX = 2**31 - 1


@pytest.fixture
def x(package):
    return tensor(package)


def packed(*values) -> tuple[bytes, ...]:
    """The parameters that int64 and float64 arguments become."""
    return tuple(struct.pack("<q" if isinstance(value, int) else "<d", value) for value in values)


# ---- arguments -------------------------------------------------------------------------------------------------------
def with_defaults(a, b=2, c=3.5):
    pass


@pytest.mark.slow
def test_keywords_and_defaults(record, package, x):
    """Of what does not fit the parameters nothing is kept."""
    kernel = fast_args(package.jit(with_defaults))
    launcher = kernel[1, 32]
    for _ in range(4):
        for arguments, named, expected in (
            ((1,), {}, (1, 2, 3.5)), ((1, 5), {}, (1, 5, 3.5)), ((1,), {"c": 0.5}, (1, 2, 0.5)),
            ((), {"c": 0.5, "b": 7, "a": 1}, (1, 7, 0.5)), ((1, 5, 6.5), {}, (1, 5, 6.5)),
        ):  # fmt: skip
            assert launched(record, launcher, *arguments, **named).parameters == packed(*expected)
    record.clear()
    wrong = [
        ((), {"c": x}, "missing 1 required positional argument: 'a'"), ((x,), {"d": x}, "unexpected keyword argument 'd'"),
        ((x, 2, x, 4), {}, "from 1 to 3 positional arguments but 4 were"), ((x,), {"a": 2}, "multiple values for argument 'a'"),
    ]  # fmt: skip
    with all_given_back(launcher, x):
        for arguments, named, said in wrong * 20:
            is_refused(functools.partial(launcher, *arguments, **named), TypeError, "with_defaults()", said)
    assert record.launches == [] and len(kernel.signatures) == 1 == kernel.counts().slow


def test_what_is_no_kernel_or_no_launch(package, x):
    kernel = kernel_of(package, 1)
    is_refused(lambda: fast_args(package.jit(lambda *args: None)), TypeError, "*args")
    is_refused(lambda: kernel(x), ValueError, "kernel[grid, block]")
    is_refused(lambda: kernel.bind(x), TypeError, "kernel[grid, block].bind")
    is_refused(lambda: fast_args(kernel.dispatcher, out="x[n] -> y[n]"), TypeError, "need launch=")
    is_refused(lambda: fast_args(kernel.dispatcher, parallel=True), TypeError, "'parallel'")


def test_signatures_in_turn(record, package, x):
    """What one launch was does not show in the next, whichever way each goes."""
    y = DeviceTensor((2, 2), "int64", data=address(package) + 512)
    kernel = kernel_of(package, 2)
    launcher = kernel[1, 32]
    launches = [(1, x), (-2, x), (2**63, x), (1.5, x), (True, y), (np.int8(3), y), (np.float32(1), (x, y)), (y, x), (1j, 2)]
    expected = [launched(record, launcher, *arguments).packed for arguments in launches]
    assert len(set(expected)) == len(launches)
    for _ in range(4):
        assert [launched(record, launcher, *arguments).packed for arguments in launches] == expected
    taken = len(launches) - 1  # an int has one, unless it needs 64 bits without a sign
    assert kernel.counts() == (4 * len(launches) + 1, taken, taken)
    assert kernel.signatures == list(kernel.dispatcher.overloads) and len(kernel.signatures) == taken


# ---- declared signatures ---------------------------------------------------------------------------------------------
# a type, numbers that become one as NumPy converts them, and ints that it cannot hold
NUMBERS = [
    ("float32", [1.5, 1, -1, True, 2**53 + 1, 2**63, np.float32(2.25), np.float64(2), np.float16(1.5), np.int8(-3),
                 np.uint64(2**64 - 1), 0.1, 1e300, -1e300, math.nan, math.inf, np.bool_(True), np.uint8(200)], []),
    ("int32", [0, -1, INT_MAX, -INT_MAX - 1, True, np.int8(-1), np.uint8(255), np.uint64(5), np.int64(-7), np.uint32(INT_MAX)],
     [INT_MAX + 1, -INT_MAX - 2, 2**63, 2**64 - 1, 2**64, np.uint64(2**63 + 1), np.uint32(2**31), np.int64(-(2**40))]),
    ("uint64", [2**64 - 1, True, np.int8(5)], [-1, np.int8(-1), 2**64]),
    ("int64", [np.uint8(255)], [2**63, np.uint64(2**63)]),
    ("int8", [-128], [128, -129]),
    ("uint8", [255], [256, -1]),
    ("uint16", [65535], [65536]),
    ("int16", [], [np.uint16(32768)]),
    ("uint32", [], [2**32]),
    ("boolean", [True], []),
    ("float64", [2**53 + 1, np.float32(0.1), np.float16(1e-7)], []),
    ("float16", [0.1, 65520.0, 65519.0, -3e-8, 2**-25, 7, -math.inf], []),
]  # fmt: skip


@pytest.mark.parametrize("declared, numbers, beyond", NUMBERS, ids=[row[0] for row in NUMBERS])
def test_a_number_becomes_the_declared_one_as_numpy_converts_it(record, package, declared, numbers, beyond):
    launcher = kernel_of(package, 1, signature=f"void({declared})")[1, 1]
    for given in numbers:
        with np.errstate(over="ignore"):
            expected = np.dtype(declared.replace("boolean", "bool")).type(given).tobytes()
        launch_cached(launcher, given)
        assert {each.parameters for each in record.launches} == {(expected,)}, repr(given)
        record.clear()
    for given in beyond:
        launch_cached(launcher, type(given)(1))
        record.clear()
        for _ in range(3):
            is_refused(functools.partial(launcher, given), OverflowError, "kernel()")
        assert record.launches == []


def test_float16_as_numpy_rounds_it(record, package):
    launcher = kernel_of(package, 1, signature="void(float16)")[1, 1]
    halves = np.arange(0, 0x7C00, 61, dtype=np.uint16).view(np.float16).astype(float)
    middles = (halves[:-1] + halves[1:]) / 2
    for value in [*halves, *middles, *np.nextafter(middles, 9), *-np.nextafter(middles, -9)]:
        assert launched(record, launcher, float(value)).packed == np.float16(value).tobytes()
        record.clear()


MISFITS = [  # of (float32, int32, float32[:]), beside a tensor `x`; what they are refused with, and what that says
    *[((1.0, 1, make), TypeError, "no signature for arguments of types") for make in (
        lambda at: DeviceTensor((3, 4), data=at), lambda at: DeviceTensor((3,), "float64", data=at), lambda at: 1,
        lambda at: ExportedTensor((3,), data=at, readonly=True), lambda at: (DeviceTensor((3,), data=at),),
        lambda at: Interface(ExportedTensor((3,), data=at, readonly=True)), lambda at: Interface(DeviceTensor((1, 3), data=at)),
        lambda at: np.zeros(3), lambda at: np.zeros((3, 1), np.float32),
    )],
    *[((1.0, given, "x"), TypeError, "'a1' (position 1)") for given in (1.0, np.float32(1), np.float16(1))],
    *[((1.0, given, "x"), OverflowError, f"argument 'a1' (position 1): {given} does not fit into")
      for given in (2**31, np.int64(-(2**40)), np.uint64(2**63))],
    ((1.0, 2**31, np.zeros(3, np.float32)), OverflowError, "'a1'"),
    ((1.0, 1.5, np.zeros(3, np.float32)), TypeError, "cannot be converted to int32 exactly"),
    (((1.0, 2), 1, "x"), TypeError, "no signature"), ((1.0, 1), TypeError, "missing"),
]  # fmt: skip


def test_what_a_declared_signature_does_not_take(record, package, x):
    mixed, at = kernel_of(package, 3, signature="void(float32, int32, float32[:])"), address(package)
    launcher = mixed[1, 32]
    for _ in range(2):
        for given, kind, said in MISFITS:
            given = [x if isinstance(value, str) else value(at) if callable(value) else value for value in given]
            record.clear()
            is_refused(functools.partial(launcher, *given), kind, said)
            assert record.launches == []
            if said and len(given) == 3 and type(given[-1]) is not np.ndarray:
                explained = str(mixed.explain(*given))
                assert kind is OverflowError or ("refused with TypeError" in explained and said in explained)
        for given in (None, "text", (1,), 1j):
            with pytest.raises((TypeError, ValueError)):
                launcher(1.0, given, x)
        is_refused(lambda: launcher(1.0, 1, b=x), TypeError, "unexpected keyword")
        launch_cached(launcher, 1.0, 1, x)
    assert launched(record, launcher, a2=x, a1=2, a0=1).parameters[:2] == (np.float32(1).tobytes(), np.int32(2).tobytes())
    launcher(1.0, 1, np.zeros(3, np.float32))  # which the package copies
    assert "known: native" in str(mixed.explain(1.0, 1, x)) and len(mixed.signatures) == 1


def test_layouts_of_declared_arrays(record, package):
    c, f, a = (kernel_of(package, 1, signature=f"void(float32[{what}])")[1, 1] for what in (":,::1", "::1,:", ":,:"))

    def made(strides, cls=DeviceTensor):
        return cls((3, 4), "float32", strides, data=address(package))

    makers = [
        made, lambda strides: made(strides, ExportedTensor), lambda strides: Interface(made(strides)),
        lambda strides: device_array(package, made(strides)),
    ]  # fmt: skip
    fits = [(c, None), (c, (4, 1)), (f, (1, 3)), (a, None), (a, (1, 3)), (a, (8, 2)), (a, (-4, 1))]
    refused = [(c, (1, 3)), (c, (8, 1)), (c, (-4, 1)), (f, None), (f, (1, 4))]
    for make in makers * 2:
        record.clear()
        for launcher, strides in fits:
            launcher(make(strides))
        for launcher, strides in refused:
            is_refused(functools.partial(launcher, make(strides)), TypeError, "no signature")
        assert len(record.launches) == len(fits)


def test_declared_tuples_and_one_of_several_signatures(record, package):
    launcher = kernel_of(package, 1, signature="void(UniTuple(float32, 2))")[1, 1]
    for _ in range(4):
        launcher((1, 2.5))
    assert record.launches[-1].parameters == (np.float32(1).tobytes(), np.float32(2.5).tobytes())
    for wrong in ((1.0,), (1.0, 2.0, 3.0), 1.0, (1j, 2)):
        is_refused(lambda wrong=wrong: launcher(wrong), TypeError, "no signature")
    kernel = kernel_of(package, 1, signature=["void(int32)", "void(float64)"])
    launcher, three = kernel[1, 1], (np.int32(3).tobytes(),)
    assert "next such call compiles" in str(kernel.explain(1))
    for given, parameter in ((1, None), (1.5, packed(1.5)), (np.int32(3), three), (np.float32(2), packed(2.0))):
        for _ in range(2):
            launcher(given)
        # Which of the two an int64 becomes is the package's choice.
        assert parameter is None or record.launches[-1].parameters == parameter
    is_refused(lambda: launcher(1j), TypeError, "no signature")
    assert len(kernel.signatures) == 2 == kernel.counts().compiled


# ---- configurations --------------------------------------------------------------------------------------------------
def test_launchers_are_remembered(package):
    kernel = kernel_of(package, 0)
    assert kernel[1, 32] is kernel[1, 32] is not kernel[2, 32] and kernel[(1, 2), (3, 4)] is kernel[(1, 2), (3, 4)]
    assert kernel.configure(1, 32) is kernel.configure(1, 32)
    assert kernel.forall(10) is kernel.forall(10) is not kernel.forall(11)
    assert kernel[1, 32].kernel is kernel and kernel[[1], 32].configuration == kernel[1, 32].configuration
    for i in range(1, 5000):
        kernel[i, 32]
        kernel.forall(i)
    assert len(kernel._launchers) <= 4096 and len(kernel._for_tasks) <= 4096


NO_CONFIGURATIONS = {
    ValueError: [
        1, (1,), (), (1, 2, 3, 4, 5, 6), None, slice(1), ((), 32), ((1, 1, 1, 1), 32), (1, (1, 2, 3, 4)), (-1, 32), (1, 2**32),
        (1, 32, -1), (1, 32, None, -1), (1, 32, None, 2**32), (1, 32, None, 0, (1, 1, 1, 1)),
    ],
    TypeError: [
        (1.0, 32), (1, "32"), (None, 32), (1, 32, "stream"), (1, 32, 1.5), (1, 32, True), (1, 32, None, 1.0),
        (1, 32, None, 0, "c"), ({1}, 32),
    ],
}  # fmt: skip
NO_TASKS = {(-1,): ValueError, (1, -1): ValueError, (1.5,): TypeError, ("1",): TypeError, (1, None): TypeError}


def test_what_is_no_configuration(package):
    kernel = kernel_of(package, 0)
    for kind, configurations in NO_CONFIGURATIONS.items():
        for configuration in configurations:
            is_refused(functools.partial(kernel.__getitem__, configuration), kind, "kernel[...]")
    for tasks, kind in NO_TASKS.items():
        is_refused(functools.partial(kernel.forall, *tasks), kind, "forall()")
    is_refused(lambda: kernel.forall(), TypeError)
    is_refused(lambda: kernel.forall(1, sharedmem=-1), ValueError)


def test_for_all_tasks(stub, package, x):
    kernel = kernel_of(package, 1)
    stub.set_occupancy(10, 96)
    for _ in range(4):
        kernel.forall(0)(x)
        kernel.forall(0).bind(x)()
    assert stub.launches == []
    for launcher, *expected in [
        *[(kernel.forall(1000), 11, 96, 0)] * 4, (kernel.forall(1000, 128, None, 512), 8, 128, 512),
        (kernel.forall(1, tpb=32, sharedmem=16), 1, 32, 16), (kernel.forall(np.int64(96)), 1, 96, 0),
    ]:  # fmt: skip
        launch = launched(stub, launcher, x)
        assert [launch.grid[0], launch.block[0], launch.shared] == expected and launch.grid[1:] == launch.block[1:] == (1, 1)


def test_the_best_block_is_that_for_the_shared_memory(stub, package, x):
    """The driver is asked once for each amount of it that launches for tasks have, if they are not too many."""
    kernel = kernel_of(package, 1)
    stub.set_trace(True)
    few, many = [0, 1024, 512, 2048] * 10, [4 * i for i in (0, 1024, 2048, 512, 256)] * 10
    for amounts, least, most in ((few, 4, 4), (many, 4, 54)):
        for shared in amounts:
            kernel.forall(1000, 0, None, shared)(x)
        assert least <= stub.trace.count("cuOccupancyMaxPotentialBlockSize") <= most
    assert [launch.shared for launch in stub.launches] == few + many


def test_where_no_block_can_run(stub, package, x):
    for shared in (0, 1024):
        launcher = kernel_of(package, 1).forall(1000, 0, None, shared)
        stub.set_occupancy(0, 0)
        for _ in range(3):
            said = "kernel() was not launched (for 1000 tasks", f"no block with {shared} bytes", "LAUNCH_OUT_OF_RESOURCES"
            is_refused(functools.partial(launcher, x), CudaError, *said)
        stub.set_occupancy(264, 256)
        launched(stub, launcher, x)


@pytest.mark.parametrize("shared", [48 * 1024, 48 * 1024 + 1])
def test_dynamic_shared_memory(record, stub_or_none, package, x, shared):
    """On the stub: the driver is asked for more than a kernel has without asking, once for the most so far."""

    def are_asked(count) -> bool:
        names = "cuFuncSetAttribute", "cuKernelSetAttribute"
        return stub_or_none is None or sum(map(stub_or_none.trace.count, names)) == count

    launcher, is_more = kernel_of(package, 1)[1, 32, None, shared], shared > 48 * 1024
    if stub_or_none is not None:
        stub_or_none.set_trace(True)
    launch_cached(launcher, x)
    assert launched(record, launcher.bind(x)).shared == shared and are_asked(is_more)
    for amount in (110_000, shared, 105_000, 110_000):
        assert launched(record, launcher.kernel[1, 32, None, amount], x).shared == amount
    assert are_asked(is_more + 1)


@pytest.mark.filterwarnings("ignore:Could not find source")
@pytest.mark.parametrize("options", [{"max_registers": 32}, {"launch_bounds": 128}, {"fastmath": True}, {"lineinfo": True}])
def test_options_that_change_nothing_here(record, package, x, options):
    kernel = kernel_of(package, 1, **options)
    launch_cached(kernel[1, 32], x)
    assert kernel.why_not == "" and kernel.dispatcher.targetoptions.items() >= options.items()


def test_the_carveout_that_a_kernel_asks_for(stub, package):
    """The package sets it for the device for which the kernel is compiled, we for the others."""
    kernel = kernel_of(package, 1, shared_memory_carveout=50)
    for device in (0, 1):
        function = launched(stub, kernel[1, 32], DeviceTensor((4,), device=device)).function
        with driver().on(device):
            assert driver().attribute(function, "PREFERRED_SHARED_MEMORY_CARVEOUT") == 50


# ---- the package's own launch ----------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Could not find source")
def test_debug_kernels_and_extensions(stub, package):
    class Doubling:
        seen = 0

        def prepare_args(self, numba_type, value, **_):
            self.seen += 1
            return numba_type, 2 * value if type(value) is float else value

    extension, array = Doubling(), device_array(package, tensor(package))
    kinds = [({"debug": True, "opt": False}, array, "debug=True"), ({"extensions": [extension]}, 1.5, "extensions")]
    for options, value, why in kinds:
        kernel = kernel_of(package, 1, **options)
        kernel[1, 32](value)
        with all_given_back(kernel[1, 32], array):
            for _ in range(3):
                launched(stub, kernel[1, 32], value)
        assert kernel.counts()[:2] == (0, 4)
        explained = str(kernel[1, 32].explain(value))
        assert f"{kernel.target.name}'s own launch" in explained and why in explained
    assert stub.launches[-1].parameters == packed(3.0) and extension.seen == 4


def test_callbacks_before_a_launch(stub_or_none, package):
    launcher = kernel_of(package, 1)[1, 32]
    launcher(1.0)
    if package.__name__ != "numba.cuda":
        is_refused(lambda: launcher.pre_launch_callbacks, AttributeError)
        return
    called = []
    launcher.pre_launch_callbacks.append(lambda kernel, configuration: called.append((kernel, configuration)))
    for i in range(4):
        launcher(1.0)
        assert len(called) == i + 1
    assert called[0][1].griddim == (1, 1, 1) and (stub_or_none is None or len(stub_or_none.launches) == 5)
    assert "own launch" in str(launcher.explain(1.0)) and "own launch" not in str(launcher.kernel.explain(1.0))
    launcher.kernel.dispatcher[1, 32](1.0)
    assert len(called) == 4 and launcher.kernel[1, 64].pre_launch_callbacks == []
    DeviceTensor.streams[0] = int(package.stream().handle)  # of the tensors' framework: another launch to the package
    launcher(device_array(package, tensor(package)))
    assert len(called) == 5
    is_refused(lambda: launcher.kernel.forall(10).pre_launch_callbacks, AttributeError)


RECORDS = np.zeros(3, [("a", "i4"), ("b", "f8")])
ONLY_THEIRS = {
    "an array of the host": (lambda package: np.arange(3, dtype=np.float32), ["HtoD", "DtoH"]),
    "records of the host": (lambda package: RECORDS, ["HtoD", "DtoH"]),
    "a record": (lambda package: RECORDS[0], []),
    "records of the device": (lambda package: package.to_device(RECORDS), []),
    "dates of the device": (lambda package: package.to_device(np.zeros(3, "M8[s]")), []),
    "In": (lambda package: package.In(np.zeros(3)), ["HtoD"]),
    "Out": (lambda package: package.Out(np.zeros(3)), ["DtoH"]),
    "InOut": (lambda package: package.InOut(np.zeros(3)), ["HtoD", "DtoH"]),
}


@pytest.mark.parametrize("name", ONLY_THEIRS)
def test_what_only_the_package_takes(stub_or_none, package, name):
    """It takes arrays of the host, but no tensor that has an exchange table alone."""
    make, copies = ONLY_THEIRS[name]
    kernel, value = kernel_of(package, 2), make(package)
    on_both = fast_args(lambda a0, a1: None, cuda=kernel, launch=(1, 32))
    third = on_both if not copies and name != "a record" else kernel[1, 32]
    for launch in (kernel[1, 32], kernel[1, 32], third):
        if stub_or_none is not None:
            stub_or_none.clear()
        launch(1.0, value)
        if stub_or_none is not None:
            names = [entry.api for entry in stub_or_none.log]
            assert len(stub_or_none.launches) == 1 and all(any(copy in api for api in names) for copy in copies), names
    explained = str(kernel.explain(1.0, value))
    assert "own launch" in explained and "path package" in explained and kernel.counts().fast == 0
    if stub_or_none is not None:
        stub_or_none.fail(stub_or_none.launches[-1].api, 719)
        with pytest.raises(Exception, match="LAUNCH_FAILED"):  # the package's own error
            kernel[1, 32](1.0, value)
    kernel[1, 32](1.0, value)
    with all_given_back(kernel[1, 32], value):
        kernel[1, 32](1.0, value)
    if name == "an array of the host":
        x, first = DeviceTensor((4,)), f"argument 'a0' (position 0): {kernel.target.name} cannot take a cuda_tensors.DeviceTensor"
        said = f"{first}, and has to make this launch itself: only it takes argument 'a1' (position 1), a numpy.ndarray"
        is_refused(lambda: kernel[1, 32](x, value), TypeError, said)
        explained = str(kernel.explain(x, value))
        assert "refused with TypeError" in explained and said in explained


# ---- the kernel itself -----------------------------------------------------------------------------------------------
SCALE = 2.0


def scale(y):
    y[0] = SCALE


def test_recompile(record, package, monkeypatch):
    x = DeviceTensor((3,), data=address(package, 16))  # a kernel that writes: where no other test reads
    kernel = fast_args(package.jit(scale))
    bound = kernel[1, 32].bind(x)
    launch_cached(kernel[1, 32], x)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    kernel.recompile()
    launch_cached(kernel[1, 32], x)
    assert len({each.function for each in record.launches}) == 2 and kernel.counts().compiled == 1
    assert launched(record, bound).packed == record.launches[0].packed  # goes on as it was bound


def test_one_kernel_for_each_dispatcher(package):
    dispatcher = dispatcher_of(package, 1)
    kernel = fast_args(dispatcher)
    assert fast_args(dispatcher) is kernel is fast_args(kernel) and fast_args(dispatcher, grad="allow") is not kernel
    assert kernel.dispatcher is dispatcher and kernel.py_func is dispatcher.py_func and kernel.__name__ == "kernel"
    assert "kernel(a0)" in repr(kernel) and "grid (1, 1, 1), block (32, 1, 1)" in repr(kernel[1, 32])
    assert "for 10 tasks" in repr(kernel.forall(10))
    assert kernel.counts() == (0, 0, 0) and kernel.signatures == []


def test_pickling(record, package):
    kernel = fast_args(package.jit(with_defaults))
    launcher = kernel[(2, 3), 32, None, 64]
    launcher(1)
    for each in (kernel, kernel.forall(100), kernel[2, 32], launcher):
        again = pickle.loads(pickle.dumps(each))
        assert type(again) is type(each) and repr(again) == repr(each)
    assert again.configuration == launcher.configuration
    again(1)
    assert record.launches[-1].packed == record.launches[0].packed and record.launches[-1].grid == (2, 3, 1)
    is_refused(lambda: pickle.dumps(kernel[1, 32, 1]), TypeError, "stream")


@pytest.mark.slow
def test_the_disk_cache(package, tmp_path):
    imports = f"from {package.__name__} import jit\nfrom fastexchange import fast_args\n"
    (tmp_path / "compiled_kernels.py").write_text(f"{imports}@fast_args\n@jit(cache=True)\ndef fast(a, x):\n    x[0] = a\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from compiled_kernels import fast
        x = DeviceTensor((3,))
        for _ in range(4):
            fast[1, 32](2.0, x)
        stats = fast.dispatcher.stats
        print(len(stats.cache_hits), len(stats.cache_misses), len({{launch.packed for launch in stub.launches}}))
    """
    assert [run_package(code, package) for _ in range(2)] == ["0 1 1\n", "1 0 1\n"]


def test_precompile_launches_nothing(record, package, x):
    """Also by the name of the kernel for the CPU."""
    kernel = kernel_of(package, 2)
    assert kernel.precompile((2.5, x), {"a1": x, "a0": 1}) == kernel.signatures
    (taken,) = kernel.precompile("(float64, int64)")
    assert record.launches == [] and kernel.signatures[2:] == [taken] and kernel.counts().fast == 0
    for value in [x, 3] * 4:
        kernel[1, 32](2.5, value)
    assert len(record.launches) == 8 and len(kernel.signatures) == 3
    is_refused(lambda: kernel.precompile(x), TypeError, "into a tuple")
    is_refused(lambda: kernel.precompile((np.ones(3), 1)), TypeError, "give the signature")
    beside = kernel_of(package, 2)
    kernel = fast_args(lambda a0, a1: None, cuda=beside, launch=(1, 32))
    assert kernel.precompile((1, x)) == beside.signatures and kernel.counts().compiled == 0
    kernel.precompile((1, 2))
    assert kernel.counts().compiled == 1 == len(beside.signatures) and len(record.launches) == 8


# ---- elements that neither Numba nor a package for CUDA computes with, and names of half precision ----
def test_elements_that_nobody_computes_with_are_their_bits_if_asked(package):
    """bfloat16 is the package's; to compile a kernel with it takes NVRTC, which is not everywhere."""
    ml_dtypes, dispatcher = pytest.importorskip("ml_dtypes"), dispatcher_of(package, 1)
    asking = fast_args(dispatcher, storage=True)
    for dtype in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn):
        assert str(asking._element_of(dtype_field(np.dtype(dtype)))) == "uint8"
    for kernel in (asking, fast_args(dispatcher)):
        assert "bfloat16" in str(kernel._element_of(BFLOAT16)).lower()


def scaled(x, y):
    y[0] = bfloat16(np.float32(x[0]) * np.float32(2))


def halved(x, y):
    y[0] = float16(np.float32(x[0]) / np.float32(2))


def eighth(x, y):
    y[0] = float8_e5m2(1.5)


def test_names_of_half_precision_are_the_packages(package):
    """A kernel's source is one for processor and GPU; of formats that the package has not, its error tells."""
    target = target_of(package.jit(scaled))
    own = {"bfloat16": package.types.bfloat16, "float16": target.type_of(types.float16)}
    float32 = target.type_of(types.float32)

    def compiled(kernel, element):
        array = target.type_of(types.Array(types.float32, 1, "C")).copy(dtype=element)
        return package.compile_ptx(kernel, (array, array), cc=(8, 0))[0]

    if nvrtc := optional("cuda.bindings.nvrtc"):
        assert nvrtc.nvrtcVersion()[1] > 0
        for element in (own["bfloat16"], float32):
            assert ".entry" in compiled(scaled, element)
        with pytest.raises(Exception, match="has no type for float8_e5m2"):
            compiled(eighth, float32)
    assert ".entry" in compiled(halved, own["float16"])
    x = np.ones(1, np.float16)
    fast_args(halved)(x, x)  # on the processor
    assert x[0] == 0.5


# ---- bound launches --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [
    lambda package: tensor(package, (3, 4), strides=(8, 2)), lambda package: tensor(package, cls=ExportedTensor),
    lambda package: Interface(tensor(package)), lambda package: device_array(package, tensor(package)),
], ids=["tensor", "tensor that is exported", "interface", "device array"])  # fmt: skip
def test_a_bound_launch_is_the_launch_with_the_arguments_that_it_keeps(record, package, make):
    arguments = (2.5, make(package), True, (np.int8(3),), 1j)
    launcher = kernel_of(package, 5)[(4, 2), 64, None, 100]
    launch = launcher.bind(*arguments[:4], a4=1j)
    assert record.launches == []
    launcher(*arguments)
    assert type(launch) is BoundCudaLaunch and launch.launcher is launcher and launch.arguments == arguments
    assert [launch() for _ in range(4)] == [None] * 4
    assert len(record.launches) == 5 and len({each._replace(api="", thread=0) for each in record.launches}) == 1


def test_rebinding(record, package, x):
    y = DeviceTensor((7,), data=address(package) + 512)
    launcher = kernel_of(package, 2)[1, 32]
    with all_given_back(x, y):
        launch = launcher.bind(1, x)
        launch()
        launch.rebind(a1=y)()
        launcher(1, y)
        launch.rebind(a0=5, a1=tensor(package, dtype="float64"))()  # another signature
    assert record.launches[1].packed == record.launches[2].packed != record.launches[0].packed
    assert record.launches[3].parameters[0] == (5).to_bytes(8, "little")

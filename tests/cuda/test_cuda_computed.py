"""Launch configurations in the notation of shapes: what is launched, whoever reads the arguments, and what is refused."""

import pickle

import numpy as np
import pytest
from cuda_checks import is_for_tasks, is_refused, launched
from cuda_producers import ArrayInterface
from launches import Interface, kernel_of, launch_cached, tensor

from fastexchange import CudaError
from fastexchange.cuda.device_kernel import launcher_of


def launcher(package, launch, parameters="x, y", out=None, **options):
    """The launcher of an empty kernel with these parameters."""
    return launcher_of(kernel_of(package, parameters, **options), launch, "made", out)


def has_sizes(launch, grid, block) -> bool:
    """Whether a launch has these sizes. No block: `grid` is a number of tasks."""
    return is_for_tasks(launch, grid) if block is None else (launch.grid, launch.block) == (grid, block)


CONFIGURATIONS = [  # a configuration, the notation of outputs, shapes of x and y, grid and block, or the number of tasks
    (("(n + 15) // 16", 16), "x[n] -> y[n]", (100,), (100,), (7, 1, 1), (16, 1, 1)),
    (("(m + 15) // 16, n", (16, 8)), "x[m, n] -> y[n, m]", (33, 5), (5, 33), (3, 5, 1), (16, 8, 1)),
    ((("m", "n", 2), "n, 2 * n"), "x[m, n] -> y[m]", (6, 3), (6,), (6, 3, 2), (3, 6, 1)),
    (("x[..., d], y[..., 2] -> d", 32), None, (7, 9, 4), (7, 9, 2), (4, 1, 1), (32, 1, 1)),
    ((4, "n"), "x[n] -> y[n]", (64,), (1,), (4, 1, 1), (64, 1, 1)),
    (("n - 2", 32, None, 100), "x[n] -> y[]", (3,), (), (1, 1, 1), (32, 1, 1)),
    ("n", "x[n] -> y[n]", (1000,), (1000,), 1000, None),
    ("x[m, n] -> m * n", None, (100, 30), (1,), 3000, None),
]


@pytest.mark.parametrize("given", CONFIGURATIONS, ids=lambda given: str(given[0]))
def test_each_launch_has_the_sizes_for_its_shapes(package, record, given):
    launch, out, x_shape, y_shape, grid, block = given
    f = launcher(package, launch, out=out)
    x, y = tensor(package, x_shape), tensor(package, y_shape)
    for call in (lambda: f(x, y), lambda: f(y=y, x=x), lambda: launch_cached(f, x, y), f.bind(x, y), lambda: f(Interface(x), y)):
        record.clear()
        call()
        assert has_sizes(record.launches[-1], grid, block) and record.launches[-1].shared == (100 if len(launch) == 4 else 0)


def test_other_shapes_have_other_sizes_in_the_next_launch(package, record):
    f = launcher(package, ("(m + 15) // 16, n", 16), out="x[m, n] -> y[m]")
    rng = np.random.default_rng(0)
    for m, n in rng.integers(1, 1000, (50, 2)).tolist():
        assert launched(record, f, tensor(package, (m, n)), tensor(package, (m,))).grid == ((m + 15) // 16, n, 1)
    assert f.kernel.counts().slow == 1


@pytest.mark.parametrize("number", [3, np.int8(3), np.uint8(200), np.int16(300), np.int32(70_000), np.uint64(5)], ids=repr)
def test_ints_are_extents(package, record, number):
    f = launcher(package, ("2 * count", 32), "p, x, a, count=4, y=None", out="x[n], count -> y[n]")
    x = tensor(package)
    given = (1, (2.0, x)), x, 1j  # words and keys of other arguments come before
    for _ in range(5):
        assert launched(record, f, *given, number, x).grid == (2 * int(number), 1, 1)
    assert launched(record, f, *given, y=x).grid == (8, 1, 1)


def test_launches_that_python_or_the_package_makes(package, stub):
    """The package copies an array of the host, Python code exports an old interface; a debug kernel is the package's."""
    f, array = launcher(package, ("(n + 31) // 32", 32), out="x[n] -> y[n]"), package.device_array(3000, np.float32)
    for arguments in (
        (np.ones(70, np.float32), package.device_array(70, np.float32)),
        (ArrayInterface(stub, (70,), version=2), tensor(package, (70,))),
    ):
        assert has_sizes(launched(stub, f, *arguments), (3, 1, 1), (32, 1, 1))
    for launch in (("(n + 31) // 32", 32), "n"):
        f = launcher(package, launch, out="x[n] -> y[n]", debug=True, opt=False)
        assert is_for_tasks(launched(stub, f, array, array), 3000)


def test_no_tasks_launch_nothing(package, record):
    f = launcher(package, "n", out="x[n] -> y[n]")
    for shape, count in ((3,), 1), ((0,), 1), ((3,), 2), ((0,), 2):
        f(tensor(package, shape), tensor(package, shape))
        assert len(record.launches) == count


REFUSED = [  # a configuration, shape of x, error, message
    (("n // 4", 32), (3,), ValueError, r"grid of \(0, 1, 1\) blocks, for x of shape \(3,\)"),
    (("1, n", 32), (65536,), ValueError, r"grid of \(1, 65536, 1\).*65535"),
    (("n * n", 32), (2**20,), ValueError, "grid of"),
    (("1", "n"), (1025,), ValueError, r"block of \(1025, 1, 1\) threads.*1 to 1024"),
    (("1", "32, n"), (33,), ValueError, "block of"),
    (("1", "1, 1, n"), (65,), ValueError, "block of.*64 in its third"),
    (("1", "n"), (0,), ValueError, "block of"),
    (("n - 5", 32), (3,), ValueError, r"its grid cannot be computed.*is -2 \(n=3\)"),
    (("4 // n", 32), (0,), ValueError, "divides by zero"),
    (("n", 32), (3, 3), ValueError, "'x'.*has 2 dimensions"),
]


@pytest.mark.parametrize("launch, shape, error, message", REFUSED, ids=str)
def test_sizes_that_are_refused(package, record, launch, shape, error, message):
    f, x = launcher(package, launch, "x", out="x[n] -> y[n]"), tensor(package, shape)
    for _ in range(3):  # also after launches that have made a cache entry
        with pytest.raises(error, match=message) as caught:
            f(x)
        assert "kernel()" in str(caught.value)
    assert not record.launches
    launched(record, launcher(package, ("(n + 3) // 3", 32), "x", out="x[n] -> y[n]"), tensor(package, (3,)))


@pytest.mark.parametrize("value, error", [(2.0, TypeError), (True, TypeError), (2**63, OverflowError), ((1, 2), TypeError)])
def test_arguments_that_are_no_extents(package, record, value, error):
    f = launcher(package, ("k", 32), "x, k", out="x[n], k -> y[k]")
    f(tensor(package), 3)
    is_refused(lambda: f(tensor(package), value), error, "'k' (position 1) is an extent")
    is_refused(lambda: f(1.0, 3), TypeError, "'x' (position 0)", "needs its shape, and a float has none")
    assert len(record.launches) == 1


BAD = [  # a configuration, the notation of outputs, the error, its message
    ("k", "x[n] -> y[n]", ValueError, "launch='k': 'k' is no dimension"),
    ("n", None, ValueError, "launch='n': its names are not known"),
    ("", "x[n] -> y[n]", ValueError, "'' is no dimension"),
    ("n, n", "x[n] -> y[n]", ValueError, "a text alone is a number of tasks"),
    ("z[n] -> n", None, ValueError, "'z' is no parameter"),
    ("n.size", "x[n] -> y[n]", ValueError, "names and numbers"),
    ("...", "x[...] -> y[...]", ValueError, "any number of dimensions"),
    (("n, n, n, n", 32), "x[n] -> y[n]", ValueError, "one to three dimensions, not 4"),
    (("n", 2.5), "x[n] -> y[n]", TypeError, "made of ints and of texts"),
    (("n", ()), "x[n] -> y[n]", ValueError, "one to three dimensions, not 0"),
    (("n",), "x[n] -> y[n]", ValueError, "optionally with stream"),
    (("n", 32, None, -1), "x[n] -> y[n]", ValueError, "shared is a number of bytes"),
    (5, "x[n] -> y[n]", TypeError, "a number of tasks in the notation of shapes"),
    ((4.0, 32), None, TypeError, "grid is an int"),
    ((0, 32), None, ValueError, r"made.*a grid of \(0, 1, 1\) blocks"),
    ((1, 1025), None, ValueError, r"of \(1025, 1, 1\) threads"),
]


@pytest.mark.parametrize("launch, out, error, message", BAD, ids=str)
def test_configurations_that_are_refused(package, launch, out, error, message):
    with pytest.raises(error, match=message) as caught:
        launcher(package, launch, out=out)
    assert "made" in str(caught.value) or "kernel[...]" in str(caught.value)


def test_a_launcher_tells_its_notation(package, stub):
    f = launcher(package, ("(n + 31) // 32", 32), out="x[n] -> y[n]")
    assert "launch=('(n + 31) // 32', 32)" in repr(f)
    stub.fail("cuLaunchKernel", 701)
    is_refused(lambda: f(tensor(package), tensor(package)), CudaError, "was not launched (launch=('(n + 31) // 32', 32)")
    assert f.explain(tensor(package), tensor(package)).kind != "refused"
    notation = pickle.loads(pickle.dumps(f.configuration.notation))
    assert notation.words == f.configuration.notation.words

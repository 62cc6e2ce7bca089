"""``kernel.bind``: a call that keeps its arguments. Each call of it is an ordinary one, with the tensors as they are then."""

import copy
import weakref

import numba
import numpy as np
import pytest
from children import at_once
from frameworks import each_mutable_framework, needs_torch, torch
from made_producers import ONLY_NUMBA
from raising import check_raises

from fastexchange import BoundLaunch, fast_args


@fast_args
def axpy(a, x, y=None):
    y += a * x


total = fast_args(lambda x: x.sum())


@each_mutable_framework
def test_a_launch_does_what_the_call_does(framework):
    x, y = np.arange(4.0), np.zeros(4)
    launch = axpy.bind(2.0, y=framework.tensor(y), x=framework.tensor(x))
    assert type(launch) is BoundLaunch and launch.kernel is axpy and launch.arguments[0] == 2.0
    for times in range(1, 40):
        assert launch() is None and y.tolist() == (2 * times * x).tolist()


TAKEN = {
    "a text": (lambda x, text: x[0] + len(text), (np.ones(2), "tëxt")),
    "what only Numba reads": (lambda x, other: x[0], (np.ones(2), ONLY_NUMBA)),
    "scalars, tuples, None": (lambda a, b, c, d: a + b[0] + c, (1, (2.5, None), 1j, None)),
    "many": (lambda *rest: len(rest), tuple(np.ones(1) for _ in range(70))),
}


def test_whatever_a_kernel_takes_is_bound():
    """``test_calls.py`` has how arguments bind."""
    for name, (function, given) in TAKEN.items():
        launch = fast_args(function).bind(*given)
        assert [launch() for _ in range(4)] == [function(*given)] * 4, name


def test_it_holds_its_arguments_and_gives_them_back():
    """``tests/exchange/test_ownership.py`` counts references, of bound launches too."""
    launch = total.bind(np.ones(1000))
    dies = weakref.ref(launch.arguments[0])
    assert launch() == 1000.0 and dies() is not None
    launch.rebind(x=np.ones(2))
    assert launch() == 2.0 and dies() is None


@needs_torch
def test_it_follows_its_tensors():
    tensor = torch.arange(4.0)
    launch = total.bind(tensor)
    assert [launch() for _ in range(4)] == [6.0] * 4
    tensor.set_(torch.full((100,), 5.0))
    assert launch() == 500.0
    tensor.resize_(2).fill_(1.5)
    assert launch() == tensor.share_memory_().sum() == launch() == 3.0
    tensor.requires_grad_()
    check_raises(BufferError, "requires grad", launch)
    assert launch.rebind(x=tensor.detach())() == 3.0


def test_it_follows_its_arrays():
    array = np.arange(4.0)
    launch = total.bind(array)
    assert launch() == 6.0
    array.__setstate__(np.ones(3000).__reduce__()[2])
    assert launch() == 3000.0
    array = np.arange(4.0)
    launch = total.bind(array)
    array.resize(2, refcheck=False)
    assert launch() == 1.0
    array.dtype = np.int64
    assert launch() == array.sum()


REFUSED = {
    "bound to too few": (lambda launch: axpy.bind(1.0), TypeError, "missing 1 required positional argument: 'x'"),
    "called with an argument": (lambda launch: launch(1.0), TypeError, "takes no arguments, 1 given; rebind"),
    "rebound to what is no parameter": (lambda launch: launch.rebind(z=1), TypeError, "'z', which is no parameter; it has a, x"),
    "copied": (copy.copy, TypeError, "pickle the kernel and the arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    (refused, error, words), y = REFUSED[name], np.zeros(2)
    launch = axpy.bind(1.0, np.ones(2), y)
    for _ in range(2):
        check_raises(error, words, refused, launch)
        launch()
    assert y.tolist() == [2.0, 2.0] and "axpy" in repr(launch) and "bound to float" in repr(launch)


def test_a_call_raises_what_the_kernels_call_raises():
    @fast_args
    def checked(x, limit):
        if x[0] > limit:
            raise ValueError("too large")
        return x[0]

    launch = checked.bind(x := np.ones(1), 2.0)
    assert [launch() for _ in range(4)] == [1.0] * 4
    x[0] = 3
    check_raises(ValueError, "too large", launch)
    check_raises(TypeError, "'x'", launch.rebind(x=object()))
    assert launch.rebind(x=x, limit=4.0)() == 3.0


def test_recompiling_and_other_types():
    kernel = fast_args(lambda x: x[0] * 2)
    launch = kernel.bind(np.ones(2))
    assert launch() == 2
    kernel.recompile()
    assert launch() == launch.rebind(x=np.ones(2, np.int32))() == launch.rebind(x=(1,))() == 2


_called: list = []


def replace_argument(array):
    """Of the module, so that Numba before 0.66 need not pickle what it refers to."""
    return _called.pop().rebind(x=array.copy(), again=False)


def test_rebinding_while_it_is_called_keeps_what_the_call_began_with():
    fresh = np.ones(4)

    @fast_args(nogil=True)
    def kernel(x, again):
        before = x.sum()
        if again:
            with numba.objmode():
                replace_argument(fresh)
        return before + x.sum()

    launch = kernel.bind(np.full(4, 2.0), True)
    _called.append(launch)
    assert launch() == 16.0 and launch() == 8.0
    spinning = fast_args(total.py_func, nogil=True).bind(np.ones(1000))

    def call():
        assert {spinning() for _ in range(3000)} == {1000.0}

    at_once(call, repeated=[lambda: [spinning.rebind(x=np.ones(1000)) for _ in range(1000)]] * 2)

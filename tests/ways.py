"""The ways by which a tensor comes into a kernel that adds its elements, and a tensor that does something on its way."""

from collections.abc import Callable

import numba
from made_producers import ONLY_NUMBA, Dunder


def total(x):
    s = 0
    for i in range(x.size):
        s += x[i]
    return s


def total_beside(x, text):
    return total_njit(x)


def total_inside(pair):
    return total_njit(pair[0]) + pair[1]


def total_listed(tensors):
    s = 0
    for each in tensors:
        s += total_njit(each)
    return s


def total_of_all(*tensors):
    return total_njit(tensors[0])


total_njit = numba.njit(total)
WAYS = {
    "position": (total, lambda kernel, x: kernel(x)), "keyword": (total, lambda kernel, x: kernel(x=x)),
    "bound": (total, lambda kernel, x: kernel.bind(x)()),
    "beside a string": (total_beside, lambda kernel, x: kernel(x, "")),
    "beside what only Numba reads": (total_beside, lambda kernel, x: kernel(x, ONLY_NUMBA)),
    "in a tuple": (total_inside, lambda kernel, x: kernel((x, 0))),
    "in a list": (total_listed, lambda kernel, x: kernel([x])), "of *args": (total_of_all, lambda kernel, x: kernel(x)),
}  # fmt: skip


class Acting(Dunder):
    """A tensor whose ``__dlpack__`` first calls `act`, a function without parameters."""

    act: Callable[[], object] | None = None

    def __dlpack__(self, **options):
        if self.act is not None:
            self.act()
        return super().__dlpack__(**options)


def mode_of(kind: type, act: Callable):
    """A mode of PyTorch's, of functions or of dispatch, in which ``act(function, args)`` runs before each call that it sees."""

    def seen(self, function, types, args=(), kwargs=None):
        act(function, args)
        return function(*args, **(kwargs or {}))

    return type("Mode", (kind,), {"__torch_function__" if "Function" in kind.__name__ else "__torch_dispatch__": seen})()

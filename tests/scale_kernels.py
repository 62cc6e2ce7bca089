"""Kernels that the tests of several frameworks call: a product by rows and its gradients, and loops over elements."""

import re
from collections.abc import Callable

import numpy as np

from fastexchange import fast_args


def elementwise(head: str, statement: str, **names) -> Callable:
    """A function with this head, such as ``f(x, y)``, that runs a statement for each index `i` of its first parameter.

    `names`: what the function knows beside NumPy.
    """
    name, first = re.match(r"(\w+)\((\w+)", head).groups()
    space = {"__name__": __name__, "np": np, **names}
    exec(f"def {head}:\n    for i in range({first}.size):\n        {statement}\n", space)
    return space[name]


@fast_args(out="x[n, d], w[d] -> y[n, d]")
def scale(x, w, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * w[j]


@fast_args(out="grad_y[n, d], x[n, d], w[d] -> grad_x[n, d], grad_w[d]")
def scale_backward(grad_y, x, w, grad_x, grad_w):
    grad_w[:] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            grad_x[i, j] = grad_y[i, j] * w[j]
            grad_w[j] += grad_y[i, j] * x[i, j]

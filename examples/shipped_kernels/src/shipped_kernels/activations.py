"""Activations and losses of neural networks: scalars, and arrays that call the scalars' kernels."""

import math

import numpy as np

from fastexchange import fast_args


@fast_args
def relu(x):
    return x if x > 0 else x * 0


@fast_args
def leaky_relu(x):
    return x if x > 0 else 0.01 * x


@fast_args
def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@fast_args
def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


@fast_args
def silu(x):
    return x * sigmoid(x)


@fast_args
def elu(x):
    return x if x > 0 else math.expm1(x)


@fast_args
def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2.0)))


@fast_args
def hard_sigmoid(x):
    return min(max(x / 6 + 0.5, 0.0), 1.0)


@fast_args(out="x[n] -> out[n]")
def silu_of(x, out):
    for i in range(x.size):
        out[i] = silu(x[i])


@fast_args(out="x[n] -> out[n]")
def gelu_of(x, out):
    for i in range(x.size):
        out[i] = gelu(x[i])


@fast_args
def log_of_sum_of_exponentials(x):
    top = x.max()
    total = 0.0
    for value in x:
        total += math.exp(value - top)
    return top + math.log(total)


@fast_args
def softmax(x):
    shift = log_of_sum_of_exponentials(x)
    return np.exp(x - shift)


@fast_args
def cross_entropy(x, label):
    return log_of_sum_of_exponentials(x) - x[label]


@fast_args
def huber(x, y, delta):
    total = 0.0
    for i in range(x.size):
        error = abs(x[i] - y[i])
        total += 0.5 * error * error if error < delta else delta * (error - 0.5 * delta)
    return total / x.size


@fast_args
def squared_error(x, y):
    total = 0.0
    for i in range(x.size):
        total += (x[i] - y[i]) ** 2
    return total / x.size


def __precompile__():
    x, y, out = np.linspace(-2, 3, 50), np.linspace(1, 4, 50), np.empty(50)
    scalars = [relu, leaky_relu, sigmoid, softplus, silu, elu, gelu, hard_sigmoid]
    return [
        *((kernel, (-0.75,)) for kernel in scalars),
        (silu_of, (x, out)), (gelu_of, (x, out)),
        (log_of_sum_of_exponentials, (x,)), (softmax, (x,)), (cross_entropy, (x, 7)),
        (huber, (x, y, 1.0)), (squared_error, (x, y)),
    ]  # fmt: skip

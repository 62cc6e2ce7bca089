"""Two vectors into a number."""

import math

import numpy as np

from fastexchange import fast_args


@fast_args
def inner(x, y):
    s = 0.0
    for i in range(x.size):
        s += x[i] * y[i]
    return s


@fast_args
def norm(x):
    return math.sqrt(inner(x, x))


@fast_args
def euclidean(x, y):
    s = 0.0
    for i in range(x.size):
        s += (x[i] - y[i]) ** 2
    return math.sqrt(s)


@fast_args
def manhattan(x, y):
    s = 0.0
    for i in range(x.size):
        s += abs(x[i] - y[i])
    return s


@fast_args
def chebyshev(x, y):
    most = 0.0
    for i in range(x.size):
        most = max(most, abs(x[i] - y[i]))
    return most


@fast_args
def cosine_similarity(x, y):
    return inner(x, y) / (norm(x) * norm(y))


@fast_args
def correlation(x, y):
    n = x.size
    mx, my = x.sum() / n, y.sum() / n
    xx = yy = xy = 0.0
    for i in range(n):
        a, b = x[i] - mx, y[i] - my
        xx, yy, xy = xx + a * a, yy + b * b, xy + a * b
    return xy / math.sqrt(xx * yy)


@fast_args
def hamming(x, y):
    count = 0
    for i in range(x.size):
        count += x[i] != y[i]
    return count


@fast_args
def great_circle(latitude1, longitude1, latitude2, longitude2):
    """In radians, on a sphere of radius 1."""
    a = math.sin((latitude2 - latitude1) / 2) ** 2
    b = math.sin((longitude2 - longitude1) / 2) ** 2
    return 2 * math.asin(math.sqrt(a + math.cos(latitude1) * math.cos(latitude2) * b))


@fast_args
def nearest(points, x):
    """The index of the nearest of several points."""
    best, at = math.inf, -1
    for i in range(points.shape[0]):
        distance = euclidean(points[i], x)
        if distance < best:
            best, at = distance, i
    return at


def __precompile__():
    x, y, n = np.linspace(-2, 3, 40), np.linspace(1, 4, 40) ** 2, np.arange(40) % 7
    kernels = [inner, euclidean, manhattan, chebyshev, cosine_similarity, correlation]
    return [
        *((kernel, (x, y)) for kernel in kernels),
        (norm, (x,)), (hamming, (n, n[::-1].copy())), (great_circle, (0.1, 0.2, 0.3, 0.4)), (nearest, (np.stack((x, y)), y)),
    ]

"""A product by rows and its gradients, which the tests of several frameworks call."""

from fastexchange import fast_args


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

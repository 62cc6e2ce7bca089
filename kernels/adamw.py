"""One step of AdamW, Adam with decoupled weight decay, over all parameters of a model: one call, one pass over their memory.

Source: I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2, in the form of
``torch.optim.AdamW``: the decay is multiplied by the learning rate, and ``eps`` is added to the corrected root.

All tensors of a list have one dtype and one number of dimensions, as a kernel is compiled for one type. A model has parameters of
several ranks: :class:`AdamW` sorts them by rank and makes one call for each, which costs less than flat views of new gradients.

Parameters of 16 bits keep steps of less than half of the last place only by :mod:`~kernels.stochastic_rounding`.

Tested in ``tests/programs/test_kernels_nn.py`` and, for 16 bits, ``test_kernels_half.py`` against ``torch.optim.AdamW`` and
the same formula in NumPy.
"""

import math

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from fastexchange import fast_args

from .exponential import is_narrow
from .overlap import apart, injective, place
from .stochastic_rounding import mixed, rounded, rounds

_WORTH_THREADS = 1 << 16  # elements of one tensor; with fewer, one thread is as fast
_BLOCK = 1 << 14  # elements that a thread updates at a time
_WITH_KEY = 9  # numbers, of which the last is the key of stochastic rounding; it is missing where numbers are rounded to nearest


def _as_stored(value, param, numbers, j):
    """What to store as element `j` of `param`: `value`, or rounded stochastically, if there is a key."""
    return value


@overload(_as_stored)
def _as_stored_of(value, param, numbers, j):
    if len(numbers) == _WITH_KEY:
        return lambda value, param, numbers, j: rounded(value, param, numbers[-1], j)
    return lambda value, param, numbers, j: value


def _numbers_of(numbers, part):
    """The numbers for one of several parts, of which each has a key of its own."""
    return numbers


@overload(_numbers_of)
def _numbers_of_part(numbers, part):
    if len(numbers) == _WITH_KEY:
        return lambda numbers, part: (*numbers[:-1], mixed(numbers[-1] + part))
    return lambda numbers, part: numbers


# "contract": a multiplication and an addition may become one instruction, which rounds once
@njit(error_model="numpy", fastmath={"contract"})
def _update_block(param, grad, exp_avg, exp_avg_sq, numbers):
    decay, beta1, rest1, beta2, rest2, correction, eps, rate = numbers[:8]
    real = type(decay)
    for j in range(param.shape[0]):
        g = real(grad[j])
        m = beta1 * exp_avg[j] + rest1 * g
        v = beta2 * real(exp_avg_sq[j]) + rest2 * g * g
        exp_avg[j] = m
        exp_avg_sq[j] = v
        updated = real(param[j]) * decay - rate * m / (math.sqrt(v) * correction + eps)
        param[j] = _as_stored(updated, param, numbers, j)


@njit(parallel=True)
def _update_blocks(param, grad, exp_avg, exp_avg_sq, numbers):
    for i in prange((param.shape[0] + _BLOCK - 1) // _BLOCK):
        a, b = i * _BLOCK, (i + 1) * _BLOCK
        _update_block(param[a:b], grad[a:b], exp_avg[a:b], exp_avg_sq[a:b], _numbers_of(numbers, i))


def _update(param, grad, exp_avg, exp_avg_sq, numbers):
    """Update one parameter of any shape, which the other three have too."""
    for i in np.ndindex(param.shape):  # interpreted
        one = tuple(slice(k, k + 1) for k in i)
        views = [array[one].reshape(1) if i else array.reshape(1) for array in (param, grad, exp_avg, exp_avg_sq)]
        _update_block(*views, numbers)
        for array, view in zip((param, grad, exp_avg, exp_avg_sq), views, strict=True):
            array[i] = view[0]


@overload(_update)
def _update_of(param, grad, exp_avg, exp_avg_sq, numbers):
    arrays = param, grad, exp_avg, exp_avg_sq
    if any(array.ndim != param.ndim for array in arrays):  # refused before
        return lambda param, grad, exp_avg, exp_avg_sq, numbers: None
    if param.ndim == 1:

        def vector(param, grad, exp_avg, exp_avg_sq, numbers):
            if param.shape[0] < _WORTH_THREADS:
                _update_block(param, grad, exp_avg, exp_avg_sq, numbers)
            else:
                _update_blocks(param, grad, exp_avg, exp_avg_sq, numbers)

        return vector
    if all(array.layout == "C" for array in arrays):

        def contiguous(param, grad, exp_avg, exp_avg_sq, numbers):
            n = param.size
            _update(param.reshape(n), grad.reshape(n), exp_avg.reshape(n), exp_avg_sq.reshape(n), numbers)

        return contiguous
    if all(array.layout == "F" for array in arrays):

        def transposed(param, grad, exp_avg, exp_avg_sq, numbers):
            _update(param.T, grad.T, exp_avg.T, exp_avg_sq.T, numbers)

        return transposed

    def rows(param, grad, exp_avg, exp_avg_sq, numbers):
        for i in range(param.shape[0]):
            _update(param[i], grad[i], exp_avg[i], exp_avg_sq[i], _numbers_of(numbers, i))

    return rows


def _real_of(exp_avg):
    """The type of the arithmetic: that of the averages, but no narrower than float32."""
    return exp_avg.dtype.type


@overload(_real_of)
def _typed_real_of(exp_avg):
    if is_narrow(exp_avg.dtype):
        return lambda exp_avg: np.float32
    return lambda exp_avg: exp_avg.dtype.type


def _is_rounded(param):
    """Whether parameters of this type can be rounded stochastically."""
    return str(param.dtype) in ("bfloat16", "float16")


@overload(_is_rounded)
def _typed_is_rounded(param):
    found = rounds(param.dtype)
    return lambda param: found


def _with_key(numbers, seed, step):
    """The numbers and, if there is a seed, the key of that seed and step."""
    return numbers


@overload(_with_key)
def _numbers_with_key(numbers, seed, step):
    if seed in (types.none, None) or isinstance(seed, types.Omitted):
        return lambda numbers, seed, step: numbers

    def keyed(numbers, seed, step):
        high, low = np.int64(seed) >> 32, np.int64(seed) & 0xFFFFFFFF
        return (*numbers, mixed(mixed(mixed(low) ^ high) ^ np.int64(step)))

    return keyed


@njit
def _place(x):
    return place(x.reshape(1) if x.ndim == 0 else x)


@njit
def _check_memory(p, g, m, v):
    if not injective(p):
        raise ValueError("params: each element must have memory of its own")
    if not injective(m):
        raise ValueError("exp_avgs: each element must have memory of its own")
    if not injective(v):
        raise ValueError("exp_avg_sqs: each element must have memory of its own")
    if not (apart(p, g) and apart(p, m) and apart(p, v)):
        raise ValueError("params: one overlaps its gradient or one of its averages")
    if not (apart(g, m) and apart(g, v)):
        raise ValueError("exp_avgs, exp_avg_sqs: one overlaps its gradient")
    if not apart(m, v):
        raise ValueError("exp_avgs: one overlaps that of the squares")


@fast_args(grad="allow", cache=True)
def adamw_step(params, grads, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay, seed=None):
    """Update parameters, and the two running averages of each, from their gradients, in place.

    Parameters
    ----------
    params : list of tensors of one rank, of any shapes, floating. Written.
    grads : list of their gradients, of the same shapes, any real dtype.
    exp_avgs, exp_avg_sqs : lists of the averages of the gradients and of their squares, of the same shapes, floating, no
        narrower than `params`; zeros before the first step. Written.
    step : the number of this step, from 1 on.
    lr, eps, weight_decay : not negative.
    beta1, beta2 : from 0 to below 1.
    seed : None: parameters are rounded to nearest. An int: those of bfloat16 or float16 are rounded stochastically; equal seeds,
        steps and tensors give equal results, on any number of threads.

    All arithmetic is in the dtype of `exp_avgs`, or in float32 if that has 16 bits or fewer, but for what is the same for all
    elements, which is computed in float64. NaN and
    infinities are as the formula has them. Complex numbers do not compile; ``torch.view_as_real`` shows them as real ones.

    Aliasing: a parameter, its gradient and its averages must not overlap each other; none that is written may overlap itself.
    Parameters are updated in their order: one that stands in the list twice is updated twice.

    Raises ValueError if the lengths of the lists, a shape, a dtype, a number's range or an overlap breaks these rules, and for
    empty lists, whose type Numba cannot know.
    """
    count = len(params)
    if len(grads) != count:
        raise ValueError("grads: must be as many as params")
    if len(exp_avgs) != count:
        raise ValueError("exp_avgs: must be as many as params")
    if len(exp_avg_sqs) != count:
        raise ValueError("exp_avg_sqs: must be as many as params")
    if step < 1:
        raise ValueError("step: must be at least 1")
    if not lr >= 0:
        raise ValueError("lr: must not be negative")
    if not (beta1 >= 0 and beta1 < 1):
        raise ValueError("beta1: must be from 0 to below 1")
    if not (beta2 >= 0 and beta2 < 1):
        raise ValueError("beta2: must be from 0 to below 1")
    if not eps >= 0:
        raise ValueError("eps: must not be negative")
    if not weight_decay >= 0:
        raise ValueError("weight_decay: must not be negative")
    for i in range(count):
        param, exp_avg, exp_avg_sq = params[i], exp_avgs[i], exp_avg_sqs[i]
        if param.dtype.kind != "f":
            raise ValueError("params: their dtype must be floating")
        if exp_avg.dtype.kind != "f" or exp_avg.itemsize < param.itemsize:
            raise ValueError("exp_avgs: their dtype must be floating, no narrower than that of params")
        if exp_avg_sq.dtype.kind != "f" or exp_avg_sq.itemsize < param.itemsize:
            raise ValueError("exp_avg_sqs: their dtype must be floating, no narrower than that of params")
        if seed is not None and not _is_rounded(param):
            raise ValueError("seed: only parameters of bfloat16 and float16 are rounded stochastically")
        if grads[i].shape != param.shape:
            raise ValueError("grads: their shapes must be those of params")
        if exp_avg.shape != param.shape:
            raise ValueError("exp_avgs: their shapes must be those of params")
        if exp_avg_sq.shape != param.shape:
            raise ValueError("exp_avg_sqs: their shapes must be those of params")
        _check_memory(_place(param), _place(grads[i]), _place(exp_avg), _place(exp_avg_sq))
    real = _real_of(exp_avgs[0])
    numbers = (
        real(1 - lr * weight_decay),
        real(beta1),
        real(1 - beta1),
        real(beta2),
        real(1 - beta2),
        real(1 / math.sqrt(1 - beta2**step)),
        real(eps),
        real(lr / (1 - beta1**step)),
    )
    keyed = _with_key(numbers, seed, step)
    for i in range(count):
        _update(params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], _numbers_of(keyed, i))


class AdamW:
    """An optimiser of PyTorch parameters: one :func:`adamw_step` for each dtype and rank among them.

    A small one: one group of options, all attributes may be changed between steps; no schedules, hooks or state dictionary.

    Parameters
    ----------
    params : PyTorch tensors that require grad, on the CPU, floating. Their averages have their strides and their dtype; those of
        16 bits have averages of float32.
    lr, betas, eps, weight_decay : as in ``torch.optim.AdamW``.
    seed : as of :func:`adamw_step`; then all parameters are of 16 bits.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, seed=None):
        import torch

        self.lr, self.betas, self.eps, self.weight_decay, self.seed = lr, betas, eps, weight_decay, seed
        self.steps = 0
        by_type: dict = {}
        for param in params:
            by_type.setdefault((param.dtype, param.ndim), []).append(param)
        self.groups = []
        for (dtype, _), alike in by_type.items():
            wide = torch.float32 if dtype.itemsize <= 2 else dtype
            averages = ([torch.zeros_like(param, dtype=wide) for param in alike] for _ in range(2))
            self.groups.append((alike, *averages))

    def step(self):
        """Update all parameters from their ``grad``. Raises ValueError, before anything is written, if one has none."""
        grads = [[param.grad for param in params] for params, _, _ in self.groups]
        if any(grad is None for alike in grads for grad in alike):
            raise ValueError("params: one has no grad")
        self.steps += 1
        numbers = self.steps, self.lr, *self.betas, self.eps, self.weight_decay
        for n, ((params, exp_avgs, exp_avg_sqs), alike) in enumerate(zip(self.groups, grads, strict=True)):
            seed = None if self.seed is None else self.seed + (n << 32)
            adamw_step(params, alike, exp_avgs, exp_avg_sqs, *numbers, seed)

    def zero_grad(self):
        """Drop all gradients."""
        for params, _, _ in self.groups:
            for param in params:
                param.grad = None

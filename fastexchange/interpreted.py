"""What ``fast_args`` makes under ``NUMBA_DISABLE_JIT=1``, where ``njit`` gives the function back: it sees NumPy views."""

import functools
import inspect
import operator
import sys
from typing import Any

import numpy as np

from .dlpack import DLDataTypeCode
from .dtypes import NoNumbaType, as_kernel_has_it, element_of, is_computed
from .naming import type_name
from .producers import torch
from .producers.omitted import OMITTED
from .registry import dtype_in


def interpreted(func, manner):
    """A function that gives `func` NumPy views of its tensors, and its results back as a kernel of this `manner` does."""
    if not inspect.isfunction(func):
        return lambda function: interpreted(function, manner)  # signatures, options: nothing is compiled
    signature = inspect.signature(func)
    outputs = None
    if manner.out is not None:
        from .kernel import _parameters_and_outputs

        parameters, outputs = _parameters_and_outputs(func, manner.out)

    @functools.wraps(func)
    def call(*args, **kwargs):
        if outputs is not None:
            bound = parameters.bind(*args, **kwargs)
            return outputs.call(bound, manner.returns, lambda completed: plain(*_without_omitted(completed, parameters)))
        return plain(*args, **kwargs)

    def plain(*args, **kwargs):
        tensors: list = []
        lists: list = []
        given = [_view(value, tensors, lists, manner) for value in args]
        named = {name: _view(value, tensors, lists, manner) for name, value in kwargs.items()}
        try:
            result = func(*given, **named)
        finally:
            for value, viewed, before in lists:
                if len(viewed) != len(before) or any(map(operator.is_not, viewed, before)):
                    value[:] = _returned(viewed[:], tensors, type(tensors[0][0] if tensors else None))
        for value, viewed, _ in lists:
            if result is viewed:
                return value
        target = tensors[0][0] if tensors else None
        if isinstance(manner.returns, str):
            target = signature.bind(*args, **kwargs).arguments[manner.returns]
        cls = manner.returns if isinstance(manner.returns, type) else type(target)
        return _returned(result, tensors, cls)

    call.py_func = func
    return call


def _without_omitted(arguments: tuple, parameters) -> list:
    return [parameters.defaults[i] if value is OMITTED else value for i, value in enumerate(arguments)]


def _view(value, tensors: list, lists: list, manner):
    if isinstance(value, tuple):
        items = [_view(item, tensors, lists, manner) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
    if type(value) is list:
        for known, viewed, _ in lists:
            if known is value:
                return viewed
        viewed = [_view(item, tensors, lists, manner) for item in value]
        lists.append((value, viewed, viewed[:]))
        return viewed
    view = value
    if torch.is_tensor_type(type(value)):
        torch.check(value, manner.allows_grad, manner.storage)
        view = value.detach()
    try:
        if hasattr(view, "__dlpack__") and not isinstance(view, np.ndarray):
            view = np.from_dlpack(_Stored(view, manner.storage))
        if isinstance(view, np.ndarray):
            dtype = as_kernel_has_it(view.dtype, manner.storage)
            view = view if dtype is view.dtype else view.view(dtype)
            tensors.append((value, view))
        return view
    except NoNumbaType as error:
        field = error.field
    from .refusal import why_not_computed

    raise BufferError(f"a {type_name(type(value))} cannot be passed to the kernel: {why_not_computed(field, value)}")


class _Stored:
    """A producer of the tensor `of`, with elements as a kernel gets them: see ``dtypes.element_of``."""

    def __init__(self, of, storage: bool):
        self._of, self._storage = of, storage

    def __dlpack_device__(self):
        return self._of.__dlpack_device__()

    def __dlpack__(self, **options):
        capsule = self._of.__dlpack__(**options)
        dtype = dtype_in(capsule)
        if dtype is not None and dtype.lanes == 1:
            field = dtype.code | dtype.bits << 8
            element_of(field, self._storage)
            if not is_computed(field):
                dtype.code = int(DLDataTypeCode.kDLUInt)
        return capsule


def _returned(result, tensors: list, cls: type):
    if isinstance(result, (tuple, list)):
        items = [_returned(item, tensors, cls) for item in result]
        return type(result)._make(items) if hasattr(result, "_make") else type(result)(items)
    if not isinstance(result, np.ndarray):
        return result
    origin: Any = None
    for tensor, view in tensors:
        if result is view:
            return tensor
        if result.dtype == view.dtype and np.may_share_memory(result, view):
            origin = tensor  # of which a view has its type, also if the kernel had its bits
            if isinstance(tensor, np.ndarray) and tensor.dtype != view.dtype:
                result = result.view(tensor.dtype)
    if torch.is_tensor_type(cls):
        return torch.with_elements_of(sys.modules["torch"].from_numpy(result), origin)
    make = getattr(sys.modules.get(cls.__module__.partition(".")[0]), "from_dlpack", None)
    return make(result) if make is not None and not issubclass(cls, np.ndarray) else result

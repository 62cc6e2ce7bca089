"""The NumPy views that Numba's dispatcher gets in place of tensors and lists, and results made of them."""

import operator
from typing import Any

import numpy as np

from ..ground.parameters import with_items
from ..producers.framework import framework_of
from .results import as_target

__all__ = ["Views"]


class Views:
    """The tensors and lists of a call by Numba's dispatcher, and what the kernel gets for each."""

    def __init__(self):
        self._tensors: list[tuple[Any, np.ndarray, np.ndarray]] = []  # tensor, NumPy view, view passed to the kernel
        self.taken: dict[int, Any] = {}
        """By ``id`` of an argument that is not PyTorch's: what Numba gets for it."""
        self._copied: list[tuple[np.ndarray, np.ndarray]] = []  # array, copy that Numba gets
        self._lists: list[tuple[list, list, list]] = []  # list, list passed to Numba, copy of that

    def add(self, tensor, view: np.ndarray, viewed: np.ndarray) -> np.ndarray:
        """Note a tensor, its NumPy view, and `viewed`, the view passed to the kernel. Returns `viewed`."""
        self._tensors.append((tensor, view, viewed))
        return viewed

    def add_list(self, value: list, make_view) -> list:
        """Return the list that Numba gets for the list `value`: the same object each time."""
        for known, viewed, _ in self._lists:
            if known is value:
                return viewed
        viewed = make_view()
        self._lists.append((value, viewed, viewed.copy()))
        return viewed

    def of_one_type(self, items: list) -> list:
        """The arrays of a list with one layout, and readonly if one is: Numba's lists have items of one type.

        Those in another order are copied, and copied back when the kernel has returned. (Native code gives them a type for any.)
        """
        if not all(issubclass(type(each), np.ndarray) for each in items):
            return items  # Numba refuses the list
        if all(each.flags.c_contiguous for each in items) and len({each.flags.writeable for each in items}) == 1:
            return items
        is_readonly = not all(each.flags.writeable for each in items)
        made = []
        for each in items:
            item = each if each.flags.c_contiguous else each.copy(order="C")
            if item is not each and not is_readonly:
                self._copied.append((each, item))
            if is_readonly:
                item = item.view()
                item.flags.writeable = False
            made.append(item)
        return made

    def reflect(self, kernel, bound: tuple) -> None:
        """Apply the kernel's changes to the caller's lists, and to the memory of items that were copied."""
        for array, copied in self._copied:
            array[...] = copied
        for value, viewed, before in self._lists:
            if len(viewed) != len(before) or any(map(operator.is_not, viewed, before)):
                value[:] = [self.returned(kernel, bound, item) for item in viewed]

    def returned(self, kernel, bound: tuple, result):
        """Convert the kernel's result: arrays become tensors, as in native code (``dispatch.boxed_results``)."""
        if isinstance(result, (list, tuple)):
            if any(result is value for value in bound):
                return result
            for value, passed, _ in self._lists:
                if result is passed:
                    return value
            return with_items(result, [self.returned(kernel, bound, item) for item in result])
        if not issubclass(type(result), np.ndarray):
            return result
        if result.dtype.type is np.void and result.dtype.names is None:
            raise TypeError(f"{kernel.__qualname__}(): NumPy has no dtype for its result; install ml_dtypes, which has one")
        origin: Any = None
        for tensor, view, viewed in self._tensors:
            is_ndarray = isinstance(tensor, np.ndarray)
            is_taken_so = result.flags.writeable or not viewed.flags.writeable
            if result is viewed or ((is_taken_so or not is_ndarray) and _is_same(result, viewed, is_ndarray)):
                return tensor
            if viewed.dtype == result.dtype and np.may_share_memory(result, viewed):
                origin = tensor
                result = result if view.dtype == viewed.dtype else result.view(view.dtype)
        made = as_target(result, self._like(kernel, bound), kernel.__qualname__)
        return framework_of(made).with_elements_of(made, origin)

    def _like(self, kernel, bound: tuple):
        """The tensor, or the type, that says what new tensors are; None: there is none."""
        if isinstance(kernel.returns, type):
            return kernel.returns
        if kernel.returns is not None:
            return bound[kernel._parameters.names.index(kernel.returns)]
        return self._tensors[0][0] if self._tensors else None


def _is_same(array: np.ndarray, other: np.ndarray, is_exact: bool) -> bool:
    """Whether two arrays show the same elements. Without `is_exact` strides to no element are not compared."""
    if (array.dtype, array.shape, array.ctypes.data) != (other.dtype, other.shape, other.ctypes.data):
        return False
    steps = zip(array.shape, array.strides, other.strides, strict=True)
    return all(one == another for extent, one, another in steps if is_exact or (extent > 1 and array.size))

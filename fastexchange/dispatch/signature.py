"""What the Numba types of a call's arguments tell of its memory blocks: lists, readonly arrays."""

from typing import Any, cast

from numba.core import types


def lists_in(numba_types) -> tuple:
    """The list types among these, also in tuples, in the order in which they are read."""
    found: list = []
    for numba_type in numba_types:
        if isinstance(numba_type, types.List):
            found.append(numba_type)
        elif isinstance(numba_type, types.BaseTuple):
            found += lists_in(cast(Any, numba_type).types)
    return tuple(found)


def readonly_arrays(numba_types) -> int:
    """``fx_overload.readonly_arrays`` for parameters of these types. With a list among them, all bits are equal."""
    lists = lists_in(numba_types)
    with_blocks = [leaf for leaf in _leaves(numba_types) if isinstance(leaf, types.Buffer | types.UnicodeType)]
    readonly = [isinstance(leaf, types.Buffer) and not leaf.mutable for leaf in with_blocks]
    if lists:
        return -int(any(readonly) or any(not each.dtype.mutable for each in lists if isinstance(each.dtype, types.Buffer)))
    return sum(1 << index for index in {min(index, 62) for index, is_readonly in enumerate(readonly) if is_readonly})


def _leaves(numba_types):
    for numba_type in numba_types:
        if isinstance(numba_type, types.BaseTuple):
            yield from _leaves(cast(Any, numba_type).types)
        else:
            yield numba_type

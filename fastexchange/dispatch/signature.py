"""What the Numba types of a call's arguments tell of its memory blocks: lists, readonly arrays."""

from numba.core import types

from ..ground.numba_internals import leaves_of


def lists_in(numba_types) -> tuple:
    """The list types among these, also in tuples, in the order in which they are read."""
    return tuple(each for each in leaves_of(*numba_types) if isinstance(each, types.List))


def readonly_arrays(given: tuple, taken: tuple) -> int:
    """``fx_overload.readonly_arrays`` for arguments of the types `given`, and parameters of the types `taken`.

    With a list among them, all bits are equal.
    """
    lists = lists_in(taken)
    there = [each for each, own in zip(taken, given, strict=True) if own != types.none]  # None for an optional has no block
    with_blocks = [leaf for leaf in leaves_of(*there) if isinstance(leaf, types.Buffer | types.UnicodeType)]
    readonly = [isinstance(leaf, types.Buffer) and not leaf.mutable for leaf in with_blocks]
    if lists:
        return -int(any(readonly) or any(not each.dtype.mutable for each in lists if isinstance(each.dtype, types.Buffer)))
    return sum(1 << index for index in {min(index, 62) for index, is_readonly in enumerate(readonly) if is_readonly})

"""The cache entries of a kernel, by which native code makes the calls that it has made before."""

from typing import NamedTuple

from fastexchange._abi import ffi
from fastexchange.dispatch import structs
from fastexchange.dispatch.owning_exports import TURNS


class CacheEntry(NamedTuple):
    """Its address, and the ``fx_row``s of its values."""

    address: int
    rows: list

    @property
    def types(self) -> list[int]:
        """The addresses of its types; 0 for one that has died."""
        return [ffi.cast("fx_entry *", row.entry).address for row in self.rows]


def cache_entries(kernel) -> list[CacheEntry]:
    """Those of the signatures that the kernel has now."""
    found = []
    for filed in kernel._native._overloads.values():
        at = filed.native.cached
        while at:
            overload = ffi.cast("fx_overload *", at)
            first = at + structs.OVERLOAD_SIZE + structs.ROW_SIZE * (1 + TURNS * overload.row_count)
            rows = ffi.cast("fx_row *", first)[0 : overload.row_count]
            found.append(CacheEntry(at, [row for row in rows if row.key]))
            at = overload.cached
    return found

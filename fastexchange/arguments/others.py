"""Objects that only Numba's own dispatcher can read, or refuse."""

from ..ground.numba_internals import is_typed_by_extension
from .kind import OTHER, Discovery


def find_typed(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Types with a Numba type by an extension of Numba: kernels read them as that type, as ``@njit`` does."""
    if not is_typed_by_extension(cls):
        return None
    notes.append("an extension of Numba gives it a type of its own")
    return Discovery(OTHER, notes=notes)


def find(cls: type, notes: list[str], instance=None) -> Discovery:
    """Any type."""
    notes.append("it is no tensor, scalar or tuple: Numba's own dispatcher unboxes it, and with it the whole call")
    return Discovery(OTHER, notes=notes)

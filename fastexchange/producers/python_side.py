"""Python objects that a producer's native code needs: names, functions, addresses. Looked up once per process."""

from ..ground import cpython as c
from ..ground.cpython import OB_ITEM
from ..ground.native import cstring, load, native, static_array, store


def python_side(module: str):
    """Make a native function that returns the address of the items of ``PYTHON_SIDE``, a tuple in the module of this full name.

    The function's first call imports the module, and keeps the tuple for ever. If that fails it returns 0, with an exception set.
    """
    slot_name = f"{module}.PYTHON_SIDE"

    @native
    def python_items():
        slot = static_array(slot_name, 1)
        side = load(slot)
        if side == 0:
            imported = c.PyImport_ImportModule(cstring(module))
            if imported == 0:
                return 0
            side = c.PyObject_GetAttrString(imported, cstring("PYTHON_SIDE"))
            c.Py_DecRef(imported)
            if side == 0:
                return 0
            store(slot, side)
        return side + OB_ITEM

    return python_items

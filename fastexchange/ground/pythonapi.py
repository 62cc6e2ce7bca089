"""CPython's C functions for calls from Python.

``ctypes.pythonapi`` is shared by the whole process: setting the argument types of a function changes them for all libraries. So
each function here has a prototype of its own. They keep the GIL, and raise the C function's exceptions.
"""

import ctypes

__all__ = [
    "PyCapsule_GetPointer",
    "PyCapsule_IsValid",
    "PyCapsule_New",
    "PyCapsule_SetName",
    "PyMem_RawFree",
    "PyType_GetSlot",
    "PyType_Modified",
    "Py_DecRef",
    "Py_IncRef",
    "prototype",
]

_OBJECT, _ADDRESS = ctypes.py_object, ctypes.c_void_p


def prototype(name: str, result, *arguments):
    """Return the C function of this name with these ctypes types."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


Py_IncRef = prototype("Py_IncRef", None, _OBJECT)
Py_DecRef = prototype("Py_DecRef", None, _OBJECT)
PyType_Modified = prototype("PyType_Modified", None, _OBJECT)
PyType_GetSlot = prototype("PyType_GetSlot", _ADDRESS, _OBJECT, ctypes.c_int)
PyMem_RawFree = prototype("PyMem_RawFree", None, _ADDRESS)
# A capsule's name is bytes, an address or None. It has to live as long as the capsule.
PyCapsule_New = prototype("PyCapsule_New", _OBJECT, _ADDRESS, _ADDRESS, _ADDRESS)
PyCapsule_IsValid = prototype("PyCapsule_IsValid", ctypes.c_int, _OBJECT, _ADDRESS)
PyCapsule_GetPointer = prototype("PyCapsule_GetPointer", _ADDRESS, _OBJECT, _ADDRESS)
PyCapsule_SetName = prototype("PyCapsule_SetName", ctypes.c_int, _OBJECT, _ADDRESS)

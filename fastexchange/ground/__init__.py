"""What everything else stands on: CPython, Numba and DLPack as they lie in memory, native functions, names."""

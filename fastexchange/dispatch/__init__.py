"""The consumer side: from a vectorcall to a compiled kernel.

``structs`` declares the structs of native code, ``vectorcall`` is the native dispatcher, ``signature`` translates keys into
Numba types, ``fast_entry`` and ``boxing`` make the machine code that calls a kernel and boxes its result.
"""

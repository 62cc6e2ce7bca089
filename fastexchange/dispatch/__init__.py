"""The consumer side: from a vectorcall to a compiled kernel.

``structs`` declares the structs of native code, ``vectorcall`` is the native dispatcher, ``signature`` translates keys into
Numba types. Machine code is made for each signature (``trampoline``, ``boxing``); cache entries are data (``rows``).
"""

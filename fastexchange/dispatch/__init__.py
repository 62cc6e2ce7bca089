"""The consumer side: from a vectorcall to a compiled kernel.

``layout`` declares what native code reads, ``shim`` is the native code, ``signature`` translates its keys into Numba
types, ``entry`` makes the machine code that calls a kernel with flat words and boxes what it returns.
"""

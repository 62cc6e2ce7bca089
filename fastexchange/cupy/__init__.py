"""CuPy: its arrays as arguments of kernels for CUDA. No module here imports CuPy before a program has.

``device_arrays``: their kind. It is read in memory, where ``array_fields`` has found what native code needs. Kernels for the CPU,
and launches with arrays that are not as usual, take a CuPy array as any object with its protocols.
"""

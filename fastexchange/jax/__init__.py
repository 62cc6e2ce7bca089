"""JAX: how its arrays are read.

A *known* array is one that native code has found to be computed, on the CPU and in C order. JAX then gives its address, in one
call; shape and dtype are read in memory. Every other array is exported first, for which JAX waits.
"""

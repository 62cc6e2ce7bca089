"""JAX: its arrays as arguments, and kernels in functions that it compiles. No module here imports JAX before a program has.

``array_kind``: its kind of argument. A *known* array is one that native code has found to be computed, on the CPU and in C order.
JAX then gives its address, in one call; shape and dtype are read in memory, where ``layout`` has found them. Every other array is
exported first, for which JAX waits. ``put``: results become its arrays. ``jax_framework``: what the others ask.

``xla_calls``: calls that JAX traces, with ``gradients`` and ``mesh_axes``. ``xla_target``: the kernels that compiled functions
name. ``xla``: the handler that XLA calls.
"""

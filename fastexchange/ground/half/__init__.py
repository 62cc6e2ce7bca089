"""Numbers of 8 and 16 bits in compiled code: bfloat16, float16 and four formats of float8.

Numba cannot compute with them on a CPU. Here an element is a code in memory, float32 where it is used, and is rounded where it is
stored; LLVM makes vectors of the conversions. Importing ``known`` teaches Numba all of it; nothing is compiled.
"""

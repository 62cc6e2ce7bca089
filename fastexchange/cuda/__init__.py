"""Kernels for CUDA: the way of an argument is that of ``dispatch``, and it ends in the driver's ``cuLaunchKernel``.

``cuda_kernel`` is what users have, ``launcher`` what they call. ``native_launch`` is native: from the words that
``dispatch.read_arguments`` has written to the driver. ``targets`` knows the packages that compile: their dispatchers, types and
parameters. ``driver`` is CUDA's driver, ``streams`` the order of work, ``array_interface`` and ``python_exports`` the
producers without an exchange table. Nothing here but ``targets`` is imported before the first kernel for CUDA is made.
"""

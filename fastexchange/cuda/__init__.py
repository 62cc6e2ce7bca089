"""Kernels for CUDA: the way of an argument is that of ``dispatch``, and it ends in the driver's ``cuLaunchKernel``.

``kernel`` is what users have, ``launcher`` what they call. ``launching`` and ``entry`` are native: from the words that
``dispatch.read_arguments`` has written to the driver. ``targets`` knows the packages that compile: their dispatchers, types and
parameters. ``driver`` is CUDA's driver, ``streams`` the order of work, ``views`` the producers without an exchange
table. Nothing here is imported before the first kernel for CUDA is made.
"""

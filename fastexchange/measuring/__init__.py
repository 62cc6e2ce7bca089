"""Measuring the cost of a call.

``overhead`` has ``fastexchange.measure``. It uses ``timing`` (statements in rounds), ``null_kernels`` (kernels that do nothing),
``argument_costs``, ``exported_calls`` (the producers' part), ``alternatives`` (other ways to call), ``restoring`` (of arguments)
and ``progress``; ``launches`` does the same for kernels for CUDA.
``report`` is its result, ``magic`` its command in IPython. ``files`` and ``tables`` store and show runs.
"""

"""Measuring the cost of a call.

``overhead`` has ``fastexchange.measure``. It uses ``timing`` (statements in rounds), ``null_kernels`` (kernels that do nothing),
``exported_calls`` (the producers' part), ``alternatives`` (other ways to call), ``restoring`` (of arguments) and ``progress``.
``report`` is its result, ``magic`` its command in IPython. ``files`` and ``tables`` store and show runs.
"""

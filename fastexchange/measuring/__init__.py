"""What a call costs.

``timing`` is how statements are timed, ``files`` and ``tables`` how runs are kept and shown. ``overhead`` has
``fastexchange.measure``, with ``null_kernels`` (kernels that do nothing), ``exports`` (the producers' part), ``alternatives``
(other ways to call), ``restoring`` (of the arguments) and ``progress``; ``report`` is what it returns, ``magic`` what IPython has
of it.
"""

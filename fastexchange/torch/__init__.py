"""PyTorch: its tensors as arguments, and kernels as its operators. No module here imports PyTorch before a program has.

``checks``: what the others ask (``producers.framework``). ``tensor_kind``: its kind of argument. ``offsets``, ``samples``,
``guard``, ``queries``: where its tensors' fields are in memory, verified, and what native code reads there. ``modes``,
``storages``, ``odd_tensors``, ``dispatch_table``: what it keeps of threads, memory, tensors and operators. ``operator`` makes
operators, by ``schema``, ``declaration``, ``library``, ``autograd``, ``transforms`` and ``mapped``. ``operator_call`` calls one;
``boxed_operator`` and ``boxed_kernel`` are called by its dispatcher. ``tracing``: calls that it traces. ``launched_kernel``: an
operator of a kernel for CUDA.
"""

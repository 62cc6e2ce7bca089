"""fastexchange: tensors of any framework straight into Numba kernels, at the cost of hand-written C."""

from .dlpack import DLDataTypeCode, DLDeviceType
from .kernel import FastKernel, KernelStats, fast_args

__all__ = ["DLDataTypeCode", "DLDeviceType", "FastKernel", "KernelStats", "fast_args"]
__version__ = "0.1.0"

"""What arrays with ``__cuda_array_interface__`` and other objects are to kernels for CUDA."""

from ..arguments.kind import Kind
from ..arguments.tensors import exported, read_tensor
from ..dispatch import structs

VIEW = Kind(
    "device-array", "its memory and shape are read once and kept as long as it lives", structs.FORM_TENSOR, read_tensor,
    exports=structs.EXPORTS_NEVER,
)
"""Device arrays of Numba's packages: each object has an ``fx_entry`` that shows it."""
INTERFACE = exported("cuda-interface", "its __cuda_array_interface__ is read in every launch")
PACKAGE = Kind("package", "only the kernel's own package takes it, so that makes the whole launch", structs.FORM_OTHER)

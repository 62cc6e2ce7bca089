"""Make the native code that wheels carry: ``python -m fastexchange._native_build``, which ``.ci/wheel`` runs with each Python.

It compiles all C functions of this checkout for every processor of each platform, x86-64 and aarch64 with Linux, and
writes the files that ``ground.shipped`` reads. The same sources, Python, Numba and llvmlite give the same bytes.
"""

import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from .command.native_code import native_code

TRIPLES = {"x86_64-linux-gnu": "x86_64-unknown-linux-gnu", "aarch64-linux-gnu": "aarch64-unknown-linux-gnu"}
"""By the platform's name in the name of a Python's ABI: its name for LLVM."""
_SETTINGS = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "3", "PYTHONHASHSEED": "0"}


def main() -> int:
    """Start a process with the settings under which the code is the same on every machine, and build in it."""
    if any(os.environ.get(name) != value for name, value in _SETTINGS.items()):
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
            environment |= {**_SETTINGS, "NUMBA_CACHE_DIR": folder}
            return subprocess.run([sys.executable, "-m", f"{__package__}._native_build"], env=environment).returncode
    from .ground.numba_code import number_names
    from .ground.numba_internals import global_compiler_lock

    with global_compiler_lock, number_names("native"):
        build()
    return 0


def build() -> None:
    """Compile everything, and write a file for each platform."""
    from .dispatch import boxing
    from .ground import numba_code, numba_internals, shipped
    from .ground.sources import code_digest, digest_of, source_files

    found = numba_internals.failures()
    if found:
        raise SystemExit(f"Numba {numba_internals.numba.__version__} is not the one that native code is for: {found}")
    here = str(sysconfig.get_config_var("SOABI"))
    version, _, platform = here.partition("-x86_64")
    if not platform or f"x86_64{platform}" not in TRIPLES:
        raise SystemExit(f"native code is made on Linux with x86-64, for all platforms; this Python's ABI is {here}")
    for name in TRIPLES:  # else this process would use their code
        shipped.path_of(f"{version}-{name}").unlink(missing_ok=True)
    functions = {}
    files: dict[str, Path] = {}
    values = list(native_code())
    for number, value in enumerate(values, 1):
        print(f"{number} of {len(values)}, for {version}: {'.'.join(map(str, value.key))}", flush=True)
        files |= source_files(*value.modules)
        functions[value.library_key] = value.compile()[:2]
    files |= source_files(boxing.__name__)
    functions[boxing.RAISE] = boxing.build_raise_error()[:2]
    codes = {name: compile(file.read_bytes(), file.name, "exec", dont_inherit=True) for name, file in files.items()}
    sources = {name: (digest_of(name)[0], code_digest(codes[name])) for name in sorted(files)}
    proof = importlib.import_module(f"{__package__}.dispatch.self_test").calls_as_numba()
    if proof:
        raise SystemExit(proof)
    for name, triple in TRIPLES.items():
        soabi = f"{version}-{name}"
        code = shipped.ShippedCode(
            (soabi, *numba_code.native_code_depends_on()[1:]),
            sources,
            {key: numba_code.serialized_for(triple, *made) for key, made in functions.items()},
            soabi == here,
        )
        path = shipped.path_of(soabi)
        shipped.write(path, code)
        print(f"{path}: {len(functions)} libraries, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

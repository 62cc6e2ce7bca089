"""``precompile [MODULE[:OBJECT] …]``: compile kernels before they are called, for images and continuous integration.

Without a module: the native code of this package. ``--into``: see ``ship``.
"""

import argparse
import os
import subprocess
import sys
import warnings

from ..ground.safe_repr import one_line
from ..ground.shipped import own_path
from ..interpreter import DISABLED
from ..measuring.tables import progress, stage
from . import CommandError
from .targets import work_of

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Compile, and print a line for each signature. Returns 1 if one cannot be compiled, or is not kept on disk.

    Raises CommandError for a target that names nothing to compile.
    """
    if DISABLED:
        raise CommandError("FASTEXCHANGE_DISABLE is set: what is compiled with it is of no use without")
    if options.into is not None:
        if options.own:
            raise CommandError("--self and --into are two commands: the native code of this package, and that of another")
        from .ship import run_into

        return run_into(options)
    if options.own:
        if options.targets:
            raise CommandError("--self takes no TARGET: it makes the native code of this package")
        return _make_own_code()
    if options.cpu or options.strict:
        raise CommandError("--cpu and --strict are for --into PACKAGE")
    if not options.targets:
        return _own_code()
    work = [each for target in options.targets for each in work_of(target)]
    is_right = True
    for name, kernel, call in work:
        line, is_done = _compiled(kernel, call)
        print(f"{name}{line}")
        is_right &= is_done
    return 0 if is_right else 1


def _own_code() -> int:
    """Load all native code of this package, or compile what the machine does not have."""
    from ..dispatch.boxing import raise_error
    from ..ground.cfunction import code_cache
    from .native_code import native_code

    for each in native_code():
        each.address  # noqa: B018 - reading it loads or compiles the function
    raise_error()
    found = f"shipped {code_cache.shipped}, loaded {code_cache.hits}, compiled {code_cache.misses}"
    why_not = code_cache.why_not_kept if code_cache.misses else ""
    print(f"native code of fastexchange: {found}: {f'not kept: {why_not}' if why_not else f'kept in {code_cache.directory}'}")
    return 1 if why_not else 0


def _make_own_code() -> int:
    """Make what wheels carry, beside the package: for every user and process of this installation, whatever its caches."""
    path = own_path()
    folder = path.parent if path.parent.exists() else path.parent.parent
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{folder} cannot be written; without --self the code goes into this user's disk cache")
    stage(f"compiling all native code into {path}")
    command = [sys.executable, "-m", f"{__package__.partition('.')[0]}._native_build"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stderr is not None
        lines = []
        for line in made.stdout:
            lines.append(line.strip())
            progress(lines[-1])
        error = made.stderr.read().strip()
    progress("")
    if made.returncode:
        raise CommandError(error.rpartition("\n")[2] or f"the process that made it has ended with exit code {made.returncode}")
    print("\n".join(line for line in lines if line.startswith(f"{path}:")))
    return 0


def _compiled(kernel, call) -> tuple[str, bool]:
    """Compile for a call. Returns what is said of it, and whether later processes find the code."""
    from ..calls.kernel import FastKernel

    with warnings.catch_warnings(record=True) as caught:  # for example why the code is not kept
        warnings.simplefilter("always")
        try:
            (signature,) = kernel.precompile(call)
        except Exception as error:
            return f": not compiled: {one_line(error)}", False
    line = f"({', '.join(map(str, signature))}): "
    if not isinstance(kernel, FastKernel):
        return f"{line}compiled for this device; what is kept is up to {kernel.target.name}", True
    folder, is_kept = kernel.stats.cache_path, kernel._stored_on_disk(signature) is not None
    if is_kept:
        return f"{line}kept in {folder}", True
    why = "; ".join(str(each.message) for each in caught)
    if folder is None:
        why = why or (f"cache=True, but {kernel._why_not_cached}" if kernel._why_not_cached else "it has no cache=True")
    return f"{line}not kept: {why or f'{folder} cannot be written'}", False

"""Native code that comes with the package: made by ``fastexchange._native_build`` for a Python version and platform.

A file has machine code of the C functions for every processor of the platform. It is used if its checksum is right, if it was
made for the installed Numba and llvmlite, and if no
source file on which it depends has changed since. Otherwise native code is compiled here: see ``cfunction.CodeCache``.
"""

import functools
import sysconfig
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from . import sources
from .disk_cache import NotBelieved, framed, unframed
from .numba_code import native_code_depends_on
from .passing import reraise_passing
from .sources import ROOT

__all__ = ["ShippedCode", "own_path", "path_of", "read", "shipped_code", "write"]

_WHAT = (
    "the ABI of Python", "the version of Numba", "the version of llvmlite", "the size of Numba's dispatcher",
    "the size of a tuple without items", "whether None is immortal",
)  # fmt: skip


class ShippedCode(NamedTuple):
    """The content of a file. Names are those of modules of this package, then of functions in them."""

    depends_on: tuple
    """``numba_code.native_code_depends_on()`` when it was made."""
    sources: dict[str, tuple[str, str]]
    """The digests of modules, by name: of the source file, and of the code that this Python makes of it."""
    functions: dict[tuple, Any]
    """The machine code of C functions, for ``numba_code.restored``."""
    is_proved: bool
    """Whether ``dispatch.self_test`` has passed with this Python and this Numba."""
    why_not: str = ""
    """Why there is no usable file."""


def path_of(soabi: str) -> Path:
    """The file for a Python's ABI, such as ``cpython-311-x86_64-linux-gnu``. The folder need not exist."""
    return ROOT / "_native" / f"{soabi}.code"


def own_path() -> Path:
    """The file for this Python, whether it is there or not."""
    return path_of(str(sysconfig.get_config_var("SOABI")))


def write(path: Path, code: ShippedCode) -> None:
    """Write a file. The same code gives the same bytes. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(framed(repr(code.depends_on), tuple(code)), 9))


def read(path: Path) -> ShippedCode:
    """Read a file and check that its code can be used here. Raises NotBelieved, with the reason, if not."""
    try:
        value = unframed(zlib.decompress(sources.read(path)), wanted=None)
    except (OSError, zlib.error) as error:
        reraise_passing(error)
        if isinstance(error, FileNotFoundError) or not ROOT.is_dir():  # a zip file's loader has one error for all
            raise NotBelieved(f"none is installed for {path.stem}") from None
        raise NotBelieved(f"{path} cannot be read: {error}") from None
    except NotBelieved as error:
        reraise_passing(error.__cause__ or error)
        raise NotBelieved(f"{path}: {error}") from None
    try:
        code = ShippedCode(*value)
        differences = list(zip(_WHAT, code.depends_on, native_code_depends_on(), strict=True))
        made_of = [(str(name), str(source), str(own)) for name, (source, own) in code.sources.items()]
        if not (isinstance(code.functions, dict)):
            raise TypeError
    except (AttributeError, TypeError, ValueError):
        raise NotBelieved(f"{path.name} has the format of another version of this package") from None
    for what, made_for, found in differences:
        if made_for != found:
            raise NotBelieved(f"{path.name} was made for another installation: {what} is {found}, not {made_for}")
    for name, source, own in made_of:
        if not sources.is_known(name) or sources.digest_of(name) not in ((source, True), (own, False)):
            raise NotBelieved(f"{name} has changed since {path.name} was made")
    return code


@functools.cache
def shipped_code() -> ShippedCode:
    """The code for this Python; without functions if there is none that can be used."""
    try:
        return read(own_path())
    except NotBelieved as error:
        return ShippedCode((), {}, {}, False, str(error))

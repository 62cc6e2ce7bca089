"""``doctor``: check this installation, and print what is slow or wrong and what to do about it.

This module checks interpreter, versions and settings, and imports no framework. ``probe`` tests native code and frameworks in
separate processes.

*Wrong*: results are wrong or calls are impossible. *Slow*: it works, but on a slower path than possible. *Unknown*: the process
that tested it timed out, was killed by another process, or could not be started.
"""

import argparse
import contextlib
import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from .. import __file__ as package_file
from ..ground.safe_repr import one_line
from ..interpreter import DISABLED, is_free_threaded
from ..measuring.tables import Row, progress, show
from ..version import DISTRIBUTION, __version__
from .probe import FRAMEWORKS, NOTHING, OK, SLOW, UNKNOWN, WRONG, Finding, failure

__all__ = ["run"]

_SECTIONS = ("interpreter", "packages", "native code", "types", "frameworks", "disk cache", "environment", "CUDA")
TESTED = ("linux", "x86_64"), ("linux", "aarch64")
"""The platforms on which this package's tests have run."""
_STYLES = {OK: "green", SLOW: "yellow", WRONG: "bold red", UNKNOWN: "bold yellow", NOTHING: "dim"}
_FROM_OUTSIDE = {
    "SIGKILL": "by the system if memory ran out, or by another process",
    **dict.fromkeys(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), "by another process"),
    **dict.fromkeys(("SIGXCPU", "SIGXFSZ"), "by a limit of this process, see ulimit -a"),
}
"""Signals that do not mean a fault of the process that gets them."""


# ---- versions ------------------------------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: of ``2.13.0+cpu`` 2, 13, 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def misfit(version: str, specifiers: str) -> str:
    """How a version misses ``>=`` and ``<`` specifiers, as in ``>=3.10,<3.14``: "older", "newer", "" if it does not.

    Other specifiers are ignored.

    >>> misfit("0.68.1", ">=0.68"), misfit("3.9.1", ">=3.10,<3.14"), misfit("3.14.0", ">=3.10,<3.14")
    ('', 'older', 'newer')
    """
    given = _numbers(version)
    for operator, wanted in re.findall(r"(>=|<)\s*([\d.]*\d)", specifiers):
        if (given >= _numbers(wanted)) != (operator == ">="):
            return "older" if operator == ">=" else "newer"
    return ""


_UNTRIED = "newer than what is tested{}: what cannot be verified takes a safer path"
_TRY_IT = "run the tests (see CONTRIBUTING), and report their result"


def _metadata() -> tuple[str, list[str], str]:
    """Return this package's ``Requires-Python`` and ``Requires-Dist``, and their source. All are empty if none is found.

    The source is the installation's metadata; for a checkout that is not installed, ``pyproject.toml`` (Python 3.11 or later).
    """
    try:
        installed = importlib.metadata.metadata(DISTRIBUTION)
        python, packages = (installed.get_all(name) or [] for name in ("Requires-Python", "Requires-Dist"))
        return ", ".join(python), packages, "installed"
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        import tomllib  # type: ignore[import-not-found]

        file = Path(package_file).parents[1] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {})
        more = [f"{requirement}; extra == {extra!r}" for extra, wanted in extras.items() for requirement in wanted]
        return project["requires-python"], [*project["dependencies"], *more], "pyproject.toml"
    except (ImportError, OSError, ValueError, KeyError):
        return "", [], ""


def _is_framework(requirement: str) -> bool:
    return requirement.startswith((*FRAMEWORKS, *FRAMEWORKS.values()))


def _interpreter(requires: str) -> Iterator[Finding]:
    section = "interpreter"
    text = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    missed = misfit(platform.python_version(), requires)
    if missed == "older":
        yield Finding(section, "version", WRONG, f"{text}: this package needs {requires}", "use such an interpreter")
    elif missed:  # no number says that it does not work
        yield Finding(section, "version", NOTHING, f"{text}, {_UNTRIED.format(f' ({requires})')}", _TRY_IT)
    else:
        yield Finding(section, "version", OK, text)
    if is_free_threaded():
        text = "a free-threaded interpreter: Numba's own dispatcher makes all calls, with tensors as NumPy views"
        yield Finding(section, "GIL", SLOW, text, "for native calls use the interpreter with the GIL, whose name has no t")
    else:
        yield Finding(section, "GIL", OK, "the interpreter has one")
    if (sys.platform, platform.machine()) not in TESTED:
        known = ", ".join(f"{system} on {machine}" for system, machine in TESTED)
        own = f"{sys.platform} on {platform.machine()}"
        text = f"{own} is not tested here, only {known}: what cannot be verified takes a safer path"
        yield Finding(section, "platform", NOTHING, text, _TRY_IT)
    if hasattr(sys, "gettotalrefcount"):
        yield Finding(section, "build", SLOW, "a debug build: it counts all references", "use a release build")
    else:
        yield Finding(section, "build", OK, f"release, {8 * struct.calcsize('P')} bits, {platform.platform()}")


def _installed_at(folder: Path) -> Path:
    """Where the installed distribution has the package: `folder` itself, if that is it."""
    installed = importlib.metadata.distribution(DISTRIBUTION)
    place = Path(str(installed.locate_file(folder.name)))
    link = json.loads(installed.read_text("direct_url.json") or "{}")
    if link.get("dir_info", {}).get("editable"):
        place = Path(urllib.parse.unquote(urllib.parse.urlsplit(link["url"]).path), folder.name)
    return folder if place.exists() and place.samefile(folder) else place


def _packages(requirements: list[str], source: str) -> Iterator[Finding]:
    section = "packages"
    folder = Path(package_file).parent
    where = {"installed": f"installed by {DISTRIBUTION}", "": "a checkout"}.get(source, f"a checkout, with its {source}")
    text = f"{__version__}, {where}: {folder}"
    if not requirements:
        yield Finding(section, "fastexchange", NOTHING, f"{text}; it is not installed, so the required versions are not known")
        requirements = ["numba", "numpy", "cffi"]
    elif source == "installed" and (known := importlib.metadata.version(DISTRIBUTION)) != __version__:
        advice = "check sys.path; after a change of version install this package again"
        yield Finding(section, "fastexchange", NOTHING, f"{text}, but its installed metadata are of {known}", advice)
    elif source == "installed" and (place := _installed_at(folder)) != folder:
        text = f"{__version__}, in {folder}: not of the installed {DISTRIBUTION}, which is in {place}"
        yield Finding(section, "fastexchange", NOTHING, text, "check sys.path")
    else:
        yield Finding(section, "fastexchange", OK, text)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        other = importlib.metadata.version("fastexchange")
        text = f"another project, fastexchange {other}, is installed, too, and its package has the same name"
        advice = f"pip uninstall fastexchange {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        yield Finding(section, "namesake", WRONG, text, advice)
    seen = set()
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        is_optional = "extra" in marker
        if re.search(r"extra == ['\"](test|dev)['\"]", marker) and not _is_framework(wanted):
            continue
        parsed = re.match(r"\s*([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)", wanted)
        if parsed is None or parsed[1] in seen:
            continue
        name, specifiers = parsed[1], parsed[2].strip()
        seen.add(name)
        needs = f" (needs {specifiers})" if specifiers else ""
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if not is_optional:
                yield Finding(section, name, WRONG, f"not installed{needs}", f"pip install {name!r}")
            continue
        advice = f"pip install '{name}{specifiers}'"
        missed = misfit(version, specifiers)
        if not missed:
            yield Finding(section, name, OK, f"{version}{needs}")
        elif missed == "newer":
            yield Finding(section, name, NOTHING, f"{version}, {_UNTRIED.format(needs)}", _TRY_IT)
        elif is_optional:
            yield Finding(section, name, SLOW, f"{version}, older than what is tested (optional, {specifiers})", advice)
        else:
            yield Finding(section, name, WRONG, f"{version}, too old{needs}", advice)


# ---- settings ------------------------------------------------------------------------------------------------------

_SETTINGS = {
    "DISABLE_JIT": (bool, "nothing is compiled, kernels run as Python; this report's tests ignore the setting"),
    "OPT": (lambda value: int(value) < 3, "kernels are not fully optimised"),
    "BOUNDSCHECK": (bool, "every kernel checks its indices"),
    "DEBUG": (bool, "Numba's debug mode"),
    "DEBUG_JIT": (bool, "generated code prints what it does"),
    "DEBUG_NRT": (bool, "generated code prints what it does with memory"),
    "DEBUGINFO_DEFAULT": (bool, "kernels are compiled with debug information"),
}


def _environment() -> Iterator[Finding]:
    from numba.core import config

    section = "environment"
    for name, (is_slow, means) in _SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and is_slow(value):
            variable = f"NUMBA_{name.removesuffix('_DEFAULT')}"
            advice = f"unset {variable}" if variable in os.environ else f"it is set in a file, {config._config_fname}"
            yield Finding(section, variable, SLOW, f"{int(value)}: {means}", advice)
    if DISABLED:
        text = "Python makes all calls, by Numba's dispatcher and NumPy's views; this report's tests ignore the setting"
        yield Finding(section, "FASTEXCHANGE_DISABLE", SLOW, text, "unset FASTEXCHANGE_DISABLE")
    slow = {f"NUMBA_{name.removesuffix('_DEFAULT')}" for name in _SETTINGS}
    for name in sorted(os.environ):
        if name.startswith("NUMBA_") and name not in slow:
            yield Finding(section, name, OK, os.environ[name])
    if not any(name.startswith("NUMBA_") for name in os.environ):
        yield Finding(section, "NUMBA_*", OK, "no variable of this name is set")


def _cuda() -> Iterator[Finding]:
    section = "CUDA"
    library = ctypes.util.find_library("cuda") or ctypes.util.find_library("nvcuda")
    yield Finding(section, "driver", NOTHING, f"library {library} found" if library else "no driver library found")
    if importlib.util.find_spec("cupy") is not None:
        yield Finding(section, "cupy", NOTHING, "installed; its arrays can be passed to kernels made by cuda.jit")


# ---- probes --------------------------------------------------------------------------------------------------------


def _probed(topic: str, seconds: float) -> list[Finding]:
    """Run ``probe`` in a process for at most `seconds`. Returns its findings, and one more if the process failed."""
    section = "native code" if topic == "native" else "frameworks"
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    try:
        done = subprocess.run(
            [*command, "-m", f"{__package__}.probe", topic],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
            env={**os.environ, "NUMBA_DISABLE_JIT": "0", "FASTEXCHANGE_DISABLE": "0"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        found = list(_parsed(late.stdout or b""))
        text = f"not done after {seconds:g} seconds{_after(found)}; this machine may be busy, or its disk slow"
        return [*found, Finding(section, topic, UNKNOWN, text, _again(3 * seconds))]
    except OSError as error:
        text = f"no process could be started to test it: {one_line(error)}"
        return [Finding(section, topic, UNKNOWN, text, "free memory or processes (see ulimit -u), and run doctor again")]
    found = list(_parsed(done.stdout))
    if done.returncode or not found:
        found.append(_ended(section, topic, done, _after(found)))
    return found


def _again(seconds: float) -> str:
    return f"run it again when the machine is idle, or with more time: python -m fastexchange doctor --timeout {seconds:g}"


def _after(found: list[Finding]) -> str:
    return f", after {found[-1].name}" if found else ""


def _ended(section: str, topic: str, done: subprocess.CompletedProcess, after: str) -> Finding:
    """Return the finding for a process that crashed, was killed, or reported nothing."""
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
    text = "the process that tested it ended without a result"
    if done.returncode < 0:
        name = _signal(-done.returncode)
        text = f"the process that tested it was ended by {name}"
        if name in _FROM_OUTSIDE:
            return Finding(section, topic, UNKNOWN, f"{text}, {_FROM_OUTSIDE[name]}{after}", "run doctor again, alone")
    elif done.returncode:
        text = f"the process that tested it ended with exit code {done.returncode}"
    advice = "native code cannot be trusted here: report it"
    if topic != "native":
        advice = f"install {FRAMEWORKS[topic]} again, or remove it"
    return Finding(section, topic, WRONG, text + (f": {last}" if last else "") + after, advice)


def _parsed(output: bytes) -> Iterator[Finding]:
    for line in output.splitlines():
        try:
            yield Finding(*json.loads(line))
        except (ValueError, TypeError):  # the last line, if the process was killed while it wrote
            continue


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- the whole -----------------------------------------------------------------------------------------------------


def _looked(section: str, findings) -> list[Finding]:
    """Return the findings. An exception while they are made is one more finding."""
    found = []
    try:
        for finding in findings:
            found.append(finding)
    except Exception as error:
        found.append(failure(section, "doctor", error, "the check failed: ", "report it"))
    return found


def _examine(seconds: float) -> list[Finding]:
    requires, requirements, source = _metadata()
    found = _looked("interpreter", _interpreter(requires))
    found += _looked("packages", _packages(requirements, source))
    found += _looked("environment", _environment())
    found += _looked("CUDA", _cuda())
    for topic in ("native", *FRAMEWORKS):
        progress(f"testing {topic} …")
        found += _probed(topic, seconds)
    progress("")
    return sorted(found, key=lambda finding: _SECTIONS.index(finding.section))


def _verdict(found: list[Finding]) -> str:
    statuses = {finding.status for finding in found}
    return next((status for status in (WRONG, UNKNOWN, SLOW) if status in statuses), OK)


def run(options: argparse.Namespace) -> int:
    """Print the findings. The exit code is 1 if something is wrong."""
    found = _examine(options.timeout)
    verdict = _verdict(found)
    if options.json:
        document = {"lines": [finding._asdict() for finding in found], "verdict": verdict}
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return int(verdict == WRONG)
    lines: list[Row | str] = []
    for section in _SECTIONS:
        inside = [finding for finding in found if finding.section == section]
        lines += [section] if inside else []
        for finding in inside:
            text = finding.text + (f"\n→ {finding.advice}" if finding.advice else "")
            lines.append(Row((finding.status, finding.name, text), _STYLES[finding.status]))
    show(("", "", ""), lines, left=(0, 1, 2))
    count = {status: sum(finding.status == status for finding in found) for status in (WRONG, UNKNOWN, SLOW)}
    not_found = f"{count[UNKNOWN]} unknown, " if count[UNKNOWN] else ""
    said = {
        WRONG: f"{count[WRONG]} wrong, {not_found}{count[SLOW]} slow: see the lines with an arrow.",
        UNKNOWN: f"warning: not everything could be checked. {not_found}{count[SLOW]} slow: see the lines with an arrow.",
        SLOW: f"Nothing is wrong; {count[SLOW]} slow: see the lines with an arrow.",
        OK: "All is well.",
    }
    print(f"\n{said[verdict]}")
    return int(verdict == WRONG)

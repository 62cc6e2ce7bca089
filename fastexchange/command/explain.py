"""``explain MODULE:OBJECT``: describe a kernel, a call of it, a bound launch, a type, or an argument."""

import argparse
import importlib
import inspect
from types import ModuleType
from typing import Any

from ..ground.safe_repr import one_line
from . import CommandError
from .objects import find, imported, split

__all__ = ["run"]


# ---- descriptions --------------------------------------------------------------------------------------------------


def _lines(facts: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in facts)
    indent = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {indent.join(text.splitlines())}" for name, text in facts)


def _kernel(kernel) -> str:
    """Describe a kernel: its source, options, compiled signatures and counts."""
    from ..calls.explanation import pickled
    from ..calls.kernel import FastKernel
    from ..calls.shipped_kernels import shipped_with
    from ..dispatch.runtime import runtime
    from ..ground.numba_internals import can_compile

    dispatcher, function = kernel.dispatcher, kernel.py_func
    options = {name: value for name, value in dispatcher.targetoptions.items() if name != "nopython" and value is not None}
    if dispatcher.stats.cache_path is not None:
        options["cache"] = True
    if not can_compile(dispatcher):
        options["signatures"] = "explicit; no others are compiled"
    own_options, usual = kernel._kernel_options._asdict(), type(kernel._kernel_options)()._asdict()
    own = {"grad": "allow" if own_options.pop("allows_grad") else "refuse"}
    own |= {name: value for name, value in own_options.items() if value != usual[name]}
    counts, cache = kernel.counts(), dispatcher.stats
    signatures = [", ".join(map(str, signature)) or "no arguments" for signature in dispatcher.signatures]
    state = runtime()
    if not state.is_native:
        way = f"Numba's own dispatcher makes all calls: {state.why_not_native}"
    elif options.get("nogil") or options.get("parallel"):
        way = "native; it gives up the GIL, so it holds owning exports of its tensors"
    else:
        way = "native; it borrows its tensors"
    shipped = shipped_with(kernel) if issubclass(type(kernel), FastKernel) else None
    if cache.cache_path is None:
        why = getattr(kernel, "_why_not_cached", "")
        how = f"cache=True, but {why}" if why else "cache=True keeps the code"
        kept = f"off: each process compiles what is not shipped; {how}"
    else:
        hits, misses = sum(cache.cache_hits.values()), sum(cache.cache_misses.values())
        kept = f"{cache.cache_path}: {hits} loaded, {misses} compiled in this process"
    facts = [
        ("defined in", f"{function.__code__.co_filename}, line {function.__code__.co_firstlineno}"),
        ("parameters", _parameters(function)),
        ("fast_args", ", ".join(f"{name}={_shown(value)}" for name, value in own.items())),
        ("njit", ", ".join(f"{name}={_shown(value)}" for name, value in sorted(options.items())) or "no options"),
        ("way", way),
        ("compiled", "\n".join(signatures) or "nothing yet: the first call compiles it" + " or loads it" * (shipped is not None)),
        ("calls", f"{counts.fast} fast, {counts.slow} slow in this process"),
        ("disk cache", kept),
    ]
    if issubclass(type(kernel), FastKernel):
        if shipped is not None:
            facts.append(("shipped", str(shipped)))
        content = pickled(kernel) or "no machine code: nothing is compiled in this process"
        facts.append(("pickle", f"carries {content}"))
    return f"{kernel!r}\n{_lines(facts)}"


def _parameters(function) -> str:
    found = inspect.signature(function).parameters.values()
    return ", ".join(str(parameter) for parameter in found) or "none"


def _shown(value) -> str:
    from ..ground.safe_repr import is_type, type_name

    return type_name(value) if is_type(value) else repr(value)


def _bound(launch) -> str:
    from .. import explain

    names = launch.kernel._parameters.names
    bound = [
        (names[i] if i < len(names) else f"output {i - len(names)}", str(explain(value)))
        for i, value in enumerate(launch.arguments)
    ]
    return f"{launch!r}\n{_lines(bound) if bound else '  no arguments'}\n{_kernel(launch.kernel)}"


def _call(kernel, given: str, module: ModuleType) -> str:
    """Describe the call of a kernel with arguments that are given as Python source."""
    try:
        args, kwargs = _evaluated(given, module)
    except (Exception, SystemExit) as error:
        raise CommandError(f"--args: {one_line(error)}") from error
    try:
        return str(kernel.explain(*args, **kwargs))
    except TypeError as error:  # the arguments do not fit the parameters
        raise CommandError(f"--args: {one_line(error)}") from error


def _evaluated(given: str, module: ModuleType) -> tuple[tuple, dict]:
    import numpy as np

    code = compile(f"_arguments({given}\n)", "--args", "eval")
    names: dict[str, Any] = {"np": np, **vars(module), "_arguments": lambda *args, **kwargs: (args, kwargs)}
    if "torch" in code.co_names and "torch" not in names:
        names["torch"] = importlib.import_module("torch")
    return eval(code, names)


def _described(found: Any, what: str) -> str:
    """Describe any object but a call."""
    from numba.core.dispatcher import Dispatcher

    from .. import BoundLaunch, explain
    from ..calls.explanation import explain_type
    from ..calls.kernel import Kernel

    cls = type(found)  # not isinstance(): an object may have any __class__
    if issubclass(cls, Kernel):
        return _kernel(found)
    if issubclass(cls, BoundLaunch):
        return _bound(found)
    if issubclass(cls, type):
        return f"an instance of {explain_type(found)}"
    name = what.rpartition(":")[2]
    if issubclass(cls, Dispatcher):
        raise CommandError(
            f"{what} is a plain Numba dispatcher, not a kernel: put @fast_args in place of @njit or above it, or call "
            f"fast_args({name})"
        )
    if inspect.isfunction(found):
        if hasattr(found, "py_func"):
            raise CommandError(f"{what} is not compiled because NUMBA_DISABLE_JIT is set: there is nothing to explain")
        raise CommandError(f"{what} is a plain Python function: decorate it with @fast_args")
    return str(explain(found))


def run(options: argparse.Namespace) -> int:
    """Print the description. Raises CommandError for an object that has none."""
    from ..calls.kernel import Kernel

    name, dotted = split(options.what)
    if not (name and dotted):
        raise CommandError(f"{options.what!r} is not MODULE:OBJECT, as in kernels.softmax:softmax or file.py:kernel")
    module = imported(name)
    found = find(module, dotted, name)
    if options.args is None:
        try:
            text = _described(found, options.what)
        except CommandError:
            raise
        except Exception as error:
            raise CommandError(f"{options.what} cannot be explained: {one_line(error)}") from error
    elif issubclass(type(found), Kernel):
        text = _call(found, options.args, module)
    else:
        _described(found, options.what)  # it may raise an error with advice
        raise CommandError(f"--args is for kernels, and {options.what} is not a kernel")
    print(text)
    return 0

"""``explain`` of a launch: who would make it, and the path of each argument."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..calls.explanation import CallExplanation, Outcome, describe_outcome, explained, refusal
from ..calls.resolve import Report
from ..cupy import device_arrays
from ..dispatch import structs
from ..dispatch.reading import DRY_RUN
from . import python_exports
from .classify import (
    ArgumentInfo,
    are_exported_by_python,
    classify_arguments,
    classify_without_errors,
    flatten,
    is_for_package,
    only_for_package,
    paths,
)
from .own_launch import why_package, why_package_cannot
from .resolve_launch import LaunchResolver, naming
from .specialising import taken_for, types_given

__all__ = ["explain_launch"]


def explain_launch(launcher, bound: tuple, complete: Callable[[tuple], tuple] = tuple) -> CallExplanation:
    """See :meth:`CudaLauncher.explain`. `complete`: makes the omitted outputs."""
    kernel = launcher.kernel
    infos: list[ArgumentInfo] = []
    try:
        bound = complete(bound)
        infos = classify_arguments(kernel, bound)
        if launcher.why_not or is_for_package(infos):
            outcome = _package_outcome(launcher, infos, launcher.why_not, launcher.why_not or _why_package(kernel, infos))
        else:
            with python_exports.exported(launcher, infos) as (arguments, _, streams):
                with naming(launcher):
                    report = LaunchResolver(launcher, arguments, launcher._on_stream(streams[0])).run(DRY_RUN)
                outcome = _native_outcome(launcher, infos, report, bound)
                if are_exported_by_python(infos):
                    outcome = outcome._replace(text=f"{outcome.text}; but an argument is exported by Python code in every launch")
                if len(streams) > 1:
                    more = "the producers work on different streams, which events order in every launch"
                    outcome = outcome._replace(text=f"{outcome.text}; {more}")
    except Exception as error:
        outcome = refusal(error)
        infos = infos or classify_without_errors(kernel, bound)
    found = explained(kernel, bound, outcome, paths(infos))
    reasons = dict.fromkeys(why for info in flatten(infos) if (why := device_arrays.why_not(type(info.value))))
    notes = (f"CuPy's arrays are not read in memory: {why}" for why in reasons)
    return replace(found, notes=(*found.notes, *notes))


def _native_outcome(launcher, infos: list[ArgumentInfo], report: Report, bound: tuple) -> Outcome:
    """The outcome of a launch whose arguments native code has read."""
    kernel = launcher.kernel
    if report.status != structs.STATUS_UNKNOWN_SHAPE:
        return _package_outcome(launcher, infos, "", "native code does not read all of its arguments")
    outcome = describe_outcome(kernel, report.keys, bound)
    taken_for(kernel, types_given(kernel, report.keys))  # raises if no declared signature fits
    why_own = kernel._native.why_own.get(report.keys, "")
    if not why_own:
        return outcome
    return _package_outcome(launcher, infos, why_own, why_own)._replace(numba_types=outcome.numba_types)


def _package_outcome(launcher, infos: list[ArgumentInfo], why_not: str, reason: str) -> Outcome:
    """The outcome of a launch that the kernel's own package makes. `reason`: why."""
    if why := why_package_cannot(launcher, infos, why_not, False):
        return refusal(TypeError(why))
    return Outcome("package", f"{launcher.kernel.target.name}'s own launch: {reason}")


def _why_package(kernel, infos: list[ArgumentInfo]) -> str:
    has_arrays = any(isinstance(info.value, np.ndarray) for info in only_for_package(infos))
    return why_package(kernel, infos) + ("; arrays of the host are copied to the device and back" if has_arrays else "")

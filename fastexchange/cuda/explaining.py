"""``explain`` of a launch: what it would do, and which way each argument takes."""

import numpy as np

from ..calls.explain import CallExplanation, describe_outcome, explained
from ..dispatch import structs
from ..dispatch.read_arguments import DRY_RUN
from . import python_exports
from .classify import (
    ArgumentInfo,
    are_exported_by_python,
    classify_arguments,
    classify_without_errors,
    is_for_package,
    only_for_package,
    paths,
)
from .own_launch import whose, why_not_even_own
from .resolve import naming, resolve
from .specialising import taken_for, types_given

__all__ = ["explain_launch"]


def explain_launch(launcher, bound: tuple) -> CallExplanation:
    """See :meth:`CudaLauncher.explain`."""
    kernel = launcher.kernel
    outcome, names = "", ["?"] * len(bound)
    infos: list[ArgumentInfo] = []
    try:
        infos = classify_arguments(kernel, bound)
        if launcher.why_not or is_for_package(infos):
            outcome = f"{kernel.target.name}'s own launch: {launcher.why_not or _whose(kernel, infos)}"
            refusal = why_not_even_own(launcher, infos, launcher.why_not, False)
            if refusal:
                outcome = f"refused with TypeError: {refusal}"
        else:
            with python_exports.exported(launcher, infos) as (arguments, _, streams):
                with naming(launcher):
                    report = resolve(launcher, arguments, launcher.on_stream(streams[0]), DRY_RUN)
                if report.status == structs.STATUS_UNKNOWN_SHAPE:
                    outcome, names = describe_outcome(kernel, report.keys, bound)
                    if names:  # it is not refused for its elements
                        taken_for(kernel, types_given(kernel, report.keys))  # raises what a declared signature has no place for
                    why_own = kernel._native.why_own.get(report.keys, "")
                    if why_own:
                        outcome = f"{kernel.target.name}'s own launch: {why_own}"
                        refusal = why_not_even_own(launcher, infos, why_own, False)
                        outcome = f"refused with TypeError: {refusal}" if refusal else outcome
                    if are_exported_by_python(infos):
                        outcome += "; but an argument is exported by Python code in every launch"
                    if len(streams) > 1:
                        outcome += "; the producers work on different streams, which events order in every launch"
    except Exception as error:
        outcome = f"refused with {type(error).__name__}: {error}"
        infos = infos or classify_without_errors(kernel, bound)
    return explained(kernel, bound, outcome, names, paths(infos))


def _whose(kernel, infos: list[ArgumentInfo]) -> str:
    has_arrays = any(isinstance(info.value, np.ndarray) for info in only_for_package(infos))
    return whose(kernel, infos) + ("; arrays of the host are copied to the device and back" if has_arrays else "")

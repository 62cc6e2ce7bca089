"""``explain`` of a launch: what it would do, and which way each argument takes."""

import numpy as np

from ..calls.explain import CallExplanation, explained, fate_of
from ..dispatch import layout
from ..dispatch.walk import FLAG_LOOK
from . import views
from .looks import Look, are_exported_by_python, is_for_package, look_at, looks_without_errors, only_for_package, paths
from .own_launch import whose, why_not_even_own
from .slow_path import naming, settle
from .specialising import taken_for, types_given

__all__ = ["explain_launch"]


def explain_launch(launcher, bound: tuple) -> CallExplanation:
    """See :meth:`CudaLauncher.explain`."""
    kernel = launcher.kernel
    outcome, names = "", ["?"] * len(bound)
    looks: list[Look] = []
    try:
        looks = look_at(kernel, bound)
        if launcher.why_not or is_for_package(looks):
            outcome = f"{kernel.target.name}'s own launch: {launcher.why_not or _whose(kernel, looks)}"
            refusal = why_not_even_own(launcher, looks, launcher.why_not, False)
            if refusal:
                outcome = f"refused with TypeError: {refusal}"
        else:
            with views.exported(launcher, looks) as (arguments, _, streams):
                with naming(launcher):
                    report = settle(launcher, arguments, launcher.on_stream(streams[0]), FLAG_LOOK)
                if report.status == layout.STATUS_UNKNOWN_SHAPE:
                    outcome, names = fate_of(kernel, report.keys, bound)
                    if names:  # it is not refused for its elements
                        taken_for(kernel, types_given(kernel, report.keys))  # raises what a declared signature has no place for
                    why_own = kernel._native.why_own.get(report.keys, "")
                    if why_own:
                        outcome = f"{kernel.target.name}'s own launch: {why_own}"
                        refusal = why_not_even_own(launcher, looks, why_own, False)
                        outcome = f"refused with TypeError: {refusal}" if refusal else outcome
                    if are_exported_by_python(looks):
                        outcome += "; but an argument is exported by Python code in every launch"
                    if len(streams) > 1:
                        outcome += "; the producers work on different streams, which events order in every launch"
    except Exception as error:
        outcome = f"refused with {type(error).__name__}: {error}"
        looks = looks or looks_without_errors(kernel, bound)
    return explained(kernel, bound, outcome, names, paths(looks))


def _whose(kernel, looks: list[Look]) -> str:
    has_arrays = any(isinstance(look.value, np.ndarray) for look in only_for_package(looks))
    return whose(kernel, looks) + ("; arrays of the host are copied to the device and back" if has_arrays else "")

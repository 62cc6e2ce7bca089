"""``precompile`` of a CUDA kernel: its own package compiles it, and loads it on the device."""

from numba.core import sigutils

from ..calls.compile_ahead import arguments_of, signature_in
from ..dispatch import structs
from ..dispatch.reading import DRY_RUN
from . import python_exports
from .classify import classify_arguments, is_for_package
from .resolve_launch import LaunchResolver, device_of, naming
from .specialising import compiled_for, taken_for, types_given

__all__ = ["precompile"]


def precompile(kernel, calls: tuple) -> list[tuple]:
    """See :meth:`CudaKernel.precompile`."""
    what = f"{kernel.__qualname__}.precompile()"
    done = []
    for call in calls:
        signature = signature_in(call)
        if signature is not None:
            given = tuple(map(kernel.target.type_of, sigutils.normalize_signature(signature)[0]))
            taken, _ = taken_for(kernel, given)
            compiled_for(kernel, taken, kernel._default_device())
            done.append(taken)
        else:
            args, kwargs = arguments_of(call, what)
            done.append(_for_example(kernel, kernel._bound_arguments(args, kwargs), what))
    return done


def _for_example(kernel, bound: tuple, what: str) -> tuple:
    """Compile for launches with these arguments on their device."""
    launcher = kernel[1, 1]
    infos = classify_arguments(kernel, bound)
    if launcher.why_not or is_for_package(infos):
        raise TypeError(f"{what}: only {kernel.target.name} makes such launches; give the signature")
    with python_exports.exported(launcher, infos) as (arguments, _, streams), naming(launcher):
        resolver = LaunchResolver(launcher, arguments, launcher._on_stream(streams[0]))
        report = resolver.run(DRY_RUN)
        if report.status != structs.STATUS_UNKNOWN_SHAPE:
            raise TypeError(f"{what}: native code does not read all of these arguments; give the signature")
        taken, _ = taken_for(kernel, types_given(kernel, report.keys))
        if kernel._native.find(report.keys) is None:
            resolver.specialise()
        if report.keys in kernel._native.why_own:
            compiled_for(kernel, taken, device_of(kernel, report))
    return taken

"""``@cuda.jit`` kernels as operators of PyTorch: ``cuda_kernel.as_torch_op``."""

import functools
import math
from types import BuiltinFunctionType
from typing import Any

from numba import types

from ..calls.kernel import FastKernel, Kernel
from ..calls.options import OptionsOf, checked_mutates
from ..cuda.device_kernel import launcher_of
from ..cuda.launch_structs import launcher_at
from ..cuda.launcher import CudaLauncher
from ..cuda.native_launch import launch_words
from ..dispatch import structs
from ..dispatch.allocation import call_with_outputs
from ..dispatch.inline_cache import look_up
from ..dispatch.overloads import KernelContext
from ..dispatch.python_calls import call_object, refuse_launch
from ..dispatch.reading import FLAG_MEMORY
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, NativeCallable, enable_vectorcall
from ..ground.dlpack import CUDA
from ..ground.native import call_word, load
from ..ground.omitted import OMITTED
from ..ground.once import cached_property
from ..ground.safe_repr import shown
from .boxed_kernel import FAILED, LEFT, MADE, boxed_at
from .modes import why_no_modes
from .new_tensors import learn_to_make
from .schema import fake_of, schema_of

__all__ = ["LaunchedKernel"]


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def launch(callable_, args, nargsf, kwnames):
    """Call the launcher of a :class:`LaunchedKernel`, with all outputs."""
    context = structs.context_at(load(callable_ + CALLABLE_CONTEXT))
    return call_object(context.device_kernel, args, nargsf & ~c.MADE_OUTPUTS, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_launched(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of a :class:`LaunchedKernel` with outputs."""
    return call_with_outputs(load(callable_ + CALLABLE_CONTEXT), callable_, args, nargsf, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def launch_boxed(boxed_address, frame_address, given, count):
    """``fx_boxed.call``: read the arguments and launch the kernel. Returns MADE, FAILED with an exception set, or LEFT.

    Python code runs only if the launch is LEFT, or FAILED.
    """
    boxed = boxed_at(boxed_address)
    if load(boxed.launcher + c.CALLABLE_VECTORCALL) != boxed.launch:  # the kernel's package launches it now, or nobody
        return LEFT
    launcher = load(boxed.launcher + CALLABLE_CONTEXT)
    context_address = launcher_at(launcher).context
    context = structs.context_at(context_address)
    frame = structs.frame_at(frame_address)
    status = call_word(structs.runtime_at(context.runtime).walk, (context_address, frame_address, given, count, FLAG_MEMORY))
    if status == structs.STATUS_OK:
        at = look_up(context, frame.keys, frame.key_count)
        if at == 0 or structs.overload_at(at).trampoline == 0:
            return LEFT
        status = launch_words(context_address, frame_address, at, launcher)
    if status == structs.STATUS_ERROR:
        c.PyErr_Clear()
    if status == structs.STATUS_DRIVER:
        refuse_launch(context, boxed.launcher, frame.code)
        return FAILED
    if status != structs.STATUS_OK:
        return LEFT
    context.calls += 1
    return MADE


class _Context(KernelContext):
    """What the native code of a :class:`LaunchedKernel` reads: it has no overloads, and its launcher makes all calls."""

    def __init__(self, kernel, outputs):
        parameters = kernel._parameters
        super().__init__(parameters, kernel.__qualname__, False, kernel._kernel_options.allows, None, outputs)
        self._launcher, self._values = kernel._launcher, parameters.defaults
        self.native.device_kernel = id(self._launcher)
        for index, value in parameters.defaults.items():  # as of a CudaContext
            self._defaults[index] = id(value)

    def _prepare(self) -> None:
        self.native.device_type, self.native.vectorcall_any = CUDA, launch.address
        self.vectorcall = launch.address if not self.native.output_count else vectorcall_launched.address


class LaunchedKernel(Kernel, NativeCallable):
    """A kernel for CUDA as an operator calls it: launched by a configuration, with outputs on the device of its first input.

    Attributes
    ----------
    cuda_kernel : the :class:`~fastexchange.CudaKernel`.
    on_cpu : the kernel that gets the calls with tensors on the CPU, or None.
    """

    _context: int  # of a NativeCallable
    _vectorcall: int

    def __init__(self, kernel, launch, out: str | None, mutates, on_cpu, what: str):
        if on_cpu is not None:
            if not isinstance(on_cpu, FastKernel):
                raise TypeError(f"{what}: cpu is a kernel for the CPU, made by fast_args, not {shown(on_cpu)}")
            if on_cpu._parameters.names != kernel._parameters.names or (out is not None and out != on_cpu.out):
                raise ValueError(f"{what}: cpu is {on_cpu!r}, which has to have the same parameters and out=")
            out, mutates = on_cpu.out, on_cpu.mutates if mutates is None else mutates
        self.cuda_kernel, self.on_cpu, self.py_func, self.__qualname__ = kernel, on_cpu, kernel.py_func, kernel.__qualname__
        self._launch, self._launcher = launch, launcher_of(kernel, launch, what, out)
        self._kernel_options = kernel._kernel_options._replace(
            out=out, mutates=None if mutates is None else checked_mutates(mutates, what)
        )
        self._declared = OptionsOf(self._kernel_options, kernel.py_func)
        self._pattern, self._parameters = self._declared.pattern, self._declared.parameters
        self._key = kernel, launch, on_cpu, self._kernel_options

    @cached_property  # one for all threads
    def _native(self) -> _Context:
        """What native code reads."""
        return _Context(self, self._declared.outputs)

    def prepare(self) -> None:
        """Let CPython call native code, but not while ``torch.export`` traces: see ``BoxedKernel.takes``."""
        if self._vectorcall or not isinstance(math.pow, BuiltinFunctionType):
            return
        if self._native.vectorcall:
            learn_to_make()
        self._context = self._native.address
        self._vectorcall = self._native.vectorcall  # last: Ctrl-C may come between any two statements

    @functools.cached_property
    def _empty(self):
        """Makes the outputs of a call with these arguments."""
        return fake_of(self, schema_of(self.py_func, self._pattern, self.mutates or (), self.__qualname__))

    def __call__(self, /, *args, **kwargs):
        """Make the calls that CPython does not pass to native code."""
        self.prepare()
        return self._call_with_outputs(*args, **kwargs)

    def _call_with_outputs(self, /, *args, **kwargs):
        """Allocate the outputs, and launch the kernel. Returns the outputs; the stream may not have executed it yet.

        Native code calls this where it cannot allocate them: arguments that do not fit, odd tensors, modes of PyTorch.
        """
        why_no_modes()  # native code takes one for active until this has been asked
        bound = self._parameters.bind(*args, **kwargs)
        made = self._empty(*args, **kwargs)
        new: tuple[Any, ...] = () if made is None else made if isinstance(made, tuple) else (made,)
        first = len(bound) - len(new)
        given = [self._parameters.defaults.get(i, value) if value is OMITTED else value for i, value in enumerate(bound[:first])]
        outputs = [self._output(first + i, old, fresh) for i, (old, fresh) in enumerate(zip(bound[first:], new, strict=True))]
        self._launcher(*given, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def _output(self, position: int, given, made):
        """The output of a call: `made`, or what is given for it. Raises ValueError if that has another shape."""
        if given is OMITTED or given is None:
            return made
        if tuple(given.shape) != tuple(made.shape):
            where = f"{self.__qualname__}(): argument {self._parameters.names[position]!r} (position {position})"
            raise ValueError(f"{where}: its shape is {tuple(given.shape)}, and must be {tuple(made.shape)} ({self._pattern})")
        return given

    @property
    def boxed_call(self) -> int:
        """The address of :data:`launch_boxed`."""
        return launch_boxed.address

    @property
    def is_native(self) -> bool:
        """Whether native code makes its launches: not with a configuration that Python code gives, nor those of the package."""
        self.prepare()
        return isinstance(self._launcher, CudaLauncher) and not self._launcher.why_not

    def on_any_device(self, /, *args):
        """Make a call with arguments on the CPU, too, by position."""
        at = self._pattern.inputs[0].position
        return self.on_cpu(*args) if self.on_cpu is not None and args[at].device.type == "cpu" else self(*args)

    def __reduce__(self):
        return LaunchedKernel, (self.cuda_kernel, self._launch, self.out, self.mutates, self.on_cpu, "a pickled operator")

    def __eq__(self, other):
        return isinstance(other, LaunchedKernel) and other._key == self._key

    def __hash__(self):
        return hash(self.cuda_kernel)


enable_vectorcall(LaunchedKernel, LaunchedKernel.__call__)

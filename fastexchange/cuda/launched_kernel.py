"""``LaunchedKernel``: a kernel for CUDA with its launch configuration, ``fast_args(launch=…)``, which may declare outputs.

PyTorch allocates them, on the inputs' device. With arrays of JAX, XLA does, and launches the kernel (``jax.xla_launches``). An
operator of PyTorch that is made of a kernel for CUDA calls it so, too.
"""

import functools
import inspect
import math
import sys
import weakref
from types import BuiltinFunctionType

import numpy as np
from numba import types

from ..calls.compile_ahead import arguments_of, signature_in
from ..calls.kernel import FastKernel, Kernel, kernel_of
from ..calls.options import KernelOptions, OptionsOf, launched
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
from ..ground.parameters import flatten
from ..ground.safe_repr import shown, type_name
from ..jax.xla_target import is_registered
from ..producers.framework import framework_that_sees
from ..torch.boxed_kernel import FAILED, LEFT, MADE, boxed_at
from ..torch.traced import asks_is_traced, is_traced
from .device_kernel import launcher_of
from .explaining import explain_launch
from .launch_structs import launcher_at
from .launcher import CudaLauncher
from .native_launch import launch_words

__all__ = ["LaunchedKernel", "launched_kernel_of"]


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


def _learn_to_make() -> None:
    """Let native code make tensors of PyTorch, and tell its modes, once the program has imported it."""
    if sys.modules.get("torch") is not None:
        from ..torch.modes import why_no_modes
        from ..torch.new_tensors import learn_to_make

        why_no_modes()  # native code takes one for active until this has been asked
        learn_to_make()


def _call_seen(kernel: "weakref.ref[LaunchedKernel]", bound: tuple):
    """See :attr:`CudaLauncher._seen`."""
    found = kernel()
    return NotImplemented if found is None or found._pattern is not None else found._call_seen(bound)


class LaunchedKernel(Kernel, NativeCallable):
    """A kernel for CUDA with its launch configuration. Made by :func:`~fastexchange.fast_args`, ``launch=``.

    A call launches it, and returns the outputs that ``out=`` declares; those that are omitted, or None, are allocated on the
    device of the first input, by PyTorch or JAX. It returns before the kernel has run, as every launch does. A function that JAX
    compiles may call it: XLA launches it then, on its own stream.

    Raises ValueError for shapes that do not fit ``out=`` or ``launch=``, TypeError for tensors of other frameworks whose outputs
    are omitted, and what a :class:`~fastexchange.CudaLauncher` raises.

    Attributes
    ----------
    cuda_kernel : the :class:`~fastexchange.CudaKernel`, which has a launcher for any configuration.
    launch : the configuration.
    on_cpu : the kernel that gets an operator's calls with tensors on the CPU, or None.
    """

    _context: int  # of a NativeCallable
    _vectorcall: int

    def __init__(self, kernel, options: KernelOptions, on_cpu, what: str):
        launch, out, mutates = options.launch, options.out, options.mutates
        if on_cpu is not None:
            if not isinstance(on_cpu, FastKernel):
                raise TypeError(f"{what}: cpu is a kernel for the CPU, made by fast_args, not {shown(on_cpu)}")
            if on_cpu._parameters.names != kernel._parameters.names or (out is not None and out != on_cpu.out):
                raise ValueError(f"{what}: cpu is {on_cpu!r}, which has to have the same parameters and out=")
            out, mutates = on_cpu.out, on_cpu.mutates if mutates is None else mutates
        functools.update_wrapper(self, kernel.py_func)
        self.cuda_kernel, self.on_cpu, self.py_func = kernel, on_cpu, kernel.py_func
        self._kernel_options = options._replace(out=out, mutates=mutates)
        self._declared = OptionsOf(self._kernel_options, kernel.py_func)
        self._declared.check()
        self.launch, self._launcher = launch, launcher_of(kernel, launch, what, out)
        if isinstance(self._launcher, CudaLauncher):  # one of its own: others call the kernel's by numbers alone
            self._launcher = CudaLauncher(kernel, self._launcher.configuration, self._launcher._stream)
            self._launcher._seen = functools.partial(_call_seen, weakref.ref(self))
        self._pattern, self._parameters = self._declared.pattern, self._declared.parameters
        self._key = kernel, on_cpu, self._kernel_options
        if out is not None:
            self.__signature__ = self._declared.signature
        launched[id(self)] = self
        if is_registered():
            self._by_xla.why_no_handler()

    @cached_property  # one for all threads
    def _native(self) -> _Context:
        """What native code reads."""
        return _Context(self, self._declared.outputs)

    def _prepare(self) -> None:
        """Let CPython call native code, but not while ``torch.export`` traces: see ``BoxedKernel.takes``."""
        if self._vectorcall or not isinstance(math.pow, BuiltinFunctionType):
            return
        _learn_to_make()
        self._context = self._native.address
        self._vectorcall = self._native.vectorcall  # last: Ctrl-C may come between any two statements

    @asks_is_traced
    def __call__(self, /, *args, **kwargs):
        """Make the calls that CPython does not pass to native code, and those that PyTorch's Dynamo traces."""
        if is_traced():
            from ..torch.tracing import call_traced

            return call_traced(self, *args, **kwargs)
        return self._call_first(*args, **kwargs)

    def _call_first(self, /, *args, **kwargs):
        """Make the first call, after which CPython calls native code directly, if it can."""
        result = self._call_with_outputs(*args, **kwargs)
        self._prepare()
        return result

    def _call_with_outputs(self, /, *args, **kwargs):
        """Allocate the outputs, and launch the kernel. Returns the outputs; the stream may not have executed it yet.

        Native code calls this where it cannot allocate them: arguments that do not fit, odd tensors, modes of PyTorch.
        """
        bound = self._parameters.bind(*args, **kwargs)
        if (result := self._call_seen(bound)) is not NotImplemented:
            return result
        _learn_to_make()
        complete = self._complete(bound)
        self._launcher(*complete)
        outputs = () if self._pattern is None else complete[-len(self._pattern.outputs) :]
        return outputs[0] if len(outputs) == 1 else outputs or None

    def _complete(self, bound: tuple) -> tuple:
        """`bound` with the defaults of arguments that are omitted, and new outputs."""
        given = [self._parameters.defaults.get(i, value) if value is OMITTED else value for i, value in enumerate(bound)]
        if self._pattern is None:
            return tuple(given)
        numbers = self._pattern.values_of(bound, self._parameters.defaults, self.__qualname__)
        inputs = [self._shape_of(each.position, given[each.position]) for each in self._pattern.inputs]
        for output, shape in zip(self._pattern.outputs, self._pattern.shapes_of(numbers, inputs, self.__qualname__), strict=True):
            value = given[output.position]
            if value is OMITTED or value is None:
                given[output.position] = self._new(output.position, shape, given)
            elif self._shape_of(output.position, value) != shape:
                raise ValueError(
                    f"{self._argument(output.position)}: its shape is {tuple(value.shape)}, and must be {shape} ({self._pattern})"
                )
        return tuple(given)

    def _argument(self, position: int) -> str:
        return f"{self.__qualname__}(): argument {self._parameters.names[position]!r} (position {position})"

    def _shape_of(self, position: int, value) -> tuple[int, ...]:
        """The shape of an argument. Raises TypeError if it is no tensor."""
        shape = getattr(value, "shape", None)
        if shape is None:
            shape = getattr(value, "__cuda_array_interface__", {}).get("shape")
        if shape is None or isinstance(value, (type, np.generic)):
            raise TypeError(f"{self._argument(position)} is a tensor in {str(self._pattern)!r}, not {type_name(type(value))}")
        return tuple(map(int, shape))

    def _call_seen(self, bound: tuple):
        """Make a call that a framework has to see. NotImplemented for any other call."""
        framework = framework_that_sees(self, [each for i, value in enumerate(bound) for _, each in flatten(i, value)])
        return framework.call(self, bound) if framework is not None else NotImplemented

    def _new(self, position: int, shape: tuple[int, ...], given: list):
        """A new output of PyTorch's on the device of the first input. Raises TypeError if that is another framework's."""
        first = self._pattern.inputs[0].position
        like = given[first]
        if not hasattr(like, "new_empty"):
            raise TypeError(
                f"{self._argument(first)} determines who allocates the output {self._parameters.names[position]!r}, PyTorch or "
                f"JAX, and is {type_name(type(like))}: pass the output, too"
            )
        from ..torch.schema import dtype_of_output

        if like.is_pinned():
            raise BufferError(
                f"{self._argument(first)} determines where the output {self._parameters.names[position]!r} is allocated, and is "
                "on the CPU: pass the output, too, or a tensor on the GPU there"
            )
        inputs = [given[each.position] for each in self._pattern.inputs]
        return like.new_empty(shape, dtype=dtype_of_output(self, position, inputs))

    def _for_cuda(self, what: str):
        """See :class:`Kernel`."""
        return self.cuda_kernel

    @property
    def _by_xla(self):
        """How XLA launches it."""
        from ..jax import xla_launches

        return xla_launches

    def __repr__(self):
        return f"<fast_args {self.__module__}.{self.__qualname__}{inspect.signature(self)}, launch={self.launch!r}>"

    def explain(self, /, *args, **kwargs):
        """Explain a call with these arguments without making it; outputs may be omitted. See :meth:`CudaLauncher.explain`."""
        return explain_launch(self._launcher, self._parameters.bind(*args, **kwargs), self._complete)

    def precompile(self, /, *calls) -> list[tuple]:
        """Compile for signatures or example arguments, whose outputs may be omitted. See :meth:`CudaKernel.precompile`."""
        what, given = f"{self.__qualname__}.precompile()", []
        for call in calls:
            if signature_in(call) is None:
                args, kwargs = arguments_of(call, what)
                call = self._complete(self._parameters.bind(*args, **kwargs))
            given.append(call)
        return self.cuda_kernel.precompile(*given)

    def recompile(self) -> None:
        """Compile the kernel anew, after a global of its function has changed."""
        self.cuda_kernel.recompile()

    def counts(self):
        """The counts of the kernel's launches, by whatever configuration."""
        return self.cuda_kernel.counts()

    def as_torch_op(self, name: str, *, backward=None, setup_context=None, vmap="loop", replace: bool = False):
        """Register the kernel as an operator of PyTorch, for tensors on CUDA devices. See :meth:`FastKernel.as_torch_op`."""
        from ..torch.operator import as_torch_op

        return as_torch_op(self, name, backward=backward, setup_context=setup_context, mutates=None, vmap=vmap, replace=replace)

    @property
    def _boxed_call(self) -> int:
        """The address of :data:`launch_boxed`."""
        return launch_boxed.address

    @property
    def _is_native(self) -> bool:
        """Whether native code makes its launches: not with a configuration that Python code gives, nor those of the package."""
        self._prepare()
        return isinstance(self._launcher, CudaLauncher) and not self._launcher.why_not

    def _on_any_device(self, /, *args):
        """Make a call with arguments on the CPU, too, by position."""
        at = self._pattern.inputs[0].position
        return self.on_cpu(*args) if self.on_cpu is not None and args[at].device.type == "cpu" else self(*args)

    def __reduce__(self):
        return LaunchedKernel, (self.cuda_kernel, self._kernel_options, self.on_cpu, "a pickled kernel")

    def __eq__(self, other):
        return isinstance(other, LaunchedKernel) and other._key == self._key

    def __hash__(self):
        return hash(self.cuda_kernel)


enable_vectorcall(LaunchedKernel, LaunchedKernel.__call__)


def launched_kernel_of(kernel, kernel_options: KernelOptions) -> LaunchedKernel:
    """Return the only one of a :class:`~fastexchange.CudaKernel` with these options, ``launch`` among them."""
    if kernel_options.returns is not None or kernel_options.cuda is not None:
        raise TypeError("fast_args(): a kernel for CUDA has no returns= or cuda=")
    launch = kernel_options.launch
    if isinstance(launch, tuple):
        launch = tuple(tuple(each) if isinstance(each, list) else each for each in launch)
    kernel_options = kernel_options._replace(launch=launch)
    OptionsOf(kernel_options, kernel.py_func).check()
    launcher_of(kernel, launch, "fast_args()", kernel_options.out)  # refuses what cannot be told apart from others
    return kernel_of(kernel.dispatcher, kernel_options, lambda *_: LaunchedKernel(kernel, kernel_options, None, "fast_args()"))

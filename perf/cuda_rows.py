"""The launches that the benchmark times, in groups, for each package that compiles kernels for CUDA.

All kernels are empty. What is called ``own`` is the package's own launch of the same kernel.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import floor
import numpy as np
from cuda_places import PACKAGES, SIZE, BareGpu, OnlyDunder
from groups import C, Group, Row, call, names_of

from fastexchange import fast_args
from fastexchange.cuda.driver import driver
from fastexchange.cuda.targets import target_of
from fastexchange.ground.native import address_of, offset_of

MANY = 26
IN_TURN = 8
_IN_GRAPH = 10
_RAW = 100  # launches of a statement, in a loop in C
_GRID, _BLOCK = 128, 128  # as numba-cuda's own benchmark of many arguments has them


class Rows:
    """The rows of one package.

    Attributes
    ----------
    cuda : the package's module.
    left_out : a sentence for each row that is left out.
    """

    def __init__(self, package: str, place):
        self.package, self.place = package, place
        self.left_out: list[str] = []
        self.cuda = importlib.import_module(PACKAGES[package])
        self.limit = floor.load_cuda()
        self.cuda.device_array(1, np.float32)  # makes a context
        functions = driver().native
        self.limit.use_driver(
            functions.launch, functions.get_current, functions.push_current, functions.pop_current,
            address_of(functions) + offset_of("fx_cuda", "contexts"),
        )  # fmt: skip
        driver().context(0)

    # ---- what rows are made of

    def kernel(self, names, declared: str = ""):
        """An empty kernel as the package's dispatcher, and with ``@fast_args`` over it. `declared`: its signature."""
        namespace: dict[str, Any] = {}
        exec(f"def kernel({', '.join(names)}):\n    pass\n", namespace)
        plain = self.cuda.jit(declared)(namespace["kernel"]) if declared else self.cuda.jit(namespace["kernel"])
        return plain, fast_args(plain)

    def tensors(self, count: int, device: int = 0) -> dict[str, Any]:
        return {name: self.place.tensor(device) for name in names_of(count)}

    def device_arrays(self, count: int) -> dict[str, Any]:
        return {name: self._device_array() for name in names_of(count)}

    def _device_array(self):
        return self.cuda.device_array(SIZE, np.float32)

    def by_hand(self, plain, signature: str, values: dict[str, Any], grid: int, block: int):
        """A launch of hand-written C, which holds these arguments for ``raw``. The kernel has been launched before."""
        target = target_of(plain)
        compiled = target.compile(plain, next(iter(plain.overloads)))
        made = self.limit.launch(signature, self.package, compiled.function(), (grid, 1, 1), (block, 1, 1), 0, -1)
        self.limit.hold(made, *values.values())
        return made

    def launched(self, launcher, values: dict[str, Any]):
        """The launcher, after launches that make its cache entry."""
        for _ in range(4):
            launcher(*values.values())
        return launcher

    # ---- groups

    def arguments(
        self, case: str, title: str, values: dict[str, Any], signature: str = "tensors",
        own: Callable[[Callable[[], Any]], dict[str, Any]] | None = None,
    ) -> Group:  # fmt: skip
        """All ways to launch a kernel with these arguments.

        `own`: from a function that makes an array to the arguments of the package's own launches.
        """
        group, key = Group(f"{self.package}: {title}"), f"{self.package}/{case}/"
        plain, kernel = self.kernel(values)
        launcher = self.launched(kernel[_GRID, _BLOCK], values)
        code, reference = call("f", values), key + "fast"
        group.add(reference, "fastexchange", code, {"f": launcher, **values})
        if case == "3":
            group.add(key + "again", "the same once more: noise", code, {"f": launcher, **values}, reference)
        on_stream = kernel[_GRID, _BLOCK, self.cuda.stream()]
        group.add(key + "stream", "fastexchange, an explicit stream", code, {"f": on_stream, **values}, reference)
        if case == "3":
            for who, label, make in (
                ("fallback/device", f"{self.package}'s device arrays", self._device_array),
                ("fallback/interface", "objects with __cuda_array_interface__", self.place.interface),
                ("fallback/dunder", "objects with only __dlpack__", lambda: OnlyDunder(self.place.tensor())),
            ):
                given = {"f": launcher, **{name: make() for name in values}}
                group.add(key + who, f"fastexchange, {label}", code, given, reference)
            if self.place.is_gpu and importlib.util.find_spec("cupy") is not None:
                given = {"f": launcher, **_cupys(importlib.import_module("cupy"))}
                group.add(key + "cupy", "fastexchange, CuPy arrays", code, given, reference)
            if self.place.is_gpu and importlib.util.find_spec("jax") is not None:
                given = {"f": launcher, **_jaxs(importlib.import_module("jax"))}
                if why := why_not_run(code, given):
                    self.left_out.append(f"{group.title}: JAX's arrays: the row is left out ({why}).")
                else:
                    self.launched(launcher, _jaxs(importlib.import_module("jax")))
                    group.add(key + "jax", "fastexchange, JAX's arrays", code, given, reference)
        self._limits(group, key, plain, signature, values)
        own = own or (lambda make: {name: make() for name in values})
        launch = plain[_GRID, _BLOCK]
        tensor = f"{self.place.tensor_name}s, through __dlpack__"
        for who, label, make in (
            ("device", "its own device arrays", self._device_array),
            ("interface", "objects with __cuda_array_interface__", self.place.interface),
            ("tensor", tensor, self.place.tensor),
        ):
            label, given = f"{self.package}'s own, {label}", {"f": launch, **own(make)}
            if why := why_not_run(code, given):
                self.left_out.append(f"{group.title}: {label}: the row is left out ({why}).")
            else:
                group.add(key + who, label, code, given, reference)
        return group

    def _limits(self, group: Group, key: str, plain, signature: str, values: dict[str, Any], grid=_GRID, block=_BLOCK) -> None:
        made = self.by_hand(plain, signature, values, grid, block)
        reference = key + "fast"
        group.add(key + "c", C, call("f", values), {"f": made, **values}, reference)
        if signature == "tensors":
            checked = self.by_hand(plain, "checked", values, grid, block)
            group.add(key + "checked", f"{C}, that checks as much", call("f", values), {"f": checked, **values}, reference)
        for who, label, released in (("raw", "", False), ("released", ", without the GIL", True)):
            names = {"f": self.limit.raw, "l": made, "n": _RAW, "r": released}
            group.add(key + who, f"cuLaunchKernel alone, from C{label}", "f(l, n, r)", names, reference, _RAW)

    def numbers_of_arguments(self) -> Iterator[Group]:
        what = self.place.tensor_name
        for count in (1, 3, MANY):
            yield self.arguments(str(count), f"{count} {what}{'s' * (count > 1)}", self.tensors(count))
        values = {"a": 2.0, **self.tensors(2)}
        own = lambda make: {"a": 2.0, "x0": make(), "x1": make()}  # noqa: E731
        yield self.arguments("axpy", f"a float, 2 {what}s", values, "axpy", own)

    def latencies(self) -> Iterator[Group]:
        """Declared signatures, as numba-cuda-mlir's own benchmark of launches has them."""
        for case, array_count, scalar_count in (
            ("none", 0, 0), ("array/1", 1, 0), ("array/16", 16, 0), ("scalar/16", 0, 16), ("scalar/256", 0, 256),
        ):  # fmt: skip
            kind, count = ("array", array_count) if array_count else ("float32 scalar", scalar_count)
            group = Group(f"{self.package}: {count} {kind}{'s' * (count > 1)}, a declared signature" if count else
                          f"{self.package}: no argument, a declared signature")  # fmt: skip
            key = f"{self.package}/{case}/"
            scalars = {name: np.float32(i) for i, name in enumerate(names_of(scalar_count))}
            values, arrays = self.tensors(array_count) | scalars, self.device_arrays(array_count) | scalars
            declared = f"void({', '.join(['float32[::1]'] * array_count + ['float32'] * scalar_count)})"
            plain, kernel = self.kernel(values, declared)
            launcher = self.launched(kernel[1, 1], values)
            code, reference = call("f", values), key + "fast"
            ours = f"fastexchange, {self.place.tensor_name}s" if array_count else "fastexchange"
            group.add(reference, ours, code, {"f": launcher, **values})
            if array_count:
                given = {"f": launcher, **arrays}
                group.add(key + "fallback", "fastexchange, the package's device arrays", code, given, reference)
            self._limits(group, key, plain, "tensors" if array_count else "scalars", values, 1, 1)
            given = {"f": plain[1, 1], **arrays}
            label = "its own device arrays" if array_count else "the same"
            group.add(key + "device", f"{self.package}'s own, {label}", code, given, reference)
            yield group

    def turns(self) -> Group:
        """Launches that are not like the one before, or are looked up each time."""
        group, key = Group(f"{self.package}: 3 {self.place.tensor_name}s, and not the same launch again"), f"{self.package}/turn/"
        values, arrays = self.tensors(3), self.device_arrays(3)
        pairs = [self.kernel(values) for _ in range(IN_TURN)]
        plain, kernel = pairs[0]
        reference = key + "same"
        launchers = {f"f{i}": self.launched(each[_GRID, _BLOCK], values) for i, (_, each) in enumerate(pairs)}
        group.add(reference, "one kernel", call("f0", values), {**launchers, **values})
        given = {f"f{i}": each[_GRID, _BLOCK] for i, (each, _) in enumerate(pairs)}
        every = lambda names: "; ".join(call(name, values) for name in names)  # noqa: E731
        own = f"{self.package}'s own, its own device arrays"
        ours = {**launchers, **values}
        group.add(key + "kernels", f"{IN_TURN} kernels in turn", every(launchers), ours, reference, IN_TURN)
        hands = {f"f{i}": self.by_hand(each, "tensors", values, _GRID, _BLOCK) for i, (each, _) in enumerate(pairs)}
        group.add(key + "kernels/c", f"{IN_TURN} kernels in turn: {C}", every(hands), {**hands, **values}, reference, IN_TURN)
        given |= arrays
        group.add(key + "kernels/own", f"{IN_TURN} kernels in turn: {own}", every(launchers), given, reference, IN_TURN)
        ours = {f"f{i}": kernel[_GRID + i, _BLOCK] for i in range(IN_TURN)} | values
        group.add(key + "grids", f"{IN_TURN} configurations in turn", every(launchers), ours, reference, IN_TURN)
        ours = {f"f{i}": plain[_GRID + i, _BLOCK] for i in range(IN_TURN)} | arrays
        group.add(key + "grids/own", f"{IN_TURN} configurations in turn: {own}", every(launchers), ours, reference, IN_TURN)
        names = {"g": _GRID, "b": _BLOCK, "n": 1000}
        for who, label, code in (
            ("item", "kernel[grid, block](…), looked up each time", "k[g, b]"),
            ("forall", "kernel.forall(n)(…), looked up each time", "k.forall(n)"),
        ):
            group.add(key + who, label, call(code, values), {"k": kernel, **names, **values}, reference)
            group.add(f"{key}{who}/own", f"{label}: {own}", call(code, arrays), {"k": plain, **names, **arrays}, reference)
        held = {"f": kernel.forall(1000), **values}
        group.add(key + "held", "kernel.forall(n), held", call("f", values), held, reference)
        by_name = call("f0", values, "{0}={0}")
        group.add(key + "keywords", "all three by keyword", by_name, {**launchers, **values}, reference)
        return group

    def changes(self) -> Group:
        """The last argument is a float and an int in turn."""
        group, key = Group(f"{self.package}: 2 {self.place.tensor_name}s and a scalar"), f"{self.package}/change/"
        values, arrays, parameters = self.tensors(2), self.device_arrays(2), (*names_of(2), "a")
        plain, kernel = self.kernel(parameters)
        numbers = {"a": 2.0, "b": 2}
        launcher, reference = kernel[_GRID, _BLOCK], key + "same"
        for number in numbers.values():
            self.launched(launcher, {**values, "a": number})
        same, turn = "f(x0, x1, a)", "f(x0, x1, a); f(x0, x1, b)"
        ours = {"f": launcher, **values, **numbers}
        group.add(reference, "a float in all launches", same, ours)
        group.add(key + "turn", "a float and an int in turn", turn, ours, reference, 2)
        own = {"f": plain[_GRID, _BLOCK], **arrays, **numbers}
        group.add(key + "own", f"a float and an int in turn: {self.package}'s own", turn, own, reference, 2)
        return group

    def operators(self) -> Iterator[Group]:
        """Operators of PyTorch, and what they do by hand. Against the stub PyTorch's allocator for devices is the stub's."""
        torch = self.place.torch
        if torch is None:
            self.left_out.append(f"{self.package}: operators of PyTorch: the rows are left out ({self.place.why_no_torch}).")
            return
        x, w = (torch.empty(SIZE, device="cuda") for _ in range(2))
        _, kernel = self.kernel(("x", "w", "y"))
        _, backward = self.kernel(("w", "grad_y", "grad_x"))
        grid, name, out = (SIZE + 31) // 32, f"fx_perf_{self.package.replace('-', '_')}", "x[n], w[n] -> y[n]"
        launcher, back = kernel[grid, 32], backward[grid, 32]

        def by_hand(x, w):
            y = torch.empty_like(x)
            launcher(x, w, y)
            return y

        @torch.library.custom_op(f"{name}::custom", mutates_args=())
        def custom(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return by_hand(x, w)

        configurations = {
            "grid": ("launch=('(n + 31) // 32', 32)", ("(n + 31) // 32", 32)),
            "tasks": ("launch='n'", "n"),
            "fixed": (f"launch=({grid}, 32)", (grid, 32)),
            "function": ("launch is a function of Python's", lambda x, w, y: ((x.shape[0] + 31) // 32, 32)),
        }
        made = {
            key: (label, kernel.as_torch_op(f"{name}::{key}", launch=launch, out=out, replace=True))
            for key, (label, launch) in configurations.items()
        }
        group, key = Group(f"{self.package}: an operator of 2 tensors that returns a third"), f"{self.package}/operator/"
        code, names, reference = "f(x, w)", {"x": x, "w": w}, key + "hand"
        group.add(reference, "empty_like and fastexchange's launch by hand", code, {"f": by_hand, **names})
        inline = {"f": launcher, "e": torch.empty_like, **names}
        group.add(key + "hand/inline", "the same, not in a function of Python's", "f(x, w, e(x))", inline, reference)
        for case, (label, operator) in made.items():
            group.add(key + case, f"operator object, {label}", code, {"f": operator, **names}, reference)
            group.add(key + case + "/ops", f"torch.ops, {label}", code, {"f": operator.overload, **names}, reference)
        group.add(key + "custom", "custom_op around by hand", code, {"f": custom, **names}, reference)
        if self.place.is_gpu:
            group.add(key + "mul", "torch.mul(x, w)", code, {"f": torch.mul, **names}, reference)
        yield group
        if self.place.is_gpu:
            custom.register_fake(lambda x, w: torch.empty_like(x))
            yield self._in_graphs(torch, key + "graph/", by_hand, made["grid"][1], custom, names)
        gradients = backward.as_torch_op(f"{name}::backward", launch=("(n + 31) // 32", 32), out="w[n], grad_y[n] -> grad_x[n]")
        trained = kernel.as_torch_op(f"{name}::trained", launch=("(n + 31) // 32", 32), out=out, backward=gradients)

        class ByHand(torch.autograd.Function):
            """The kernels as users put them into autograd by hand."""

            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(w)
                return by_hand(x, w)

            @staticmethod
            def backward(ctx, grad):
                (w,) = ctx.saved_tensors
                made = torch.empty_like(grad)
                back(w, grad, made)
                return made, None

        leaf = torch.empty(SIZE, device="cuda", requires_grad=True)
        names = {"x": leaf, "w": w, "g": torch.empty(SIZE, device="cuda"), "grad": torch.autograd.grad}
        code, reference = "grad(f(x, w), (x,), g)", key + "gradient/hand"
        group = Group(f"{self.package}: that operator, forward and backward")
        group.add(reference, "an autograd.Function by hand", code, {"f": ByHand.apply, **names})
        group.add(key + "gradient", "operator object", code, {"f": trained, **names}, reference)
        group.add(key + "gradient/ops", "torch.ops", code, {"f": trained.overload, **names}, reference)
        yield group

    def _in_graphs(self, torch, key: str, by_hand, operator, custom, names) -> Group:
        """One of ten calls, one after the other, in a function that Inductor has compiled."""

        def ten(function):
            def run(x, w):
                for _ in range(_IN_GRAPH):
                    x = function(x, w)
                return x

            return run

        group = Group(f"{self.package}: one of {_IN_GRAPH} such operators in a graph of Inductor's")
        group.add(key + "hand", "by hand, not compiled", "f(x, w)", {"f": ten(by_hand), **names}, None, _IN_GRAPH)
        for case, function, mode in (
            ("operator object", operator, "default"), ("custom_op around by hand", custom, "default"),
            ("operator object", operator, "reduce-overhead"), ("torch.mul(x, w)", torch.mul, "reduce-overhead"),
        ):  # fmt: skip
            given = {"f": torch.compile(ten(function), fullgraph=True, mode=mode), **names}
            label = case + (f", mode={mode!r}" if mode != "default" else "")
            if why := why_not_run("f(x, w)", given):
                self.left_out.append(f"{group.title}: {label}: the row is left out ({why}).")
            else:
                group.add(f"{key}{case}/{mode}", label, "f(x, w)", given, key + "hand", _IN_GRAPH)
        return group

    def other_device(self) -> Group:
        """Tensors on the second device, while the first is current."""
        group, key = Group(f"{self.package}: 3 {self.place.tensor_name}s on the other device"), f"{self.package}/device/"
        values = self.tensors(3, 1)
        plain, kernel = self.kernel(values)
        launcher, reference = self.launched(kernel[_GRID, _BLOCK], values), key + "fast"
        code = call("f", values)
        group.add(reference, "fastexchange", code, {"f": launcher, **values})
        with self.cuda.gpus[1]:
            made = self.by_hand(plain, "tensors", values, _GRID, _BLOCK)
            names = {"f": plain[_GRID, _BLOCK], "d": self.cuda.gpus[1], **self.device_arrays(3)}
        group.add(key + "c", C, code, {"f": made, **values}, reference)
        group.add(key + "own", f"with cuda.gpus[1]: {self.package}'s own, device arrays", f"with d: {code}", names, reference)
        return group

    def groups(self) -> list[Group]:
        """All groups of the package."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of grids that are small
            found = [*self.numbers_of_arguments(), *self.latencies(), self.turns(), self.changes(), *self.operators()]
            if self.place.device_count > 1:
                found.append(self.other_device())
        return found


def why_not_run(code: str, names: dict[str, Any]) -> str:
    """What keeps a statement of other packages from being timed; "" if nothing does. Whatever it compiles is compiled then."""
    try:
        for _ in range(2):  # numba-cuda-mlir 0.6 takes a tensor of PyTorch once, and cannot read its dtype in the next launch
            exec(code, dict(names))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return ""


# ---- peers on a GPU --------------------------------------------------------------------------------------------------


def _cupy(place, torch) -> tuple[str, str, dict[str, Any]]:
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void kernel(float *x, float *y, float *z) {}', "kernel")
    return "CuPy RawKernel, 3 CuPy arrays", "f(g, b, (x0, x1, x2))", {"f": kernel, "g": (_GRID,), "b": (_BLOCK,), **_cupys(cupy)}


def _jaxs(jax) -> dict[str, Any]:
    """Computed, so that launches read them where they are."""
    return {name: jax.numpy.zeros(SIZE, jax.numpy.float32).block_until_ready() for name in names_of(3)}


def _cupys(cupy) -> dict[str, Any]:
    return {name: cupy.zeros(SIZE, cupy.float32) for name in names_of(3)}


def _triton(place, torch) -> tuple[str, str, dict[str, Any]]:
    import triton

    @triton.jit
    def kernel(x, y, z):
        pass

    tensors = {name: place.tensor() for name in names_of(3)}
    return "Triton, 3 torch tensors", "f[g](x0, x1, x2)", {"f": kernel, "g": (_GRID,), **tensors}


def _torch(place, torch) -> tuple[str, str, dict[str, Any]]:
    tensors = {name: place.tensor() for name in names_of(3)}
    return "torch.add(x, y, out=z)", "f(x0, x1, out=x2)", {"f": torch.add, **tensors}


def peers(place) -> tuple[Group | None, list[str]]:
    """What other packages take to launch; and a sentence for each that is left out."""
    kinds = {"CuPy": _cupy, "Triton": _triton, "PyTorch": _torch}
    if not place.is_gpu:
        return None, [f"{', '.join(kinds)}: their rows need a GPU."]
    if isinstance(place, BareGpu):
        return None, [f"{', '.join(kinds)}: their rows need PyTorch."]
    import torch

    group, left_out = Group("Others: 3 arrays"), []
    for name, make in kinds.items():
        try:
            label, code, names = make(place, torch)
        except Exception as error:  # it is not installed, or not for this GPU
            left_out.append(f"{name}: its row is left out ({type(error).__name__}: {error}).")
            continue
        if why := why_not_run(code, names):
            left_out.append(f"{name}: its row is left out ({why}).")
        else:
            group.add(f"peer/{name}", label, code, names)
    return group, left_out


def prepared(row: Row, place) -> Row:
    """The row, with what the place wants to be done before it is timed, and how often."""
    return replace(row, statement=replace(row.statement, prepare=place.prepare, most_calls=place.most_launches))

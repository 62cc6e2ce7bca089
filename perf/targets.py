"""The project's promises, each with what was measured. Ratios and differences are of the same run."""

from collections.abc import Iterator

import numpy as np
import rows
from book import Book, Target
from rows_arguments import BEYOND, NUMBAS, SLOPE_COUNTS

from fastexchange.measuring.timing import Samples


def slope(times: dict[str, Samples], key: str) -> Samples:
    """Nanoseconds per further argument, up to 32: least squares over ``SLOPE_COUNTS``, round by round. `key` holds ``{}``."""
    counts = np.array(SLOPE_COUNTS, float)
    values = np.array([times[key.format(count)].values for count in SLOPE_COUNTS])
    centred = counts - counts.mean()
    return Samples(centred @ values / (centred @ centred))


def slope_beyond(times: dict[str, Samples], key: str) -> Samples:
    """Nanoseconds per further argument of those beyond 32. `key` holds ``{}``."""
    few, many = BEYOND
    return (times[key.format(many)] - times[key.format(few)]) / (many - few)


def per_scalar(times: dict[str, Samples], kind: str, who: str) -> Samples:
    """Nanoseconds of one scalar, from the calls with nine and with one."""
    return (times[f"scalar/{kind}/9/{who}"] - times[f"scalar/{kind}/1/{who}"]) / 8


def _tensors(book: Book) -> None:
    call = "3 torch CPU tensors"
    c, ours = "torch/3/c", "torch/3/fast"
    book.add(call, "≤ 0.30 x C, exchange table", lambda t: t[ours] / t[c], 0.30, "x")
    book.add(call, "≤ 1.6 x C that reads memory", lambda t: t[ours] / t["torch/3/memory"], 1.6, "x")
    book.add(call, "≥ 6 x faster than tvm-ffi", lambda t: t["torch/3/tvm"] / t[ours], 6, "x faster")
    book.add(call, "≥ 10 x faster than x.numpy()", lambda t: t["torch/3/views"] / t[ours], 10, "x faster")
    holding = lambda t: (t["torch/3/holding"] - t["torch/1/holding"]) / 2  # noqa: E731
    book.add("each torch tensor, nogil=True", "≤ 50 ns", holding, 50, "ns")
    plain = "torch/3/fast"
    book.add("3 torch views", "≤ 1.3 x 3 plain ones", lambda t: t["autograd/views/fast"] / t[plain], 1.3, "x")
    weights = lambda t: (t["autograd/weights/fast"] - t["autograd/mode"]) / t[plain]  # noqa: E731
    book.add("3 weights, no_grad() apart", "≤ 1.6 x 3 plain ones", weights, 1.6, "x")
    asked = lambda t: t["asked/fast"] / t["asked/c"]  # noqa: E731
    book.add("3 torch, PyTorch asked about each", "≤ 6 x C without guards", asked, 6, "x")
    without_table = lambda t: t["tableless/fast"] / t["tableless/views"]  # noqa: E731
    book.add("3 torch, no exchange table", "≤ 1 x njit_kernel(x.numpy(), …)", without_table, 1, "x")
    by_hand = "njit(np.asarray(x), …)"
    book.add("3 JAX arrays", f"≤ 0.2 x {by_hand}", lambda t: t["jax/3/fast"] / t["jax/3/asarray"], 0.2, "x")
    book.add("an output in JAX", "≤ 1.3 x jax.jit(x + y)", lambda t: t["jax/output/fast"] / t["jax/output/jit"], 1.3, "x")
    book.add("3 array.array", "≤ 3 x hand-written C", lambda t: t["buffer/3/fast"] / t["buffer/3/c"], 3, "x")
    call = "3 NumPy arrays"
    book.add(call, "≤ 2 x empty C builtin", lambda t: t["numpy/3/fast"] / t["numpy/3/empty"], 2, "x")
    with_loop = "≤ 2 x empty, loop counted"
    book.add(call, with_loop, lambda t: (t["numpy/3/fast"] + t["loop"]) / (t["numpy/3/empty"] + t["loop"]), 2, "x")
    book.add(call, "≥ 5 x faster than Numba's", lambda t: t["numpy/3/njit"] / t["numpy/3/fast"], 5, "x faster")
    for form, call in (("", "each further argument"), ("unpacked/", "each further, f(*arguments)")):
        ours = form + "{}/{{}}/fast"
        book.add(call, "NumPy ≤ 5 ns", lambda t, o=ours: slope(t, o.format("numpy")), 5, "ns")
        if not form:  # CPython's own part: it has a step at 30 arguments
            above = lambda t: slope(t, "numpy/{}/fast") - slope(t, "numpy/{}/empty")  # noqa: E731
            book.add(call, "NumPy ≤ 5 ns above empty", above, 5, "ns")
        book.add(call, "torch ≤ 7 ns", lambda t, o=ours: slope(t, o.format("torch")), 7, "ns")
    book.add("each beyond 32, f(*arguments)", "NumPy ≤ 3.5 ns", lambda t: slope_beyond(t, "unpacked/numpy/{}/fast"), 3.5, "ns")


def _scalars_and_signatures(book: Book) -> None:
    for key, (label, _) in NUMBAS.items():
        ratio = lambda t, k=f"numbas/{key}/": t[k + "fast"] / t[k + "njit"]  # noqa: E731
        book.add(f"{label}, through Numba", "≤ 1.05 x njit", ratio, 1.05, "x")
    for kind in ("float", "int", "bool"):
        book.add(f"scalar: {kind}", "≤ 4 ns each", lambda t, kind=kind: per_scalar(t, kind, "fast"), 4, "ns")
    more = "≤ 15 ns more than the 1st"
    book.add("the 8th of 8 signatures", more, lambda t: t["sites/8/last"] - t["sites/8/first"], 15, "ns")
    for count, bound in ((8, 30), (64, 45)):
        more = lambda t, k=f"sites/{count}/": t[k + "turn"] - t[k + "apart"]  # noqa: E731
        book.add(f"{count} signatures in turn", f"≤ {bound} ns more than {count} kernels", more, bound, "ns")


def _keywords_and_optionals(book: Book) -> None:
    for name in ("numpy", "torch"):
        for form, label in (("3", "in order"), ("r", "reversed")):
            call = f"3 {name} keywords, {label}"
            more = "≤ 25 ns more than positional"
            difference = lambda t, n=name, f=form: t[f"keywords/{n}/{f}"] - t[f"keywords/{n}/0"]  # noqa: E731
            book.add(call, more, difference, 25, "ns")
    for kind, label in rows.OPTIONALS.items():
        ours, plain = f"optional/{kind}/fast", f"optional/{kind}/njit"
        book.add(label, "≤ 10 ns", lambda t, o=ours: t[o] - t["optional/one/fast"], 10, "ns")
        must_be = "≥ 20 x faster than Numba's"
        if plain in book.times and book.times[plain].median < 5 * book.times["optional/one/njit"].median:
            book.targets.append(Target(label, must_be, "Numba's stays on its fast path", None))
        else:
            book.add(label, must_be, lambda t, o=ours, p=plain: t[p] / t[o], 20, "x faster")


def _results_and_launches(book: Book) -> None:
    new = lambda t: t["results/torch/new"] / t["results/torch/own"]  # noqa: E731
    book.add("a new 4-element torch result", "≤ 0.8 x torch.empty_like", new, 0.8, "x")
    for count in (1, 3, 32):
        more = lambda t, n=count: t[f"bound/{n}"] - t[f"bound/{n}/call"]  # noqa: E731
        book.add(f"bound to {count}", "≤ 5 ns more than the call", more, 5, "ns")
    for name in ("numpy", "torch"):
        more = lambda t, n=name: t[f"tuple/{n}/tuple"] - t[f"tuple/{n}/apart"]  # noqa: E731
        book.add(f"a tuple of 3 {name}", "≤ 30 ns more than the 3", more, 30, "ns")
        each = lambda t, n=name: (t[f"tuple/{n}/100"] - t[f"tuple/{n}/list"]) / 97  # noqa: E731
        book.add(f"a list of {name}", "≤ 15 ns each", each, 15, "ns")


def _fallback_and_start(book: Book) -> None:
    for name in ("numpy", "torch"):
        key = f"fallback/{name}/"
        more = "≤ __dlpack__ + 250 ns each"
        book.add(f"fallback around {name}", more, lambda t, k=key: (t[k + "fast"] - t[k + "export"]) / 3, 250, "ns")
    extra = "≤ 40 ms more than numba"
    book.add("import, processes apart", extra, lambda t: (t["import/fastexchange"] - t["import/numba"]) / 1e6, 40, "ms")
    book.add("import, after numba", "≤ 10 ms", lambda t: t["import/after"] / 1e6, 10, "ms")
    for kind, call in (
        ("numpy/call", "new installation, NumPy"), ("torch/call", "new installation, PyTorch"),
        ("torch/out", "the same with out="), ("torch/bind", "the same with bind()"), ("torch/list", "the same with a list"),
        ("torch/convert", "the same, convert()"), ("cuda/call", "new installation, a launch"),
    ):  # fmt: skip
        plain = "new/cuda/njit/both" if kind.startswith("cuda") else "new/numpy/njit/both"
        more = lambda t, k=f"new/{kind}/both", plain=plain: (t[k] - t[plain]) / 1e9  # noqa: E731
        book.add(call, "≤ 0.5 s more than njit", more, 0.5, "s")
    for part, call in (
        ("numpy/{}/first", "first call, warm disk cache"), ("numpy/{}/both", "the same, decoration included"),
        ("torch/{}/both", "the same with PyTorch's tensors"),
    ):  # fmt: skip
        key = f"start/{part}"
        ratio = lambda t, k=key: t[k.format("fast")] / t[k.format("njit")]  # noqa: E731
        book.add(call, "≤ 1.15 x njit(cache=True)", ratio, 1.15, "x")


def _exchange(book: Book) -> None:
    ours, theirs = "convert/numpy/fast", "convert/numpy/numpy"
    book.add("from_dlpack(tensor)", "≥ 6 x faster than NumPy's", lambda t: t[theirs] / t[ours], 6, "x faster")
    call, key = "convert(array, torch.Tensor)", "convert/torch/{}"
    for theirs, must_be, bound in (
        ("dlpack", "≥ 2 x faster than torch's", 2),
        ("from_numpy", "not slower than from_numpy", 1),
    ):
        ratio = lambda t, theirs=theirs: t[key.format(theirs)] / t[key.format("fast")]  # noqa: E731
        book.add(call, must_be, ratio, bound, "x faster")
    call, ratio = "tvm-ffi, 3 NumPy arrays", lambda t: t["polyfill/without"] / t["polyfill/with"]
    book.add(call, "≥ 1.3 x faster polyfilled", ratio, 1.3, "x faster")
    for ndim in rows.EXPORTED_NDIMS:
        ours, c = f"export/{ndim}/fast", f"export/{ndim}/c"
        ratio = lambda t, o=ours, c=c: t[o] / t[c]  # noqa: E731
        book.add(f"NumPy's export + deleter, {ndim}-D", "≤ 1.3 x hand-written C", ratio, 1.3, "x")


def targets(times: dict[str, Samples]) -> Iterator[Target]:
    """Every promise, in the order in which the project makes them."""
    book = Book(times)
    parts = _tensors, _scalars_and_signatures, _keywords_and_optionals, _results_and_launches, _fallback_and_start, _exchange
    for part in parts:
        part(book)
    return iter(book.targets)

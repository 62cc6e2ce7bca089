"""What launches of CUDA kernels are to cost, each promise with what was measured. Ratios and differences are of one run."""

from book import Book, Target

from fastexchange.measuring.timing import Samples

_DECLARED = {
    "none": "no argument", "array/1": "1 array", "array/16": "16 arrays", "scalar/16": "16 scalars", "scalar/256": "256 scalars",
}  # fmt: skip


def targets(times: dict[str, Samples], is_gpu: bool) -> list[Target]:
    """Every promise, for a run on a GPU or against the driver stub."""
    book = Book(times)
    for package in ("numba-cuda", "numba-cuda-mlir"):
        if f"{package}/3/fast" in times:
            (_on_gpu if is_gpu else _on_stub)(book, package)
            _always(book, package)
    return book.targets


def _faster(book: Book, package: str, case: str, than: str, label: str, factor: float, who: str) -> None:
    ours, theirs = f"{package}/{case}/fast", f"{package}/{case}/{than}"
    name = f"{package}: {label}"
    book.add(name, f"≥ {factor} x faster than {who}", lambda t: t[theirs] / t[ours], factor, "x faster")


def _on_stub(book: Book, package: str) -> None:
    key = package + "/{}/fast"
    each = lambda t: (t[key.format(26)] - t[key.format(1)]) / 25  # noqa: E731
    book.add(f"{package}: a tensor argument", "≤ 60 ns", each, 60, "ns")
    if package == "numba-cuda":
        _faster(book, package, "3", "tensor", "3 torch-like tensors", 50, "its own launch")


def _on_gpu(book: Book, package: str) -> None:
    if package + "/operator/hand" in book.times:
        ratio = lambda t: t[package + "/operator/grid/ops"] / t[package + "/operator/hand"]  # noqa: E731
        book.add(f"{package}: that operator as torch.ops…", "≤ 1.4 x by hand", ratio, 1.4, "x")
    for case in ("3", "26"):
        ratio = lambda t, k=f"{package}/{case}/": t[k + "fast"] / t[k + "c"]  # noqa: E731
        book.add(f"{package}: {case} torch tensors", "≤ 1.25 x hand-written C", ratio, 1.25, "x")
    key = f"{package}/3/"
    if key + "cupy" in book.times and "peer/CuPy" in book.times:
        book.add(f"{package}: 3 CuPy arrays", "≤ 1 x CuPy's own", lambda t: t[key + "cupy"] / t["peer/CuPy"], 1, "x")
    if key + "jax" in book.times:
        each = lambda t: (t[key + "jax"] - t[f"{package}/none/fast"]) / 3 / t[key + "raw"]  # noqa: E731
        book.add(f"{package}: each of 3 JAX arrays, besides the launch", "≤ 0.55 x cuLaunchKernel alone", each, 0.55, "x")
    graph = f"{package}/operator/graph/"
    if graph + "operator object/default" in book.times:
        ratio = lambda t: t[graph + "operator object/default"] / t[graph + "hand"]  # noqa: E731
        book.add(f"{package}: one of ten operators in a graph of Inductor's", "≤ 2.4 x by hand", ratio, 2.4, "x")
    if package == "numba-cuda":
        _faster(book, package, "3", "tensor", "3 torch tensors", 5, "its own launch")
        _faster(book, package, "26", "tensor", "26 torch tensors", 10, "its own launch")


def _always(book: Book, package: str) -> None:
    hand = package + "/operator/hand"
    if hand in book.times:
        for case, label in {"grid": "a grid in the notation of shapes", "tasks": "tasks in it", "fixed": "a fixed one"}.items():
            ratio = lambda t, k=f"{package}/operator/{case}": t[k] / t[hand]  # noqa: E731
            book.add(f"{package}: operator object, {label}", "≤ 1.05 x by hand", ratio, 1.05, "x")
    if package == "numba-cuda-mlir":
        for case, label in _DECLARED.items():
            _faster(book, package, case, "device", label, 2, "its own launch of device arrays")

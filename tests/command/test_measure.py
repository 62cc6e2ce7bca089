"""``measure``: what it attributes to whom, held against known costs and an independent harness; and what it leaves behind."""

import ctypes
import gc
import html
import itertools
import json
import re
import signal
import sys
import traceback
import warnings
import weakref
from dataclasses import replace
from unittest.mock import Mock
from xml.etree import ElementTree

import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import FRAMEWORKS, torch
from made_producers import ONLY_NUMBA, Dunder, Tabled, tabled_type

import fastexchange
from fastexchange import OverheadReport, fast_args, measure
from fastexchange.ground.dlpack import ffi
from fastexchange.measuring import judgement, overhead, timing, trial
from fastexchange.measuring.exported_calls import statements_of
from fastexchange.measuring.restoring import Snapshot
from fastexchange.torch import offsets as torch_offsets

pytestmark = pytest.mark.filterwarnings("ignore:measure:RuntimeWarning")  # of noise: other things run beside the tests

usleep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(("usleep", ctypes.CDLL(None)))
ONES = np.ones(3)


@fast_args
def take(x, y, z=1.0, *, scale=2):
    return scale


@fast_args
def shift(x, out, pair=None, by=1):
    out[:] = x + by


@fast_args
def sleep(us):
    usleep(us)


repeated = fast_args(lambda x, k, y: y.fill(x[0]), out="x[n], k -> y[k]")
doubled = fast_args(lambda x, y: y.fill(2 * x[0]), out="x[n] -> y[n]", backward=lambda grad_y: 2 * grad_y)
nothing, nothing_without_the_gil = fast_args(lambda *arguments: None), fast_args(nogil=True)(lambda x: None)
bits = fast_args(storage=True)(lambda x, y: x[0] + y)


def quick(kernel, *args, alternatives=False, rounds=3, **kwargs) -> OverheadReport:
    """A report that takes little time, for what is not about its numbers."""
    return measure(kernel, *args, alternatives=alternatives, rounds=rounds, **kwargs)


# ---- parts, paths, results and alternatives --------------------------------------------------------------------------
PRODUCERS = [each for each in FRAMEWORKS if each.name in ("numpy", "exchange table", "__dlpack__", "legacy __dlpack__", "torch")]


@pytest.mark.parametrize("framework", PRODUCERS, ids=str)
def test_parts_and_paths_of_a_call(framework):
    """The parts are the whole, paths and reasons are those of ``explain``, and arguments are as they were."""
    x, out = np.arange(3.0), np.full(3, np.nan)
    tensor = framework.tensor(x)
    report = quick(shift, tensor, framework.tensor(out) if framework.mutable else out, (tensor, 2), by=5)
    whole = report.call + report.keywords
    for cost in report.arguments:
        whole = whole + cost.total
    assert np.allclose(whole.values, report.overhead.values)
    assert np.allclose((report.overhead + report.alone).values, report.total.values)
    assert report.rounds == 3 and report.result is None and report.result_type is None and "the result" not in str(report)
    is_read_in_place = framework.name == "numpy" or (framework.name == "torch" and torch_offsets.guard().knows_views)
    path, has_producer = fastexchange.explain(tensor).path, not is_read_in_place
    paths = [("x", path), ("out", path if framework.mutable else "ndarray"), ("pair", "tuple"), ("by", "scalar")]
    assert [(cost.name, cost.path) for cost in report.arguments] == paths
    producers = [has_producer, has_producer and framework.mutable, has_producer, False]
    assert [cost.producer is not None for cost in report.arguments] == producers
    assert report.arguments[0].reasons == fastexchange.explain(tensor).reasons
    assert x.tolist() == [0, 1, 2] and np.isnan(out).all()
    assert not any("anew" in sentence for sentence in report.warnings)


CALLS = {  # a kernel, its arguments, keywords, their paths, and what the result is
    "the bits of elements without a Numba type": (bits, (np.ones(2, np.float16), 1), {}, "ndarray scalar", "int"),
    "a buffer and a list": (nothing, (bytearray(8), [np.ones(2), ONES]), {}, "buffer list", None),
    "what only Numba takes": (nothing, (ONES, ONLY_NUMBA), {}, "numba numba", None),
    "a petabyte, which is copied once": (nothing, (np.broadcast_to(np.zeros(1), (1 << 50,)),), {}, "ndarray", None),
    "no arguments": (nothing, (), {}, "", None),
    "declared writes": (fast_args(mutates="out")(shift.py_func), (ONES, ONES * 0), {}, "ndarray ndarray", None),
    "a backward pass": (doubled, (ONES,), {}, "ndarray", "numpy.ndarray"),
    "arrays": (fast_args(lambda x: (x.copy(), x)), (ONES,), {}, "ndarray", "tuple"),
    "a number": (take, (ONES, ONES), {}, "ndarray ndarray", "int"),
    "parameters named as modules": (fast_args(lambda np, numpy: np.copy()), (ONES, 1), {}, "ndarray scalar", "numpy.ndarray"),
    "an output that is omitted": (repeated, (ONES, 4), {}, "ndarray scalar", "numpy.ndarray"),
    "an output of None": (repeated, (ONES, 4), {"y": None}, "ndarray scalar", "numpy.ndarray"),
    "an output by name": (repeated, (ONES, 4), {"y": np.zeros(4)}, "ndarray scalar ndarray", "numpy.ndarray"),
    "an output by position": (repeated, (ONES, 4, np.zeros(4)), {}, "ndarray scalar ndarray", "numpy.ndarray"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_paths_and_results(call):
    kernel, arguments, keywords, paths, result_type = CALLS[call]
    report = quick(kernel, *arguments, **keywords)
    assert " ".join(cost.path for cost in report.arguments) == paths and report.call.rounds == 3
    assert (report.keywords is not None) == ("by name" in call)
    assert (report.result_type, report.result is not None) == (result_type, result_type is not None or kernel is repeated)
    assert ("the result" in str(report)) == (report.result is not None)
    assert kernel is not bits or report.arguments[0].numba_type.startswith("array(uint16, 1d, C), the bits of its elements")
    assert "buffer" not in paths or report.arguments[0].producer is not None


READONLY, BIG = np.broadcast_to(np.ones(1), 3), np.zeros(1 << 22)  # 32 MiB


def grow(x, by):
    x[0] += by[0]


def generate(x):
    yield x[0]


SAID = {
    "a call that Numba makes": (generate, (ONES,), "Numba's own dispatcher makes this call, .*counted as the kernel's own"),
    "a result that cannot be told": (lambda x: [1, x.shape[0]], (ONES,), "is counted as the kernel's own"),
    "what cannot be restored":
        (lambda x: x.append(1), (numba.typed.List([1]),), "what the kernel changes in 'x' is not seen and not undone"),
    "big arrays": (grow, (BIG, READONLY), "too large to be restored in each round"),
    "a slow kernel": (sleep.py_func, (np.uint32(30_000),), r"one call takes 0\.\d+ s: it is timed call by call"),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_is_said(what):
    function, arguments, said = SAID[what]
    with pytest.warns(RuntimeWarning, match=said):
        report = quick(fast_args(function), *arguments)
    assert any(re.search(said, sentence) for sentence in report.warnings)
    assert report.result is None and report.alone.rounds == 3 and BIG[0] == 0
    assert what != "a slow kernel" or report.alone.median + report.overhead.median > 2e7


def test_without_the_gil_tensors_are_owned_and_that_is_said():
    report = quick(nothing_without_the_gil, Tabled(np.ones(3)))
    (note,) = report.notes
    assert "holds owning exports" in note and note in str(report) and html.escape(note) in report._repr_html_()
    assert note in report.to_dict()["notes"] and quick(nothing, Tabled(np.ones(3))).notes == ()


PLAIN = "plain @njit"
ALTERNATIVES = [  # a call, and of words in labels why that is not measured: "" if it is, None if there is no such way
    (shift, (np.ones(2), Dunder(np.ones(2))), {}, {
        f"{PLAIN}, NumPy views made beforehand": "", f"{PLAIN}, np.from_dlpack(x) in each call": "",
        "x.__dlpack__(max_version=(1, 3)) of each tensor, no call": "",
    }),
    (take, (np.ones(2), np.ones(2)), {"scale": 3}, {PLAIN: "TypeError"}),  # Numba's dispatcher binds it not
    (repeated, (ONES, 4), {}, {PLAIN: None}),
    (repeated, (ONES, 4), {"y": np.zeros(4)}, {PLAIN: ""}),
]  # fmt: skip
if torch is not None:
    shift_any = fast_args(grad="allow")(shift.py_func)
    ALTERNATIVES += [
        (shift, (torch.ones(2), torch.ones(2)), {}, {f"{PLAIN}, x.numpy() in each call": ""}),
        (shift_any, (torch.ones(2, requires_grad=True), torch.ones(2)), {}, {f"{PLAIN}, x.detach().numpy() in each call": ""}),
    ]


@pytest.mark.parametrize(("kernel", "arguments", "keywords", "expected"), ALTERNATIVES)
def test_alternatives_are_measured_or_say_why_not(kernel, arguments, keywords, expected):
    before = [each.tolist() if hasattr(each, "tolist") else each for each in arguments]
    ways = quick(kernel, *arguments, **keywords, alternatives=True).alternatives
    assert all((way.overhead is None) == bool(way.why_not) for way in ways)
    assert before == [each.tolist() if hasattr(each, "tolist") else each for each in arguments]
    for words, why_not in expected.items():
        why = next((way.why_not for way in ways if words in way.label), None)
        assert why == why_not or (why_not and why_not in why), words


# ---- what it leaves behind -------------------------------------------------------------------------------------------
def fill_both(numbers, records):
    numbers.add(len(numbers))
    records[0]["a"] += 1


@pytest.mark.parametrize(("function", "make", "said"), [
    (grow, lambda: [np.zeros(3), READONLY], "each call changes 'x' anew"),
    (lambda x: x.append(x[0] + 1), lambda: [[np.ones(2)]], ""),
    (fill_both, lambda: [{5}, np.zeros(2, [("a", "f8"), ("b", "i4")])], ""),
], ids=["an array that grows", "a list that grows", "a set, and records"])  # fmt: skip
def test_what_a_kernel_changes_is_restored(function, make, said):
    arguments = make()
    items = [*arguments[0]]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = quick(fast_args(function), *arguments)
    assert repr(arguments) == repr(make()) and (not isinstance(arguments[0], list) or arguments[0][0] is items[0])
    for sentences in (report.warnings, [str(each.message) for each in warned]):
        assert not said or any(said in sentence for sentence in sentences)


def test_equal_numbers_of_a_list_are_no_change():
    """A kernel that writes to a list leaves new objects in it, also for the numbers that it has not changed."""
    numbers = [1.5, float("nan"), 2]
    seen = Snapshot({"x": numbers})
    numbers[:] = [float("1.5"), float("nan"), 2]
    assert seen.changed() == []
    numbers[2] = 3
    assert seen.changed() == ["x"]


def test_each_run_begins_with_the_values_as_they_were(monkeypatch):
    add = Snapshot._add
    monkeypatch.setattr(Snapshot, "_add", lambda self, name, value: name == "seen" or add(self, name, value))

    @fast_args
    def count(counter, seen):
        counter[0] += 1
        seen[0] += 1
        seen[1] = max(seen[1], counter[0])

    counter, seen = np.zeros(1), np.zeros(2)
    quick(count, counter, seen, rounds=9)
    assert counter[0] == 0
    assert 1 < seen[1] < seen[0]  # the most calls between two restorations; all calls


def test_interrupted_again_while_arguments_are_restored(monkeypatch):
    x, restore, calls = np.zeros(3), Snapshot.restore, Mock(side_effect=[KeyboardInterrupt, None])
    monkeypatch.setattr(Snapshot, "restore", lambda self: calls() or restore(self))
    with pytest.raises(KeyboardInterrupt), Snapshot({"x": x}):
        x += 1
    assert x.tolist() == [0, 0, 0] and calls.call_count == 2


class OfNumPy(Dunder):
    """Its capsules release what nobody has taken, as those of all frameworks do."""

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize(("kernel", "kind"), [
    (nothing_without_the_gil, Tabled), (nothing, OfNumPy), (nothing, bytearray), (nothing, lambda array: array.view()),
])  # fmt: skip
def test_every_export_is_given_back_once_and_nothing_is_kept(kernel, kind):
    array = np.ones(3)
    tensor, before = kind(array), sys.getrefcount(array)
    report = quick(kernel, tensor, alternatives=True)
    assert (report.arguments[0].producer is not None) == (type(tensor) is not np.ndarray)
    del report
    gc.collect()  # NumPy's views among the alternatives
    assert sys.getrefcount(array) == before
    if kind is Tabled:
        assert tensor.ledger.made == tensor.ledger.deleted > 1000 and not tensor.ledger.out
    elif kind is bytearray:
        tensor.append(0)  # BufferError while somebody holds its buffer
    else:
        alive = weakref.ref(tensor)
        del tensor
        assert alive() is None


@pytest.mark.parametrize("status", [0, -1])
def test_an_export_that_fails_is_no_export(status):
    nothing_exported = ffi.callback("int(void *, DLManagedTensorVersioned **)", lambda py_object, out: status)
    failing = tabled_type("Failing", managed_tensor_from_py_object_no_sync=nothing_exported)(np.ones(3))
    assert statements_of(failing, needs_owning_exports=True) == []
    assert len(statements_of(failing, needs_owning_exports=False)) == 1


# ---- errors, and interrupts ------------------------------------------------------------------------------------------
def test_a_kernel_that_raises_raises_and_is_undone():
    @fast_args
    def failing(x, most):
        x[0] += 1
        if x[0] > most:
            raise IndexError("beyond")

    x = np.ones(3)
    for calls in (0, 50):
        with pytest.raises(IndexError, match="beyond"):
            quick(failing, x, 1.0 + calls)
        assert x.tolist() == [1, 1, 1]
    assert quick(failing, x, 1e9).rounds == 3


def frames_of(error: BaseException | None) -> list[str]:
    """The functions in a traceback; of this package, and of Numba's, the modules."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "_dynamo" not in frame.f_code.co_filename]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]  # PyTorch's are wrappers, after Dynamo has traced
    return [each if each.startswith("fastexchange") else f.f_code.co_name for each, f in zip(modules, frames, strict=True)]


def test_what_a_call_raises_shows_the_callers_frames():
    """One frame of this package's, that of measure() itself; those of a producer stay."""

    class Raising(Dunder):
        def __dlpack__(self, **options):
            raise OSError("gone")

    def fails(kernel, tensor):
        measure(kernel, tensor)

    with pytest.raises(OSError, match="gone") as raised:
        fails(nothing, Raising(np.ones(1)))
    assert frames_of(raised.value)[-3:] == ["fails", "fastexchange.measuring.overhead", "__dlpack__"]
    with pytest.raises(numba.TypingError) as typing_error:
        fails(fast_args(lambda x: x.no_such_attribute), np.ones(1))
    cause = typing_error.value
    assert [each for each in frames_of(cause) if each.startswith("fastexchange")] == ["fastexchange.measuring.overhead"]
    while cause := cause.__cause__ or cause.__context__:
        assert "fastexchange" not in str(frames_of(cause))


def test_a_very_slow_kernel_is_called_once(monkeypatch):
    monkeypatch.setattr(trial, "_SURELY_SLOW_NS", 50_000_000)
    monkeypatch.setattr(overhead, "_BUDGET_NS", 80_000_000)
    with pytest.warns(RuntimeWarning, match="it is not called again"):
        assert quick(sleep, np.uint32(90_000)).alone.rounds == 1


@pytest.mark.parametrize(("modules", "name", "nth", "call", "rounds", "words"), [
    ((timing,), "_least", 200, (nothing, ONES), 1_000_000, "there are "),
    ((trial, overhead), "timed", 4, (sleep, np.uint32(30_000)), 5, "there are 5 of 5 rounds, and 2 calls of the kernel"),
], ids=["a quick kernel", "a slow kernel"])  # fmt: skip
def test_ctrl_c_ends_it_with_what_there_is(modules, name, nth, call, rounds, words, monkeypatch):
    calls, original = itertools.count(1), getattr(modules[0], name)

    def interrupted(*given):
        if next(calls) == nth:
            signal.raise_signal(signal.SIGINT)
        return original(*given)

    for module in modules:
        monkeypatch.setattr(module, name, interrupted)
    with pytest.warns(RuntimeWarning, match=f"interrupted: {words}"):
        report = measure(*call, alternatives=False, rounds=rounds)
    assert 0 < report.rounds < 200 and str(report) and any("interrupted" in sentence for sentence in report.warnings)
    assert call[0] is not sleep or (report.alone.rounds, report.overhead.rounds) == (2, 5)


BAD = [
    ((), {}, TypeError, "missing 1 required positional argument"),
    ((len, 1), {}, TypeError, r"measure\(\) takes a kernel made by fast_args .*decorate it with @fast_args"),
    ((3,), {}, TypeError, "measure.. takes a kernel made by fast_args as its first argument, not 3"),
    ((numba.njit(lambda x: x), 1), {}, TypeError, "decorate it with @fast_args"),
    ((take,), {}, TypeError, "missing 2 required positional arguments: 'x' and 'y'"),
    ((take, 1, 2, 3, 4), {}, TypeError, "positional arguments"), ((take, object(), 2), {}, TypeError, "argument 'x'"),
    *(((take, 1, 2), {"rounds": rounds}, error, "rounds")
      for error, wrong in ((ValueError, (0, -1)), (TypeError, (2.5, True, "9"))) for rounds in wrong),
    ((take, 1, 2), {"alternatives": 1}, TypeError, "alternatives is True or False"),
]  # fmt: skip
if torch is not None:
    BAD.append(((take, torch.ones(3, requires_grad=True), 1), {}, BufferError, "argument 'x'"))
    BAD.append(((take, 1, torch.ones(3, device="meta")), {}, BufferError, "argument 'y'"))


@pytest.mark.parametrize(("arguments", "keywords", "error", "message"), BAD)
def test_bad_arguments(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        measure(*arguments, **keywords)


# ---- what it shows ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def report() -> OverheadReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return measure(take, np.ones(2), Dunder(np.ones(2)), scale=3, rounds=3)


def test_as_text_as_html_and_as_data(report, tmp_path):
    lines = str(report).splitlines()
    assert lines[0].startswith("take(): ") and "overhead" in lines[0] and "kernel" in lines[0]
    heads = [line.split()[0] for line in lines if line[:1].isalpha()]
    assert heads[:8] == ["take():", "argument", "x", "y", "scale", "the", "keywords", "the"]
    assert all(words in str(report) for words in ("dunder", "ndarray", PLAIN))
    document = ElementTree.fromstring(report._repr_html_())
    assert len(document.findall(".//tr")) == 1 + 3 + 3 + 1 + 1 + len(report.alternatives)
    assert "<script" not in report._repr_html_() and "<b>x</b>" not in replace(report, kernel="<b>x</b>")._repr_html_()
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == text + "\n"
    data = json.loads(text)
    assert data == json.loads(json.dumps(report.to_dict())) and data["kernel"] == "take" and data["rounds"] == 3
    assert [argument["path"] for argument in data["arguments"]] == ["ndarray", "dunder", "scalar"]
    assert data["arguments"][1]["producer"]["median_ns"] == pytest.approx(report.arguments[1].producer.median)
    assert len(data["total"]["samples_ns"]) == 3 and data["machine"]["packages"]["numba"] == numba.__version__


def test_pandas_and_plot(report):
    frame = pytest.importorskip("pandas") and report.to_pandas()
    assert list(frame.part) == ["x", "y", "scale", "the call itself", "keywords", "the result", "the kernel"]
    assert list(frame.median_ns[:3]) == [cost.total.median for cost in report.arguments]
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    axes = report.plot()
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["x  (ndarray)", "y  (dunder)"]
    assert report.plot(axes) is axes
    pyplot.close("all")


@pytest.mark.parametrize(("module", "method"), [("matplotlib", "plot"), ("pandas", "to_pandas")])
def test_what_is_not_installed_is_named(report, monkeypatch, module, method):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs {module}: pip install {module}$"):
        getattr(report, method)()


def test_without_any_extra():
    fork_python("""
        import sys
        sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "tqdm", "IPython", "tvm_ffi", "torch")))
        import numpy as np
        from fastexchange import fast_args, measure
        report = measure(fast_args(lambda x: None), np.ones(3), rounds=3)
        assert all("overhead" in text for text in (str(report), report._repr_html_(), report.to_json()))
        """)


def test_progress_is_shown_where_somebody_looks(monkeypatch):
    tqdm, shown = pytest.importorskip("tqdm"), []
    update = tqdm.tqdm.update
    monkeypatch.setattr(tqdm.tqdm, "update", lambda bar, n=1: shown.append(n) or update(bar, n))
    quick(nothing, 1.0)
    assert not shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(judgement, "clock_tick", lambda: 50_000)
    said = quick(nothing, 1.0).warnings
    assert sum(shown) == 3 and any("clock moves in steps of 50.0 us" in sentence for sentence in said)

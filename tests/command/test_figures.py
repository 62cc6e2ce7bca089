"""Which figures mean anything: one rule, and every place that shows one. Samples here are made up; nothing is timed."""

import itertools
import json
import time
import warnings

import numpy as np
import pytest
from made_producers import Dunder

from fastexchange import OverheadReport, fast_args
from fastexchange.command import bench
from fastexchange.command.compare import compare
from fastexchange.measuring import figures, files, overhead, pictures
from fastexchange.measuring.judgement import Notes, judge
from fastexchange.measuring.report import Alternative, ArgumentCost
from fastexchange.measuring.timing import Samples, Statement, Timings, is_measurable, time_statements

LOST = "not measurable here (spread "


def samples(median: float, spread: float) -> Samples:
    """Of five rounds, with this median and this interquartile range."""
    return Samples(median + spread * np.linspace(-1, 1, 5))


RULE = [  # a median, a spread, whether the figure has a sign, whether it means anything
    (26.2, 1.1, False, True), (1.0, 1.0, False, True), (0.0, 0.0, False, True), (0.5, 0.6, False, False),
    (-1261.7, 2475.4, False, False), (-5.0, 1.0, False, False), (-5.0, 1.0, True, True), (-5.0, 6.0, True, False),
    (float("nan"), 1.0, False, False), (1.0, float("nan"), False, False), (float("inf"), 1.0, True, False),
]  # fmt: skip


def test_the_rule():
    for *figure, expected in RULE:
        assert is_measurable(*figure) is expected, figure
    made = samples(-1261.7, 2475.4)
    assert made.spread == pytest.approx(2475.4) and not made.is_measurable()
    assert figures.time(made) == "not measurable here (spread 2.48 us)" and figures.time(samples(86.7, 2)) == "86.7 ns"
    assert figures.figure(samples(-3, 1), "{:.1f}".format, signed=True) == "-3.0"
    assert figures.spread(Samples(np.array([20.0]))) == "not measurable", "of one round there is no spread"
    assert figures.spread(Samples(np.array([20.0, 20.0]))) == "0.0"


def test_a_ratio_of_what_is_not_measurable_is_not_either():
    lost = samples(100.0, 150.0)
    steady = lost / lost  # 1 in every round: its own spread shows nothing
    assert (steady.median, steady.spread) == (1.0, 0.0) and not steady.is_measurable()
    for ratio in (samples(50, 1) / lost, lost / samples(50, 1), steady * 2, steady / 2):
        assert not ratio.is_measurable()
    assert (samples(50, 1) / samples(100, 1)).is_measurable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not (samples(50, 1) / Samples(np.zeros(5))).is_measurable()


def test_what_is_timed_is_a_call(monkeypatch):
    """On a clock that only stands still or jumps: without the loop, its preparation, and interruptions."""
    now, interruptions, runs = [0], itertools.cycle([0, 0, 10_000]), []

    def spend(ns: int):
        now[0] += ns

    def repeat(_, count: int):
        spend(next(interruptions))
        for _ in range(count):
            yield spend(5)

    def prepare():
        spend(1000)
        runs.append(0)

    def call(ns: int):
        runs[-1] += 1
        spend(ns)

    monkeypatch.setattr(itertools, "repeat", repeat)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    once = Statement("spend(70)", {"spend": spend})
    twice = Statement("call(60); call(40)", {"call": call}, calls=2, prepare=prepare, most_calls=4)
    found = time_statements({"once": once, "twice": twice}, rounds=3, batch_ns=1000)
    assert [each.values.tolist() for each in (*found.calls.values(), found.loop)] == [[70] * 3, [50] * 3, [5] * 3]
    assert max(runs) == 4


@fast_args
def add(x, y):
    pass


ARGUMENTS = np.ones(1), 2.5


def measured(monkeypatch, noise: float, kernel=add, arguments=ARGUMENTS) -> tuple[OverheadReport, list[str]]:
    """A report, and the warnings, where a call takes 100 ns, and 10 for each argument, 70 for one with only ``__dlpack__``.

    `noise`: the standard deviation.
    """

    generator = np.random.default_rng(0)

    def time_statements(statements, rounds=25, **options) -> Timings:
        calls = {}
        for key, statement in statements.items():
            ns = 100 + sum(70 if type(each) is Dunder else 10 for each in statement.names.get("a", arguments))
            calls[key] = Samples(ns + noise * generator.standard_normal(rounds))
        calls["call"] = calls["empty"] + Samples(50 + noise * generator.standard_normal(rounds))
        return Timings(calls, Samples(np.full(rounds, 5.0)))

    monkeypatch.setattr(overhead, "time_statements", time_statements)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = overhead.measure(kernel, *arguments)
    return report, [str(each.message) for each in said]


def test_a_quiet_machine_has_figures(monkeypatch):
    report, said = measured(monkeypatch, 0.01)
    assert [each.total.median for each in report.arguments] == [pytest.approx(10, abs=0.1)] * 2
    assert LOST not in str(report) + report._repr_html_() and said == []
    assert str(report).splitlines()[0] == "add(): 170 ns a call, of which overhead 120 ns (71%), kernel 50 ns"
    (line,) = [line for line in str(report).splitlines() if line.startswith("x ")]
    assert line.split()[:4] == ["x", "numpy.ndarray", "ndarray", "10.0"]
    frame = report.to_dict()
    assert frame["call"]["measurable"] and frame["arguments"][0]["total"]["measurable"] and frame["noise"]["measurable"]
    for arguments in ((Dunder(np.ones(1)), np.ones(1), 1), (*[np.ones(1)] * 8, Dunder(np.ones(1)))):
        report, _ = measured(monkeypatch, 0.01, fast_args(lambda *arguments: None), arguments)
        costs = [70 if type(each) is Dunder else 10 for each in arguments]
        assert [round(each.total.median) for each in report.arguments] == costs and round(report.call.median) == 100


def test_a_busy_machine_has_none(monkeypatch):
    report, said = measured(monkeypatch, 3000.0)
    assert not report.call.is_measurable()
    text, shown = str(report), report._repr_html_()
    headline = text.splitlines()[0]
    assert headline.count(LOST) >= 2 and "%" not in headline
    for where in (text, shown):
        for part in (report.call, *(cost.total for cost in report.arguments), report.overhead):
            assert not part.is_measurable() and f"{LOST}{part.spread:.1f})" in where
            assert f"{part.median:.1f}" not in where.replace(f"{part.spread:.1f}", "")
    assert "background:" not in shown, "a bar of what is not measurable"
    assert any(sentence.startswith("measure(): noise: the overhead is " + LOST) for sentence in said)
    assert not any("-" in sentence.partition("noise")[2].split("%")[0] and "%" in sentence for sentence in said)
    data = json.loads(report.to_json())
    assert data["call"]["measurable"] is False and data["call"]["median_ns"] == report.call.median
    assert data["alternatives"][-1]["overhead"]["measurable"] is False
    pytest.importorskip("pandas")
    frame = report.to_pandas()
    assert not frame.measurable.any() and frame.median_ns[0] == report.arguments[0].total.median


def crafted(*costs: ArgumentCost, **parts) -> OverheadReport:
    usual = dict.fromkeys(("keywords", "result", "result_type")) | dict.fromkeys(("alternatives", "warnings"), ())
    usual |= dict.fromkeys(("passing", "overhead", "total"), samples(100, 1))
    usual |= {"call": samples(10, 1), "alone": samples(5, 1), "noise": samples(1, 0.01), "machine": {}}
    return OverheadReport("kernel", costs, **usual | parts)


def cost(name: str, total: Samples, producer: Samples | None = None, path: str = "c-exchange") -> ArgumentCost:
    return ArgumentCost(name, 0, "T", "t", path, (), total, producer)


def plotted(report: OverheadReport):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = report.plot()
    matplotlib.pyplot.close("all")
    return axes, matplotlib


IN_PARTS, OWN = [(pictures.PRODUCER, 30.0), (pictures.OWN, 10.0)], [(pictures.OWN, 2.0)]
BARS = [  # an argument's cost, and its bar: the parts that mean anything
    (cost("both", samples(40, 1), samples(30, 1)), IN_PARTS), (cost("ours", samples(2, 0.1)), OWN),
    (cost("lost", samples(2, 9), samples(1, 0.1)), []), (cost("lost", samples(40, 90), samples(30, 1)), []),
    (cost("numba", samples(40, 1), path="numba"), [(pictures.NUMBA, 40.0)]),
    # an export alone that takes longer than in the call: no two parts
    (cost("whole", samples(20, 1), samples(30, 1)), [(pictures.UNDIVIDED, 20.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "bar"), BARS)
def test_bars_and_legends_have_the_colours_that_there_are(argument, bar):
    report = crafted(argument)
    call = [(pictures.NUMBA if argument.name == "numba" else pictures.OWN, 10.0)]
    assert [*pictures.bars(report)] == [bar, call]
    expected = [who for who in pictures.COLOURS if who in dict([*bar, *call])]
    document = report._repr_html_()
    assert expected == [who for who in pictures.COLOURS if f"&#9632;</span> {pictures._escaped(who)}" in document]
    for who, colour in pictures.COLOURS.items():
        assert (f"background:{colour}" in document) is (who in expected)
    axes, matplotlib = plotted(report)
    drawn = {patch.get_facecolor() for patch in axes.patches if patch.get_width() > 0}
    assert drawn == {matplotlib.colors.to_rgba(pictures.COLOURS[who]) for who in expected}
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == expected if legend else len(expected) == 1
    assert argument.name != "whole" or ("20.0" in str(report) and f"{LOST}1.0)" not in str(report).splitlines()[2])


def test_a_plot_and_a_table_say_what_is_not_measurable():
    lost = samples(-1261.7, 2475.4)
    axes, _ = plotted(crafted(cost("x", samples(2, 0.1)), call=lost, alone=lost, overhead=lost))
    assert [text.get_text().strip() for text in axes.texts] == ["2.0", f"{LOST}2475.4)"]
    words = "not measurable here (spread 2.48 us)"
    assert axes.get_title(loc="left") == f"kernel(): 100 ns a call, of which overhead {words}, kernel {words}"
    assert len(axes.get_yticks()) == 2 and axes.get_ylim() == (1.5, -0.5)
    report = crafted(alternatives=(Alternative("another", samples(300, 2), ""),), passing=samples(100, 300))
    this, another = [line for line in str(report).splitlines() if line.startswith(("another", "this call"))]
    assert LOST in this and "300.0" in another and LOST in another  # no ratio to it


def test_noise_and_drift_are_warned_of(monkeypatch):
    report, warned = measured(monkeypatch, 50.0)
    assert report.overhead.is_measurable() and not any(each.total.is_measurable() for each in report.arguments)
    (sentence,) = [each for each in report.warnings if each.startswith("noise: what 'x', 'y' cost is not measurable here;")]
    assert f"measure(): {sentence}" in warned

    def said(empty, control, loop) -> list[str]:
        notes = Notes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judge(Timings({"empty": Samples(empty), "control": Samples(control)}, Samples(loop)), notes)
        return notes.said

    steady, scattered = np.full(12, 100.0), np.tile([60.0, 100.0, 140.0], 4)
    assert said(steady, steady, steady) == []
    assert "the same call twice differs by 20%" in said(steady, 1.2 * steady, steady)[0]
    assert "interquartile range" in said(scattered, scattered, steady)[0]
    assert "the machine's speed changed while it was measured, by 50%" in said(steady, steady, np.repeat([4.0, 5.0, 6.0], 4))[0]
    for lost in (np.tile([-160.0, -100.0, 340.0], 4), np.tile([-300.0, 10.0, 340.0], 4)):
        (sentence, *_) = said(lost, lost, steady)
        assert LOST in sentence and "%" not in sentence


def test_bench(capsys):
    def call(key: str, label: str = "") -> bench._Call:
        return bench._Call(key, label, "", {"kernel": None})

    controls = [call("control/x/a"), call("control/x/b")]
    kinds = [bench._Kind("things", [call("bench/x/fast", "ours"), call("bench/x/njit", "theirs")], controls)]
    times = {"bench/x/fast": samples(-20, 90), "bench/x/njit": samples(100, 1)}
    times |= dict.fromkeys(("control/x/a", "control/x/b"), samples(3, 9))
    bench._show_table(kinds, times)
    ours, theirs = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("ours", "theirs")))
    assert f"{LOST}90.0)" in ours and "-20" not in ours and "-6.7" not in ours
    assert "100.0" in theirs and LOST in theirs
    assert f"{LOST}0.000 x) with things" in bench._noise(kinds, times)


def document(measurable: float = 0.01, **rows: tuple[float, float]) -> dict:
    """Of rows with a median and a spread; of ``fast`` the ratio to ``njit`` has the spread `measurable`."""
    results = [{"key": f"bench/{name}", "median_ns": median, "iqr_ns": spread} for name, (median, spread) in rows.items()]
    if "njit" in rows:
        results[0] |= {"reference": "bench/njit", "ratio": 0.2, "ratio_iqr": measurable}
    return {"machine": {}, "rounds": 5, "results": results}


def test_compare_leaves_out_what_is_not_measurable_and_files_mark_it():
    row = files.result("a", samples(-20, 90))
    assert row["measurable"] is False and row["median_ns"] == -20 and len(row["samples_ns"]) == 5
    assert "measurable" not in files.result("a", samples(20, 1))
    found = compare(
        document(fast=(5.0, 30.0), other=(20.0, 1.0), negative=(-3.0, 1.0), nothing=(0.0, 0.0)),
        document(fast=(500.0, 1.0), other=(20.0, 1.0), negative=(3.0, 1.0), nothing=(1.0, 0.0)))  # fmt: skip
    assert [move.key for move in found.moves] == ["bench/other"]
    assert found.incomparable == ["bench/fast", "bench/negative", "bench/nothing"]
    for spread, expected in ((0.5, None), (0.01, pytest.approx(1))):
        old, new = (document(each, fast=(20.0, 1.0), njit=(100.0, 1.0)) for each in (spread, 0.01))
        assert compare(old, new).moves[0].to_reference == expected

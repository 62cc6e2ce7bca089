"""``%fastargs`` and ``%%fastargs``: the report of ``measure`` in IPython."""

import traceback
import warnings

import numpy as np
import pytest

from fastexchange import OverheadReport, fast_args

interactiveshell = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
from IPython.core.error import UsageError  # noqa: E402
from IPython.utils.capture import capture_output  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:measure:RuntimeWarning")
count = fast_args(lambda x: x.fill(x[0] + 1))


@fast_args
def add(x, y, out=None):
    if out is not None:
        out[0] = x[0] + y


@pytest.fixture(scope="module")
def shell():
    made = interactiveshell.InteractiveShell.instance(colors="nocolor")
    made.extension_manager.load_extension("fastexchange")
    made.user_ns.update(add=add, count=count, x=np.ones(2), np=np)
    yield made
    made.history_manager.end_session()
    interactiveshell.InteractiveShell.clear_instance()


def run(shell, line: str, cell: str | None = None):
    with warnings.catch_warnings(record=True) as said, capture_output() as shown:
        warnings.simplefilter("always")
        result = shell.run_line_magic("fastargs", line) if cell is None else shell.run_cell_magic("fastargs", line, cell)
    return result, shown, [str(warning.message) for warning in said]


def test_a_line_and_its_options(shell):
    result, shown, _ = run(shell, "-r 3 add(x, 2.0)")
    assert result is None
    (output,) = shown.outputs
    assert set(output.data) == {"text/plain", "text/html"}
    assert output.data["text/plain"].startswith("add(): ") and "np.from_dlpack(x) in each call" in output.data["text/plain"]
    report, shown, _ = run(shell, "-r 4 -a -q -o add(x, y=2.0)")
    assert isinstance(report, OverheadReport) and report.keywords is not None
    assert (report.rounds, report.alternatives, shown.outputs) == (4, (), [])


def test_a_cell_runs_what_comes_before_the_call_once(shell):
    shell.user_ns["runs"] = []
    report, *_ = run(shell, "-r 3 -a -q -o runs.append(1)", "z = np.full(3, 7.0)\nruns.append(len(z))\n\nadd(z,\n    1.0)\n")
    assert shell.user_ns["runs"] == [1, 3] and shell.user_ns["z"].tolist() == [7, 7, 7]
    assert report.arguments[0].type == "numpy.ndarray"


@pytest.mark.parametrize(("line", "names"), [
    ("add(*[x, 2.0], **{'out': np.zeros(1)})", ["x", "y", "out"]),
    ("{'add': add}['add']([row for row in np.ones((2, 2))][1], sum(i for i in range(3)) * 1.0)", ["x", "y"]),
])  # fmt: skip
def test_kernels_and_arguments_are_any_expressions(shell, line, names):
    report, *_ = run(shell, f"-r 3 -a -q -o {line}")
    assert report.kernel == "add" and [argument.name for argument in report.arguments] == names
    assert report.arguments[0].numba_type.startswith("array(float64, 1d")


@pytest.mark.parametrize(("line", "error", "message"), [
    *((line, UsageError, "there is no call of a kernel at the end") for line in ("", "x", "y = add(x, 1.0)")),
    ("add(x, ", UsageError, "usage: %fastargs"),
    ("print(x)", UsageError, "print is a builtin_function_or_method, not a kernel made by fast_args; of one for CUDA"),
    ("-r many add(x, 1.0)", UsageError, "-r takes a number of rounds, not 'many'"),
    ("-z add(x, 1.0)", UsageError, "option -z not recognized"),
    ("-r 0 add(x, 1.0)", UsageError, "-r takes at least 1 round, not 0"),
    ("nowhere(1)", NameError, ""), ("add()", TypeError, ""), ("-q add(x.no_such_attribute, 1.0)", AttributeError, ""),
    ("-q add(object(), 1.0)", TypeError, ""),
])  # fmt: skip
def test_errors(shell, line, error, message):
    """Those of the call arrive without frames of this package but the magic's."""
    with pytest.raises(error, match=message) as raised:
        shell.run_line_magic("fastargs", line)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    assert error is UsageError or {n for n in names if n.startswith("fastexchange")} == {"fastexchange.measuring.magic"}


@pytest.mark.parametrize(("options", "times"), [("", 0), ("-q ", 1)])
def test_warnings_are_said_once(shell, options, times):
    report, shown, said = run(shell, f"-a -o -r 3 {options}count(np.zeros(1))")
    assert sum("changes 'x' anew" in sentence for sentence in report.warnings) == 1
    assert sum("changes 'x' anew" in sentence for sentence in said) == times and len(shown.outputs) == (not options)

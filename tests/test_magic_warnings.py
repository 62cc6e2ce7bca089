"""``%fastargs`` and the warnings of ``measure``: said once, in the report where one is shown."""

import warnings

import numpy as np
import pytest

from fastexchange import fast_args

shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")


@pytest.fixture
def shell():
    shell = shells.InteractiveShell.instance()
    shell.run_line_magic("load_ext", "fastexchange")

    @fast_args
    def count(x):
        x[0] += 1

    shell.push({"count": count, "x": np.zeros(1)})
    yield shell
    shells.InteractiveShell.clear_instance()


@pytest.mark.parametrize("options, times", [("", 0), ("-q ", 1)])
def test_warnings_are_said_once(shell, capsys, options, times):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = shell.run_line_magic("fastargs", f"-a -o -r 3 {options}count(x)")
    assert sum("changes 'x' anew" in sentence for sentence in report.warnings) == 1
    assert sum("changes 'x' anew" in str(warning.message) for warning in said) == times
    assert ("changes 'x' anew" in capsys.readouterr().out) == (not options)

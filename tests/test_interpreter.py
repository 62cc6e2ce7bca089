"""Interpreters on which the package does not trust itself are refused when it is imported."""

import subprocess
import sys
import textwrap

import pytest

FREE_THREADED_BUILD = "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
GIL_OFF = "sys._is_gil_enabled = lambda: False"
OTHER = "sys.implementation = types.SimpleNamespace(**{**vars(sys.implementation), 'name': 'pypy'})"


@pytest.mark.parametrize(
    ("change", "words"), [(FREE_THREADED_BUILD, "free-threaded"), (GIL_OFF, "free-threaded"), (OTHER, "this is pypy")]
)
def test_an_interpreter_that_is_not_trusted(change, words):
    script = f"""
    import sys, sysconfig, types
    import numba
    {change}
    for _ in range(2):
        try:
            import fastexchange
        except ImportError as error:
            assert {words!r} in str(error), error
        else:
            raise SystemExit("it was imported")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Interpreters that are refused when the package is imported, and those on which Numba's dispatcher makes all calls."""

import sys

import pytest
from forked import needs_fork
from interpreter import run_python
from other_ways import run_changed

FREE_THREADED_BUILD = "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
WITH_THE_GIL_ON = f"{FREE_THREADED_BUILD}; sys._is_gil_enabled = lambda: True"
GIL_OFF = "sys._is_gil_enabled = lambda: False"


@needs_fork
def test_an_interpreter_that_is_not_trusted():
    run_changed("""
        import sys, types
        sys.implementation = types.SimpleNamespace(**{**vars(sys.implementation), "name": "pypy"})
        for _ in range(2):
            try:
                import fastexchange
            except ImportError as error:
                assert "this is pypy" in str(error), error
            else:
                raise SystemExit("it was imported")
    """)


@needs_fork
@pytest.mark.parametrize("change", [FREE_THREADED_BUILD, WITH_THE_GIL_ON, GIL_OFF])
def test_free_threaded_interpreters(change):
    """As far as one with the GIL can show it: no code reads objects, none that is native makes calls, and results are right."""
    run_changed(f"""
        import array, sys, sysconfig, threading
        import numpy as np
        {change}
        from fastexchange.ground import cpython
        from fastexchange.dispatch import vectorcall
        assert cpython._FLAGS_OFFSET is None and not cpython.verify()["object"]
        vectorcall.vectorcall_any = None  # no kernel may ask for it

        import fastexchange
        from other_ways import Protocol, check, raises
        kernel, errors = check()[0], []
        def caught():
            try:
                for _ in range(50):
                    x = Protocol(np.ones(3))
                    assert kernel(2.0, x, (1.0, 2.0)) == kernel.bind(2.0, x, (1.0, 2.0))() == 9.0
                    assert fastexchange.from_dlpack(x).sum() == fastexchange.convert(x, np.ndarray).sum() == 3.0
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=caught) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        assert fastexchange.from_dlpack(array.array("h", [1, 2])).tolist() == [1, 2]
        assert raises(lambda: fastexchange.polyfill(np.ndarray), "laid out")
        assert kernel.counts().fast == 0 and "free-threaded" in str(kernel.explain(1.0, np.ones(3), (1.0, 2.0)))
    """)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with CPython 3.12")
def test_monitoring_sees_calls_if_numba_is_to_report_them():
    code = """
        import sys
        import numpy as np
        from fastexchange import explain, fast_args

        @fast_args
        def kernel(x):
            return x[0]

        for _ in range(40):
            kernel(np.ones(2))
        monitoring, seen = sys.monitoring, []
        monitoring.use_tool_id(2, "test")
        monitoring.register_callback(2, monitoring.events.PY_START, lambda code, offset: seen.append(code.co_name))
        monitoring.set_events(2, monitoring.events.PY_START)
        kernel(np.ones(2)), kernel(np.ones(2))
        monitoring.set_events(2, 0)
        print(seen.count("kernel"), kernel.explain(np.ones(2)).kind)
    """
    assert run_python(code, NUMBA_ENABLE_SYS_MONITORING="1").stdout.split() == ["2", "numba"]
    assert run_python(code, NUMBA_ENABLE_SYS_MONITORING="0").stdout.split() == ["0", "native"]

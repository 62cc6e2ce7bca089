"""Interpreters that are refused when the package is imported, or whose calls Numba's dispatcher makes; and no compiler."""

import sys

import pytest
from forked import fork_python, needs_fork
from interpreter import run_python
from other_ways import run_changed


@needs_fork
def test_an_interpreter_that_is_not_trusted():
    run_changed("""
        import sys, types
        sys.implementation = types.SimpleNamespace(**{**vars(sys.implementation), "name": "pypy"})
        for _ in range(2):
            try:
                import fastexchange
                raise SystemExit("it was imported")
            except ImportError as error:
                assert "this is pypy" in str(error), error
    """)


@needs_fork
@pytest.mark.parametrize("change", [
    pytest.param("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; sys._is_gil_enabled = lambda: True", id="such a build"),
    pytest.param("sys._is_gil_enabled = lambda: False", id="the GIL is off"),
])  # fmt: skip
def test_free_threaded_interpreters(change):
    """As far as one with the GIL can show it: no code reads objects, none that is native makes calls, and results are right."""
    run_changed(f"""
        import array, sys, sysconfig
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np
        {change}
        from fastexchange.ground import cpython
        from fastexchange.dispatch import vectorcall
        assert cpython._FLAGS_OFFSET is None and not cpython.verify()["object"]
        vectorcall.vectorcall_any = None  # no kernel may ask for it

        import fastexchange
        from other_ways import Protocol, check, is_type_error
        kernel = check()[0]
        @fastexchange.fast_args(out="x[n] -> y[n]")
        def added(items, pair, x, y):
            for i in range(x.shape[0]):
                y[i] = items[-1][i] + pair[1][i] + x[i]

        readonly = np.ones(3)
        readonly.flags.writeable = False
        def calls(_):
            for _ in range(50):
                x = Protocol(np.ones(3))
                assert kernel(2.0, x, (1.0, 2.0)) == kernel.bind(2.0, x, (1.0, 2.0))() == 9.0
                assert fastexchange.from_dlpack(x).sum() == fastexchange.convert(x, np.ndarray).sum() == 3.0
                y = added([x, x], (1.0, x), Protocol(readonly))
                assert y.tolist() == added.bind([x, x], (1.0, x), Protocol(readonly))().tolist() == [3.0] * 3
                assert is_type_error(lambda: added([x, x], (1.0, x), object()), "added(): argument 'x' (position 2)")
                assert is_type_error(lambda: added([x, x], (1.0, object()), x), "added(): argument 'pair' (position 1)")
                assert is_type_error(lambda: added([x, object()], (1.0, x), x), "added(): argument 'items' (position 0)")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(calls, range(4)))
        assert fastexchange.from_dlpack(array.array("h", [1, 2])).tolist() == [1, 2]
        assert is_type_error(lambda: fastexchange.polyfill(np.ndarray), "laid out")
        assert kernel.counts().fast == added.counts().fast == 0
        assert "free-threaded" in str(kernel.explain(1.0, np.ones(3), (1.0, 2.0)))
    """)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with CPython 3.12")
def test_monitoring_sees_calls_if_numba_is_to_report_them():
    code = """
        import sys
        import numpy as np
        from fastexchange import fast_args

        kernel = fast_args(lambda x: x[0])
        for _ in range(4):
            kernel(np.ones(2))
        monitoring, seen = sys.monitoring, []
        monitoring.use_tool_id(2, "test")
        monitoring.register_callback(2, monitoring.events.PY_START, lambda code, offset: seen.append(code))
        monitoring.set_events(2, monitoring.events.PY_START)
        kernel(np.ones(2)), kernel(np.ones(2))
        monitoring.set_events(2, 0)
        print(seen.count(kernel.py_func.__code__), kernel.explain(np.ones(2)).kind)
    """
    for value, expected in (("1", ["2", "numba"]), ("0", ["0", "native"])):
        assert run_python(code, NUMBA_ENABLE_SYS_MONITORING=value).stdout.split() == expected


@pytest.mark.slow
def test_without_a_compiler_kernels_have_what_compiled_ones_have():
    """So that a program runs under ``NUMBA_DISABLE_JIT=1``, too."""
    code = """
        import os
        import numpy as np
        from numba import cloudpickle
        from fastexchange import fast_args
        FACTOR = 2

        @fast_args(out="x[n] -> y[n]")
        def kernel(x, y):
            y[:] = FACTOR * x

        for n in range(3):
            kernel(np.ones(n + 1))
        counts, hits = kernel.counts(), sum(kernel.stats.cache_hits.values())
        print(counts.fast + counts.slow, len(kernel.signatures) == counts.compiled, hits, kernel.out)
        kernel.recompile()
        explained = kernel.explain(np.ones(2))
        print([(name, how.path, numba_type) for name, how, numba_type in explained.arguments])
        print(cloudpickle.loads(cloudpickle.dumps(kernel))(np.ones(3)), fast_args(lambda x: x + 1)(1))
        print(kernel.explain(np.ones((2, 2))).outcome)
        try:
            kernel.explain()
        except TypeError:
            print("TypeError")
        if os.environ["NUMBA_DISABLE_JIT"] == "1":
            assert "NUMBA_DISABLE_JIT" in str(explained) and kernel.precompile((np.ones(3),), "(float64[:],)") == []
        """
    compiled, interpreted = (fork_python(code, NUMBA_DISABLE_JIT=value).stdout for value in "01")
    assert compiled == interpreted and "[2. 2. 2.] 2" in compiled and "refused with ValueError" in compiled

"""Interpreters that are refused when the package is imported, and those on which Numba's dispatcher makes all calls."""

import importlib.util
import sys

import pytest
from interpreter import run_python

FREE_THREADED_BUILD = "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
WITH_THE_GIL_ON = f"{FREE_THREADED_BUILD}; sys._is_gil_enabled = lambda: True"
GIL_OFF = "sys._is_gil_enabled = lambda: False"


def test_an_interpreter_that_is_not_trusted():
    run_python("""
        import sys, types
        import numba
        sys.implementation = types.SimpleNamespace(**{**vars(sys.implementation), "name": "pypy"})
        for _ in range(2):
            try:
                import fastexchange
            except ImportError as error:
                assert "this is pypy" in str(error), error
            else:
                raise SystemExit("it was imported")
    """)


@pytest.mark.slow
@pytest.mark.parametrize("change", [FREE_THREADED_BUILD, WITH_THE_GIL_ON, GIL_OFF])
def test_free_threaded_interpreters(change):
    """As far as one with the GIL can show it: no code reads objects, none that is native makes calls, and results are right."""
    has_torch = importlib.util.find_spec("torch") is not None
    assert run_python(f"""
        import array, collections, importlib, sys, sysconfig, threading, warnings
        import numpy as np
        {change}
        from fastexchange.ground import cpython
        from fastexchange.dispatch import vectorcall
        assert cpython._FLAGS_OFFSET is None and not cpython.verify()["object"]
        vectorcall.vectorcall_any = None  # no kernel may ask for it

        import fastexchange
        from fastexchange import fast_args
        Pair = collections.namedtuple("Pair", "a b")

        @fast_args
        def total(x, pair, y=2.0):
            s = y
            for value in x:
                s += value
            return s + pair[0][0] + pair[1][0]

        @fast_args
        def first(items):
            s = 0.0
            for item in items:
                s += item[0]
            return s

        @fast_args
        def same(x):
            return x

        @fast_args
        def twice(x):
            return 2 * x

        @fast_args(out="x[n] -> y[n]")
        def copied(x, y):
            for i in range(x.shape[0]):
                y[i] = x[i]

        class Protocol:
            def __init__(self, array):
                self.array = array
            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)
            def __dlpack_device__(self):
                return 1, 0

        x = np.arange(4.0)
        tensors = [x, x[::-1], Protocol(x)]
        if {has_torch}:
            import torch
            tensors += [torch.arange(4.0, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64)[::2] / 2]

        def calls():
            for t in tensors:
                assert total(t, (t, x)) == total(t, Pair(t, x), y=2.0) == total(t, pair=(t, x)), type(t)
                assert first([t, t]) == first((t, t)) == 2 * first((t,))
                assert same(t) is t and np.array_equal(np.asarray(copied(t)), np.asarray(fastexchange.from_dlpack(t)))
                bound = copied.bind(t)
                assert np.array_equal(np.asarray(bound()), np.asarray(copied(t)))
                assert np.array_equal(fastexchange.convert(t, np.ndarray), fastexchange.from_dlpack(t))
                if {has_torch} and t is not tensors[1]:
                    assert fastexchange.convert(t, torch.Tensor).tolist() == fastexchange.from_dlpack(t).tolist()
                    assert twice(tensors[3]).tolist() == [0.0, 2.0, 4.0, 6.0] and type(twice(tensors[3])) is torch.Tensor

        calls()
        errors = []
        def caught():
            try:
                for _ in range(5):
                    calls()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=caught) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors

        readonly = np.arange(3.0)
        readonly.flags.writeable = False
        assert not fastexchange.from_dlpack(Protocol(readonly)).flags.writeable
        assert fastexchange.from_dlpack(x).flags.writeable and fastexchange.from_dlpack(np.empty((0, 3))).shape == (0, 3)
        assert fastexchange.from_dlpack(array.array("h", [1, 2])).tolist() == [1, 2]
        count = sys.getrefcount(x)
        made = fastexchange.from_dlpack(Protocol(x))
        del made
        assert sys.getrefcount(x) == count
        try:
            total(object(), (x, x))
        except TypeError as error:
            assert "argument 'x' (position 0)" in str(error), error
        else:
            raise SystemExit("an object was taken")
        try:
            fastexchange.polyfill(np.ndarray)
        except TypeError as error:
            assert "laid out" in str(error)
        else:
            raise SystemExit("polyfilled")
        assert total.counts().fast == 0 and "free-threaded" in str(total.explain(x, (x, x)))
        print("done")
    """).stdout.split() == ["done"]  # fmt: skip


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

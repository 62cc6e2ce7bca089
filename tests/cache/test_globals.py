"""Functions whose globals no other process finds in a module: those of ``__main__``, and what ``exec`` has made."""

import pickle
import warnings

import numba
import numpy as np
import pytest
from forked import fork_python
from numba.core.errors import NumbaWarning

from fastexchange import fast_args
from fastexchange.calls.dependencies import NotDescribable, dependencies

SENDER = """
    import pickle, sys
    import numba, numpy as np
    from fastexchange import fast_args
    SCALE = 2.0

    def helper(value):
        return value * SCALE

    def made():
        @fast_args
        def kernel(x):
            with numba.objmode(found="float64"):
                found = helper(float(x[0]))
            return found + 1
        return kernel

    compiled, idle = made(), made()
    assert compiled(np.ones(2)) == 3.0
    SCALE = 3.0
    assert compiled(np.ones(2)) == 4.0  # as in Python: what it names now
    SCALE = 2.0
    with open(sys.argv[1], "wb") as file:
        pickle.dump([compiled, idle], file)
    """
RECEIVER = """
    import pickle, sys
    import numpy as np
    exec(sys.argv[2])
    with open(sys.argv[1], "rb") as file:
        kernels = pickle.load(file)
    print([kernel(np.ones(2)) for kernel in kernels], [sum(kernel.stats.cache_misses.values()) for kernel in kernels])
    """


def test_a_block_of_objmode_has_the_senders_globals(tmp_path):
    """Whether its code is carried, or compiled by the receiver, which may have others."""
    fork_python(SENDER, str(tmp_path / "pickled"))
    for own in ("", "SCALE, helper = 7.0, lambda value: -100.0"):
        assert fork_python(RECEIVER, str(tmp_path / "pickled"), own).stdout == "[3.0, 3.0] [0, 1]\n"


def made(name, source):
    names = {"numba": numba, "np": np, "__builtins__": __builtins__}
    if name is not None:
        names["__name__"] = name
    exec(source, names)
    return names


SUM = "def kernel(x, y):\n    for i in range(x.shape[0]): y[i] = 2 * x[i]"


nameless = pytest.mark.parametrize("name", [None, "no.module_of_the_test"])


@nameless
def test_no_key_without_a_module(name):
    """Its code was written, and never loaded. So is that of what calls such a function."""
    names = made(name, SUM)
    with pytest.raises(NotDescribable, match=rf"'kernel' belongs to no module .* its `__name__` is {name!r}"):
        dependencies(names["kernel"], {})
    kernel = numba.njit(names["kernel"])

    def outer(x, y):
        return kernel(x, y)

    with pytest.raises(NotDescribable, match=r"'kernel', named by .* belongs to no module"):
        dependencies(outer, {})


@nameless
def test_what_has_no_module_works(name, tmp_path, monkeypatch):
    """Cached, it says why not; pickled, it arrives; an operator of its own has a name."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    source = tmp_path / "source.py"
    source.write_text(SUM)
    kernel = fast_args(out="x[n] -> y[n]", cache=True)(made(name, compile(SUM, str(source), "exec"))["kernel"])
    with pytest.warns(NumbaWarning, match="kernel is compiled by each process: 'kernel' belongs to no module"):
        assert kernel(np.ones(2)).tolist() == [2.0, 2.0]
    assert "belongs to no module" in str(kernel._pickled())
    again = pickle.loads(pickle.dumps(kernel).replace(str(kernel._uuid).encode(), b"with globals" * 3))
    assert again is not kernel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)
        assert again(np.ones(2)).tolist() == [2.0, 2.0]


@nameless
def test_objmode_and_tracing_without_a_module(name):
    source = "def helper(v): return v + 1\ndef kernel(x):\n with numba.objmode(y='float64'):\n  y = helper(x)\n return y"
    assert fast_args(made(name, source)["kernel"])(1.0) == 2.0
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    kernel = fast_args(out="x[n] -> y[n]")(made(name, SUM)["kernel"])
    assert make_fx(lambda x: kernel(x) + 1)(torch.ones(3))(torch.ones(3)).tolist() == [3.0] * 3

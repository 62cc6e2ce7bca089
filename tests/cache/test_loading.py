"""Machine code that is cached, on disk or in a pickle, is run without Numba's compiler, unless it needs a part of it."""

import textwrap

import pytest
from forked import fork_python
from interpreter import run_python

MODULE = """
    import numpy as np
    from fastexchange import fast_args

    @fast_args(cache=True)
    def plain(x, k):
        y = np.empty(len(x))
        for i in range(len(x)):
            if x[i] < 0:
                raise ValueError("negative", x[i])
            y[i] = x[i] * k
        return y, x.sum()

    parallel = fast_args(cache=True, parallel=True)(lambda x, k: (x * k).sum())
    hashed = fast_args(cache=True)(lambda x, k: hash("abc"[:k]))  # the code has the names of Python's secret for hashes
    text = fast_args(cache=True)(lambda x, k: "abc"[:k])
    set_of = fast_args(cache=True)(lambda x, k: {k, k + 1})  # code that makes a set of Python is not kept
"""
CALLED = """
    import os, pickle, sys
    name, file = sys.argv[1:3]
    sys.path.insert(0, os.path.dirname(file))
    import numpy as np
    if os.path.exists(file):
        with open(file, "rb") as pickles:
            kernel = pickle.load(pickles)
    else:
        import kernels_of_the_test
        kernel = getattr(kernels_of_the_test, name)
    x = np.array([1.0, 2.0])
    found = {repr(kernel(x, 2) == hash("ab") if name == "hashed" else kernel(x, 2)) for _ in range(4)}
    try:
        name == "plain" and kernel(-x, 2)
    except ValueError as error:
        found.add(str(error))
    compiled = sum(kernel.stats.cache_misses.values())
    print(sorted(found), compiled, "numba.np.arraymath" in sys.modules, sep=";")
    if sys.argv[3:]:
        with open(file, "wb") as pickles:
            pickle.dump(kernel, pickles)
    """


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "parallel", "hashed", "text", "set_of"])
def test_numbas_compiler_is_loaded_if_the_code_needs_it(name, tmp_path):
    """Code with unknown names ends the process."""
    (tmp_path / "kernels_of_the_test.py").write_text(textwrap.dedent(MODULE))
    arguments = name, str(tmp_path / "pickled")
    results, compiled, _ = fork_python(CALLED, *arguments).stdout.strip().split(";")
    assert compiled == "1"
    for more in (("write",), ()):  # from disk, then from a pickle
        loads = str(name in ("hashed", "text", "set_of"))
        assert run_python(CALLED, *arguments, *more).stdout.strip().split(";") == [results, "0", loads]
        assert (tmp_path / "pickled").exists()


EXTENSION = """
import numba
from numba import types
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

class Metres: pass
class MetresType(types.Opaque): pass

def init():
    typeof_impl.register(Metres)(lambda value, context: MetresType("Metres"))
    numba.extending.overload(length_of)(lambda x: (lambda x: 3.0) if isinstance(x, MetresType) else None)
    register_model(MetresType)(models.OpaqueModel)
    unbox(MetresType)(lambda typ, obj, c: NativeValue(c.context.get_dummy_value()))

def length_of(x):
    raise NotImplementedError
"""
KERNEL = """
from fastexchange import fast_args
from extension_of_the_test import length_of
length = fast_args(cache=True)(lambda x: length_of(x))
"""
FILES = {  # an installed extension, which is found by its entry point, as Numba finds it
    "extension_of_the_test.py": EXTENSION, "kernels_with_extension.py": KERNEL,
    "extension_of_the_test-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: extension-of-the-test\nVersion: 1\n",
    "extension_of_the_test-1.dist-info/entry_points.txt": "[numba_extensions]\ninit = extension_of_the_test:init\n",
}  # fmt: skip


@pytest.mark.slow
def test_extensions_are_loaded_before_arguments_are_typed(tmp_path):
    (tmp_path / "extension_of_the_test-1.dist-info").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    program = "import sys; sys.path.insert(0, sys.argv[1]); import kernels_with_extension as k, extension_of_the_test as e; "
    for _ in range(2):
        assert run_python(f"{program} print(k.length(e.Metres()))", str(tmp_path)).stdout.split() == ["3.0"]


@pytest.mark.slow
def test_settings_for_users_functions_compile_no_native_code_anew():
    settings = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_BOUNDSCHECK": "1", "NUMBA_DISABLE_INTEL_SVML": "1"}
    code = """
        import numpy as np
        from fastexchange import fast_args
        from fastexchange.ground.cfunction import code_cache
        print(fast_args(lambda x: x[0])(np.ones(3)), code_cache.hits > 10, code_cache.misses)
    """
    assert run_python(code, **settings).stdout == "1.0 True 0\n"

"""Kernels under ``NUMBA_DISABLE_JIT=1`` have what compiled ones have, so that a program runs there, too."""

from forked import fork_python

PROGRAM = """
    import numpy as np
    from fastexchange import fast_args

    @fast_args(out="x[n] -> y[n]")
    def kernel(x, y):
        y[:] = 2 * x

    for n in range(3):
        kernel(np.ones(n + 1))
    counts = kernel.counts()
    print(counts.fast + counts.slow, len(kernel.signatures) == counts.compiled, sum(kernel.stats.cache_hits.values()), kernel.out)
    kernel.recompile()
    explained = kernel.explain(np.ones(2))
    print([(name, how.path, numba_type) for name, how, numba_type in explained.arguments], "NUMBA_DISABLE_JIT" in str(explained))
    try:
        kernel.explain()
    except TypeError:
        print("TypeError")
    """


def test_what_kernels_have():
    compiled, interpreted = (fork_python(PROGRAM, NUMBA_DISABLE_JIT=value).stdout.splitlines() for value in "01")
    assert [line.replace("False", "True") for line in compiled] == interpreted and len(compiled) == 3


def test_without_a_compiler_kernels_are_pickled_and_nothing_is_precompiled():
    code = """
        import numpy as np
        from numba import cloudpickle
        from fastexchange import fast_args

        FACTOR = 2

        @fast_args(out="x[n] -> y[n]")
        def scaled(x, y):
            y[:] = FACTOR * x

        assert scaled.precompile((np.ones(3),), "(float64[:],)") == []
        print(cloudpickle.loads(cloudpickle.dumps(scaled))(np.ones(3)), fast_args(lambda x: x + 1)(1))
        """
    assert fork_python(code, NUMBA_DISABLE_JIT="1").stdout == "[2. 2. 2.] 2\n"

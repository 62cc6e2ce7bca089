"""The libraries of ``libraries.py``: where their tests are, which of them are run, and a typical call of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """A library that uses Numba."""

    name: str
    """As pip knows it."""
    package: str
    """As Python imports it."""
    tests: tuple[str, ...]
    """What pytest is told: files and folders in the source distribution, or ``--pyargs`` and packages of the installed one."""
    which: str
    """Which of its tests these are, for the table."""
    call: str
    """What is timed, as a user would write it."""
    prepare: str
    """What comes before it."""
    needs: tuple[str, ...] = ()
    """What its tests want beside it."""
    imported: str = ""
    """What of it is imported, where the package itself imports next to nothing."""
    options: tuple[str, ...] = ()
    """Of pytest, for its tests."""
    has_source: bool = False
    """Whether the tests are in the source distribution only."""


LIBRARIES = (
    Library(
        "sparse", "sparse",
        ("--pyargs", "sparse.numba_backend"), "all of `sparse.numba_backend`",
        "s @ x",
        "s = sparse.random((100, 80), density=0.05, random_state=0)\nx = numpy.random.default_rng(0).random((80, 4))",
        ("dask", "hypothesis"),
    ),
    Library(
        "stumpy", "stumpy",
        tuple(f"tests/test_{name}.py" for name in ("core", "stump", "motifs", "floss")),
        "`core`, `stump`, `motifs`, `floss`",
        "stumpy.mass(q, t)",
        "t = numpy.random.default_rng(0).random(200)\nq = t[50:66].copy()",
        ("pandas", "polars", "dask", "distributed"), has_source=True,
    ),
    Library(
        "quantecon", "quantecon",
        ("--pyargs", "quantecon"), "all",
        "chain.simulate(20, init=0, random_state=rng)",
        "chain = quantecon.MarkovChain([[0.9, 0.1], [0.4, 0.6]])\nrng = numpy.random.default_rng(0)",
        ("sympy",),
    ),
    Library(
        "pynndescent", "pynndescent",
        ("pynndescent/tests/test_distances.py", "pynndescent/tests/test_rank.py"), "`test_distances`, `test_rank`",
        "index.query(q, k=5)",
        "x = numpy.random.default_rng(0).random((300, 8), numpy.float32)\n"
        "index = pynndescent.NNDescent(x, n_neighbors=10, random_state=0)\nindex.prepare()\nq = x[:1] + 0.01",
        has_source=True,
    ),
    Library(
        "umap-learn", "umap", ("library_umap.py",), "none are to be had: its documented examples, `library_umap.py`",
        "reducer.transform(q)",
        "x = numpy.random.default_rng(0).random((100, 8))\n"
        "reducer = umap.UMAP(n_neighbors=10, n_epochs=20, random_state=0, n_jobs=1).fit(x)\nq = x[:1] + 0.01",
    ),
    Library(
        "librosa", "librosa",
        ("tests/test_sequence.py", "tests/test_dtw.py", "tests/test_segment.py"), "`sequence`, `dtw`, `segment`",
        "librosa.sequence.dtw(x, y)",
        "rng = numpy.random.default_rng(0)\nx, y = rng.random((12, 20)), rng.random((12, 30))",
        ("matplotlib", "pytest-mpl", "resampy", "samplerate"), "librosa.sequence", has_source=True,
    ),
    Library(
        "clifford", "clifford",
        ("--pyargs", *(f"clifford.test.test_{name}" for name in ("numba_extensions", "io", "function_cache", "layout_helpers"))),
        "`numba_extensions`, `io`, `function_cache`, `layout_helpers`",
        "a * b",
        "from clifford import g3c\na = 1 + 2 * g3c.e1 + g3c.e23\nb = g3c.e1 + 3 * g3c.e4",
        ("ipython",), "clifford.g3c", ("-m", "not veryslow"),
    ),
    Library(
        "numba-stats", "numba_stats",
        tuple(f"tests/test_{name}.py" for name in ("norm", "expon", "truncnorm", "poisson", "uniform", "scalar")),
        "`norm`, `expon`, `truncnorm`, `poisson`, `uniform`, `scalar`",
        "norm.logpdf(x, 0.5, 1.2)",
        "from numba_stats import norm\nx = numpy.linspace(-3, 3, 20)",
        ("pytest-benchmark", "iminuit"), "numba_stats.norm", has_source=True,
    ),
    Library(
        "interpolation", "interpolation", ("--pyargs", "interpolation"), "all",
        "eval_linear(grid, values, points)",
        "from interpolation.splines import UCGrid, eval_linear\ngrid = UCGrid((0.0, 1.0, 11), (0.0, 1.0, 11))\n"
        "values = numpy.random.default_rng(0).random((11, 11))\npoints = numpy.random.default_rng(1).random((10, 2))",
        imported="interpolation.splines",
    ),
)  # fmt: skip

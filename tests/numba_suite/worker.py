"""One process that runs tests of ``numba.tests``: ``python worker.py REQUEST RESULTS``.

REQUEST is a JSON file: ``modules``, whose tests are loaded; ``share``, of which every so-manieth is run; ``tests``, null or the
names of those that are; ``without``, the names of those that are not; ``accelerated``, whether ``numba.njit`` and ``numba.jit``
make kernels. RESULTS gets a line of JSON as each test begins, and one as it ends, so that a crash or a hang has a name.
"""

import json
import sys
import unittest
import zlib

NOTED = {"error": "errors", "failure": "failures", "unexpected success": "unexpectedSuccesses", "skipped": "skipped",
         "expected failure": "expectedFailures"}  # fmt: skip
"""What may become of a test, if it does not pass, and where unittest notes it; the first counts."""


class Result(unittest.TestResult):
    def __init__(self, file):
        super().__init__()
        self.buffer = True  # what tests print is nobody's
        self._file = file
        self.names: dict[unittest.TestCase, str] = {}

    def write(self, *line):
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def startTest(self, test):
        super().startTest(test)
        self.write("begins", self.names.get(test, test.id()))

    def stopTest(self, test):
        super().stopTest(test)
        outcome, why = "passed", ""
        for kind, name in reversed(NOTED.items()):
            for noted in getattr(self, name):
                outcome, why = kind, noted[1] if isinstance(noted, tuple) else ""
            getattr(self, name).clear()
        self.write("ends", self.names.get(test, test.id()), outcome, why)

    def addError(self, test, err):
        super().addError(test, err)
        if not isinstance(test, unittest.TestCase):  # of setUpClass or of a module: its tests do not begin
            self.write("ends", test.id(), "error", self.errors.pop()[1])


def tests_of(suite, module: str) -> dict:
    """The tests in a suite by their names, in order; of a module that cannot be imported, its import."""
    found = {}
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            found |= tests_of(each, module)
        else:
            found[f"{module}.<import>" if type(each).__name__ == "_FailedTest" else each.id()] = each
    return found


def chosen(names: list[str], share: int) -> list[str]:
    """Every `share`-th of a module's tests, the same in each process: those with the least checksums of names, in order."""
    wanted = set(sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[: -(-len(names) // share)])
    return [name for name in names if name in wanted]


def main(request: str, results: str) -> None:
    with open(request) as file:
        asked = json.load(file)
    # Where numba-cuda is installed, it is numba.cuda. Its own helpers for tests, which are not ours, ask for further packages.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]
    if asked["accelerated"]:
        import numba
        import numpy

        import fastexchange

        fastexchange.accelerate()
        # The first call, and one with more arguments than any before, makes memory that stays, and tests count that.
        made = numba.njit(lambda x, many: x.size)
        for _ in range(2):
            made(numpy.zeros(1), (1,) * 250)
        if not made.counts().fast:
            sys.exit("fastexchange makes no call of njit's functions natively here: there is nothing to compare")
    with open(results, "a") as file:
        result = Result(file)
        for module in asked["modules"]:
            result.write("loads", module)
            loaded = tests_of(unittest.defaultTestLoader.loadTestsFromName(module), module)
            result.names = {test: name for name, test in loaded.items()}
            names = chosen(list(loaded), asked["share"]) if asked["tests"] is None else [n for n in loaded if n in asked["tests"]]
            result.write("module", module)
            unittest.TestSuite(loaded[name] for name in names if name not in asked["without"]).run(result)
        result.write("done", "")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""``python tests/numba_suite``: all of Numba's tests that use ``njit`` or ``jit``, or every so-manieth; prints counts.

Exit code 1 if one fails with fastexchange that does not fail without and is not listed in ``differences.txt``.
"""

import argparse
import collections
import concurrent.futures
import json
import sys
import time

from suite import Comparison, compare, listed, modules


def show(chunk: list[str], made: Comparison, known: dict[str, str], seconds: float) -> None:
    """Print what became of the tests of some modules, with all that is said of a new difference."""
    print(f"{', '.join(name.removeprefix('numba.tests.') for name in chunk)}: {made.counts()}; {seconds:.0f} s")
    for test, outcome in made.unsteady.items():
        print(f"    only in company: {test}: {outcome.outcome}")
    for test, outcome in made.different.items():
        if test not in known:
            print(f"\n--- NEW: {test}: {outcome.outcome}\n{outcome.why}")
    sys.stdout.flush()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="numba_suite", description=__doc__)
    parser.add_argument("modules", nargs="*", help="names in numba.tests, for example test_dispatcher; all without")
    parser.add_argument("--share", type=int, default=1, help="run every so-manieth test of each module")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a test may take")
    parser.add_argument("--together", type=int, default=1, help="how many modules share a process")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run at a time")
    parser.add_argument("--json", help="a file that gets all outcomes")
    options = parser.parse_args()
    names = modules()
    if options.modules:
        names = [name for name in names if name.rpartition(".")[2] in options.modules]
    known, total, began = listed(), Comparison(), time.monotonic()
    chunks = [names[first : first + options.together] for first in range(0, len(names), options.together)]

    def compared(chunk):
        started = time.monotonic()
        return chunk, compare(chunk, share=options.share, limit=options.limit), time.monotonic() - started

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for chunk, made, seconds in pool.map(compared, chunks):
            for part, found in vars(made).items():
                getattr(total, part).update(found)
            show(chunk, made, known, seconds)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump({part: {n: vars(o) for n, o in found.items()} for part, found in vars(total).items()}, file)
    new = [test for test in total.different if test not in known]
    stale = [test for test in known if test in total.outcomes and test not in total.different]
    if options.share == 1 and not options.modules:
        stale += [test for test in known if test not in total.outcomes]
    print(f"\n{total.counts()}; {time.monotonic() - began:.0f} s")
    for reason, count in collections.Counter(known[test] for test in total.different if test in known).items():
        print(f"    {count} x known: {reason}")
    for test in stale:
        print(f"    listed in differences.txt, and no longer different: {test}")
    for test in new:
        print(f"    NEW: {test}")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

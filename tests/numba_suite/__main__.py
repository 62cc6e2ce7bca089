"""``python tests/numba_suite``: all of Numba's tests that use ``njit`` or ``jit``, or every so-manieth; prints counts.

Exit code 1 if one fails with fastexchange that does not fail without and is not listed in ``differences.txt``, or if none ran.
"""

import argparse
import collections
import concurrent.futures
import sys
import time

from suite import Comparison, compare, listed, modules


def main() -> int:
    parser = argparse.ArgumentParser(prog="numba_suite", description=__doc__)
    parser.add_argument("modules", nargs="*", help="names in numba.tests, for example test_dispatcher; all without")
    parser.add_argument("--share", type=int, default=1, help="run every so-manieth test of each module")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a test may take")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run at a time, a module in each")
    options = parser.parse_args()
    names = [name for name in modules() if not options.modules or name.rpartition(".")[2] in options.modules]
    if missing := {*options.modules} - {name.rpartition(".")[2] for name in names}:
        parser.error(f"numba.tests has no {', '.join(missing)}")
    known, total, began = listed(), Comparison({}, {}, {}, {}), time.monotonic()

    def compared(name):
        started = time.monotonic()
        return name, compare([name], share=options.share, limit=options.limit), time.monotonic() - started

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, made, seconds in pool.map(compared, names):
            print(f"{name.removeprefix('numba.tests.')}: {made.counts()}; {seconds:.0f} s")
            for part, found in zip(total, made, strict=True):
                part.update(found)
            for test, outcome in made.unsteady.items():
                print(f"    only in company: {test}: {outcome.outcome}")
            for test, outcome in made.different.items():
                if test not in known:
                    print(f"\n--- NEW: {test}: {outcome.outcome}\n{outcome.why}")
            sys.stdout.flush()
    is_whole = options.share == 1 and not options.modules
    stale = [test for test in known if test not in total.different and (is_whole or test in total.outcomes)]
    new = [test for test in total.different if test not in known]
    reasons = collections.Counter(known[test] for test in total.different if test in known)
    print(f"\n{total.counts()}; {time.monotonic() - began:.0f} s")
    said = [f"{count} x known: {reason}" for reason, count in reasons.items()]
    said += [f"listed in differences.txt, and no longer different: {test}" for test in stale] + [f"NEW: {test}" for test in new]
    for line in said:
        print(f"    {line}")
    return 1 if new or not total.outcomes else 0


if __name__ == "__main__":
    sys.exit(main())

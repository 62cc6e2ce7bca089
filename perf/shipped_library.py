"""Seconds to the first result of a library in a new container, plain and with shipped code: QuantEcon.py, unchanged.

``shipped_library.py [--rounds N]`` installs quantecon into a temporary folder (pip needs an index), records what a program
calls, puts the code of these kernels into a copy, and runs the program in processes without any cache. With the code the program
calls ``accelerate("quantecon")`` first. Only the ratios mean something. What quantecon's gufuncs compile at its import stays.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys, time
import numpy as np
import numba
if sys.argv[1] == "shipped":
    import fastexchange
    fastexchange.accelerate("quantecon")
begin = time.perf_counter()
import quantecon as qe
from quantecon.game_theory import NormalFormGame, Player, lemke_howson
from quantecon.markov import DiscreteDP, MarkovChain
imported = time.perf_counter()
random = np.random.default_rng(0)
rewards, moves = random.random((50, 4)), random.random((50, 4, 50))
moves /= moves.sum(-1, keepdims=True)
values = DiscreteDP(rewards, moves, 0.95).solve(method="policy_iteration").v
states = MarkovChain(moves[:, 0]).simulate(1000, init=0, random_state=1)
incomes = random.random(500)
game = NormalFormGame((Player(random.random((4, 4))), Player(random.random((4, 4)))))
found = values.sum(), states.sum(), qe.gini_coefficient(incomes), qe.lorenz_curve(incomes)[1].sum(), lemke_howson(game)
print(imported - begin, time.perf_counter() - imported, *found)
"""


def run(site: Path, *command: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))), "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(rounds: int) -> None:
    from fastexchange.ground.package_code import fitting_levels
    from fastexchange.ground.shipped import shipped_code

    if shipped_code().why_not:
        sys.exit(f"fastexchange has none of its own: {shipped_code().why_not}; run: python -m fastexchange precompile --self")
    with tempfile.TemporaryDirectory() as folder:
        plain, shipped = Path(folder, "plain"), Path(folder, "shipped")
        program, seen = Path(folder, "program.py"), Path(folder, "seen.json")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(plain), "quantecon"], check=True)
        shutil.copytree(plain, shipped)
        program.write_text(PROGRAM)
        run(plain, "-m", "fastexchange", "record", "-o", str(seen), "--", str(program), "shipped", cache=Path(folder, "first"))
        into = ("-m", "fastexchange", "precompile", str(seen), "--into", "quantecon", "--cpu", fitting_levels()[0])
        print(run(shipped, *into, cache=Path(folder, "second")).splitlines()[-1])
        times: dict[str, list[tuple[float, float]]] = {"plain": [], "shipped": []}
        results = set()
        for number in range(rounds):
            for site in plain, shipped:
                said = run(site, str(program), site.name, cache=Path(folder, f"{site.name} {number}")).split(maxsplit=2)
                times[site.name].append((float(said[0]), float(said[1])))
                results.add(said[2])
        assert len(results) == 1, results
        for who, those in times.items():
            imports, calls = (statistics.median(each) for each in zip(*those, strict=True))
            print(f"{who:8} import {imports:6.2f} s, then to the results {calls:6.2f} s")
        ratios = [sum(one) / sum(other) for one, other in zip(times["shipped"], times["plain"], strict=True)]
        after = [one[1] / other[1] for one, other in zip(times["shipped"], times["plain"], strict=True)]
        print(f"shipped / plain: {statistics.median(ratios):.3f} in all, {statistics.median(after):.3f} after the imports")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)

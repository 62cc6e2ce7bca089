"""The first calls of a hundred kernels in a new process: shipped, ``njit(cache=True)`` from a warm cache, plain ``njit``.

``shipped_kernels.py [--rounds N] [--site FOLDER]`` builds the wheel of ``examples/shipped_kernels`` for this machine, or takes a
folder into which one is unpacked, and starts the processes in turns. The times are wall times, imports apart: only the ratios of
neighbours mean something, of which the median counts. Nothing is compiled for shipped kernels, and nothing of theirs is cached.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "shipped_kernels"
WANTED = 0.35
"""Of the time of ``cached``, the most that ``shipped`` may take."""


def built(folder: Path, level: str) -> Path:
    """Build the example's wheel for one level. Returns the wheel."""
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    with open(source / "pyproject.toml", "a") as file:  # the hook's table is the last
        file.write(f'cpu = ["{level}"]\n')
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def first_calls(who: str, site: Path, cache: Path | None) -> dict:
    """Make all first calls in a new process. `cache`: for Numba's files; None: the machine's, which may have our native code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(EXAMPLE / "first_calls.py"), who]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(rounds: int, site: Path | None) -> None:
    from fastexchange.ground.package_code import fitting_levels

    with tempfile.TemporaryDirectory() as temporary:
        if site is None:
            wheel = built(Path(temporary), fitting_levels()[0])
            site = Path(temporary, "site")
            zipfile.ZipFile(wheel).extractall(site)
            print(f"{wheel.name}: {wheel.stat().st_size} bytes")
        cache = Path(temporary, "cache")
        cache.mkdir()
        first_calls("cached", site, cache)  # warms it
        said: dict[str, list[dict]] = {"njit": [first_calls("njit", site, cache)], "cached": [], "shipped": []}
        for _ in range(rounds):
            said["cached"].append(first_calls("cached", site, cache))
            said["shipped"].append(first_calls("shipped", site, None))
    calls = {who: statistics.median(each["first calls"] for each in runs) for who, runs in said.items()}
    for who, runs in said.items():
        imports = statistics.median(each["import numba"] + each["import"] for each in runs)
        spread = ", ".join(f"{each['first calls']:.2f}" for each in runs)
        print(f"{who:8} first calls {calls[who]:6.2f} s ({spread}), imports {imports:.2f} s, compiled {runs[-1]['compiled']}")
    last = said["shipped"][-1]
    native = ", ".join(f"{name.partition(' ')[2]} {count}" for name, count in last.items() if name.startswith("native"))
    print(f"{last['kernels']} kernels, {last['calls']} calls; native functions: {native}")
    ratios = [one["first calls"] / other["first calls"] for one, other in zip(said["shipped"], said["cached"], strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"shipped / cached {statistics.median(ratios):.2f} ({each}; wanted: at most {WANTED})")
    print(f"shipped / njit   {calls['shipped'] / calls['njit']:.3f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--site", type=Path, help="a folder with the package from a wheel; without it one is built, in minutes")
    options = parser.parse_args()
    main(options.rounds, options.site)

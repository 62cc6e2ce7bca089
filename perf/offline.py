"""``python perf/offline.py fetch | install``: what a GPU machine without a network lacks, and the way there.

``fetch``, on a machine with a network, puts wheels for the GPU machine's Python into ``perf/.offline``, which git ignores.
``install``, on the GPU machine, installs them for the Python that runs it, asking no network. The wheels are packed anew,
by LZMA, which pip reads: two thirds of the size.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "perf" / ".offline"
NAMES = (
    "numba", "llvmlite", "numba-cuda", "numpy<2.5", "cffi", "pycparser",  # numba-cuda 0.30 uses what NumPy 2.5 no longer has
    "pytest", "pluggy", "iniconfig", "packaging", "Pygments", "hypothesis", "sortedcontainers",
)  # fmt: skip
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # pip takes a platform's number exactly as it is given
_OF_OLD = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")


def pinned(name: str, python: str, constraints: str) -> str:
    """The requirement for `name` in the text of ``constraints.txt``: for this Python, else the last; `name` if none is there."""
    found = re.findall(rf'^{re.escape(name)}(==[^;\s]+)(?:; python_version ([<>=]+) "([\d.]+)")?', constraints, re.M | re.I)
    last = name + found[-1][0] if found else name
    return next((name + version for version, sign, limit in found if _holds(python, sign, limit)), last)


def _holds(python: str, sign: str, limit: str) -> bool:
    have, want = (tuple(map(int, each.split("."))) for each in (python, limit or python))
    return {"": True, "<": have < want, "<=": have <= want, ">": have > want, ">=": have >= want, "==": have == want}[sign]


def pack(wheel: Path, into: Path) -> Path:
    """The same wheel, smaller. Half of one, which a call that is killed leaves, is not called a wheel."""
    target = into / wheel.name
    part = target.with_name(wheel.name + ".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as new:
        for item in old.infolist():
            new.writestr(item, old.read(item), compress_type=zipfile.ZIP_LZMA)
    part.replace(target)
    return target


def fetch(names, python: str, folder: Path, limit: int) -> int:
    """Fetch wheels; the exit code is 1 if they and the working tree are larger than `limit` MiB."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = [pinned(name, python, constraints) for name in names]
    platforms = [f"manylinux_2_{number}_x86_64" for number in _GLIBC] + list(_OF_OLD)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("*.part")):
        old.unlink()
    print(f"downloading {len(wanted)} wheels for Python {python}: {', '.join(wanted)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", directory]
        command += ["--python-version", python, "--implementation", "cp", *(f"--platform={each}" for each in platforms), *wanted]
        subprocess.run(command, check=True)
        print("packing them anew, which takes a second for some MiB:", flush=True)
        sizes = {}
        for wheel in sorted(Path(directory).iterdir()):
            sizes[wheel.name] = size = pack(wheel, folder).stat().st_size
            print(f"{size / 2**20:7.1f} MiB instead of {wheel.stat().st_size / 2**20:7.1f}  {wheel.name}", flush=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    tree = sum((ROOT / name).stat().st_size for name in files if name and (ROOT / name).is_file())
    total = (sum(sizes.values()) + tree) / 2**20
    print(f"{total:7.1f} MiB with the working tree, of {limit}")
    return int(total > limit)


def install(folder: Path) -> int:
    """Install what has been fetched, over what is there."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"There is nothing in {folder}: python perf/offline.py fetch, where there is a network, fills it.")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--no-compile", *wheels]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    """Fetch, or install."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fetch", "install"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to fetch instead of {', '.join(NAMES)}")
    parser.add_argument("--python", default="3.12", metavar="3.X", help="the GPU machine's Python (3.12)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the wheels are (perf/.offline)")
    parser.add_argument("--limit", type=int, default=64, metavar="MIB", help="what may come along, in MiB (64)")
    options = parser.parse_args()
    if options.what == "install":
        return install(options.folder)
    return fetch(options.names or NAMES, options.python, options.folder, options.limit)


if __name__ == "__main__":
    sys.exit(main())

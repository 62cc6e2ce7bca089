"""``python -m fastexchange run`` and ``record``: a program sees, prints and ends as with ``python PROGRAM``."""
# ruff: noqa: E501  (a program is a line)

import concurrent.futures
import os
import py_compile
import re
import subprocess
import sys
import zipfile

import pytest
from shell import ROOT

SNIPPETS = {
    "stack in a function": "import inspect\ndef f():\n    return len(inspect.stack())\nprint(f())",
    "extract_stack": "import traceback; print(len(traceback.extract_stack()))",
    "warning above all": "import warnings; warnings.warn('w', stacklevel=2)",
    "logging far above": "import logging; logging.basicConfig(format='%(filename)s'); logging.warning('x', stacklevel=5, stack_info=True)",
    "traced": "import sys\nn = []\nsys.settrace(lambda *a: n.append(a[1]))\ndef f(): pass\nf()\nsys.settrace(None)\nprint(n)",
    "faulthandler": "import faulthandler, sys; faulthandler.dump_traceback(sys.stdout.fileno())",
    "names": "print(__name__, __file__, __package__, __spec__, __doc__, globals().get('__cached__', 'none'))",
    "loader": "print(type(__loader__).__name__, getattr(__loader__, 'path', None), getattr(__loader__, 'name', None))",
    "get_source": "import inspect\ndef f(): pass\nprint(inspect.getsource(f), inspect.getsourcefile(f))",
    "path": "import sys; print(sys.path)", "input": "print(input())",
    "modules": "import sys; print(sorted({*sys.modules} - {'atexit'}))",  # a built-in module, which `record` needs
    "flags": "import sys; print(sys.flags, sys.warnoptions, sys._xoptions, sys.executable, sys.prefix)",
    "environment": "import os; print(sorted(os.environ.items()))",
    "environment of a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os, sys; print(sorted(os.environ), sys.path)'])",
    "stdin": "import sys; print(sys.stdin.read(), sys.stdin.isatty())", "import beside it": "import beside; print(beside.__file__)",
    "pickle": "import pickle\nclass C: pass\nprint(pickle.loads(pickle.dumps(C())).__class__.__module__)",
    "forked": "import os, sys\nsys.stdout.flush()\nif not os.fork():\n    sys.exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "descriptors": "import os; print(sorted(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else '')",
    "garbage": "import gc; print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())",
}  # fmt: skip
"""What only prints: all together are one program."""
PROGRAMS = {
    "what only prints": "\n".join(f"print({name!r})\n{code}" for name, code in SNIPPETS.items()),
    "error in a function": "def f():\n    raise KeyError('x')\nf()", "syntax": "def f(:\n    pass",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e",
    "not UTF-8": "print('é')".encode("latin-1"), "import error": "import nothere",
    "excepthook": "import sys, traceback\nsys.excepthook = lambda *a: print(a[0], len(traceback.extract_tb(a[2])))\n1 / 0",
    "unraisable": "class D:\n    def __del__(self):\n        1 / 0\nD()",
    "exit": "import sys; sys.exit(3)", "exit with text": "import sys; sys.exit('said')",
    "_exit": "import os; print(1, flush=True); os._exit(5)", "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted by a signal": "import signal; signal.raise_signal(signal.SIGINT)",
    "atexit": "import atexit; atexit.register(print, 1); atexit.register(print, 2); print(0)",
    "atexit that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "a thread at the end": "import threading, time\ndef f():\n    time.sleep(.2); print(len(__import__('inspect').stack()), __name__)\nthreading.Thread(target=f).start()",
    "a daemon at the end": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint(1)",
    "broken pipe": "import sys\nsys.stdout.close()\nsys.exit(2)",
    "not flushed": "import sys; sys.stdout.write('no newline')", "docstring": "'''said'''\nprint(__doc__)",
    "recursion limit": "import sys; sys.setrecursionlimit(60); print(sys.getrecursionlimit())",
    "import of itself": "import sys\nif __name__ == '__main__':\n    import program\nprint(__name__, sys.argv)",
    "its own numba": "import numba; print(numba.__file__)",
    "workers": "import multiprocessing as m\ndef f(x):\n    return x + 1, __name__\nif __name__ == '__main__':\n    with m.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [1]))",
}  # fmt: skip
"""Programs whose output, errors and end are compared."""
OURS = ["-m", "fastexchange"]


def ended(command: list, folder, text: bytes = b"in\n") -> tuple:
    """How a Python ends, what it prints, and what it prints as errors: without addresses, and the line of ``record``."""
    given = {"input": text, "cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "COLUMNS": "80"}}
    done = subprocess.run([sys.executable, *command], **given, capture_output=True, timeout=300)
    said = re.sub(rb"(^|\n)[^\n]*: 0 signatures of 0 kernels, [^\n]*\n", b"\n", done.stderr)
    return done.returncode, *(re.sub(rb"0x[0-9a-f]+", b"", each).strip() for each in (done.stdout, said))


def differing(folder, programs: dict[str, tuple[list, list]], **given) -> list:
    """What ends otherwise under ``run`` or ``record`` than by itself. `programs`: by name, Python's options, and a command line."""

    def compared(name):
        options, program = programs[name]
        expected = ended([*options, *program], folder, **given)
        ways = ["run"], ["record", "-o", f"{abs(hash(name))}.json"]
        found = [ended([*options, *OURS, *way, *program], folder, **given) for way in ways]
        return [f"{name}: {expected} by python, {each}" for each in found if each != expected]

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        return [each for found in threads.map(compared, programs) for each in found]


@pytest.mark.slow
def test_a_program_is_run_as_by_python(tmp_path):
    calls = {}
    for number, (name, content) in enumerate(PROGRAMS.items()):
        place = tmp_path / str(number)
        place.mkdir()
        (place / ("numba.py" if name == "its own numba" else "beside.py")).touch()
        (place / "program.py").write_bytes(content if isinstance(content, bytes) else content.encode())
        calls[name] = [], [f"{number}/program.py", "a", "-m", "--", "-o", "x"]
    assert differing(tmp_path, calls) == []
    assert ended(["0/program.py"], tmp_path)[0] == 0, "what only prints has failed"


SAYS = "import sys\nprint(__name__, globals().get('__file__'), __package__, __spec__, sys.argv, sys.path, sys.flags)\n"
FAILS = SAYS + "def f():\n    1 / 0\nf()\n"
FILES = {
    "plain.py": FAILS, "-dash.py": SAYS, "no_suffix": SAYS, "broken.py": "import nothere\n", "directory/__main__.py": FAILS,
    "package/__init__.py": "", "package/__main__.py": FAILS, "no_main/__init__.py": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link.py").symlink_to(folder / "plain.py")
    py_compile.compile(str(folder / "plain.py"), str(folder / "compiled.pyc"))
    for name, inside in (("archive.zip", "__main__.py"), ("no_main.zip", "other.py")):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(inside, FAILS)
    return folder


WAYS = {
    "relative": [["./plain.py", "x"], ["package/../plain.py"], ["link.py"], ["no_suffix"], ["compiled.pyc", "x"]],
    "module": [["-m", "plain"], ["-m", "package", "-m"], ["-mpackage"], ["-m", "broken"], ["-m", "plain.inside"], ["-m", "no_main"]],
    "container": [["directory"], ["archive.zip", "x"], ["no_main.zip"]],
    "from its input": [["-", "x"], ["/dev/stdin", "x"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_where_a_program_lies(places, way):
    given = {"text": FAILS.encode()} if way == "from its input" else {}
    assert [] == differing(places, {str(program): ([], program) for program in WAYS[way]}, **given)


@pytest.mark.slow
def test_options_of_python(places):
    options = ["-OO -bb -u -s -q", "-Werror", "-W ignore -Xutf8", "-BO -X tracemalloc", "-x"]
    options += ["-P"] if hasattr(sys.flags, "safe_path") else []
    assert [] == differing(places, {each: (each.split(), ["plain.py", "-O"]) for each in options})
    assert ended(["-BOm", "fastexchange", "run", "-m", "plain"], places) == ended(["-BOm", "plain"], places)
    assert ended([*OURS, "run", "--", "-m", "plain", "a", "-m", "b"], places) == ended(["-m", "plain", "a", "-m", "b"], places)
    dashed = ended([*OURS, "run", "--", "-dash.py"], places)
    assert dashed == ended(["--", "-dash.py"], places) and dashed[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("python_path", [None, "", f"{os.curdir}{os.pathsep}nowhere"])
def test_environments(places, python_path, monkeypatch):
    """With and without a PYTHONPATH, and with the environment's own ``sitecustomize``, which both of the interpreters import."""
    (places / "sitecustomize.py").write_text("import sys; print('site', sys.path)")
    shown = "os.environ.get('PYTHONPATH'), len(os.environ), sys.path, 'sitecustomize' in sys.modules"
    (places / "environment.py").write_text(f"import os, sys; print({shown})")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    commands = [sys.executable, "environment.py"], [sys.executable, *OURS, "run", "environment.py"]
    plain, found = (subprocess.run(each, cwd=places, capture_output=True, text=True, timeout=100) for each in commands)
    assert found.stdout.endswith(plain.stdout) and plain.stdout and found.stderr == plain.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("start", [["-I"], ["-E"], ["-c", f"import runpy; runpy.run_module({OURS[1]!r}, None, '__main__', True)"]])
def test_where_this_process_runs_it(places, start):
    """Python cannot be started anew there: our frames are below the program, and tracebacks leave them out."""
    options, ours = ([], start) if start[0] == "-c" else (start, [*start, *OURS])
    (places / "fails.py").write_text("import sys; print(__name__, __file__, sys.argv)\ndef f():\n    1 / 0\nf()\n")
    (places / "broken_syntax.py").write_text("def f(:\n")
    for program in ("fails.py", "broken_syntax.py"):
        plain = ended([*options, program], places)
        assert plain == ended([*ours, "run", program], places) and plain[0] == 1
    for program in ("/dev/stdin", "-"):
        assert ended([*ours, "run", program], places, b"print(5)")[:2] == (0, b"5")
    code, _, said = ended([*ours, "run", "-m", "nothere"], places)
    assert code == 1 and said.endswith(b": No module named nothere")


ACCELERATED = {
    "this package first": "from fastexchange import fast_args, bfloat16\nimport numba",
    "Numba first": "import numba",
    "a room of this package first": "import fastexchange.dispatch.structs\nimport numba",
    "looked for first": "import importlib.util as u\nu.find_spec('numba'), u.find_spec('fastexchange.api')\nimport numba",
    "in a thread": "import threading as t\nx = t.Thread(target=__import__, args=('fastexchange.api',))\nx.start()\nx.join()\nimport numba",
    "settings that Numba reads when it is imported": "import os\nos.environ['NUMBA_NUM_THREADS'] = '1'\nimport numba\n"
    "assert numba.config.NUMBA_NUM_THREADS == 1 and type(numba.__spec__.loader).__name__ == 'SourceFileLoader'",
}


@pytest.mark.slow
def test_a_program_is_accelerated(tmp_path):
    """As soon as Numba is there, whoever has imported it; the hook is gone then."""
    shown = "print(hasattr(numba.njit(lambda: 1), 'counts'), [type(each).__name__ for each in sys.meta_path])"
    programs = {name: f"{first}\nimport sys\n{shown}\n".encode() for name, first in ACCELERATED.items()}
    calls = [([*OURS, "run", "-"], program) for program in programs.values()]
    calls += [(["-I", *OURS, "run", "/dev/stdin"], programs["this package first"])]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda call: ended(call[0], tmp_path, call[1]), calls))
    assert all(code == 0 and b"True" in printed and b"Accelerating" not in printed and not said for code, printed, said in found), found
    settings = [name for name in os.environ if name.startswith("FASTEXCHANGE")]
    child = "import numba, os; print(hasattr(numba.njit(lambda: 1), 'counts'), [n for n in os.environ if n.startswith('FASTEXCHANGE')])"
    (tmp_path / "program.py").write_text(f"import numba, subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    assert ended([*OURS, "run", "program.py"], tmp_path) == (0, f"False {settings}".encode(), b""), "children are not accelerated"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-I"]], ids=["anew", "here"])
def test_a_record_is_kept_where_no_program_runs(places, options):
    (places / "kept.json").write_text("kept")
    for program in (["-m", "nothere"], ["nothere.py"], ["no_main"]):
        assert ended([*options, *OURS, "record", "-o", "kept.json", *program], places)[0] in (1, 2)
        assert (places / "kept.json").read_text() == "kept"
    in_current_folder = [] if options else [["-m", "plain"]]  # -I does not look there
    for program in (*in_current_folder, ["archive.zip"], ["-"]):
        (places / "new.json").write_text("kept")
        ended([*options, *OURS, "record", "-o", "new.json", *program], places, b"print(1)")
        assert (places / "new.json").read_text() != "kept", program

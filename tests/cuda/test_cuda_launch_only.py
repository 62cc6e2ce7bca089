"""Kernels that only their package's own launch compiles, or launches as they ask: each in a process of its own."""

import importlib

import pytest
from stub_processes import is_installed, run_package

pytestmark = pytest.mark.slow

BODY = """
def body(x, n):
    x[0] = n
"""
LITERAL = """
from numba_cuda_mlir.numba_cuda.misc.special import literally

def body(x, n):
    x[0] = literally(n)
"""
PLANNED = """
from numba_cuda_mlir import extending

@extending.register_planner
class Planner(extending.WholeFunctionPlanner):
    def run(self):
        {}
        return False
""" + BODY
IF_THERE_IS_ONE = """try:
            extending.require_launch_config(self.state)
        except RuntimeError:
            pass"""
REWRITTEN = """
from numba.cuda import launchconfig
from numba.cuda.core.rewrites import Rewrite, register_rewrite

@register_rewrite("after-inference")
class Configured(Rewrite):
    def __init__(self, state):
        pass

    def match(self, *block):
        launchconfig.ensure_current_launch_config().dispatcher.mark_launch_config_sensitive()
        return False
""" + BODY
MLIR = "numba_cuda_mlir.cuda"
KERNELS = {  # by package, and what its code depends on, or asks for
    (MLIR, "the value of an argument"): LITERAL,
    (MLIR, "the launch configuration"): PLANNED.format("extending.require_launch_config(self.state)"),
    (MLIR, "dynamic shared memory of its own"): PLANNED.format("extending.set_required_dynamic_shared_memory(self.state, 4096)"),
    ("numba.cuda", "the launch configuration"): REWRITTEN,
}
SCENE = """
from children import at_once

def ahead(*example):
    try:
        kernel.precompile(example)
        return "compiled"
    except TypeError as error:
        return f"TypeError: {error}"

x = cuda.to_device(np.zeros(4, "f4"))
kernel = fast_args(cuda.jit(body))
print(ahead(x, 7))
for block in (32, 32, 64):
    for n in (7, 8):
        kernel[1, block](x, n)
kernel[1, 32].bind(x, 7)()
assert len(stub.launches) == 7 and kernel.counts().fast == 0
print(ahead(x, 7))
print({launch.shared for launch in stub.launches})
print(kernel[1, 32].explain(x, 7).outcome)
try:
    fast_args(cuda.jit(body))[1, 32](DeviceTensor((4,)), 7)
except TypeError as error:
    print(error)
stub.clear()
for _ in range(3):
    new = fast_args(cuda.jit(body))
    at_once(*(lambda n=n: [new[1, 32 + 32 * (n % 2)](x, n % 3) for _ in range(4)] for n in range(8)))
assert len(stub.launches) == 96
"""


def packages(names):
    return [pytest.param(*row, id=" ".join(row), marks=pytest.mark.skipif(not is_installed(row[0]), reason="not installed"))
            for row in names]  # fmt: skip


@pytest.mark.parametrize(("name", "why"), packages(KERNELS))
def test_it_is_launched_by_its_package(name, why):
    """As ``explain`` says, also by several threads at once, which would compile it at the same time."""
    package = importlib.import_module(name)
    before, after, shared, outcome, refused = run_package(KERNELS[name, why] + SCENE, package).splitlines()
    own = {"numba.cuda": "numba-cuda", MLIR: "numba-cuda-mlir"}[name]
    ahead = f"TypeError: body(): {own} compiles it in a launch only: its code depends on {why}"
    assert before == ("compiled" if "memory" in why else ahead) and shared == ("{4096}" if "memory" in why else "{0}")
    assert after == ("compiled" if name == "numba.cuda" else before)  # it finds what a launch has compiled
    assert outcome.startswith(f"{own}'s own launch: its code ") and outcome.endswith(why)
    assert f"{own} cannot take a cuda_tensors.DeviceTensor, and has to make this launch itself: its code" in refused


@pytest.mark.skipif(not is_installed(MLIR), reason="not installed")
def test_code_that_uses_a_configuration_if_there_is_one():
    """The package has launched it, so what it compiles without a launch is other code."""
    scene = """
x = cuda.to_device(np.zeros(4, "f4"))
dispatcher = cuda.jit(body)
dispatcher[1, 32](x, 7)
kernel = fast_args(dispatcher)
kernel[1, 64](x, 7)
print(kernel.counts().fast, kernel[1, 64].explain(x, 7).outcome)
"""
    said = run_package(PLANNED.format(IF_THERE_IS_ONE) + scene, importlib.import_module(MLIR))
    assert said == "0 numba-cuda-mlir's own launch: its code depends on the launch configuration\n"

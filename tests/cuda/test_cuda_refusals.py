"""What no launch takes: refused in every way, with the argument's name, before anything is launched, and nothing is kept."""

import array as stdlib_array
import functools
import sys

import numpy as np
import pytest
from cuda_checks import all_given_back, both_ways, is_refused, traced
from cuda_producers import CUDA, MANAGED, ArrayInterface, Exports, ExportsLegacy
from cuda_stub import Stub
from cuda_tensors import DeviceTensor
from frameworks import torch
from launches import ExportedTensor, address
from made_producers import Dunder, Ledger, Tabled, Wrapper, capsule, capsule_name, export_versioned


class Own(Exception):
    pass


class Maker:
    """What makes the values: exports are entered in `ledger`, interfaces are read by native code already or `is_new`."""

    def __init__(self, record, package, is_new: bool):
        self.record, self.ledger, self.at, self.is_new = record, Ledger(), address(package), is_new

    def tensor(self, *shape, cls=DeviceTensor, **options):
        return cls(shape or (4,), **{"data": self.at, **options})

    def tensor_that_says(self, **lies):
        tensor = self.tensor()
        tensor.lied = export_versioned(Ledger(), np.zeros(4, np.float32), **{"device_type": 2, **lies})
        tensor._managed.dl_tensor = tensor.lied.dl_tensor
        return tensor

    def array(self, **lies):
        value = (type("New", (ArrayInterface,), {}) if self.is_new else ArrayInterface)(self.record)
        value.say(**lies)
        return value

    def gives(self, give):
        return type("Gives", (Exports,), {"__dlpack__": lambda tensor, **options: give(tensor)})(self.ledger)

    def capsule(self, tensor, name=b"dltensor_versioned", ledger=None, **lies):
        return capsule(export_versioned(ledger or self.ledger, tensor.array, **{**tensor.lies, **lies}), name)

    def gives_what_is_consumed(self):
        used = self.capsule(Exports(self.ledger), b"used_dltensor_versioned", Ledger())
        return self.gives(lambda tensor: used)


def _raise(error):
    raise error


# ---- memory of the host, and of devices that there are not --------------------------------------------------------------
HOST = {
    "a table": lambda m: m.tensor(device_type=1), "a wrapper": lambda m: Wrapper(m.tensor(device_type=1)),
    "a table that only exports": lambda m: m.tensor(cls=ExportedTensor, device_type=1),
    "a made table": lambda m: Tabled(np.zeros(4, np.float32), m.ledger),
    "__dlpack__": lambda m: Dunder(np.zeros(4, np.float32), m.ledger),
    "__dlpack__ that says another device": lambda m: type(
        "Liar", (Exports,), {"__dlpack_device__": lambda tensor: (CUDA, 0)})(m.ledger, device_type=1),
    "OpenCL's": lambda m: m.tensor(device_type=4), "pinned by ROCm": lambda m: m.tensor(device_type=11),
}  # fmt: skip
if torch is not None:
    HOST |= {
        "torch": lambda m: torch.ones(3), "torch, with a gradient": lambda m: torch.ones(3, requires_grad=True),
        "torch, a parameter": lambda m: torch.nn.Parameter(torch.ones(3)),
        "torch, meta": lambda m: torch.ones(3, device="meta"),
        "torch, meta, with a gradient": lambda m: torch.ones(3, device="meta", requires_grad=True),
        "torch, conjugated": lambda m: torch.ones(3, dtype=torch.complex64).conj(),
        "torch, negated": lambda m: torch.ones(3, dtype=torch.complex64).conj().imag,
        "torch, sparse": lambda m: torch.ones(3).to_sparse(),
    }  # fmt: skip

NOWHERE = {
    f"{what} on {kind.name}:{number}": lambda m, make=make, kind=kind, number=number: make(m, device=number, device_type=kind)
    for what, make in (("DeviceTensor", Maker.tensor), ("Exports", lambda m, **place: Exports(m.ledger, **place)))
    for kind in (CUDA, MANAGED) for number in (-1, 9, 64, 2**31 - 1)
    if (kind, number) != (MANAGED, 9)  # beside others that is on their device
}  # fmt: skip

# ---- nonsense, as a table or an export tells it, and as a __cuda_array_interface__ does -----------------------------------
LIES = [
    {"ndim": -1}, {"ndim": 65}, {"shape": None}, {"shape": (-3,)}, {"shape": (2**62,)}, {"shape": (3,), "strides": (2**61,)},
    {"lanes": 2}, {"lanes": 0}, {"bits": 7}, {"bits": 0}, {"code": 99}, {"code": 5, "bits": 255}, {"data": 0},
    {"data": 0, "byte_offset": 4096}, {"byte_offset": 2**63}, {"byte_offset": 2**64 - 1}, {"byte_offset": 3},
    {"device_type": 99},
]  # fmt: skip
WRONG = {
    BufferError: [
        {"mask": np.ones(4, bool)}, {"mask": 1}, {"strides": (6,)}, {"strides": (4, 4)}, {"shape": (4, 5), "strides": (20,)},
        {"data": (2**40 + 64, False)}, {"data": (0, False)}, {"data": (-8, False)}, {"data": (2**64, False)},
        {"data": lambda at: (at + 1, False)}, {"shape": (2**63,)}, {"shape": (-1,)}, {"shape": (2**40, 2**40)},
        {"shape": (3, 3), "strides": (2**62, 4)}, {"shape": (1,) * 65}, {"stream": -1}, {"stream": True}, {"stream": "1"},
        {"stream": 2**64},
    ],
    KeyError: [{"shape": ...}, {"data": ...}, {"typestr": ...}],
    ValueError: [{"data": (2**40,)}, {"data": (2**40, False, 1)}],
    TypeError: [
        {"data": 5}, {"shape": None},
        *[{"typestr": text} for text in ["<f/", "<f0", "<f40", "<i:4", "f4<", "<c-8", "<x4", "nonsense", None]],
    ],
}  # fmt: skip
NONSENSE = {
    "a table that only exports no memory": lambda m: m.tensor(cls=ExportedTensor, data=0),
    "a table that only exports 65 dimensions": lambda m: m.tensor(*[1] * 65, cls=ExportedTensor),
    "a table that says a vector, misaligned": lambda m: m.tensor(data=m.at + 1),
    "a capsule that has been consumed": Maker.gives_what_is_consumed,
    "a capsule of a version of the future": lambda m: m.gives(lambda t: m.capsule(t, version=(2, 0))),
    **{f"a __dlpack__ that gives {given!r}": lambda m, given=given: m.gives(lambda t: given) for given in (None, 5, "capsule")},
    **{f"an export that says {lies}": lambda m, lies=lies: Exports(m.ledger, **lies) for lies in LIES},
    **{f"a table that says {lies}": lambda m, lies=lies: m.tensor_that_says(**lies) for lies in LIES},
}  # fmt: skip

REFUSED = {  # who makes it, what it is refused with, and what that says
    **{f"host: {name}": (make, BufferError, "") for name, make in HOST.items()},
    **{name: (make, BufferError, "") for name, make in (NOWHERE | NONSENSE).items()},
    **{f"an interface, {i}, {kind.__name__}": (lambda m, lies=lies: m.array(**lies), kind, "")
       for kind, rows in WRONG.items() for i, lies in enumerate(rows)},
    **{f"a __dlpack__ that raises {kind.__name__}": (lambda m, kind=kind: m.gives(lambda t: _raise(kind("no"))), kind, "")
       for kind in (Own, BufferError, TypeError, KeyError)},
    **{f"an int that no parameter holds, {number}": (lambda m, number=number: number, OverflowError, "int64")
       for number in (2**64, -(2**63) - 1, 2**70)},
    **{f"a {type(value).__name__}": (
        lambda m, value=value: value, TypeError, f"no kernel for CUDA takes an argument of type {type(value).__name__}")
       for value in ("s", [1.0], None, {1: 2}, object())},
    **{f"a tensor of {name}": (
        lambda m, name=name: m.tensor(dtype=getattr(pytest.importorskip("ml_dtypes"), name)), BufferError, "storage=True")
       for name in ("float8_e5m2", "float8_e4m3fn")},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(record, package, kernels, name):
    make, kind, text = REFUSED[name]
    _, one, two, _ = kernels
    good, device_array, host = DeviceTensor((4,)), package.to_device(np.zeros(4, np.float32)), np.zeros(4, np.float32)

    def attempt(value) -> None:
        pairs = [(value, 1), (1, value), ((value, 2), 1), (((value,),), good), (good, value), (device_array, value)]
        if name.startswith("host") and "says" not in name:  # who lies about where it is, lies to the package
            pairs += [(host, value), (value, host), ((host, value), host)]
        for pair in pairs * 2:
            said = is_refused(functools.partial(two[1, 32], *pair), kind, text)
            assert "kernel(): argument '" in said or sys.version_info < (3, 11)
        for launch in (lambda: one[1, 32](x=value), lambda: one[1, 32](value), one[1, 32].bind(value)):
            said = is_refused(launch, kind, text)
            assert kind is not BufferError or (said.count("(): argument '") == 1 and "_View" not in said)
        explained = "own launch: only it takes" if "no kernel" in text else f"refused with {kind.__name__}"
        assert explained in str(one.explain(value))

    for is_new in (True, False):
        both_ways(lambda: one[1, 32](good))
        both_ways(lambda: two[1, 32](good, good))
        maker = Maker(record, package, is_new)
        value = make(maker)
        record.clear()
        with all_given_back(good, value), traced(record) if isinstance(record, Stub) else all_given_back() as calls:
            attempt(value)
        assert not record.launches and not [call for call in calls or () if call.startswith(("cuMem", "cuLaunch"))]
        assert maker.ledger.made == maker.ledger.deleted and not maker.ledger.out
        one[1, 32](good)
        one[1, 32](maker.array())


def test_buffers_are_memory_of_the_host(record, kernels):
    for buffer in (stdlib_array.array("f", [1, 2]), memoryview(bytearray(8)), b"12"):
        is_refused(lambda: kernels[1][1, 32](buffer), BufferError, "kDLCPU")  # noqa: B023
    assert not record.launches


class _LegacyRaises(ExportsLegacy):
    """Exports, and then cannot be asked whether it is readonly."""

    @property
    def __cuda_array_interface__(self):
        if self.told:
            raise ValueError("the array interface is not to be had")
        raise AttributeError("not yet")


def test_a_legacy_export_whose_interface_raises(record, kernels):
    value = _LegacyRaises(Ledger())
    is_refused(lambda: kernels[1][1, 32](value), ValueError, "array interface is not to be had")
    assert not record.launches
    assert capsule_name(value.capsule) == b"dltensor", "it is consumed; its producer owns it"

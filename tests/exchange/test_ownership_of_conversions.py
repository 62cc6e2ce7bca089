"""Ownership in conversions: however one ends, each managed tensor is given back once and each reference is back."""

import functools
import gc
import itertools
import weakref

import made_producers
import numpy as np
import pytest
from forked import fork_python
from frameworks import has_table, is_borrowed, needs_torch, torch, tvm_ffi
from fuzzing import is_fast
from hostile_producers import Gives, GivesLegacy
from interpreter import run_python
from made_producers import Ledger
from test_ownership import BAD, WARM, gather

from counting import (  # isort: skip
    BUFFERS, PRODUCERS, account, check_dies, end_of, forget_notes, memory_of, no_violations, raised, scene, tensor_of,
)
from fastexchange import convert, fast_args, from_dlpack, to_dlpack
from fastexchange.dispatch.runtime import runtime

assert no_violations  # a fixture


class Unmade:
    """A type that no tensor can be converted to."""


CONVERSIONS = {
    "from_dlpack": from_dlpack,
    "from_dlpack, copied": lambda x: from_dlpack(x, copy=True),
    "from_dlpack, another dtype": lambda x: from_dlpack(x, dtype="i2"),
    "from_dlpack, another device": lambda x: from_dlpack(x, device=(2, 0)),
    "from_dlpack, no device": lambda x: from_dlpack(x, device="nowhere"),
    "from_dlpack, a bad copy": lambda x: from_dlpack(x, copy="yes"),
    "from_dlpack, an unknown option": lambda x: from_dlpack(x, unknown=x),
    "from_dlpack, two": lambda x: from_dlpack(x, x),
    "to_dlpack, dropped": to_dlpack,
    "to_dlpack, versioned and dropped": lambda x: to_dlpack(x, max_version=(1, 3)),
    "to_dlpack, copied and dropped": lambda x: to_dlpack(x, max_version=(1, 0), copy=True),
    "to_dlpack, consumed": lambda x: np.from_dlpack(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, legacy and consumed": lambda x: np.from_dlpack(GivesLegacy(lambda _: to_dlpack(x))),
    "to_dlpack, consumed by a kernel": lambda x: gather(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, consumed by from_dlpack": lambda x: from_dlpack(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, a bad version": lambda x: to_dlpack(x, max_version="1.3"),
    "to_dlpack, another device": lambda x: to_dlpack(x, device=(2, 0)),
    "convert to NumPy": lambda x: convert(x, np.ndarray),
    "convert to NumPy, copied": lambda x: convert(x, np.ndarray, copy=True),
    "convert to NumPy, shared": lambda x: convert(x, np.ndarray, copy=False),
    "convert to what is no tensor": lambda x: convert(x, int),
    "convert to what is no tensor either": lambda x: convert(x, Unmade),
    "convert to what is no type": lambda x: convert(x, 5),
    "convert, a bad copy": lambda x: convert(x, np.ndarray, copy=3),
}
if torch is not None:
    CONVERSIONS["convert to PyTorch"] = lambda x: convert(x, torch.Tensor)
    CONVERSIONS["convert to PyTorch, copied"] = lambda x: convert(x, torch.Tensor, copy=True)
    CONVERSIONS["convert to PyTorch, shared"] = lambda x: convert(x, torch.Tensor, copy=False)
    CONVERSIONS["to_dlpack, consumed by PyTorch"] = lambda x: torch.from_dlpack(to_dlpack(x, max_version=(1, 0)))
if tvm_ffi is not None:
    CONVERSIONS["convert to tvm_ffi"] = lambda x: convert(x, tvm_ffi.Tensor)


@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions(way):
    """However a conversion ends, with a result that is dropped or with an exception: nothing is left."""
    makers = {**{kind: functools.partial(tensor_of, kind) for kind in PRODUCERS}, **{name: BAD[name][0] for name in BAD}}
    del makers["int of 71 bits"]
    for name, readonly in itertools.product(makers, (False, True)):
        if readonly and (name in ("torch", "tvm_ffi", *BUFFERS) or name in BAD):
            continue  # which are always writeable
        if way == "to_dlpack, consumed by PyTorch" and name.startswith("device"):
            continue  # PyTorch takes the capsule, fails, and calls the deleter with its exception set
        ledger, memory = Ledger(), memory_of(1, 1, 1)
        memory.flags.writeable = not readonly
        tensor = makers[name](memory, ledger)
        end_of(CONVERSIONS[way], tensor)  # what is learnt at the first call stays
        with scene(name, readonly):
            account(functools.partial(CONVERSIONS[way], tensor), tensor, ledgers=(ledger,))
            owner = weakref.ref(memory)
            forget_notes(tensor)
            del tensor, memory
            check_dies(owner)


EXPORTED_OTHERWISE = {
    "of another major version": ({"version": (2, 0)}, None),
    "without memory": ({"data": 0}, None),
    "of a type that the target lacks": ({"code": 200}, None),
    "for a subclass, which PyTorch's table does not make": ({}, None),
    "of a tensor that autograd tracks since": ({}, lambda tensor: tensor.requires_grad_()),
    "of a tensor whose memory is gone since": ({}, lambda tensor: tensor.untyped_storage().resize_(0)),
}
"""What native code finds after it has made an export: lies of the export, and what happens to the tensor meanwhile."""


@pytest.mark.skipif(not has_table(), reason="native code exports no tensor of this PyTorch")
@pytest.mark.parametrize("what", EXPORTED_OTHERWISE)
def test_a_conversion_that_native_code_gives_up_after_the_export(what):
    """Python code makes another export, and raises or converts. Both exports are given back."""
    (lies, happens), ledger, tensor = EXPORTED_OTHERWISE[what], Ledger(), torch.ones(3)
    target = type("Derived", (torch.Tensor,), {}) if "subclass" in what else np.ndarray

    @made_producers.ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def export(py_object, out):
        if happens is not None:
            happens(tensor)
        out[0] = made_producers.export_versioned(ledger, np.ones(3, np.float32), **lies)
        return 0

    for known in (tensor, tensor if target is np.ndarray else tensor.as_subclass(target)):  # native code has to know both types
        convert(known, np.ndarray)
    entries = runtime().entries
    honest = entries.fields(torch.Tensor)["managed"]
    entries.update(torch.Tensor, managed=made_producers.address_of(export))
    try:
        end_of(lambda: convert(tensor, target))
    finally:
        entries.update(torch.Tensor, managed=honest)
    gc.collect()
    assert ledger.made > 0
    ledger.check(ledger.made)


# ---- what would crash ------------------------------------------------------------------------------------------------


def plain_table():
    """A new type with an exchange table, whose tensors need no guard: an instance."""
    return made_producers.tabled_type("Plain")(np.ones(3))


def guarded_table():
    """A new subclass of PyTorch's tensor, which has a guard: an instance."""
    return torch.ones(3, dtype=torch.float64).as_subclass(type("Guarded", (torch.Tensor,), {}))


def call_often(kernel, tensor) -> None:
    for _ in range(WARM):
        assert kernel(tensor) == 1.0
    gc.collect()


@needs_torch
def test_a_plan_without_a_guard_is_not_used_again_for_pytorch():
    kernel = fast_args(lambda x: x[0])
    call_often(kernel, plain_table())
    tensor = guarded_table()
    call_often(kernel, tensor)
    assert is_fast(kernel, tensor) is is_borrowed()
    for bad in (tensor.clone().requires_grad_(), torch._neg_view(tensor.as_subclass(torch.Tensor)).as_subclass(type(tensor))):
        assert raised(end_of(kernel, bad)) is BufferError
    call_often(kernel, plain_table())


@needs_torch
def test_messages_do_not_read_a_tensor_whose_memory_was_freed():
    """In a process of its own: for the repr of a tensor PyTorch reads its elements."""
    fork_python(
        """
        import numpy as np
        import torch
        from counting import end_of, raised
        from fastexchange import convert, exchange_api, fast_args, from_dlpack, polyfill, to_dlpack

        freed, array = torch.ones(3), np.ones(3)
        freed.untyped_storage().resize_(0)
        for call in (
            lambda: fast_args(freed), lambda: fast_args(grad=freed), lambda: convert(array, freed),
            lambda: convert(array, np.ndarray, copy=freed), lambda: from_dlpack(array, copy=freed),
            lambda: from_dlpack(array, device=freed), lambda: from_dlpack(array, dtype=freed),
            lambda: to_dlpack(array, max_version=freed), lambda: to_dlpack(array, device=freed), lambda: polyfill(freed),
            lambda: exchange_api(freed),
        ):
            assert raised(end_of(call)) in (TypeError, ValueError, BufferError)
        """
    )


@pytest.mark.slow
def test_deleters_that_are_gone_before_the_last_array_are_not_called():
    """They are made in Python; the last arrays die when the interpreter ends."""
    run_python(
        """
        import numpy as np
        from counting import TENSORS, tensor_of
        from fastexchange import fast_args, from_dlpack
        from made_producers import Ledger

        part = fast_args(lambda x: x[1:3], returns=np.ndarray)
        kept = [keep(tensor_of(kind, np.arange(4.0), Ledger())) for kind in TENSORS for keep in (part, from_dlpack)]
        np.kept = [keep(tensor_of(kind, np.arange(4.0), Ledger())) for kind in TENSORS for keep in (part, from_dlpack)]
        np.kept.append(np.kept)
        """
    )

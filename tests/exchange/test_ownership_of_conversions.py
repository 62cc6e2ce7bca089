"""Ownership in conversions, where ``test_ownership.py`` does not have it: exports of native code, and what would crash."""

import functools
import gc

import made_producers
import numpy as np
import pytest
from counting import DELETING, account, end_of, memory_of, no_violations, raised, scene
from exchanges import CALLS
from forked import fork_python
from frameworks import has_table, is_borrowed, needs_torch, torch
from fuzzing import is_fast
from interpreter import run_python
from made_producers import Ledger
from test_ownership import WARM

from fastexchange import convert, fast_args
from fastexchange.dispatch.runtime import runtime

assert no_violations  # a fixture
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


@pytest.mark.parametrize("name", CALLS)
def test_conversions_of_what_has_odd_deleters(name):
    for kind, make in DELETING.items():
        ledger = Ledger()
        tensor = make(memory_of(1, 1, 1), ledger)
        with scene(kind):
            end_of(CALLS[name], tensor)  # what is learnt at the first call stays
            account(functools.partial(CALLS[name], tensor), tensor, ledgers=(ledger,))


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
        from fastexchange import convert, exchange_api, fast_args, from_dlpack, polyfill, to_dlpack
        from oracle import type_and_message

        freed, array = torch.ones(3), np.ones(3)
        freed.untyped_storage().resize_(0)
        for call in (
            lambda: fast_args(freed), lambda: fast_args(grad=freed), lambda: convert(array, freed),
            lambda: convert(array, np.ndarray, copy=freed), lambda: from_dlpack(array, copy=freed),
            lambda: from_dlpack(array, device=freed), lambda: from_dlpack(array, dtype=freed),
            lambda: to_dlpack(array, max_version=freed), lambda: to_dlpack(array, device=freed), lambda: polyfill(freed),
            lambda: exchange_api(freed),
        ):
            assert type_and_message(call)[0] in (TypeError, ValueError, BufferError)
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

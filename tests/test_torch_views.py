"""PyTorch's tensors on the CPU, read in memory by cached calls: what is read is what PyTorch says, or is not used.

In a process of its own with ``FASTEXCHANGE_TORCH=memory``.
"""

import contextlib
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from interpreter import run_python  # noqa: E402

from fastexchange import fast_args  # noqa: E402
from fastexchange.producers import torch_offsets as producer  # noqa: E402

FIELDS = ("ndim", "sizes", "strides", "inline_ndim", "storage_offset", "elements")
needs_views = pytest.mark.skipif(not producer.guard().knows_views, reason="tensors are not read in memory here")


@fast_args
def described(x):
    return x.shape, x.strides, x.sum()


def cached(kernel, *arguments) -> None:
    """Call a kernel until it has a fast entry for these arguments."""
    for _ in range(40):
        kernel(*arguments)


def without_its_table(kernel) -> int:
    """Let cached calls that ask an exchange table fail there. Returns how many records of arguments there are."""
    count = 0
    for filed in kernel._native._overloads.values():
        for entry in filed.cached:
            for record in entry.expected:
                record.borrow = 8  # a call of it ends the process
                count += 1
    return count


def tensors():
    base = torch.arange(120.0)
    yield from (base[:0], base[:1], base[7:], base[::3], base[5], base.view(10, 12).t(), base.view(2, 3, 4, 5)[1:, :, 1::2])
    yield from (base.view(1, 2, 3, 4, 5), base.view(2, 3, 2, 2, 5, 1).transpose(0, 4), base.view(1, 2, 1, 3, 1, 4, 1, 5)[:, 1:])
    yield from (base[:3].expand(4, 3), torch.ones(0, 3), torch.ones(3, 0)[1:], torch.nn.Parameter(torch.ones(3), False))
    yield from (torch.from_numpy(np.arange(5.0)), base.clone().share_memory_()[3:])
    yield torch.frombuffer(bytearray(16), dtype=torch.int16)
    yield from (torch.ones(3, dtype=each) for each in (torch.int64, torch.bool, torch.int8, torch.complex64, torch.float64))
    with torch.inference_mode():
        yield torch.ones(4)[1:]


@needs_views
def test_cached_calls_read_memory():
    for tensor in tensors():
        kernel = fast_args(described.py_func)
        cached(kernel, tensor)
        assert without_its_table(kernel) == 1, tensor.shape
        before = kernel.counts()
        shape, strides, s = kernel(tensor)
        assert kernel.counts()[:2] == (before.fast + 1, before.slow)
        assert shape == tensor.shape and s == tensor.sum().item()
        assert not tensor.numel() or strides == tuple(tensor.element_size() * step for step in tensor.stride())


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_elsewhere_is_noticed(field, monkeypatch):
    found = producer.Guard._set
    monkeypatch.setenv("FASTEXCHANGE_TORCH", "memory")

    def set_wrongly(self, **fields):
        if "sizes" in fields:
            if field == "elements":
                self._elements[6] += 1 << 8
            else:
                fields[field] += 8 if field != "inline_ndim" else 1
        found(self, **fields)

    monkeypatch.setattr(producer.Guard, "_set", set_wrongly)
    guard = producer.Guard()
    assert guard.knows_all and not guard.knows_views and guard.native.ndim == 0 and "views" in guard.why


@needs_views
@pytest.mark.parametrize("step", [8, -8, 16, 40])
@pytest.mark.parametrize("field", ["ndim", "sizes", "strides", "storage_offset", "storage_data"])
def test_each_new_kind_of_tensor_is_checked(field, step, monkeypatch):
    """Before a combination of type, dtype and rank is cached. A wrong offset is not used, and the results are right."""
    native = producer.guard().native
    some = torch.arange(12.0).view(3, 4)[1:], torch.arange(7)[2:], torch.from_numpy(np.ones((4, 3)))[1:]
    assert all(map(producer.guard().reads, some))
    monkeypatch.setattr(native, field, getattr(native, field) + step, raising=False)
    try:
        assert not all(map(producer.guard().reads, some))
    finally:
        monkeypatch.undo()
    assert all(map(producer.guard().reads, some))


@needs_views
def test_tensors_that_change_between_calls():
    """In place: shape, strides, memory, dtype, storage, copy-on-write, ``requires_grad``."""
    rng = random.Random(0)
    x, kept = torch.arange(24.0), []

    def move():
        x.set_(torch.arange(float(rng.randrange(30))))

    changes = (
        lambda: x.resize_(rng.choice([(2, 3), (4,), (1, 2, 3, 1, 2, 2), (0,), ()])), lambda: x.t_() if x.ndim < 3 else None, move,
        lambda: x.set_(torch.arange(40.0)[3:].view(37)[::2]), lambda: kept.append(torch._lazy_clone(x)), kept.clear,
        lambda: setattr(x, "data", torch.ones(9, dtype=rng.choice([torch.float32, torch.float64, torch.int16, torch.complex64]))),
        lambda: setattr(x, "data", torch.arange(6.0).view(2, 3).t()), lambda: x.unsqueeze_(0) if x.ndim < 6 else None,
        lambda: x.is_floating_point() and x.is_leaf and x.requires_grad_(not x.requires_grad),
        lambda: x.untyped_storage().resize_(rng.choice([0, 4, 4 * 64])) if x.untyped_storage().resizable() else None,
    )  # fmt: skip
    refused = 0
    for _ in range(6000):
        with contextlib.suppress(RuntimeError):  # PyTorch refuses some, of a leaf that requires grad, or of a borrowed storage
            rng.choice(changes)()
        x = x if rng.random() > 0.05 else torch.arange(24.0)
        try:
            got = described(x)
        except BufferError:
            refused += 1
            end = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
            is_short = x.numel() and end * x.element_size() > x.untyped_storage().nbytes()
            assert x.requires_grad or is_short
            if is_short or rng.random() < 0.3:
                x = torch.arange(24.0)
            continue
        except RuntimeError as error:
            assert "COW.cpp" in str(error)  # PyTorch's own, of a copy-on-write storage that has been resized to nothing
            x = torch.arange(24.0)
            continue
        expected = described.py_func(x.detach().clone().numpy() if not x.numel() else x.detach().numpy())
        assert got[:1] == expected[:1] and np.array_equal(got[2], expected[2], equal_nan=True)
        steps, told = ([step for step, extent in zip(each[1], got[0], strict=True) if extent > 1] for each in (got, expected))
        assert not x.numel() or steps == told
    assert 100 < refused < 5000


@pytest.mark.slow
@pytest.mark.skipif(producer.guard().knows_views, reason="this is that process")
def test_in_a_process_that_reads_memory():
    code = f"import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', {__file__!r}]))"
    done = run_python(code, FASTEXCHANGE_TORCH="memory")
    assert "28 passed" in done.stdout, done.stdout

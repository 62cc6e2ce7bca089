"""The sources of a PyTorch tensor's view: memory, the exchange table. What is read is what PyTorch says."""

import contextlib
import ctypes
import functools
import mmap
import random
import re
import sys
from unittest.mock import Mock

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cache_entries import cache_entries  # noqa: E402
from forked import fork_python  # noqa: E402
from frameworks import has_table, with_strides_of  # noqa: E402
from interpreter import FOR_TESTS, HERE, run_python  # noqa: E402
from oracle import check_same_as_njit, new_kernel, references_kept  # noqa: E402
from raising import check_raises  # noqa: E402
from torch_operators import UNKNOWN, needs_views  # noqa: E402

from fastexchange import fast_args  # noqa: E402
from fastexchange._abi import ffi  # noqa: E402
from fastexchange.exchange.export import known  # noqa: E402
from fastexchange.ground import readable  # noqa: E402
from fastexchange.ground.native import address_of  # noqa: E402
from fastexchange.torch import offsets as producer  # noqa: E402

FIELDS = ("ndim", "sizes", "strides", "inline_ndim", "storage_offset", "device", "elements")


@numba.njit
def described_njit(x):
    s = 0j
    for each in x.flat:
        s += each
    return x.shape, x.strides, s


described = fast_args(described_njit)


def tensors():
    base, z = torch.arange(120.0), torch.ones(4, dtype=torch.complex64)
    yield from (base[:0], base[:1], base[7:], base[::3], base[5], base.view(10, 12).t(), base.view(2, 3, 4, 5)[1:, :, 1::2])
    yield from (base.view(1, 2, 3, 4, 5), base.view(2, 3, 2, 2, 5, 1).transpose(0, 4), base.view(1, 2, 1, 3, 1, 4, 1, 5)[:, 1:])
    yield from (base[:3].expand(4, 3), torch.ones(0, 3), torch.ones(3, 0)[1:], torch.nn.Parameter(torch.ones(3), False))
    yield from (torch.from_numpy(np.arange(5.0)), base.clone().share_memory_()[3:])
    yield from (torch.frombuffer(bytearray(16), dtype=torch.int16), base.as_subclass(type("Sub", (torch.Tensor,), {})))
    yield from (base.unfold(0, 3, 2), base.view(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(1).expand(3, 4))
    yield from (z.real, z.imag, torch.view_as_complex(base.view(60, 2)), torch.arange(4).view(torch.int16), base > 5)
    yield from (torch.arange(9, dtype=torch.uint8)[1:], torch.nn.Buffer(torch.ones(3)), base.view(10, 12)[:, :9].diagonal())
    yield from (torch.ones(3, dtype=each) for each in (torch.int64, torch.bool, torch.int8, torch.complex64, torch.float64))
    with torch.inference_mode():
        yield torch.ones(4)[1:]


@needs_views
def test_cached_calls_read_memory():
    assert producer.guard().knows_views, producer.guard().why  # else an earlier test has left it so
    for tensor in tensors():
        kernel = new_kernel(described_njit)
        for _ in range(3):
            kernel(tensor)
        ((row,),) = (entry.rows for entry in cache_entries(kernel))
        entry = ffi.cast("fx_entry *", row.entry)
        entry.borrow, own = 8, entry.borrow  # the exchange table's function: a call of it ends the process
        before = kernel.counts()
        shape, strides, s = kernel(tensor)
        entry.borrow = own
        assert kernel.counts()[:2] == (before.fast + 1, before.slow)
        assert shape == tensor.shape and s == tensor.sum().item()
        assert not tensor.numel() or strides == tuple(tensor.element_size() * step for step in tensor.stride())


def test_kernels_see_the_arrays_that_numpy_sees():
    for tensor in tensors():
        plain = tensor.as_subclass(torch.Tensor)
        check_same_as_njit(new_kernel(described_njit), (tensor,), (with_strides_of(plain, plain.numpy()),))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_elsewhere_is_noticed(field, monkeypatch):
    found = producer.Guard._set

    def set_wrongly(self, **fields):
        if "sizes" in fields and field == "elements":
            self._elements[6] += 1 << 8
        elif "sizes" in fields:
            fields[field] += {"inline_ndim": 1, "device": 2}.get(field, 8)
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
    with monkeypatch.context() as wrongly:
        wrongly.setattr(native, field, getattr(native, field) + step)
        assert not all(map(producer.guard().reads, some))
    assert all(map(producer.guard().reads, some))


@needs_views
@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("place", ["storage", "sizes"])
def test_an_object_at_the_end_of_memory(place):
    """Behind a storage, or the extents of many dimensions, there may be nothing: only what is needed is asked for."""
    guard, tensor = producer.guard(), torch.ones((2,) * 7)
    at, pages = tensor._cdata + getattr(guard.native, place), mmap.mmap(-1, 2 * mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
    size = 80 if place == "storage" else 2 * 8 * tensor.ndim
    pointer = ctypes.c_size_t.from_address(at)
    own = pointer.value
    ctypes.memmove(end - size, own, size)
    pointer.value = end - size
    try:
        assert guard.reads(tensor)
    finally:
        pointer.value = own
    assert [readable.read_word(end - 8, 8 * i) for i in (1, 2)] == [None, None] == [readable.read_byte(end - 1, 1)] * 2
    assert readable.read_bytes(end - 8, 100) == bytes(ctypes.string_at(end - 8, 8))


@needs_views
def test_a_failure_that_passes_is_no_difference(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__dlpack_device__", Mock(side_effect=RecursionError("deep")))
    check_raises(RecursionError, "deep", fast_args(lambda x: x.sum()), torch.ones(3))
    assert producer.guard().knows_views


CHANGES = {
    "resize_": lambda x, rng, kept: x.resize_(rng.choice([(2, 3), (4,), (1, 2, 3, 1, 2, 2), (0,), ()])),
    "t_": lambda x, rng, kept: x.t_() if x.ndim < 3 else None,
    "unsqueeze_": lambda x, rng, kept: x.unsqueeze_(0) if x.ndim < 6 else None,
    "set_": lambda x, rng, kept: x.set_(torch.arange(float(rng.randrange(30)))),
    "set_ to a view": lambda x, rng, kept: x.set_(torch.arange(40.0)[3:].view(37)[::2]),
    "copy-on-write": lambda x, rng, kept: kept.append(torch._lazy_clone(x)),
    "no longer": lambda x, rng, kept: kept.clear(),
    "other dtype": lambda x, rng, kept: setattr(x, "data", torch.ones(9, dtype=rng.choice(
        [torch.float32, torch.float64, torch.int16, torch.complex64]))),
    "other order": lambda x, rng, kept: setattr(x, "data", torch.arange(6.0).view(2, 3).t()),
    "requires_grad": lambda x, rng, kept: x.is_floating_point() and x.is_leaf and x.requires_grad_(not x.requires_grad),
    "other storage": lambda x, rng, kept: x.untyped_storage().resizable() and x.untyped_storage().resize_(
        rng.choice([0, 4, 4 * 64])),
}  # fmt: skip


@needs_views
@pytest.mark.parametrize(("seed", "count"), [
    (0, 2000), *(pytest.param(seed, 100_000, marks=pytest.mark.nightly) for seed in range(1, 101)),
])  # fmt: skip
def test_a_tensor_that_changes_between_calls(seed, count):
    """In place. The oracle is the function itself with ``.numpy()``."""
    rng, changes = random.Random(seed), [*CHANGES.values()]
    x, kept, refusals = torch.arange(24.0), [], 0
    for _ in range(count):
        with contextlib.suppress(RuntimeError):  # PyTorch refuses some, of a leaf that requires grad, or of a borrowed storage
            rng.choice(changes)(x, rng, kept)
        x = x if rng.random() > 0.05 else torch.arange(24.0)
        try:
            got = described(x)
        except BufferError:
            refusals += 1
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
        expected = described.py_func(x.detach().numpy() if x.numel() else x.detach().clone().numpy())
        assert got[:1] == expected[:1] and np.allclose(got[2], expected[2], rtol=1e-5, equal_nan=True)  # of whatever was there
        steps, told = ([step for step, extent in zip(each[1], got[0], strict=True) if extent > 1] for each in (got, expected))
        assert not x.numel() or steps == told
    assert 0.025 * count < refusals < 0.85 * count


@pytest.mark.parametrize("seed", range(30))
def test_memory_that_looks_otherwise(seed, monkeypatch):
    """Some words of each tensor and storage are not what they are, as in a PyTorch with another layout: no wrong view."""
    rng, right = random.Random(seed), producer.Guard()
    at = 8 * rng.randrange(32)
    change = rng.choice([lambda word: word + 8, lambda word: 0, lambda word: word ^ 1, lambda word: word >> 8])
    moved = rng.choice([0, 8, -8])  # or all words from `at` on lie elsewhere
    read_word, read_byte, heads, kept = producer.read_word, producer.read_byte, {}, []
    size_at = ctypes.CDLL(None).malloc_usable_size
    size_at.restype, size_at.argtypes = ctypes.c_size_t, [ctypes.c_void_p]

    def is_changed(address: int) -> bool:
        return any(head + at <= address < head + min(size, 256 if moved else at + 8) for head, size in heads.items())

    def word(base: int, offset: int = 0) -> int | None:
        if not is_changed(base + offset):
            return read_word(base, offset)
        found = read_word(base, offset + moved)
        return found if moved or found is None else ctypes.c_ssize_t(change(found)).value

    def byte(base: int, offset: int) -> int | None:
        return read_byte(base, offset + moved if is_changed(base + offset) else offset)

    def noted(tensor) -> int:
        """Where a tensor or a storage is."""
        found = own.__get__(tensor)
        heads[found] = size_at(found)  # behind it another one may lie
        kept.append(tensor)  # nothing else may come to lie there
        return found

    own = torch._C.TensorBase._cdata if seed % 2 else torch.UntypedStorage._cdata
    owner = torch.Tensor if seed % 2 else torch.UntypedStorage
    monkeypatch.setattr(owner, "_cdata", property(noted), raising=False)
    monkeypatch.setattr(producer, "read_word", word)
    monkeypatch.setattr(producer, "read_byte", byte)
    found = producer.Guard()
    if found.knows_views:  # then nothing that matters has changed, or all was found where it now is
        assert all(map(found.reads, tensors()))
        names = ("storage", "storage_data", "storage_size", "storage_checked", *FIELDS[:-1])
        assert moved or all(getattr(found.native, name) == getattr(right.native, name) for name in names)


@pytest.mark.parametrize("forbid", ["_set_throw_on_mutable_data_ptr", "_set_warn_deprecated_on_mutable_data_ptr"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_that_must_not_be_read(forbid):
    """PyTorch makes the storages of functional tensors so. The error is PyTorch's own, as of the exchange table."""
    alone, of_first = fast_args(lambda x: x.sum()), fast_args(lambda x: x[0].sum())
    ends = contextlib.nullcontext if "warn" in forbid else functools.partial(pytest.raises, RuntimeError, match="'x'")
    for kernel, wrapped in ((alone, lambda x: x), (of_first, lambda x: [x]), (of_first, lambda x: (x, 1))):
        for _ in range(3):
            kernel(wrapped(torch.arange(3.0)))
        tensor = torch.arange(3.0)
        getattr(torch._C, forbid)(tensor)
        for _ in range(3):
            with references_kept(tensor), ends():
                kernel(wrapped(tensor))
        assert "throw" in forbid or kernel(wrapped(tensor)) == 3.0
        assert kernel(wrapped(torch.arange(3.0))) == 3.0


@needs_views
def test_a_launch_notices_a_storage_that_becomes_copy_on_write():
    x = torch.arange(3.0)
    launch = fast_args(lambda x: np.multiply(x, 2, x)).bind(x)
    launch()
    lazy = torch._lazy_clone(x)
    launch()
    assert lazy.tolist() == [0.0, 2.0, 4.0] and x.tolist() == [0.0, 4.0, 8.0]


SAY = """
import torch, fastexchange
from fastexchange.command import probe
print(fastexchange.explain(torch.ones(3)), "by doctor:", *probe._torch(torch))
"""


def test_the_source_is_named():
    for before, explained, found in (
        ("", "it is read in memory, where", "memory: its layout"),
        (UNKNOWN, "its type's exchange table gives its view) - it is not read in memory: unknown", "the exchange table, or"),
    ):
        said, doctor = fork_python(before + SAY).stdout.split("by doctor:")
        assert found in doctor and (explained in re.sub(r"\s+", " ", said) or not has_table())


@needs_views
def test_memory_that_turns_out_otherwise_is_read_no_more():
    """With the first tensor of a new signature: other kernels, which have read such in memory, do so no more either."""
    assert "it is not read in memory: a tensor of this process was read otherwise" in fork_python("""
        import torch, fastexchange
        from fastexchange.torch import offsets as torch_offsets
        guard, first = torch_offsets.guard(), fastexchange.fast_args(lambda x: x.sum())
        assert {first(torch.ones(3)) for _ in range(4)} == {3} and guard.knows_views
        torch_offsets.Guard._views = lambda self, tensor: ((4,), (5,))
        for x in (torch.ones(3).to("meta"), torch._lazy_clone(torch.ones(3))):  # which native code does not read in memory
            assert not guard.why_wrong_about(x)
        assert {fastexchange.fast_args(lambda x: x[1])(torch.ones(3)) for _ in range(4)} == {1}
        assert not guard.knows_views and guard.native.ndim == 0
        assert {first(torch.ones(3)) for _ in range(4)} == {3} and first.counts().compiled == 1
        print(*fastexchange.explain(torch.ones(3)).reasons)
    """).stdout


@pytest.mark.slow
@needs_views
@pytest.mark.parametrize("inline_ndim", [5, 6])
def test_readers_come_with_the_package_or_are_compiled_for_other_offsets(inline_ndim):
    """Here for another number, with which tensors of up to five dimensions lie in the same places."""
    theirs, others = "True False", "False True"
    if inline_ndim == 6:
        expected = {others}
    else:  # the offsets of these versions come with the package
        expected = {theirs} if torch.__version__.startswith(("2.13.", "2.14.")) else {theirs, others}
    assert fork_python(f"""
        import torch, fastexchange
        from cache_entries import cache_entries
        from fastexchange.torch import tensor_kind as torch_tensors
        from fastexchange.torch import offsets as torch_offsets
        torch_offsets.guard()._set(inline_ndim={inline_ndim})
        kernel = fastexchange.fast_args(lambda x: (x.ndim, x.sum()))
        for tensor in [torch.ones((2,) * ndim) for ndim in range(6)] + [torch.ones(3, 4).T, torch.ones(3, 4, 5)[:, ::2, 1]]:
            for _ in range(3):
                assert kernel(tensor) == (tensor.ndim, tensor.numel())
        used = {{entry.rows[0].reader for entry in cache_entries(kernel)}}
        shipped = {{reader.address for reader in torch_tensors._SHIPPED}}
        print(used <= shipped, not used & shipped)
    """).stdout.strip() in expected


# ---- tensors on a GPU ----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def said_to_be_on(tensor, index: int):
    """Within: the tensor says that it is on a GPU, although its memory is the CPU's. PyTorch must not compute with it."""

    def keys(*names):
        return sum(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names)

    native = producer.guard().native
    at = ctypes.c_uint16.from_address(tensor._cdata + native.device)
    own_keys = ctypes.c_uint64.from_address(tensor._cdata + native.keys)
    before = at.value, own_keys.value
    at.value = 1 | index << 8
    own_keys.value = own_keys.value & ~keys("CPU", "AutocastCPU") | keys("CUDA", "AutocastCUDA")
    try:
        yield
    finally:
        at.value, own_keys.value = before


@needs_views
@pytest.mark.parametrize("index", [0, 7])
def test_a_tensor_on_a_gpu(index):
    """It is read as PyTorch's own functions tell, and only after one such tensor has been compared with what they tell."""
    guard, tensor = producer.Guard(), torch.arange(12.0).view(3, 4)[1:]
    with said_to_be_on(tensor, index):
        assert tensor.device == torch.device("cuda", index) and not guard.native.cuda
        assert guard.reads(tensor) and guard.native.cuda == 2
        assert not producer.keys_of(tensor) & guard.native.odd_keys
        if has_table():
            view, borrow = ffi.new("DLTensor *"), ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
            assert borrow(known(torch.Tensor)["borrow"])(tensor, address_of(view)) == 0
            assert (int(view.device.device_type), view.device.device_id) == (2, index)
            assert address_of(view.data) == tensor.data_ptr() and [view.shape[0], view.shape[1]] == [2, 4]
        check_raises((BufferError, TypeError), "'x'[^|]*(device|cuda)", described, tensor)
    assert described(tensor)[0] == (2, 4)


# ---- tensors that follow each other --------------------------------------------------------------------------------
each_of = fast_args(lambda tensors: [(t.size, t.strides[0], t.ctypes.data, t.sum()) for t in tensors])
corners = fast_args(lambda tensors: [(t.size, t[-1, 1] if t.size else 0.0) for t in tensors])
sizes = fast_args(lambda tensors: [t.size for t in tensors])


@fast_args
def all_of(a, b, c, d, e, f):
    return a.size + a.sum(), b.size + b.sum(), c.size + c.sum(), d.size + d.sum(), e.size + e.sum(), f.size + f.sum()


def between(one, like=lambda i: torch.arange(4.0) + i):
    """Lists of tensors of the same kind with `one` among them: at each place, and twice."""
    others = [like(i) for i in range(5)]
    for place in range(6):
        yield [*others[:place], one, *others[place:]]
    yield [*others[:2], one, one, *others[2:4]]


def told(t) -> tuple:
    return t.numel(), t.stride()[0] * t.element_size(), t.data_ptr(), t.sum().item()


def resized(size: int, start: int = 0):
    tensor = torch.arange(8.0)[start:]
    tensor.untyped_storage().resize_(size)
    return tensor


ALIKE = {
    "a view": lambda: torch.arange(9.0)[3:], "strided": lambda: torch.arange(9.0)[::2], "empty": lambda: torch.empty(0),
    "an empty view": lambda: torch.arange(4.0)[2:2], "one element": lambda: torch.ones(1),
    "expanded": lambda: torch.ones(1).expand(3), "a parameter": lambda: torch.nn.Parameter(torch.ones(3), False),
    "copy-on-write": lambda: torch._lazy_clone(torch.arange(3.0)), "shared": lambda: torch.arange(3.0).share_memory_(),
    "NumPy's": lambda: torch.from_numpy(np.arange(3, dtype=np.float32)), "an array": lambda: np.arange(3, dtype=np.float32),
    "unaligned": lambda: torch.from_numpy(np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32)),
    "to the end of its storage": lambda: torch.arange(8.0)[5:8],
}  # fmt: skip
OF_ANOTHER_KIND = {
    "of integers": lambda: torch.arange(3), "of float64": lambda: torch.ones(3, dtype=torch.float64),
    "of two dimensions": lambda: torch.ones(2, 3), "of none": lambda: torch.tensor(2.0),
}  # fmt: skip
REFUSED = {
    "requires grad": lambda: torch.ones(3, requires_grad=True), "negated": lambda: torch._neg_view(torch.ones(3)),
    "on no device": lambda: torch.ones(3, device="meta"), "of a storage that is freed": lambda: resized(0),
    "of a storage that is freed, with an offset": lambda: resized(0, 2), "of a storage that is short": lambda: resized(28),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_a_tensor_between_others_of_its_kind(name):
    one = ALIKE[name]()
    for tensors in between(one):
        expected = [told(torch.as_tensor(tensor)) for tensor in tensors]
        for _ in range(2):
            assert each_of(tensors) == expected and all_of(*tensors) == tuple(size + s for size, _, _, s in expected)
    kernel = fast_args(lambda tensors: len(tensors))
    assert kernel([torch.arange(4.0), one]) == 2 and kernel.signatures[0][0].dtype.aligned == (name != "unaligned")


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_tensor_between_others_that_are_not_alike(name):
    for tensors in list(between(OF_ANOTHER_KIND[name]()))[::3]:
        check_raises(TypeError, "one element type", each_of, tensors)
        assert all_of(*tensors) == tuple(tensor.numel() + tensor.sum().item() for tensor in tensors)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_between_others_that_is_refused(name):
    for tensors in between(REFUSED[name]()):
        with references_kept(*tensors):
            check_raises(BufferError, r"argument 'tensors' \(position 0\)", each_of, tensors)
        check_raises(BufferError, "argument", all_of, *tensors)


@pytest.mark.parametrize("one", [torch.arange(6.0).view(3, 2).t(), torch.ones(0, 3)], ids=["transposed", "empty"])
def test_a_tensor_in_another_order_between_others(one):
    for tensors in between(one, lambda i: torch.arange(6.0).view(2, 3) + i):
        assert corners(tensors) == [(t.numel(), t[-1, 1].item() if t.numel() else 0.0) for t in tensors]


@needs_views
def test_a_tensor_on_a_gpu_between_others():
    one = torch.arange(3.0)
    for tensors in between(one):
        with said_to_be_on(one, 0), pytest.raises((BufferError, TypeError)):
            each_of(tensors)
    assert each_of([one, one]) == [told(one)] * 2


def test_an_array_between_tensors_whose_memory_looks_like_a_tensor():
    tensor = torch.arange(4.0)
    array = np.frombuffer(ctypes.string_at(tensor._cdata, 256), np.float32).copy()
    for tensors in between(array):
        assert sizes(tensors) == [64 if each is array else 4 for each in tensors]


def test_a_lazy_clone_between_others_is_written_to():
    @fast_args
    def negate(tensors):
        for t in tensors:
            np.negative(t, t)

    for place in range(6):
        original = torch.arange(4.0)
        tensors = [*between(torch._lazy_clone(original))][place]
        expected = [(-tensor).tolist() for tensor in tensors]
        negate(tensors)
        assert [tensor.tolist() for tensor in tensors] == expected and original.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ndim", [1, 5, 8])
def test_many_tensors_of_one_kind(ndim):
    """More than a frame has room for: of keys, and of words, which depend on the rank."""
    for count in (1, 63, 64, 65, 1500):
        tensors = [torch.full((2, *(1,) * (ndim - 2), i % 5 + 1)[-ndim:], i + 0.5) for i in range(count)]
        for given in (tensors, tensors[::-1]):
            with references_kept(*given):
                assert each_of(given) == [told(tensor) for tensor in given]


@pytest.mark.nightly
def test_pytorchs_tests_by_the_exchange_table():
    own, exchange = ("torch", "torch_storages", "torch_views"), ("storage", "escape", "refusals")
    folders = {"pytorch": own, "exchange": exchange, "calls": ("lists", "bound", "calls", "results", "outputs")}
    files = [str(HERE / f"{folder}/test_{name}.py") for folder, names in folders.items() for name in names]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not nightly", *files]
    done = run_python(f"{UNKNOWN}\nimport pytest\nraise SystemExit(pytest.main({options!r}))", seconds=FOR_TESTS)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 300, done.stdout

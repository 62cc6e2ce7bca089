"""PyTorch's tensors whose memory is not their value, or not there: the guards in the shim."""

import collections
import contextlib
import ctypes
import enum
import gc
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forked import needs_fork, run_forked  # noqa: E402
from frameworks import has_table, is_borrowed  # noqa: E402
from interoperability import Wrapper  # noqa: E402
from interpreter import run_python  # noqa: E402
from made_producers import ONLY_NUMBA, Dunder, Ledger, Legacy, tabled_type  # noqa: E402
from odd_tensors import ODD  # noqa: E402

import fastexchange  # noqa: E402
from fastexchange import fast_args  # noqa: E402
from fastexchange._abi import ffi  # noqa: E402
from fastexchange.dispatch.runtime import runtime  # noqa: E402
from fastexchange.exchange.export import known  # noqa: E402
from fastexchange.producers import torch_offsets as producer  # noqa: E402

Pair = collections.namedtuple("Pair", "first second")


class Answer(enum.Enum):
    YES = 1


@fast_args
def total(x):
    return x.sum()


def test_the_layout_of_tensors_is_found():
    assert producer.guard().knows_all
    assert not producer.guard().native.asks


def test_the_layout_is_found_whatever_mode_the_caller_is_in():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (torch.inference_mode(), torch.no_grad(), FakeTensorMode(), torch.device("meta")):
        with mode:
            found = producer.Guard()
        assert found.knows_all


@pytest.mark.parametrize("chance", [26, 129, 200])
def test_a_byte_that_is_1_by_chance_is_not_taken_for_a_flag_of_the_layout(chance, monkeypatch):
    """In one process of some hundred a byte of an address is 1 in all leaves of the experiment, and 0 in all others."""
    expected = producer.Guard().native.requires_grad
    offsets = producer._offsets
    by_chance = {1: [chance]}
    monkeypatch.setattr(producer, "_offsets", lambda step, holds: sorted([*offsets(step, holds), *by_chance.get(step, [])]))
    found = producer.Guard()
    assert not found.knows_autograd or found.native.requires_grad == expected


def test_what_is_read_of_autograd_is_what_pytorch_says():
    leaf = torch.ones(4, requires_grad=True)
    written = torch.zeros(4)
    row, rows_row = written[1:], written[1:][1:]
    written.mul_(leaf)
    part = torch.zeros(4)
    part_row = part[2:]
    part_row.mul_(leaf[2:])
    tensors = [
        torch.ones(3), torch.tensor([1.0]), torch.ones(3)[1:], torch.ones(3).detach(), leaf, leaf[1:], leaf[1:].detach(),
        leaf.data, leaf * 2, (leaf * 2)[1:], written, row, rows_row, part, part_row, torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), False), torch.nn.Linear(2, 2).weight, torch.ones(3).requires_grad_(),
        torch.ones(3).requires_grad_().requires_grad_(False), leaf.clone(), leaf.detach().clone(), leaf.view(2, 2).t(),
        *torch.ones(4).split(2), *leaf.split(2), torch.ones(3, 3).diagonal(), torch.ones(1).expand(3),
        leaf.as_subclass(torch.nn.Parameter), torch.frombuffer(bytearray(8), dtype=torch.float32), torch.from_numpy(np.ones(3)),
    ]  # fmt: skip
    with torch.no_grad():
        tensors += [leaf * 2, leaf[1:], leaf.view(2, 2)]
    with torch.inference_mode():
        tensors += [leaf * 2, torch.ones(2)[1:]]
    for index, tensor in enumerate(tensors):
        for _ in range(2):
            if tensor.requires_grad:
                with pytest.raises(BufferError, match="requires grad"):
                    total(tensor)
                with torch.no_grad():
                    total(tensor)
            else:
                assert total(tensor) == tensor.sum().item(), index
        if producer.guard().knows_all:
            assert producer.guard()._is_watched(tensor) == tensor.requires_grad, index


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("calls_before", [0, 1, 40])
def test_odd_tensors_are_refused_on_every_path(name, calls_before):
    plain = torch.ones(3, dtype=torch.complex64) if name == "conjugated" else torch.ones(3)
    for _ in range(calls_before):
        total(plain)
    for _ in range(2):
        with pytest.raises((BufferError, RuntimeError), match="'x'"):
            total(ODD[name])
    assert total(plain) == 3


def test_gradients_are_taken_while_grad_mode_is_off():
    leaf = torch.ones(2, requires_grad=True)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert [total(leaf) for _ in range(40)] == [2.0] * 40
        with mode:
            before = total.counts()
            assert [total(leaf) for _ in range(40)] == [2.0] * 40
            is_read = producer.guard().knows_all or (producer.guard().native.asks and has_table())
            assert total.counts()[:2] == ((before.fast + 40, before.slow) if is_read else (before.fast, before.slow + 40))
    with pytest.raises(BufferError, match="detach"):
        total(leaf)


@fast_args(grad="allow")
def total_without_autograd(x):
    return x.sum()


def watched_tensors():
    leaf = torch.ones(4, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(4))
    return [leaf, leaf * 1, leaf[:], leaf.view(2, 2).t(), parameter, (parameter * 1)[:], leaf.as_subclass(Unlike)]


class Unlike(torch.Tensor):
    """Takes the way of ``__dlpack__``."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("index", range(7))
def test_a_kernel_that_allows_gradients_takes_them_always(index):
    tensor = watched_tensors()[index]
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            assert [total_without_autograd(tensor) for _ in range(40)] == [4.0] * 40
            assert total_without_autograd(x=tensor) == 4.0
    with pytest.raises(BufferError, match=r"requires grad.*detach"):
        total(tensor)
    with torch.no_grad():  # also by way of __dlpack__, which refuses it even now
        assert [total(tensor) for _ in range(3)] == [4.0] * 3


@pytest.mark.parametrize("name", ODD)
def test_a_kernel_that_allows_gradients_allows_nothing_else(name):
    for _ in range(2):
        if "grad" in name or name == "non-leaf":
            assert total_without_autograd(ODD[name]) == ODD[name].sum().item()
        else:
            with pytest.raises((BufferError, RuntimeError), match="'x'"):
                total_without_autograd(ODD[name])


def test_tensors_with_gradients_stay_native_where_they_are_allowed():
    for tensor in watched_tensors()[:-1]:
        total_without_autograd(tensor)
        before = total_without_autograd.counts()
        assert [total_without_autograd(tensor) for _ in range(40)] == [4.0] * 40
        assert total_without_autograd.counts()[:2] == (before.fast + 40, before.slow)


@pytest.mark.parametrize("options", [{"nogil": True}, {"parallel": True}, {"cache": True}])
def test_gradients_are_allowed_with_options_of_numba(options):
    @fast_args(grad="allow", **options)
    def double(x, out):
        for i in numba.prange(x.size):
            out[i] = 2 * x[i]

    weights, out = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    for _ in range(20):
        double(weights, out)
    assert out.tolist() == [2.0] * 4


def test_one_dispatcher_two_kernels():
    dispatcher = numba.njit(lambda x: x.sum())
    careful, allowing = fast_args(dispatcher), fast_args(dispatcher, grad="allow")
    assert careful is not allowing and fast_args(dispatcher) is careful and fast_args(dispatcher, grad="allow") is allowing
    assert not careful.allows_grad and allowing.allows_grad and fast_args(allowing) is allowing
    weights = torch.ones(3, requires_grad=True)
    for _ in range(20):
        assert allowing(weights) == 3.0
        with pytest.raises(BufferError, match="requires grad"):
            careful(weights)
    assert fast_args(careful, grad="allow")(weights) == 3.0  # a kernel is a dispatcher
    again = pickle.loads(pickle.dumps(total_without_autograd))
    assert again is total_without_autograd


@pytest.mark.parametrize("grad", [True, None, "yes", "ALLOW"])
def test_other_words_for_grad(grad):
    with pytest.raises(ValueError, match="grad is 'refuse' or 'allow'"):
        fast_args(lambda x: x, grad=grad)


@pytest.mark.slow
def test_gradients_without_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
        import torch
        from fastexchange import fast_args
        kernels = fast_args(lambda x: x.sum()), fast_args(lambda x: x.sum(), grad="allow")
        weights = torch.ones(3, requires_grad=True)
        assert kernels[1](weights) == 3.0 == kernels[0](weights.detach())
        negated = (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag
        for kernel, tensor in ((kernels[0], weights), (kernels[0], negated), (kernels[1], negated)):
            try:
                kernel(tensor)
            except BufferError:
                continue
            raise SystemExit("not refused")
        """)],
        capture_output=True, text=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_views_and_subclasses_stay_native():
    class Sub(torch.Tensor):
        pass

    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (base.t(), base[1:], torch.tensor([1.0, 2.0]), base.as_subclass(Sub), torch.nn.Parameter(base, False)):
        total(tensor)
        before = total.counts()
        assert [total(tensor) for _ in range(40)] == [tensor.sum().item()] * 40
        assert total.counts()[:2] == (before.fast + 40, before.slow)


@pytest.mark.parametrize("unknown", ["_find_keys", "_find_storage", "_find_autograd", "_find_dtype"])
def test_pytorch_is_asked_where_not_all_of_the_layout_is_found(unknown, monkeypatch):
    monkeypatch.setattr(producer.Guard, unknown, lambda self: False)
    found = producer.Guard()
    assert found.native.asks and not found.knows_all
    assert found.native.odd_keys == -1 and found.native.autograd == found.native.storage == 0  # nothing half-known is used


@pytest.mark.slow
@pytest.mark.parametrize("unknown", ["_find_keys", pytest.param("_find_keys _find_queries", marks=pytest.mark.nightly)])
def test_the_slow_check_gives_the_same_answers(unknown):
    """As on a PyTorch whose tensors lie in memory in some other way: all that is not about how fast it is."""
    script = f"""
    import pytest
    from fastexchange.producers import torch_offsets as producer
    for name in {unknown!r}.split():
        setattr(producer.Guard, name, lambda self: False)
    guard = producer.guard()
    assert not guard.knows_all and guard.native.asks == ("_find_queries" not in {unknown!r})
    others = "layout or slow_check or from_many_threads or without_the_compiler"  # the last are processes of their own
    if not guard.native.asks:  # nor can PyTorch be asked natively, not even for a storage
        others += " or native or is_read or borrowed or without_the_gil or box_hold or owner or modes"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", f"not ({{others}})"]
    raise SystemExit(pytest.main([*options, "tests/pytorch/test_torch.py"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 70


PRIVATE_NAMES = (
    "DisableTorchFunctionSubclass", "_disabled_torch_function_impl", "_dispatch_keys", "_dispatch_tls_is_dispatch_key_included",
    "_functorch", "_get_tracing_state", "_is_functional_tensor",
)  # fmt: skip


@pytest.mark.slow
def test_a_pytorch_without_the_private_names_that_python_code_asks():
    """No call ends with an AttributeError: results and refusals are the same, by another way."""
    run_python(f"""
        import torch, torch._subclasses.fake_tensor
        for name in {PRIVATE_NAMES}:
            delattr(torch._C if hasattr(torch._C, name) else torch, name)
        from fastexchange import convert, explain, fast_args
        import numpy as np

        @fast_args
        def total(x):
            return x.sum()

        @fast_args(out="x[n] -> y[n]")
        def twice(x, y):
            y[:] = 2 * x

        x = torch.arange(4.0)
        op = twice.as_torch_op("fx_private::twice")
        for _ in range(20):
            assert total(x) == total(x[::2]) + 4.0 == 6.0
            assert type(twice(x)) is torch.Tensor and torch.equal(twice(x), 2 * x) and torch.equal(op(x), 2 * x)
        assert convert(x, np.ndarray).tolist() == x.tolist() and total.bind(x)() == 6.0
        conjugated = torch.ones(3, dtype=torch.complex64).conj()
        for odd in (torch.ones(3, requires_grad=True), conjugated, conjugated.imag, torch.ones(3, device="meta")):
            try:
                total(odd)
            except BufferError:
                continue
            raise SystemExit("not refused")
        assert "PyTorch is asked about each" in str(explain(x)) and "PyTorch is asked about each" in str(total.explain(x))
        from fastexchange.command import probe
        found = list(probe._torch(torch))
        assert {{each.status for each in found}} <= {{"ok", "slow", "-"}}, found
        assert any("_dispatch_keys" in each.text for each in found)
    """)


@pytest.mark.slow
def test_a_pytorch_whose_storages_native_code_cannot_ask():
    """Its tensors are read in memory all the same. What has to hold storages goes to Numba's dispatcher, with a reason."""
    run_python("""
        import torch
        from fastexchange import explain, fast_args
        from fastexchange.producers import torch_offsets
        torch_offsets.function_of = lambda descriptor: 0
        guard = torch_offsets.guard()
        assert guard.knows_all and not guard.can_ask
        total, without_the_gil = fast_args(lambda x: x.sum()), fast_args(lambda x: x.sum(), nogil=True)
        x = torch.arange(4.0)
        for kernel in (total, without_the_gil):
            for _ in range(20):
                assert kernel(x) == kernel.bind(x)() == 6.0
        assert total.counts().fast and not without_the_gil.counts().fast
        assert "no C function" in str(explain(x)) and "no C function" in str(without_the_gil.explain(x))
        from fastexchange.command import probe
        assert "no C function" in {each.name: each for each in probe._torch(torch) if each.status == "slow"}["torch.Tensor"].text
    """)


WITHOUT_A_TABLE = """
    import torch
    for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"):
        if name in vars(torch.Tensor):
            delattr(torch.Tensor, name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("unknown", ["", pytest.param("_find_keys", marks=pytest.mark.nightly)])
def test_without_an_exchange_table_the_answers_are_the_same(unknown):
    """As on PyTorch before 2.10, whose tensors are exported by the C function behind ``__dlpack__``, or by that itself."""
    script = f"""
    {WITHOUT_A_TABLE}
    import pytest
    from fastexchange import explain
    from fastexchange.producers import torch_offsets as producer
    if {unknown!r}:
        setattr(producer.Guard, {unknown!r}, lambda self: False)
    assert ("to_dlpack" in str(explain(torch.ones(3)))) == (not {unknown!r})
    others = "layout or slow_check or from_many_threads or without_the_compiler or exchange_table"
    if {unknown!r}:  # then each call is one for Python
        others += " or native or is_read or borrowed or without_the_gil or box_hold or owner or modes"
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/pytorch/test_torch.py", "-k", f"not ({{others}})"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 70


def test_python_code_of_a_mode_runs_before_any_view_is_borrowed():
    from torch.overrides import TorchFunctionMode

    @fast_args
    def first_and_sum(a, b):
        return b[0] + b[1], a.sum()

    a = torch.ones(1 << 16, dtype=torch.float64)
    b = torch.ones(8, dtype=torch.float64)[2:]
    for _ in range(30):
        first_and_sum(a, b)

    class Frees(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            a.untyped_storage().resize_(0)
            return function(*args, **(kwargs or {}))

    if producer.guard().knows_all and is_borrowed():
        with Frees():  # PyTorch is asked nothing, so nothing is freed
            assert first_and_sum(a, b) == (2.0, 1 << 16)
    else:
        with Frees(), pytest.raises(BufferError, match="'a'"):
            first_and_sum(a, b)
    with Frees(), pytest.raises(BufferError, match=r"requires grad|NULL|freed|storage"):
        first_and_sum(a, b.clone().requires_grad_())


def test_kernels_without_the_gil_forbid_resizing_as_numpy_does():
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(6)[3:], torch.ones(3).t()):
        kernel = fast_args(nogil=True, storage=True)(lambda x: x.size)
        assert "new" in str(kernel.explain(tensor)) and tensor.untyped_storage().resizable()
        assert [kernel(tensor) for _ in range(20)] == [3] * 20
        assert kernel.counts().fast >= 19
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(0)
        assert kernel(tensor) == 3
    literal = fast_args(nogil=True)(lambda x, name: x.size)  # text: Numba's own dispatcher makes the call
    tensor = torch.ones(3)
    assert "Numba's own" in str(literal.explain(tensor, ONLY_NUMBA)) and tensor.untyped_storage().resizable()  # it was no call
    assert literal(tensor, ONLY_NUMBA) == 3 and not tensor.untyped_storage().resizable()


@pytest.mark.parametrize("place", ["plain", "in a tuple"])
def test_cached_calls_without_the_gil_hold_storages_and_give_them_back(place):
    @fast_args(nogil=True)
    def kernel(x, y):
        return x, x.sum()

    @fast_args(nogil=True)
    def in_a_tuple(x, y):
        return x[0], x[0].sum()

    x, y = torch.ones(3), torch.ones(3, 2).t()
    storages = [tensor.untyped_storage() for tensor in (x, y)]
    call = (lambda: kernel(x, y)) if place == "plain" else (lambda: in_a_tuple((x, 1.0), y))
    results = [call() for _ in range(100)]
    assert all(back is x and total == 3.0 for back, total in results)
    del results
    before = [sys.getrefcount(thing) for thing in (x, y, *storages)]
    for _ in range(100):
        call()
    with pytest.raises(TypeError):
        kernel(x, y, 1)
    assert kernel(y, y)[1] == 6.0 and kernel(x.double(), y)[1] == 3.0  # what differs is released, too
    assert [sys.getrefcount(thing) for thing in (x, y, *storages)] == before


def test_a_storage_that_changes_while_others_are_held_is_not_read():
    from torch.overrides import TorchFunctionMode

    @fast_args(nogil=True)
    def total(a, b):
        return a.sum() + b.sum()

    a, b = torch.ones(1 << 16, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    for _ in range(100):
        assert total(a, b) == (1 << 16) + 8.0

    class Sets(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if args and args[0] is b and a.numel() > 3:
                a.set_(torch.full((3,), 2.0, dtype=torch.float64))
            return function(*args, **(kwargs or {}))

    with Sets():
        assert total(a, b) == 6.0 + 8.0
    assert total(a, b) == 6.0 + 8.0


def test_without_the_byte_that_says_what_can_be_resized_pytorch_is_asked():
    guard = producer.guard()
    if not guard.native.storage_movable:
        pytest.skip("the byte is not found")
    kernel = fast_args(nogil=True)(lambda x: x.size)
    for _ in range(100):
        assert kernel(torch.ones(3)) == 3
    kept = [guard._guards[number].storage_movable for number in range(producer.GUARDS)]
    try:
        for number in range(producer.GUARDS):
            guard._guards[number].storage_movable = 0
        tensor = torch.ones(3)
        assert kernel(tensor) == 3 and not tensor.untyped_storage().resizable()
        assert kernel(tensor) == 3
    finally:
        for number, at in enumerate(kept):
            guard._guards[number].storage_movable = at


def test_explain_tells_which_tensors_of_a_kernel_without_the_gil_go_to_numbas_dispatcher():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    kernel = fast_args(nogil=True)(lambda x: x.size)
    tensor = torch.ones(3).as_subclass(Own)
    for _ in range(2):
        assert "Numba's own dispatcher" in str(kernel.explain(tensor))
        assert kernel(tensor) == 3


@pytest.mark.slow
@pytest.mark.parametrize("act", [
    lambda tensor: tensor.set_(torch.zeros(1)), lambda tensor: setattr(tensor, "data", torch.zeros(1)),
    lambda tensor: tensor.untyped_storage().resize_(0),
], ids=["set_", "data", "resize_"])  # fmt: skip
def test_kernels_that_run_python_themselves_hold_what_they_read(act):
    tensor = torch.ones(1 << 20)

    def hook():
        with contextlib.suppress(RuntimeError):  # not resizable
            act(tensor)

    def kernel(x):
        with numba.objmode():
            hook()
        return x.sum()

    plain = fast_args(lambda x: x.sum())
    assert plain(torch.ones(3)) == 3.0 and not plain._native.native.needs_owning_exports
    assert fast_args(kernel)(tensor) == 1 << 20
    inner = numba.njit(kernel)
    tensor = torch.ones(1 << 20)
    assert fast_args(lambda x: inner(x))(tensor) == 1 << 20


class Calls(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})

    def is_neg(self):
        return False


def test_subclasses_with_a_torch_function_are_checked_like_any_other():
    tensor = torch.ones(1 << 20).as_subclass(Calls)
    silent = fast_args(nogil=True)(lambda x: x.sum())
    assert [total(tensor), silent(tensor)] == [1 << 20] * 2
    cut = torch.ones(1 << 20).as_subclass(Calls)
    cut.untyped_storage().resize_(8)
    negated = (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag.as_subclass(Calls)
    for kernel in (total, silent):
        for bad, why in ((cut, "storage"), (negated, "negated")):
            with pytest.raises(BufferError, match=why):
                kernel(bad)


def test_more_tensors_in_a_tuple_than_looks():
    silent = fast_args(nogil=True)(lambda items: items[0].sum() + len(items))
    assert silent(tuple(torch.ones(1) for _ in range(80))) == 81.0


def test_what_a_kernel_without_the_gil_returns_holds_the_storage():
    identity = fast_args(nogil=True)(lambda x: x[1:])
    tensor = torch.arange(1000.0)
    kept = identity(tensor)
    storage = tensor.untyped_storage()
    tensor.set_(torch.zeros(3))
    before = sys.getrefcount(storage)
    assert kept[0] == 1.0 and kept[-1] == 999.0
    del kept
    assert sys.getrefcount(storage) == before - 1


def test_numpy_and_torch_in_turn():
    array, tensor = np.ones(3, np.float32), torch.ones(3)
    for _ in range(50):
        assert total(array) == total(tensor) == 3.0


@pytest.mark.parametrize("count", [6, 7, 12])
def test_many_tensors_have_a_fast_entry(count):
    names = ", ".join(f"x{i}" for i in range(count))
    namespace = {}
    exec(f"def kernel({names}): return x0[0] + 10 * x{count - 1}[0]", namespace)
    kernel = fast_args(namespace["kernel"])
    tensors = [torch.full((1,), i + 1.0) for i in range(count)]
    assert [kernel(*tensors) for _ in range(40)] == [1.0 + 10 * count] * 40


@pytest.mark.slow
def test_the_first_tensors_of_a_process_come_from_many_threads():
    run_python(
        """
        import threading, torch
        from fastexchange import fast_args
        from fastexchange.producers import torch_offsets as producer

        start = threading.Barrier(6)
        tensor = torch.ones(4)
        failed = []

        def work():
            try:
                start.wait()
                kernel = fast_args(lambda x: x.size)
                assert [kernel(tensor) for _ in range(40)] == [4] * 40
                assert kernel.counts().fast >= 30, kernel.counts()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        """
    )


@pytest.mark.slow
@needs_fork
def test_the_layout_is_found_whatever_the_default_dtype():
    prelude = "import torch\nfrom fastexchange.producers.torch_offsets import guard\n"
    scenes = {dtype: f"torch.set_default_dtype(torch.{dtype})\nassert guard().knows_all" for dtype in DEFAULTS}
    for end in run_forked(prelude, scenes).values():
        end.check()


DEFAULTS = ["float64", "float16", "bfloat16"]


class Tenfold(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__dlpack__:
            return (args[0].as_subclass(torch.Tensor) * 10).__dlpack__(**(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__dlpack__:
            raise PermissionError("not this one")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_that_change_what_dlpack_returns_are_heard():
    tensor = torch.ones(3).as_subclass(Tenfold)
    assert [total(tensor) for _ in range(40)] == [30.0] * 40
    assert "__torch_function__" in str(fastexchange.explain(tensor)) or not has_table()
    for _ in range(3):
        with pytest.raises(PermissionError, match="not this one"):
            total(torch.ones(3).as_subclass(Refuses))


def test_an_uninitialised_parameter_is_refused():
    parameter = torch.nn.UninitializedParameter()
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises((BufferError, ValueError, RuntimeError)):
            total(parameter)


@pytest.mark.filterwarnings("ignore:Code running in object mode:numba.NumbaWarning")
@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=["", "nogil"])
def test_an_exception_survives_the_end_of_a_storage_that_only_the_call_still_held(options):
    """The deleter of the storage's memory is Python, and must not see the kernel's exception."""
    tensor = None

    def let_go():
        tensor.set_(torch.zeros(1, dtype=torch.float64))

    @fast_args(**options)
    def fails(x):
        with numba.objmode():
            let_go()
        if x[0] == 5.0:
            raise ValueError("from the kernel")
        return x[0]

    for _ in range(3):
        ledger = Ledger()
        tensor = torch.from_dlpack((Dunder if has_table() else Legacy)(np.full(3, 5.0), ledger))
        with pytest.raises(ValueError, match="from the kernel"):
            fails(tensor)
        gc.collect()
        ledger.check(1)


@pytest.mark.slow
@pytest.mark.parametrize("act", [
    lambda tensor: tensor.set_(torch.zeros(1)), lambda tensor: tensor.untyped_storage().resize_(0),
], ids=["set_", "resize_"])  # fmt: skip
def test_parallel_loops_hold_what_they_read(act):
    """Numba gives up the GIL for as long as one takes."""

    @fast_args(parallel=True)
    def rounds(x, count):
        s = 0.0
        for _ in range(count):
            for i in numba.prange(x.shape[0]):
                s += x[i]
        return s

    rounds(torch.ones(3), 1)
    tensor = torch.ones(100_000)
    took = time.perf_counter()
    rounds(tensor, 100)
    count = 100 * max(1, int(0.3 / (time.perf_counter() - took)))
    outcome = []

    def meanwhile():
        with contextlib.suppress(RuntimeError):  # not resizable
            act(tensor)
        outcome.append([torch.full((100_000,), 7.0) for _ in range(20)])

    other = threading.Timer(0.05, meanwhile)
    other.start()
    assert rounds(tensor, count) == 100_000.0 * count
    other.join()
    assert outcome


def test_kernels_that_call_back_hold_what_they_read():
    """A function behind a pointer may be Python: here one of ctypes."""
    tensor = torch.ones(1000)

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def free():
        with contextlib.suppress(RuntimeError):  # not resizable
            tensor.untyped_storage().resize_(0)
        tensor.set_(torch.zeros(1))
        return len([torch.full((1000,), 7.0) for _ in range(20)])

    @fast_args
    def total_after(x):
        free()
        return x.sum()

    for _ in range(3):
        tensor = torch.ones(1000)
        assert total_after(tensor) == 1000.0


@pytest.mark.parametrize("kind", ["named tuple", "enum", "list"])
def test_results_that_python_helps_to_box_hold_nothing(kind):
    """It is after the kernel has run: tensors stay resizable, and calls fast."""
    kernels = {
        "named tuple": lambda x: Pair(1.0, 2.0), "enum": lambda x: Answer.YES,
        "list": lambda x: [1.0, 2.0],
    }  # fmt: skip
    kernel = fast_args(kernels[kind])
    tensors = [torch.ones(3) for _ in range(30)]
    for tensor in tensors:
        kernel(tensor)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
    assert kernel.counts().slow <= 2


def test_an_argument_in_a_result_has_an_owner_before_python_runs():
    """A named tuple's class is called for the result: here it lets the tensor go whose memory another part of that shows."""
    tensor = None

    def new(cls, *items):
        tensor.set_(torch.zeros(1))
        new.junk = [torch.full((1000,), 7.0) for _ in range(20)]
        return tuple.__new__(cls, items)

    Made = collections.namedtuple("Made", "a")
    kernel = fast_args(lambda x: (Made(1.0), x[1:]))
    assert kernel(torch.ones(3))[0] == (1.0,)
    Made.__new__ = new
    for _ in range(40):
        tensor = torch.ones(1000)
        assert kernel(tensor)[1].tolist() == [1.0] * 999


def test_modes_of_the_caller_do_not_see_what_holds_a_storage():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Swallows(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return args[0] if "set_" in str(function) else function(*args, **(kwargs or {}))

    kernel = fast_args(nogil=True)(lambda x: x.size)
    # Without a table, __dlpack__ makes a view of the tensor, which this mode refuses.
    fake = [FakeTensorMode] if has_table() else []
    for mode in (*fake, Swallows, lambda: torch.device("meta")):
        tensor = torch.ones(3)
        with mode():
            assert kernel(tensor) == 3
        assert not tensor.untyped_storage().resizable()


# ---- tensors on a GPU ----------------------------------------------------------------------------------------------


def test_keys_of_tensors_on_a_gpu_are_plain():
    """As far as that can be seen without one: the keys by name, and none that makes a tensor odd."""
    from fastexchange.producers.torch_offsets import guard

    def named(name):
        return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()

    if not guard().knows_all:
        pytest.skip("PyTorch is asked about each tensor")
    odd = guard().native.odd_keys
    assert odd & named("CUDA") == odd & named("AutocastCUDA") == 0
    odd_names = "Conjugate Negative SparseCUDA SparseCsrCUDA QuantizedCUDA NestedTensorCUDA Python ZeroTensor"
    for name in odd_names.split():
        assert odd & named(name), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_a_gpu_are_told_apart():
    from fastexchange.producers.torch_offsets import guard, keys_of

    if not guard().knows_all:
        pytest.skip("PyTorch is asked about each tensor")
    x, z = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.complex64, device="cuda")
    odd = guard().native.odd_keys
    assert not any(keys_of(tensor) & odd for tensor in (x, x[1:], z, x.requires_grad_(), x * 2))
    assert all(keys_of(tensor) & odd for tensor in (z.conj(), z.conj().imag, x.detach().to_sparse()))


@pytest.mark.slow
def test_the_first_call_does_not_import_pytorchs_compiler():
    """The import is slow."""
    run_python(
        """
        import sys
        import torch
        from fastexchange import fast_args
        before = set(sys.modules)
        assert fast_args(lambda x, y: x[0] + y[0])(torch.ones(3), torch.ones(3)) == 2
        imported = {name.partition(".")[0] + "." + name.split(".")[1] for name in set(sys.modules) - before if "torch." in name}
        assert not {"torch._dynamo", "torch._inductor"} & imported, imported
        """
    )


def counted_refusals(tensor, ways) -> str:
    """Refuse `tensor` in each of `ways`; check that nobody has kept it. Returns the last message."""
    for _ in range(2):
        before = tensor._use_count(), sys.getrefcount(tensor)
        for way in ways:
            with pytest.raises(BufferError) as raised:
                way(tensor)
        message = str(raised.value)
        del raised
        assert (tensor._use_count(), sys.getrefcount(tensor)) == before
    return message


def test_tensors_that_pytorch_does_not_export_are_not_kept():
    """PyTorch before 2.10 keeps each such tensor that it is asked to export."""
    bits = fast_args(storage=True)(lambda x: x.sum())
    ways = [total, bits, fastexchange.from_dlpack, fastexchange.to_dlpack, lambda x: fastexchange.convert(x, np.ndarray)]
    for dtype in producer.dtypes_not_exported():
        tensor = torch.empty(3, dtype=dtype)
        assert tensor.is_quantized or f"{str(dtype).removeprefix('torch.')}, which" in counted_refusals(tensor, ways)
    assert "device meta" in counted_refusals(torch.empty(3, device="meta"), ways)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert "dequantize" in counted_refusals(quantized, ways)


def test_a_subclass_may_export_what_pytorch_does_not():
    class Exporting(torch.Tensor):
        def __dlpack__(self, **options):
            return self.as_subclass(torch.Tensor).view(torch.uint8).__dlpack__()

    tensor = torch.ones(3, dtype=torch.uint8).view(torch.bits8).as_subclass(Exporting)
    assert [total(tensor) for _ in range(3)] == [3] * 3


Exporting = tabled_type("Exporting", dltensor_from_py_object_no_sync=None)


@fast_args
def reverse(x):
    return x[::-1]


@pytest.mark.skipif(not has_table(), reason="this PyTorch has no table")
def test_pytorch_gets_no_offset_that_it_could_ignore():
    """Its conversions did before version 2.9, also behind the table that tvm-ffi gives such a version."""
    own, offsets = known(torch.Tensor)["to_object"], []
    convert_it = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    @convert_it
    def to_object(managed, out):
        offsets.append(ffi.cast("DLManagedTensorVersioned *", managed).dl_tensor.byte_offset)
        return convert_it(own)(managed, out)

    array, made = np.arange(12.0), []
    runtime().entries.update(torch.Tensor, to_object=ctypes.cast(to_object, ctypes.c_void_p).value)
    try:
        for offset in (0, 32):
            given = Dunder(array[:4], Ledger(), byte_offset=offset)
            made += [fastexchange.convert(given, torch.Tensor) for _ in range(3)]
    finally:
        runtime().entries.update(torch.Tensor, to_object=own)
    assert offsets == [0] * 6
    assert [tensor.tolist() for tensor in made] == [[0, 1, 2, 3]] * 3 + [[4, 5, 6, 7]] * 3



def test_what_the_framework_itself_would_misread():
    """PyTorch before 2.10 has no table, and its ``from_dlpack`` aborts at negative strides and ignores byte offsets."""
    array, readonly = np.arange(4.0), np.arange(4.0)
    readonly.flags.writeable = False
    for memory in (array[::-1], array.reshape(2, 2)[:, ::-1], readonly):
        for _ in range(2):
            tensor = fastexchange.convert(memory, torch.Tensor)
            assert np.array_equal(tensor.numpy(), memory) and not np.shares_memory(tensor.numpy(), memory)
            with pytest.raises(BufferError, match=r"has no (negative strides|readonly tensors)"):
                fastexchange.convert(memory, torch.Tensor, copy=False)
    address = array.ctypes.data
    for _ in range(2):
        with pytest.raises(BufferError, match="negative stride"):
            reverse(torch.ones(3))
        for options in ({}, {"copy": False}):
            ledger = Ledger()
            tensor = fastexchange.convert(Dunder(array, ledger, data=address - 64, byte_offset=64), torch.Tensor, **options)
            assert tensor.data_ptr() == address and tensor.tolist() == [0, 1, 2, 3]
            del tensor
            ledger.check(ledger.made)  # native code gives an export with an offset back, and Python code makes another
    ledger = Ledger()
    with contextlib.suppress(BufferError):  # a device that PyTorch knows, and may refuse after it has released the export
        fastexchange.convert(Exporting(array, ledger, device_type=4), torch.Tensor)
    ledger.check(1)


def test_a_wrapped_tensor_is_mutable():
    """As the tensor is, also where PyTorch exports it by capsules that cannot say so."""
    tensor = torch.zeros(3)

    @fast_args
    def add_one(x):
        x += 1

    for _ in range(3):
        add_one(Wrapper(tensor))
    fastexchange.from_dlpack(Wrapper(tensor))[0] = 7
    assert tensor.tolist() == [7, 3, 3]


def test_a_freed_storage_is_refused_with_the_same_words_everywhere():
    cut = torch.ones(8)
    cut.untyped_storage().resize_(8)
    for way in (total, fast_args(nogil=True)(lambda x: x.sum()), fastexchange.from_dlpack, fastexchange.to_dlpack):
        for _ in range(3):
            with pytest.raises(BufferError, match="storage has been freed or made smaller"):
                way(cut)

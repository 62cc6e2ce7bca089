"""A kernel's native memory: its ``fx_context``, overloads and inline caches. Python writes it; the native dispatcher reads it."""

import sys
from typing import Any, NamedTuple

from numba.core import types

from .._abi import ffi
from ..ground.dlpack import CPU
from ..ground.native import address_of
from ..ground.numba_internals import address_of_kernel
from ..ground.omitted import OMITTED
from ..ground.once import forkable_lock
from ..ground.passing import Retries
from . import allocation, boxed_results, boxing, structs
from .boxing import BOXES_ARRAYS, BOXES_NONE, BOXES_SCALARS
from .frame import ARRAY_WORDS_PER_KEY
from .kept import what_is_kept
from .runtime import runtime
from .signature import lists_in, readonly_arrays
from .trampoline import trampoline
from .type_table import GOLDEN

METHODS = (
    "_call_slowly", "_call_numba", "_failed", "_refused", "_call_with_outputs", "_driver_error", "_call_itself",
)  # fmt: skip
"""The methods that native code calls: of a kernel, or of a launcher."""
AGAIN = object()
"""What ``_call_slowly`` of a kernel returns if native code can make the call now."""
_FIRST_BUCKETS = 8


class _Code(NamedTuple):
    """The code for one signature of the kernel. Zeros: only Numba's dispatcher can make the call."""

    trampoline: int = 0
    kernel: int = 0
    box: int = 0
    constants: tuple = ()
    boxes: int = BOXES_NONE
    given: tuple = ()
    taken: tuple = ()
    compiled: Any = None
    keeps: int = 0


class Overload(NamedTuple):
    """The code for calls with a key sequence. It lives as long as the kernel, even if the kernel is recompiled."""

    native: Any
    """Its ``fx_overload *``."""
    code: _Code
    kept: list
    """Memory that the ``fx_overload`` points to."""

    @property
    def is_native(self) -> bool:
        """Whether native code can make the calls, not only Numba's dispatcher."""
        return bool(self.code.trampoline)

    @property
    def taken(self) -> tuple:
        """The Numba types of the parameters."""
        return self.code.taken


class KernelContext:
    """The structs that a kernel's native code reads.

    No struct moves or is freed while the kernel lives, even if it has been replaced: a call in progress may still read it.
    """

    vectorcall: int = 0
    """The address of the native function that makes the kernel's calls; 0: there is none."""

    def __init__(
        self, parameters, name: str, release_gil: bool, allows: int, returns: type | int | None = None, outputs=None
    ):
        names = parameters.names
        self.runtime = runtime()
        self._kept = name, returns
        self._strings = [sys.intern(name) for name in (*names, *METHODS)]
        self._names = ffi.new("intptr_t[]", [id(name) for name in self._strings])
        stand_ins = [id(OMITTED) if parameters.may_be_omitted(i) else 0 for i in range(len(names))]
        self._defaults = ffi.new("intptr_t[]", stand_ins or [0])
        self._lock = forkable_lock()
        buckets = _new_buckets(_FIRST_BUCKETS)
        self._retired: list[Any] = [buckets]
        self._overloads: dict[tuple[int, ...], Overload] = {}
        self.retries = Retries()
        """Of compilations for key sequences."""
        # `last` before the first cached call.
        self._nothing = ffi.new("fx_overload *")
        self._sites = ffi.new("intptr_t[]", structs.SITES)
        native = self.native = ffi.new("fx_context *")
        native.runtime = self.runtime.address
        native.last, native.sites = address_of(self._nothing), address_of(self._sites)
        native.buckets = address_of(buckets)
        native.parameter_count = len(names)
        native.variadic = parameters.variadic is not None
        native.plain_count = len(names) if not native.variadic and parameters.positional == len(names) else -1
        native.positional_only, native.positional_count = parameters.positional_only, parameters.positional
        native.names = address_of(self._names)
        native.defaults = address_of(self._defaults)
        native.omitted = id(OMITTED)
        methods = map(id, self._strings[len(names) :])
        native.slow_name, native.numba_name, native.failed_name, *further = methods
        native.refused_name, native.outputs_name, native.driver_error_name, native.itself_name = further
        if outputs is not None:
            if self.runtime.is_native:
                self.runtime.add(allocation.allocate, allocation.note_error)
            native.output_count = len(outputs)
            if outputs.program is not None:
                self._program = ffi.new("int64_t[]", outputs.program)
                native.outputs = address_of(self._program)
        native.release_gil = native.needs_owning_exports = release_gil
        native.allows = allows
        native.name = id(name)
        native.returns_type = id(returns) if isinstance(returns, type) else 0
        native.returns_position = returns if isinstance(returns, int) else -1
        if self.runtime.is_native:
            self._prepare()
        self._nothing.enter = native.vectorcall_any

    def _prepare(self) -> None:
        """Set the fields that depend on the kernel's device, here the CPU."""
        self.native.device_type = CPU
        shared = self.runtime.native
        self.native.vectorcall_any, self.native.run = shared.vectorcall_any, shared.run
        self.native.begin_row, self.native.launch_row = shared.begin_row, shared.launch_row
        self.native.raise_error = boxing.raise_error()
        self.native.again = id(AGAIN)

    @property
    def address(self) -> int:
        """The address of the ``fx_context``."""
        return address_of(self.native)

    def __len__(self) -> int:
        """The number of overloads filed."""
        return len(self._overloads)

    def find(self, keys: tuple[int, ...]) -> Overload | None:
        """The overload that is filed for these keys. Another thread may :meth:`forget` it at any moment."""
        return self._overloads.get(keys)

    @property
    def generation(self) -> object:
        """A token for :meth:`add`: no later call finds what is added with a token from before :meth:`forget`."""
        return self._overloads

    def require_owning_exports(self, runs: int) -> None:
        """Let all calls hold owning exports if code of the kernel `runs` other code: one of RUNS_*, or 0.

        The cache entries that there are have no such exports: they are filled anew.
        """
        is_new = runs and not self.native.needs_owning_exports
        self.native.needs_owning_exports = max(self.native.needs_owning_exports, runs)
        if is_new:
            with self._lock:
                for filed in self._overloads.values():
                    self.runtime.kill_entries(filed.native)

    def add_numba_only(self, keys: tuple[int, ...], generation: object) -> Overload:
        """File a key sequence whose calls only Numba's dispatcher can make."""
        return self._file(keys, _Code(), generation)

    def add(self, keys: tuple[int, ...], given: tuple, taken: tuple, compiled, generation: object) -> Overload:
        """File a compiled signature for calls with these keys, unless `generation` is an earlier one. Returns the overload.

        `given` and `taken`: the Numba types of the arguments and of the parameters.
        Raises: ``boxing.UnsupportedEntry`` if only Numba's own dispatcher can call the signature.
        """
        address = trampoline(given, taken)
        box, constants = boxing.box(compiled.signature.return_type)
        kernel = address_of_kernel(compiled)
        if kernel == 0:
            raise boxing.UnsupportedEntry("another kernel has taken the names of its symbols")
        boxes = BOXES_NONE
        if box:
            boxes = BOXES_SCALARS
            if boxing.holds_array(compiled.signature.return_type):
                boxes = BOXES_ARRAYS
                self.runtime.add(*boxed_results.BOXING)
        kept = what_is_kept(taken, compiled)
        return self._file(keys, _Code(address, kernel, box, constants, boxes, given, taken, compiled, kept), generation)

    def _file(self, keys: tuple[int, ...], code: "_Code", generation: object) -> Overload:
        with self._lock:
            if generation is not self._overloads:  # the call in progress may use it, as if it had begun earlier
                self._retired.append(overload := self._made(keys, code))
                return overload
            if keys not in self._overloads:
                self._overloads[keys] = self._made(keys, code)  # complete: Ctrl-C may come between any two statements
            overload = self._overloads[keys]
            if not self._is_linked(overload.native):  # the overload is new, or Ctrl-C interrupted its linking
                self._link(overload.native)
            return overload

    def _made(self, keys: tuple[int, ...], code: "_Code") -> Overload:
        """Make the ``fx_overload`` of code for calls with these keys."""
        key_words = ffi.new("int64_t[]", keys or [0])
        constants = ffi.new("intptr_t[]", [id(constant) for constant in code.constants] or [0])
        overload = ffi.gc(ffi.new("fx_overload *"), self.runtime.free_entries)
        overload.hash, overload.key_count, overload.keys = _hash(keys), len(keys), address_of(key_words)
        overload.trampoline, overload.kernel = code.trampoline, code.kernel
        overload.box, overload.box_constants, overload.keeps = code.box, address_of(constants), code.keeps
        lists = lists_in(code.given)
        overload.lists = id(lists)
        if code.boxes == BOXES_ARRAYS:
            is_one = isinstance(code.compiled.signature.return_type, types.Array)
            overload.boxes_arrays = boxed_results.ONE if is_one else boxed_results.SEVERAL
            overload.readonly_arrays = readonly_arrays(code.given, code.taken)
        overload.enter = self.native.vectorcall_any
        if len(self._overloads) > self._buckets[0]:
            self._spread(4 * (1 + self._buckets[0]))
        overload.given_count, rows = self._rows(keys, code) or (-1, [])
        overload.row_count = len(rows) if overload.given_count >= 0 else -1
        words = sum(map(structs.words_of.py_func, keys))
        overload.room = max(len(keys), -(-words // ARRAY_WORDS_PER_KEY))
        overload.array_count = sum(map(structs.has_array.py_func, keys))
        native_rows = ffi.new("fx_row[]", rows or 1)
        overload.rows = address_of(native_rows)
        return Overload(overload, code, [key_words, constants, lists, native_rows])

    def _rows(self, keys: tuple[int, ...], code: "_Code") -> tuple[int, list[dict[str, Any]]] | None:
        """The number of arguments of cached calls with these keys, and their ``fx_row``s; None: there are no cached calls.

        Omitted arguments have no rows, and can only be the last ones.
        """
        if not code.trampoline or any(key & 0xFF == structs.KEY_LIST for key in keys):
            return None
        rows: list[dict[str, Any]] = []
        stream = iter(enumerate(keys))
        names = self.native.parameter_count

        def add(index: int, key: int, position: int, level: int = 0) -> None:
            length = self._length(key) if structs.is_tuple.py_func(key) else -1
            rows.append({"key": key, "position": position, "level": level, "expected": [index, length]})
            if length >= 0:
                for _ in range(length):
                    add(*next(stream), position, level + 1)
                rows.append({"key": 0, "position": position, "level": level})

        given = 0
        for position in range(names):
            index, key = next(stream)
            if key == structs.KEY_OMITTED:
                continue
            if given < position:
                return None
            add(index, key, position)
            given += 1
        if self.native.variadic:
            count = next(stream)[1] >> structs.SERIAL_SHIFT
            if count and given < names:
                return None
            for position in range(names, names + count):
                add(*next(stream), position)
            given += count
        elif given > self.native.positional_count:
            return None
        return given, rows

    def _length(self, key: int) -> int:
        """The number of items of the tuples with a key."""
        number = key >> structs.SERIAL_SHIFT
        if key & 0xFF != structs.KEY_NAMED_TUPLE:
            return number
        named: Any = self.runtime.serials[number]()
        return len(named._fields)

    def forget(self) -> None:
        """Unlink all overloads. They stay in memory for calls in progress."""
        with self._lock:
            buckets = _new_buckets(_FIRST_BUCKETS)
            self._retired += [self._overloads, buckets]
            self._overloads, self.retries = {}, Retries()
            self.native.buckets = address_of(buckets)
            for site in range(structs.SITES):
                self._sites[site] = 0
            self.native.last = address_of(self._nothing)  # after the sites: a call in another thread may take it from one

    @property
    def _buckets(self):
        """The native hash table: the mask, then for each bucket the address of its first overload."""
        return ffi.cast("intptr_t *", self.native.buckets)

    def _spread(self, size: int) -> None:
        """Link all overloads in more buckets.

        The old tables stay for calls in progress. Tables grow by a factor, so all old ones together are smaller than the new one.
        """
        buckets = _new_buckets(size)
        self._retired.append(buckets)
        for filed in self._overloads.values():
            filed.native.next = 0
        self.native.buckets = address_of(buckets)
        for filed in self._overloads.values():
            self._link(filed.native)

    def _bucket_of(self, overload) -> int:
        return 1 + (((overload.hash * GOLDEN & (1 << 64) - 1) >> 40) & self._buckets[0])

    def _is_linked(self, overload) -> bool:
        address = self._buckets[self._bucket_of(overload)]
        while address and address != address_of(overload):
            address = ffi.cast("fx_overload *", address).next
        return bool(address)

    def _link(self, overload) -> None:
        index = self._bucket_of(overload)
        overload.next = self._buckets[index]
        self._buckets[index] = address_of(overload)


def _new_buckets(size: int):
    buckets = ffi.new("intptr_t[]", 1 + size)
    buckets[0] = size - 1
    return buckets


def _hash(keys) -> int:
    """The hash of a key sequence, as ``inline_cache.look_up`` computes it in wrapping 64-bit arithmetic."""
    value = 0
    for key in keys:
        value = _signed(value << 5) ^ (value >> 59) ^ key
    return value


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)

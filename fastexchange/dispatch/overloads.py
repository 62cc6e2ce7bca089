"""A kernel's native memory: its ``fx_context``, overloads and inline caches. Python writes it; the native dispatcher reads it."""

import sys
from typing import Any, NamedTuple

from numba.core import types

from .._abi import ffi
from ..ground.dlpack import CPU, INT, UINT, field_of_type
from ..ground.native import address_of
from ..ground.numba_internals import address_of_kernel
from ..ground.omitted import OMITTED
from ..ground.once import forkable_lock
from ..ground.passing import Retries, may_pass
from ..producers import torch_abi, torch_offsets
from ..producers.ndarray import dtype_of
from . import boxing, fast_entry, results, structs, vectorcall
from . import outputs as allocation
from .boxing import BOXES_ARRAYS, BOXES_NONE, BOXES_SCALARS
from .entry_builder import Node, with_items
from .fast_readers import READERS
from .frame import DEFAULT_KEYS
from .kept import what_is_kept
from .pack import misaligned_bits
from .readers import SCALAR_INT64
from .runtime import runtime
from .signature import lists_in, readonly_arrays
from .torch_guard import OFFSETS, Offsets
from .trampoline import trampoline
from .type_table import GOLDEN

METHODS = (
    "_call_slowly", "_call_numba", "_failed", "_cache_call", "_refused", "_call_with_outputs", "_driver_error", "_call_itself",
)  # fmt: skip
"""The methods that native code calls: of a kernel, or of a launcher."""
AGAIN = object()
"""What ``_call_slowly`` of a kernel returns if native code can make the call now."""
_FIRST_BUCKETS = 8
_BYTES = field_of_type(INT, 8), field_of_type(UINT, 8)


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


class _CacheEntry(NamedTuple):
    """An entry of an overload's inline cache: its ``fx_overload *``, its ``fx_expected[]``, and the dtypes that it refers to.

    ``compiled_for``: the kinds, guards and lengths that are compiled into the fast entry; None if there is no fast entry.
    """

    overload: Any
    expected: Any
    compiled_for: tuple | None
    held: list

    def is_dead(self) -> bool:
        """Whether a type in the entry has died."""
        return any(record.type == 0 for record in self.expected)


class _Filed(NamedTuple):
    """An overload: its ``fx_overload *``, its code, memory that the ``fx_overload`` points to, and its inline cache."""

    overload: Any
    code: _Code
    kept: list
    cached: list[_CacheEntry]


class KernelContext:
    """The structs that a kernel's native code reads.

    No struct moves or is freed while the kernel lives, even if it has been replaced: a call in progress may still read it.
    """

    _MAX_CACHED = DEFAULT_KEYS  # a fast entry takes any free frame, and each has room for so many keys
    vectorcall: int = 0
    """The address of the native function that makes the kernel's calls; 0: there is none."""

    def __init__(
        self, parameters, name: str, release_gil: bool, guard: int, returns: type | int | None = None, outputs=None
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
        self._overloads: dict[tuple[int, ...], _Filed] = {}
        self.retries = Retries()
        """Of compilations for key sequences, and of fast entries for them."""
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
        native.slow_name, native.numba_name, native.failed_name, native.cache_name, *further = methods
        native.refused_name, native.outputs_name, native.driver_error_name, native.itself_name = further
        if outputs is not None:
            if self.runtime.is_native:
                self.runtime.add(allocation.allocate, allocation.note_error)
            native.output_count = len(outputs)
            if outputs.program is not None:
                self._program = ffi.new("int64_t[]", outputs.program)
                native.outputs = address_of(self._program)
        native.release_gil = native.needs_owning_exports = release_gil
        native.guard_offset = guard * structs.GUARD_SIZE
        native.name = id(name)
        native.returns_type = id(returns) if isinstance(returns, type) else 0
        native.returns_position = returns if isinstance(returns, int) else -1
        if self.runtime.is_native:
            self._prepare()
        self._nothing.fast_entry = native.vectorcall_any

    def _prepare(self) -> None:
        """Set the fields that depend on the kernel's device, here the CPU."""
        self.native.device_type = CPU
        shared = self.runtime.native
        self.native.vectorcall_any, self.native.walk, self.native.run = shared.vectorcall_any, shared.walk, shared.run
        self.native.raise_error = boxing.raise_error()
        self.native.again = id(AGAIN)

    @property
    def address(self) -> int:
        """The address of the ``fx_context``."""
        return address_of(self.native)

    def __len__(self) -> int:
        """The number of overloads filed."""
        return len(self._overloads)

    def __contains__(self, keys: tuple[int, ...]) -> bool:
        return keys in self._overloads

    def is_native(self, keys: tuple[int, ...]) -> bool:
        """Whether native code can make calls with these keys."""
        return keys in self._overloads and bool(self._overloads[keys].code.trampoline)

    def types_taken_by(self, keys: tuple[int, ...]) -> tuple:
        """The Numba types of the parameters of the code that is filed for these keys."""
        return self._overloads[keys].code.taken

    def _code_of(self, overload: int) -> _Code:
        """The code of the ``fx_overload`` at this address; an empty ``_Code`` if the overload has been forgotten."""
        return next((filed.code for filed in self._overloads.values() if address_of(filed.overload) == overload), _Code())

    def types_of(self, overload: int) -> tuple:
        """The Numba argument types of the ``fx_overload`` at this address."""
        return self._code_of(overload).given

    @property
    def generation(self) -> object:
        """A token for :meth:`add`, which files nothing for a token from before :meth:`forget`."""
        return self._overloads

    def add_numba_only(self, keys: tuple[int, ...], generation: object) -> None:
        """File a key sequence whose calls only Numba's dispatcher can make."""
        self._file(keys, _Code(), generation)

    def add(self, keys: tuple[int, ...], given: tuple, taken: tuple, compiled, generation: object) -> None:
        """File a compiled signature for calls with these keys, unless `generation` is an earlier one.

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
                self.runtime.add(*results.BOXING)
        kept = what_is_kept(taken, compiled)
        self._file(keys, _Code(address, kernel, box, constants, boxes, given, taken, compiled, kept), generation)

    def _file(self, keys: tuple[int, ...], code: "_Code", generation: object) -> None:
        with self._lock:
            if generation is not self._overloads:
                return
            if keys not in self._overloads:
                self._file_new(keys, code)
            overload = self._overloads[keys].overload
            if not self._is_linked(overload):  # the overload is new, or Ctrl-C interrupted its linking
                self._link(overload)

    def _file_new(self, keys: tuple[int, ...], code: "_Code") -> None:
        key_words = ffi.new("int64_t[]", keys or [0])
        constants = ffi.new("intptr_t[]", [id(constant) for constant in code.constants] or [0])
        overload = ffi.new("fx_overload *")
        overload.hash, overload.key_count, overload.keys = _hash(keys), len(keys), address_of(key_words)
        overload.trampoline, overload.kernel = code.trampoline, code.kernel
        overload.box, overload.box_constants, overload.keeps = code.box, address_of(constants), code.keeps
        lists = lists_in(code.given)
        overload.lists = id(lists)
        if code.boxes == BOXES_ARRAYS:
            is_one = isinstance(code.compiled.signature.return_type, types.Array)
            overload.boxes_arrays = results.ONE if is_one else results.SEVERAL
            overload.readonly_arrays = readonly_arrays(code.taken)
        overload.fast_entry = self.native.vectorcall_any
        if len(self._overloads) > self._buckets[0]:
            self._spread(4 * (1 + self._buckets[0]))
        self._overloads[keys] = _Filed(overload, code, [key_words, constants, lists], [])

    def add_cache_entry(self, keys: tuple[int, ...], bound: tuple) -> None:
        """Compile a fast entry for calls with these keys and the argument types of `bound`.

        If there can be no fast entry (for a complex number, say), the entry is filed without one: no later call tries again.
        """
        first, code, _, cached = self._overloads[keys]
        values = tuple(self._with_items(bound))
        nodes = self._nodes(keys, bound, code.given)
        compiled_for = None if nodes is None else tuple((node.kind, node.guard, node.items) for node in nodes)
        with self._lock:
            dead = next((entry for entry in cached if entry.compiled_for == compiled_for and entry.is_dead()), None)
            if dead is not None:  # reuse its memory: types that come and go must not leak entries
                self._expect(dead.expected, keys, values, dead.held)
                return
            if first.cached_count >= structs.MAX_CACHED:
                return
        expected = ffi.new("fx_expected[]", len(values))
        held: list[Any] = []
        self._expect(expected, keys, values, held)
        overload = ffi.new("fx_overload *", first[0])
        overload.expected, overload.expected_count = address_of(expected), len(values)
        try:
            if nodes is not None:
                self.runtime.add(vectorcall.release_cached, vectorcall.refuse_argument)
                overload.given_count = _given_count(bound)
                overload.fast_entry = self._fast_entry(code, nodes, overload.given_count)
        except Exception as error:
            if may_pass(error):
                failures = self.retries.failed((keys, compiled_for), error)
                first.uncached_calls = structs.CALLS_PER_CACHE_ENTRY * (1 - failures**2)
            else:  # file the entry: else later calls would try again
                self._file_entry(first, cached, _CacheEntry(overload, expected, compiled_for, held))
            raise
        self._file_entry(first, cached, _CacheEntry(overload, expected, compiled_for, held))

    def _file_entry(self, first, cached: list[_CacheEntry], entry: _CacheEntry) -> None:
        with self._lock:
            cached.append(entry)
            entry.overload.cached, first.cached = first.cached, address_of(entry.overload)
            first.cached_count += 1

    def _fast_entry(self, code: "_Code", nodes: tuple[Node, ...], count: int) -> int:
        holds = bool(self.native.needs_owning_exports)
        return fast_entry.fast_entry(code.given, code.taken, nodes, count, code.boxes, holds)

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
            filed.overload.next = 0
        self.native.buckets = address_of(buckets)
        for filed in self._overloads.values():
            self._link(filed.overload)

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

    def without_exports(self, bound: tuple) -> tuple[tuple, list[int]]:
        """A call's arguments with None in place of each tensor that would be exported, and the places of these in the keys."""
        exported = [i for i, value in enumerate(self._with_items(bound)) if self._is_exported(value)]

        def shown(value):
            if self._is_exported(value):
                return None
            if self.runtime.entries.fields(type(value))["kind"] not in structs.TUPLE_KINDS:
                return value
            return tuple.__new__(type(value), map(shown, value))

        return tuple(map(shown, bound)) if exported else bound, exported

    def _is_exported(self, value) -> bool:
        return self.runtime.entries.fields(type(value))["kind"] == structs.KIND_MANAGED

    def keys_like(self, keys: tuple[int, ...], places: list[int]) -> list[tuple[int, ...]]:
        """The filed keys that differ from `keys` only at these places, where they are of arrays.

        Of several those whose last call is to get a cache entry.
        """
        like = []
        for filed in list(self._overloads):
            rest = [key if i not in places else structs.KIND_NONE for i, key in enumerate(filed)]
            if tuple(rest) == keys and all(filed[i] & 0xFF == structs.KIND_ARRAY for i in places):
                like.append(filed)
        wanted = [filed for filed in like if self._overloads[filed].overload.uncached_calls == structs.WANTS_CACHE_ENTRY]
        return wanted or like

    def _with_items(self, values):
        """The arguments of a call, each tuple followed by its items, in the order of the keys."""
        for value in values:
            yield value
            if self.runtime.entries.fields(type(value))["kind"] in structs.TUPLE_KINDS:
                yield from self._with_items(value)

    def _nodes(self, keys: tuple[int, ...], bound: tuple, given: tuple) -> tuple[Node, ...] | None:
        """The nodes of a fast entry, without omitted arguments at the end; None if there can be no fast entry."""
        if self.native.plain_count < 0:
            return None
        count = _given_count(bound)
        values = tuple(self._with_items(bound[:count]))
        if len(keys) != len(values) + len(bound) - count or len(keys) > self._MAX_CACHED:
            return None
        types_of_values = with_items(given[:count])
        nodes = []
        for value, key, numba_type in zip(values, keys, types_of_values, strict=False):
            kind = self.runtime.entries.fields(type(value))["kind"]
            # An int beyond int64 gets no cache entry: the next int of this type may fit into int64.
            if not (kind in READERS or self._may_export(value)) or (kind == structs.KIND_INT and key != SCALAR_INT64):
                return None
            items = len(value) if kind in structs.TUPLE_KINDS else -1
            guard = self._guard_offsets(value, key)
            if kind == structs.KIND_EXCHANGE and self.native.needs_owning_exports and not self._may_hold_storage(value, guard):
                return None
            nodes.append(Node(numba_type, kind, guard, items))
        return tuple(nodes)

    def _may_export(self, value) -> bool:
        """Whether a fast entry may make owning exports of tensors of a value's type."""
        fields = self.runtime.entries.fields(type(value))
        is_on_cpu = self.native.device_type == CPU
        return is_on_cpu and self._is_exported(value) and not fields.get("guard")

    def _may_hold_storage(self, value, guard: tuple[int, ...]) -> bool:
        """Whether a call may hold the storage of a tensor instead of an export: ``take_exports.is_storage_enough``."""
        is_own_memory = self.runtime.entries.fields(type(value)).get("is_own_memory")
        return bool(is_own_memory and guard and Offsets(*guard).ndim and torch_offsets.guard().native.storage_object)

    def _guard_of(self, fields: dict[str, int]) -> int:
        """:func:`torch_guard.guard_of` in Python."""
        address = fields.get("guard", 0)
        return address + self.native.guard_offset if address else 0

    def _guard_offsets(self, value, key: int) -> tuple[int, ...]:
        """``torch_guard.OFFSETS`` for tensors of a value's type with this key."""
        fields = self.runtime.entries.fields(type(value))
        address = self._guard_of(fields)
        guard = ffi.cast("fx_guard *", address)
        field = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
        may_be_narrow = field in _BYTES  # types narrower than a byte are exported as bytes
        irrelevant = set() if may_be_narrow else {"odd_types"}
        if address and guard.ndim and not torch_offsets.guard().reads(value):
            irrelevant.add("ndim")  # its exchange table is asked
        if not address:
            return ()
        offsets = (0 if name in irrelevant else getattr(guard, name) for name in OFFSETS[:-1])
        return (*offsets, int(torch_abi.is_borrow_function(fields["borrow"])))

    def _expect(self, expected, keys: tuple[int, ...], bound: tuple, held: list) -> None:
        """Fill the records of a cache entry (see ``fast_parts``), and `held` with the dtypes that it refers to.

        `bound`: the arguments, each tuple followed by its items. If the entry is a dead one, its last call may be in progress
        (in a producer's Python code, or in a kernel without the GIL), and reads the records later: what the keys and the fast
        entry determine is never another value, not even for a moment.
        """
        before, has_list = len(held), len(keys) != len(bound)
        for record in expected:  # another thread may call at any step: no call agrees with the entry until it is complete
            record.type = 0
        for index, value in enumerate(bound):
            fields = self.runtime.entries.fields(type(value))
            expected[index].items = len(value) if fields["kind"] in structs.TUPLE_KINDS else -1
            expected[index].origin = -1 if has_list else self._origin_of(fields)
            if not has_list:
                self._describe(expected[index], value, keys[index], fields, held)
            self.runtime.entries.watch(type(value), expected)
        for record, value in zip(expected, bound, strict=True):
            record.type = id(type(value))
        del held[:before]  # last: Ctrl-C may interrupt at each step

    def _origin_of(self, fields: dict[str, int]) -> int:
        """The ``origin`` of the record for values of a type whose entry has these fields."""
        origins = {
            structs.KIND_NDARRAY: structs.ORIGIN_NDARRAY, structs.KIND_STRING: structs.ORIGIN_STRING,
            structs.KIND_MANAGED: structs.ORIGIN_EXPORT,
            structs.KIND_EXCHANGE: structs.ORIGIN_EXPORT if self.native.needs_owning_exports else structs.ORIGIN_VIEW,
        }  # fmt: skip
        return origins.get(fields["kind"], -1)

    def _describe(self, record, value, key: int, fields: dict[str, int], held: list) -> None:
        record.flags = key >> structs.FLAGS_SHIFT
        if fields["kind"] == structs.KIND_NDARRAY:
            dtype = dtype_of(value)
            held.append(dtype)
            record.dtype, record.itemsize = id(dtype), dtype.itemsize
        elif fields["kind"] == structs.KIND_MANAGED:
            record.borrow = fields.get("managed", 0)
            record.dtype = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
        elif fields["kind"] == structs.KIND_EXCHANGE:
            record.dtype = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
            record.itemsize = record.dtype >> 11
            record.misaligned = misaligned_bits.py_func(record.dtype)
            record.borrow, record.guard = fields["borrow"], self._guard_of(fields)
            record.stream = fields.get("stream", 0)
            if record.guard:
                record.number = torch_offsets.guard().number_of(value)


def _given_count(bound: tuple) -> int:
    """The number of arguments without those omitted at the end."""
    count = len(bound)
    while count and bound[count - 1] is OMITTED:
        count -= 1
    return count


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

"""The structs that the native dispatcher reads, and the 64-bit keys that name a call's shape.

A *key* says everything about one leaf (an array, a scalar, a ``None`` …) on which compiled code depends, and nothing
else: two calls with equal key sequences run the same machine code. A tuple is a key of its own, followed by its leaves; a
list is one, followed by the key of an array, which all its items are.

====  ==================================================================
bits  meaning
====  ==================================================================
0-7   what the leaf is, one of ``KEY_*``
8-31  array, scalar: the dtype (``ground.dtypes.dtype_field``)
32-39 array: ``ndim``
40-50 array: ``C_ORDER``, ``F_ORDER``, ``ALIGNED``, ``WRITEABLE``, at the distances that NumPy's flags have
56-62 array: Numba's class of it, a number that ``arguments.buffer`` knows; 0 for plain arrays
32-63 tuple: its length; named tuple, constant: its serial number
====  ==================================================================
"""

from ..ground import dltensor, parameters
from ..ground.dlpack import COMPLEX, CPU
from ..ground.native import native, offset_of, sizeof, struct_at
from ..producers import ndarray

CDEF = """
/* One thing found by address: a type, or a NumPy dtype object. It never moves, and is used again when the thing has died. */
typedef struct {
    int64_t address;            /* 0: the thing has died */
    int64_t kind;               /* fx_kind * */
    int64_t device_kind;        /* the same for kernels on a device */
    int64_t row_readers[10];    /* of an fx_row with such a value, by `inline_cache.place_of` its key; 0: `rows.read_value` */
    int64_t key;                /* the key of a leaf, or for arrays what its type adds to it; dtypes: the dtype field */
    int64_t size;               /* scalars, dtypes: bytes of one element */
    int64_t borrow;             /* dltensor_from_py_object_no_sync, or 0 */
    int64_t managed;            /* managed_tensor_from_py_object_no_sync */
    int64_t guard;              /* what the functions of its kind need, or 0 */
    int64_t to_object;          /* managed_tensor_to_py_object_no_sync, or 0 */
    int64_t takes_all;          /* whether tensors of this type can be readonly and have negative strides */
    int64_t allocator;          /* managed_tensor_allocator, or 0 */
    int64_t make;               /* PyObject * (fx_entry *, DLTensor *): makes a tensor on a device, like a prototype; or 0 */
    int64_t stream;             /* current_work_stream, or 0 */
    int64_t asks_python;        /* whether exports are made by Python code, which has to be told of a stream */
    int64_t is_by_object;       /* whether objects of this type have entries of their own, with `shown` */
    int64_t shown;              /* DLManagedTensorVersioned * of the object, valid as long as it lives */
    int64_t interface;          /* for launches on a device: `managed` of an array with __cuda_array_interface__, or 0 */
    int64_t is_own_memory;      /* whether its exports show the memory of the tensor's own storage */
    int64_t memory;             /* in an object that may be given other memory while it is exported: its address; 0: none may */
    int64_t is_typed;           /* FORM_OTHER: Numba has typed an object of this type, and takes them as they are */
} fx_entry;

/* A kind of argument, see `arguments.kind`: what native code does with such a value. */
typedef struct {
    int64_t form;               /* FORM_*: what it is to Numba's dispatcher */
    int64_t reader;             /* key or -STATUS_* (PyObject *, fx_entry *, fx_frame *, word, fx_array *); 0: see its form */
    int64_t fill_row;           /* bool (fx_context *, fx_row *, PyObject *), see `inline_cache.expect_value`; or 0 */
    int64_t mark;               /* word (fx_entry *, PyObject *), see `inline_cache.site_of`; or 0 */
    int64_t read_shape;         /* word (fx_context *, fx_entry *, PyObject *, shape, room), see `allocation`; or 0 */
    int64_t exports;            /* EXPORTS_*: whether a call needs an owning export of it */
    int64_t turns;              /* bit i: the export does something in turn i, see `owning_exports` */
    int64_t take_turn;          /* STATUS_* (fx_context *, fx_entry *, fx_export *, turn, flags): that; 0: `make_export` */
    int64_t prepare;            /* STATUS_* (fx_context *, fx_entry *, PyObject *), see `arguments.kind`; or 0 */
    int64_t owner;              /* PyObject * (fx_entry *, PyObject *): what owns a tensor's memory; 0: the tensor */
    int64_t is_odd;             /* bool (fx_entry *, PyObject *, DLTensor *), see `arguments.kind`; or 0 */
    int64_t makes_tensors;      /* whether `to_object` of its entries takes an export only if it succeeds */
    int64_t schema_type;        /* 1 << index in SCHEMA_TYPES: its type in an operator's schema; 0: none */
} fx_kind;

typedef struct fx_frame fx_frame;

/* One per process. */
typedef struct {
    int64_t entries;            /* (address, fx_entry *)[1 + size]: open addressing, linear probing; the first: size - 1 */
    int64_t frames;             /* free fx_frames, linked */
    int64_t dtype_fields[64];   /* by NumPy type number: the dtype field, 0 for parametric dtypes */
    int64_t descrs[64];         /* by NumPy type number: the dtype object of most arrays, which never dies; or 0 */
    int64_t release_owner;      /* NRT destructor: drops the Python reference that owned an escaped array's memory */
    int64_t release_managed;    /* NRT destructor: calls the deleter of an escaped array's managed tensor */
    int64_t release_both;       /* NRT destructor: both of these */
    int64_t walk;               /* STATUS_* (fx_context *, fx_frame *, args, nargs, flags): of `read_arguments` */
    int64_t export_managed;     /* STATUS_* (fx_context *, fx_frame *, args, nargs, flags): of `take_exports` */
    int64_t run;                /* STATUS_* (fx_context *, args, nargs, flags, state), as `vectorcall.run`, for the CPU */
    int64_t vectorcall_any;     /* vectorcallfunc of the general path, which makes any call */
    int64_t leave_row;          /* result of the call (fx_frame *, status, position): of `vectorcall` */
    int64_t end_call, read_value, leave_tuple;   /* of `rows`, by its names */
    int64_t begin_row, export_row, launch_row, call_kernel;     /* of `rows`, too */
    int64_t take_turn;          /* of `owning_exports` */
    int64_t call_cached;        /* vectorcallfunc with two more arguments, fx_context *, fx_overload *: of cached calls */
    int64_t cuda;               /* fx_cuda *, 0 before the first kernel for CUDA */
    int64_t box_result, box_array, finish_array, delete_result;     /* of results, by its names */
    int64_t results, as_target; /* PyObject *, a module and a function's name: (ndarray, like, kernel's name, field) -> result */
    int64_t reflect;            /* PyObject *, another's name: see lists.reflect_changes */
    int64_t release_items;      /* destructor of the items of a list */
    int64_t allocate, note_error;       /* of outputs, by its names */
    int64_t sees_calls;         /* bool (void): whether a framework has to see calls that declare what they write to; or 0 */
    int64_t nothing;            /* fx_entry * of no type */
    int64_t ndarray;            /* PyTypeObject *, numpy.ndarray, once its entry has an allocator; else 0 */
    int64_t numbas_call;        /* ternaryfunc, what a call of a dispatcher is to Numba */
    int64_t numbas_entry;       /* fx_overload *, the cache entry of all calls that go to Numba's dispatcher as they are */
} fx_runtime;

/* A step of an overload's cached calls. Most read a value, which is an argument or an item of a tuple. */
typedef struct {
    int64_t reader;             /* result of vectorcall (items, fx_row *, word, fx_array *, fx_frame *): see `rows` */
    int64_t entry;              /* fx_entry * of the value's type */
    int64_t key;                /* of the value; 0: the row is the end of a tuple */
    int64_t position;           /* of the argument that the value is, or is in */
    int64_t level;              /* of a tuple and its end: in how many tuples it is */
    int64_t expected[3];        /* what its reader compares, see there; in an overload: the index of the key, a tuple's length */
} fx_row;

/* One compiled signature of one kernel. */
typedef struct {
    int64_t next;               /* in its bucket */
    int64_t cached;             /* fx_overload *, the next entry of the inline cache: the same keys and code, with types */
    int64_t cached_count;       /* of the first: how many entries follow it */
    int64_t hash;
    int64_t key_count;
    int64_t keys;               /* int64_t[key_count] */
    int64_t trampoline;         /* 0: only Numba's own dispatcher can make this call */
    int64_t kernel;             /* address of the compiled kernel */
    int64_t box;                /* PyObject *(result, box_constants, fx_frame *); 0: the kernel returns None */
    int64_t boxes_arrays;       /* 1: the result is an array, 2: it holds some; either needs the frame */
    int64_t box_constants;      /* PyObject *[], what the boxing code needs */
    int64_t readonly_arrays;    /* bit i: the i-th array argument is readonly to the kernel; bit 62: one from there on */
    int64_t lists;              /* PyObject *, the Numba types of the lists among the arguments, in their order */
    int64_t rows;               /* fx_row[row_count], without omitted arguments; of a cache entry: see `inline_cache` */
    int64_t row_count;          /* -1: there are no cached calls */
    int64_t array_count;        /* how many values are arrays or strings */
    int64_t room;               /* the `key_capacity` of a frame that has room for a call */
    int64_t enter;              /* vectorcallfunc with two more arguments, fx_context *, fx_overload * */
    int64_t given_count;        /* how many positional arguments a call by `enter` has */
    int64_t launchable;         /* of a kernel for CUDA: fx_launchable *, how it is launched; else 0 */
    int64_t keeps;              /* `kept.what_is_kept` */
} fx_overload;

/* One per kernel. */
typedef struct {
    int64_t runtime;
    int64_t last;               /* fx_overload *, the cache entry of the last cached call: it gets the next call */
    int64_t sites;              /* fx_overload *[SITES], cache entries by a hash of the arguments that they were found for */
    int64_t buckets;            /* fx_overload *[1 + size]; the first word: size - 1 */
    int64_t parameter_count;    /* without *args */
    int64_t plain_count;        /* the same, or -1 for a kernel with *args or keyword-only parameters */
    int64_t defaults;           /* PyObject *[parameter_count], what stands for a parameter that is omitted; 0: it may not be */
    int64_t positional_count;   /* how many may be given without a name */
    int64_t positional_only;    /* parameters whose name is no keyword */
    int64_t variadic;           /* the kernel has *args */
    int64_t names;              /* PyObject *[parameter_count], interned */
    int64_t allows;             /* ALLOWS_*: which tensors the kernel takes, although they are odd */
    int64_t omitted;            /* PyObject *, what stands for an output that is omitted */
    int64_t name;               /* PyObject *, the kernel's qualified name */
    int64_t returns_type;       /* PyTypeObject * of the tensors that arrays in a result become; 0: see returns_position */
    int64_t returns_position;   /* the argument with that type; -1: the first tensor in the call */
    int64_t outputs;            /* int64_t[], `allocation.words_of` the declared outputs; 0: Python makes them */
    int64_t output_count;       /* how many of the last parameters are outputs */
    int64_t outputs_name;       /* PyObject *, name of the method for calls whose outputs Python has to make */
    int64_t slow_name;          /* PyObject *, name of the method for calls that native code does not know */
    int64_t again;              /* PyObject *, what that method returns if native code can make the call now; or 0 */
    int64_t itself_name;        /* PyObject *, name of the method that then makes the call, if native code cannot all the same */
    int64_t numba_name;         /* PyObject *, name of the method that makes calls for Numba's dispatcher */
    int64_t failed_name;        /* PyObject *, name of the method that words an exception of Numba's dispatcher */
    int64_t refused_name;       /* PyObject *, name of the method that words a producer's exception */
    int64_t release_gil;        /* the kernel runs without the GIL */
    int64_t is_generator;       /* Numba's dispatcher makes all calls of the kernel */
    int64_t stores;             /* the kernel gets elements without a Numba type as their bits */
    int64_t needs_owning_exports;   /* other code may run before the kernel has returned, so it holds owning exports: RUNS_* */
    int64_t raise_error;        /* void (int code, excinfo *) */
    int64_t calls;              /* calls that reached a kernel without Python */
    int64_t numba_calls;        /* calls that reached Numba's dispatcher */
    int64_t vectorcall_any;     /* vectorcallfunc for calls that no cache entry makes */
    int64_t begin_row, launch_row;      /* the runtime's, or those for CUDA: readers of the rows around those of values */
    int64_t run;                /* the runtime's, or that for CUDA: it makes a call with arguments in parameter order */
    int64_t device_type;        /* DLDeviceType of the tensors that the kernel reads */
    int64_t device_kernel;      /* PyObject *, what gets the calls with tensors of another device; 0: they are refused */
    int64_t driver_error_name;  /* PyObject *, name of the method that raises the error of a device's driver */
} fx_context;

/* An array argument of the call in progress. */
typedef struct {
    int64_t meminfo;            /* NRT_MemInfo *, the frame's, lent to each array in this place */
    int64_t origin;             /* the object, borrowed, plus ORIGIN_* */
    int64_t held;               /* how many of the block's references are the call's: the frame's, and that of a list */
} fx_array;

/* A list argument of the call in progress, in the order of the arguments. */
typedef struct {
    int64_t object;             /* PyListObject *, borrowed */
    int64_t snapshot;           /* PyTupleObject *, owned: its items when the call began */
    int64_t meminfo;            /* NRT_MemInfo *, owned: what the kernel gets */
} fx_list;

/* What owns an array's memory during the call in progress: a managed tensor, or only a reference to the tensor's storage. */
typedef struct {
    int64_t object, managed, storage;   /* managed is 0 for one that is still to be made, and with HOLDS_STORAGE */
    int64_t state;              /* UNDECIDED, HOLDS_STORAGE, NEEDS_MANAGED */
    int64_t is_given;           /* to an array that was kept */
    int64_t is_interface;       /* `interface` of its entry made it */
} fx_export;

/* The working memory of one call; taken from a list of free ones, so that calls may nest. */
struct fx_frame {
    int64_t next;
    int64_t words, words_limit;         /* the kernel's arguments, 8 bytes a leaf; where array arguments have to end */
    int64_t keys, key_capacity, key_count;
    int64_t entries;                    /* fx_entry *[key_capacity], of the types of the values with these keys */
    int64_t arrays, array_count;        /* fx_array[key_capacity] */
    int64_t takes_back;                 /* references to arrays that are left are leaked ones: take_back() */
    int64_t exports, export_capacity, export_count;
    int64_t lists, list_count, snapshot_count;      /* fx_list[key_capacity]; how many have `meminfo`, and `snapshot` */
    int64_t bound, bound_capacity;      /* PyObject *[], positional and keyword arguments in order */
    int64_t result;                     /* RESULT_BYTES, 16-byte aligned */
    int64_t position;                   /* index of the argument at which the reading stopped */
    int64_t object;                     /* the leaf at which it stopped, borrowed */
    int64_t tensor[8];                  /* a copy of the DLTensor that was refused */
    int64_t context;
    int64_t flags, is_owning;           /* of the reading: FLAG_*; whether the call needs owning exports of all its tensors */
    int64_t exports_used;               /* how many exports the reading has used, which it does in their order */
    int64_t callable, nargsf, overload; /* of a cached call */
    int64_t args;                       /* of a cached call, and while a result is boxed: the arguments */
    int64_t scratch;                    /* of a row's reader: an overflow, or the tensor that has been checked */
    int64_t parents[8];                 /* of a cached call: the next items of the tuples in which the reading is */
    int64_t error[3];                   /* while a result is boxed: the first exception */
    int64_t elements;                   /* then: the dtype field of an array's elements, if the kernel had their bits; else 0 */
    int64_t readonly_arrays;            /* then: the overload's */
    /* Of a launch on a device: */
    int64_t device, managed_device;     /* of the tensors, and of managed memory, which other devices read too; -1: none */
    int64_t stream, other_stream;       /* current_work_stream of the producers, 0: none, or no other */
    int64_t own_stream, own_streams_differ;     /* the stream in the arrays' interfaces, 0: none; whether there are several */
    int64_t array_stream;       /* CuPy's current stream, which its arrays' interfaces would name; 0: not asked yet */
    int64_t code;               /* the driver's error */
};

/* What `attempt` tells Python. */
typedef struct {
    int64_t status;             /* STATUS_* */
    int64_t position;
    int64_t object;
    int64_t key_count;
    int64_t key_capacity;
    int64_t keys;               /* int64_t[key_capacity], the caller's */
    int64_t tensor[8];
    int64_t launcher;           /* of a launch on a device, the caller's: fx_launcher * */
    int64_t code, device, managed_device;       /* of a launch on a device: the frame's */
} fx_report;

/* What a bound launch calls, and with what. The launch has its address, which rebinding replaces. */
typedef struct {
    int64_t callable;           /* PyObject *, the kernel or the launcher, which the launch holds */
    int64_t args, nargs, kwargs;        /* PyObject *[nargs], and a dict or 0 */
    int64_t arguments;          /* PyObject *, what owns all this */
    int64_t refuse_name;        /* PyObject *, name of the method for calls with arguments */
} fx_bound;
"""

# What a leaf is, in its key.
KEY_ARRAY = 1
KEY_SCALAR = 2
KEY_NONE = 3
KEY_OMITTED = 4
KEY_TUPLE = 5
KEY_NAMED_TUPLE = 6
KEY_CONSTANT = 7  # typed by identity: a jitted function
KEY_LIST = 8  # of arrays that have one type; the key of that follows
KEY_STRING = 9

# What a value is to Numba's dispatcher.
FORM_PLAIN = 1  # it takes it as it is
FORM_ARRAY = 2  # and this, if it has its dtype
FORM_BUFFER = 3  # and this, as an array
FORM_TENSOR = 4  # it gets a NumPy view
FORM_TUPLE = 5  # of such values
FORM_LIST = 6
FORM_OTHER = 7  # only it can read it, or refuse it
FORM_OMITTED = 8

EXPORTS_NEVER, EXPORTS_IF_OWNING, EXPORTS_ALWAYS = 0, 1, 2
ALLOWS_GRAD = 1  # tensors that require grad are not odd
ALLOWS_BITS = 2  # integers of less than a byte, stored one in a byte, are not odd
SCHEMA_TYPES = "Tensor", "Tensor[]", "float", "SymInt", "bool", "None"
SCHEMA_TENSOR, SCHEMA_TENSORS, SCHEMA_INT, SCHEMA_NONE = (
    1 << SCHEMA_TYPES.index(name) for name in ("Tensor", "Tensor[]", "SymInt", "None")
)

DTYPE_SHIFT, NDIM_SHIFT, SERIAL_SHIFT = 8, 32, 32
FLAGS_SHIFT = 40
CLASS_SHIFT = 56
FIELD_MASK = 0xFFFFFF  # key >> DTYPE_SHIFT & FIELD_MASK is the dtype field
# NumPy's own values, so that its flags need no work.
C_ORDER, F_ORDER, ALIGNED, WRITEABLE = ndarray.C_CONTIGUOUS, ndarray.F_CONTIGUOUS, ndarray.FLAG_ALIGNED, ndarray.FLAG_WRITEABLE
KEY_FLAGS = C_ORDER | F_ORDER | ALIGNED | WRITEABLE

# Who has the memory of an array argument, in the bits below an object's address: an object that is an ndarray, and is read again
# as one; an owning export that the call has; any other object, of which an owning export is made if the kernel keeps the array.
ORIGIN_NDARRAY, ORIGIN_EXPORT, ORIGIN_VIEW = 0, 1, 2
ORIGIN_STRING = 3  # of a str, which has a memory block as an array has

# What the reading of the arguments ends with. From STATUS_NULL_DATA on: an argument is refused.
STATUS_OK = 0
STATUS_ERROR = 1  # a producer set a Python exception
STATUS_GROW = 2  # the frame is too small
STATUS_EXPORT = 3  # owning exports have to be made first
STATUS_UNKNOWN_TYPE = 4
STATUS_UNKNOWN_DTYPE = 5
STATUS_UNKNOWN_SHAPE = 6  # no overload for these keys
STATUS_NUMBA = 7  # an argument, or this shape of call, is for Numba's dispatcher
STATUS_CHECK = 8  # the tensor is not plain, or has no DLTensor: ask its framework, or Numba
STATUS_CHANGED = 9  # an argument changed while a producer's Python code ran
STATUS_ARITY = 10  # wrong number of arguments, or an unknown keyword
STATUS_BIG_INT = 11  # an int beyond uint64
STATUS_MOVABLE = 12  # a tensor's memory could be freed under a kernel that runs without the GIL
STATUS_MIXED = 13  # the arrays of a list differ in element type or rank
STATUS_DEVICES = 14  # tensors are on different devices
STATUS_STREAM = 15  # an export is made by Python code that has to be told of the stream
STATUS_STREAMS = 16  # the tensors' producers work on different streams
STATUS_UNBOUND = 17  # the kernel is not loaded on the tensors' device
STATUS_DRIVER = 18  # CUDA's driver has refused the launch
STATUS_RANGE = 19  # a number does not fit into the parameter that a signature declares
STATUS_CONFIGURATION = 20  # no configuration can be computed for the launch, or devices take none of such a size
STATUS_NULL_DATA = dltensor.NULL_DATA
STATUS_DEVICE = dltensor.DEVICE
STATUS_DTYPE = dltensor.DTYPE
STATUS_NDIM = dltensor.NDIM
STATUS_SHAPE = dltensor.SHAPE
STATUS_OVERFLOW = dltensor.OVERFLOW
STATUS_VERSION = dltensor.VERSION
STATUS_NO_ERROR_SET = 39  # the producer failed without an exception
STATUS_MISALIGNED = 40  # elements are not where a device can read them

# Of an fx_export: whether the tensor's memory is read, while its storage is held, or a managed tensor has to own it.
UNDECIDED, HOLDS_STORAGE, NEEDS_MANAGED = 0, 1, 2

MAX_NDIM = dltensor.MAX_NDIM
MAX_CACHED = 8  # entries of an inline cache
SITES = 256  # a power of 2
MAX_TUPLE_DEPTH = parameters.MAX_TUPLE_DEPTH
RESULT_BYTES = 4096
MAX_DEVICES = 64

STRING_WORDS = 7  # Numba's string struct and the memory block: see `arguments.strings`
ARRAY_HEAD_WORDS = 5  # Numba's array struct: meminfo, parent, number of items, item size, data; then shape, strides

ENTRY_KIND, ENTRY_DEVICE_KIND = offset_of("fx_entry", "kind"), offset_of("fx_entry", "device_kind")
entry_at = struct_at("fx_entry")
kind_at = struct_at("fx_kind")
runtime_at = struct_at("fx_runtime")
ROW_SIZE = sizeof("fx_row")
row_at = struct_at("fx_row")
OVERLOAD_SIZE = sizeof("fx_overload")
overload_at = struct_at("fx_overload")
context_at = struct_at("fx_context")
array_at = struct_at("fx_array")
export_at = struct_at("fx_export")
list_at = struct_at("fx_list")
frame_at = struct_at("fx_frame")
report_at = struct_at("fx_report")
bound_at = struct_at("fx_bound")


@native
def kind_of(context, entry):
    """The ``fx_kind`` of the values of a type, as a kernel reads them."""
    return kind_at(entry.kind if context.device_type == CPU else entry.device_kind)


@native
def is_tensor(kind):
    """Whether values of a kind are arrays to a kernel."""
    return FORM_ARRAY <= kind.form and kind.form <= FORM_TENSOR


@native
def is_tuple(key):
    """Whether a key is a tuple's, whose items' keys follow."""
    return key & 0xFF == KEY_TUPLE or key & 0xFF == KEY_NAMED_TUPLE


@native
def is_array(key):
    """Whether a key is an array's."""
    return key & 0xFF == KEY_ARRAY


@native
def words_of(key):
    """The number of words of a value with this key. Python calls it, too."""
    kind = key & 0xFF
    if kind == KEY_ARRAY:
        return ARRAY_HEAD_WORDS + 2 * (key >> NDIM_SHIFT & 0xFF)
    if kind == KEY_STRING:
        return STRING_WORDS
    if kind == KEY_SCALAR:
        return 2 if key >> DTYPE_SHIFT & 0xFF == COMPLEX else 1
    has_none = key & 0xFF == KEY_OMITTED or key & 0xFF == KEY_TUPLE or key & 0xFF == KEY_NAMED_TUPLE
    return 0 if has_none else 1


@native
def has_array(key):
    """Whether a value with this key has a memory block: an array, or a string. Python calls it, too."""
    return key & 0xFF == KEY_ARRAY or key & 0xFF == KEY_STRING

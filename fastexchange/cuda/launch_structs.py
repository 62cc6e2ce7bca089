"""The structs that launches read, and the codes of a kernel's parameters and of conversions.

The code of a *parameter* says how a parameter of a compiled kernel is made of the words that ``dispatch.read_arguments`` writes:

=====  ==================================================================
bits   meaning
=====  ==================================================================
0-7    ``WORD``: it is the word. ``ZERO``: it is 0. ``ELEMENTS``: it is the word, a stride in bytes, converted to elements.
       ``JOINED``: it is the low halves of the word and of the next one
8-31   the word's index
32-63  ``ELEMENTS``: bytes of an element
=====  ==================================================================

The code of a *conversion* says how a word gets the type that a declared signature has: bits 0-23 are the word's index; from
bit 24 on the kind (4 bits) and the size (8 bits) of the number that it holds, from 36 on those of the converted number.
"""

from ..ground.native import native, sizeof, struct_at

CDEF = """
/* CUDA's driver, as native code calls it. One per process. */
typedef struct {
    int64_t launch, launch_extended;                            /* cuLaunchKernel, cuLaunchKernelEx */
    int64_t get_current, push_current, pop_current;             /* cuCtxGetCurrent … */
    int64_t get_device, get_attribute;                          /* cuCtxGetDevice, cuPointerGetAttribute */
    int64_t contexts[64];       /* CUcontext, the primary one of each device; 0: not known yet */
    int64_t default_device;     /* the device of a launch without tensors by a thread without a context */
    int64_t resets;             /* how many resets of contexts have been noticed */
} fx_cuda;

/* A compiled kernel on one device. */
typedef struct {
    int64_t function;           /* CUfunction; 0: it is not loaded yet */
    int64_t blocks[4];          /* the best numbers of threads in a block, for launches without one; 0: not known yet */
    int64_t blocks_shared[4];   /* for each, the bytes of dynamic shared memory */
    int64_t shared_limit;       /* bytes of dynamic shared memory that launches may have without asking for more */
} fx_loaded;

/* How a compiled signature of a kernel is launched. */
typedef struct {
    int64_t loaded;             /* fx_loaded[MAX_DEVICES] */
    int64_t parameters;         /* int64_t[parameter_count], the codes of the kernel's parameters: see above */
    int64_t parameter_count;
    int64_t conversions;        /* int64_t[conversion_count], the codes of conversions to a declared signature */
    int64_t conversion_count;
    int64_t is_cooperative;     /* all blocks of a launch have to run at the same time */
    int64_t places;             /* int64_t[], of each of its parameters: the index of the key, from bit 32 on that of the word */
} fx_launchable;

/* A launch configuration of one kernel. */
typedef struct {
    int64_t context;            /* fx_context * of the kernel */
    int64_t grid[3], block[3];
    int64_t shared;             /* bytes of dynamic shared memory */
    int64_t stream;             /* CUstream; -1: the one on which the tensors' producers work */
    int64_t default_stream;     /* CUstream, if no producer has one */
    int64_t tasks;              /* launch this number of threads, in blocks of the best size; -1: launch grid and block */
    int64_t cluster[3];         /* blocks in a cluster; 0: none */
    int64_t is_mixed;           /* the producers work on several streams, which the caller has ordered */
    int64_t program;            /* int64_t[], computes grid and block, or tasks, of each launch: `computed`; 0: fixed ones */
} fx_launcher;

/* CUlaunchAttribute and CUlaunchConfig of cuda.h. */
typedef struct { int32_t id; char pad[4]; int32_t value[16]; } fx_launch_attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    int64_t stream, attributes;
    uint32_t attribute_count;
} fx_launch_config;
"""

LAUNCHER_STREAM_OF_PRODUCERS = -1
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: the same stream as 0
COOPERATIVE, CLUSTER_DIMENSION = 2, 4  # CUlaunchAttributeID
SHARED_WITHOUT_ASKING = 48 * 1024  # bytes in a block, static and dynamic: CUDA C++ Programming Guide, 16.8.3 and before
MAX_BEST_BLOCKS = 4  # the length of fx_loaded.blocks
MAX_BLOCKS = 2**31 - 1  # in a grid's first dimension, on every device
MAX_BLOCKS_BEYOND = 65535  # in each of the others: CUDA C++ Programming Guide, 16.2, as the next three
MAX_THREADS = 1024  # in a block, and in each of its first two dimensions
MAX_THREADS_LAST = 64  # in its third
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has no context
MAX_PARAMETERS = 1024  # of a launch whose pointers to its parameters are on the stack

WORD, ZERO, ELEMENTS, JOINED = 0, 1, 2, 3
PARAMETER_WORD_SHIFT, PARAMETER_SIZE_SHIFT = 8, 32
SIGNED, UNSIGNED, FLOAT = 1, 2, 3
PLACE_WORD_SHIFT, PLACE_KEY_MASK = 32, (1 << 32) - 1
FROM_KIND_SHIFT, FROM_BITS_SHIFT, TO_KIND_SHIFT, TO_BITS_SHIFT = 24, 28, 36, 40

cuda_at = struct_at("fx_cuda")
loaded_at = struct_at("fx_loaded")
LOADED_SIZE = sizeof("fx_loaded")
launchable_at = struct_at("fx_launchable")
launcher_at = struct_at("fx_launcher")
LAUNCHER_WORDS = sizeof("fx_launcher") // 8
attribute_at = struct_at("fx_launch_attribute")
ATTRIBUTE_SIZE = sizeof("fx_launch_attribute")
config_at = struct_at("fx_launch_config")
CONFIG_WORDS = (sizeof("fx_launch_config") + 7) // 8


@native
def is_same_stream(stream, other):
    """Whether two ``CUstream`` handles mean the same stream: the legacy default stream has two. Python calls it, too."""
    return stream == other or (stream | other == LEGACY_STREAM and stream & other == 0)


def parameter(kind: int, word: int = 0, size: int = 0) -> int:
    """The code of a parameter."""
    return kind | word << PARAMETER_WORD_SHIFT | size << PARAMETER_SIZE_SHIFT


def conversion(word: int, given: tuple[int, int], taken: tuple[int, int]) -> int:
    """The code of a conversion; `given` and `taken` are (kind, bits)."""
    code = word | given[0] << FROM_KIND_SHIFT | given[1] << FROM_BITS_SHIFT
    return code | taken[0] << TO_KIND_SHIFT | taken[1] << TO_BITS_SHIFT

/* A stand-in for the CUDA driver: device memory is host memory; kernels are kept and their launches recorded, but none
 * runs.
 *
 * Handles are addresses of objects that are never freed, so that a stale handle is told from a live one. One lock
 * guards everything; a context is current per thread, as in the driver. What tests read is declared in record.h.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#pragma GCC visibility push(default)
#include "record.h"
#pragma GCC visibility pop

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void (*Function)(void); /* of any type */

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_STATE = 401,
    NOT_FOUND = 500, OUT_OF_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709, COOPERATIVE_TOO_LARGE = 720,
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903, CAPTURE_IMPLICIT = 906,
};

enum {
    MAX_DEVICES = 8, STACK = 64, ATTRIBUTES = 32, BUCKETS = 4096,
    SM_COUNT = 132, SHARED_DEFAULT = 49152, SHARED_OPTIN = 232448, SHARED_PER_SM = 233472, REGISTERS = 65536,
};
static const unsigned long long MEMORY = 80ull << 30;

/* Objects */

typedef enum { CONTEXT = 1, LIBRARY, KERNEL, MODULE, FUNCTION, STREAM, EVENT, POOL, GRAPH } Kind;

typedef struct Object {
    struct Object *next; /* in its bucket */
    Kind kind;
    int alive;
    struct Context *context; /* that owns it; NULL: none */
} Object;

typedef struct Context {
    Object object;
    int device, primary, retained, active; /* a primary one is active from its first retaining to a reset */
    unsigned flags;
    unsigned long long id;
} Context;

typedef struct Global {
    struct Global *next;
    char *name;
    unsigned long long size;
    const unsigned char *content; /* NULL: zeros */
    CUdeviceptr place[MAX_DEVICES];
} Global;

typedef struct Library {
    Object object;
    unsigned char *image;
    unsigned long long image_size;
    int architecture; /* 90 */
    struct Kernel *kernels;
    unsigned kernel_count;
    Global *globals;
    unsigned long long constant;
    struct Module *modules; /* one per context that asked for it */
} Library;

typedef struct Kernel {
    Object object;
    struct Kernel *next;
    Library *library;
    char *name;
    stub_parameter *parameters;
    unsigned parameter_count, size; /* size of the whole parameter space */
    int registers, max_threads;
    unsigned shared, local;
    int values[MAX_DEVICES][ATTRIBUTES];
    struct Handle *functions;
} Kernel;

typedef struct Module {
    Object object;
    struct Module *next;
    Library *library;
    int owner; /* made by cuModuleLoad*: unloading it unloads the library */
} Module;

typedef struct Handle { /* a CUfunction: a kernel in a context */
    Object object;
    struct Handle *next;
    Kernel *kernel;
    Module *module;
    int values[ATTRIBUTES];
    unsigned set; /* a bit per attribute set on this handle: it goes before the kernel's */
} Handle;

typedef struct Graph {
    Object object;
    int mode, invalid;
    unsigned long long id;
    long thread;
    struct Stream *origin; /* NULL: ended */
    unsigned nodes;
} Graph;

typedef struct Stream {
    Object object;
    struct Stream *next;
    unsigned flags;
    unsigned long long id;
    Graph *graph; /* that captures it */
} Stream;

typedef struct Event {
    Object object;
    unsigned flags;
    int recorded;
    long time;    /* of the record, counted in log entries */
    Graph *graph; /* that captured its record */
} Event;

typedef struct Pool {
    Object object;
    int device;
    unsigned long long threshold, settings[4], used, high;
} Pool;

enum { HOST = 1, DEVICE = 2 }; /* CUmemorytype */
typedef struct {
    CUdeviceptr base;
    unsigned long long size, id;
    int type, device, managed;
    unsigned flags;
    Context *context;
    Pool *pool;
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized, forked, device_count = 2, driver_version = 13000;
static int capability[MAX_DEVICES][2];
static Context *primaries[MAX_DEVICES];
static Pool *default_pools[MAX_DEVICES], *current_pools[MAX_DEVICES];
static Object *buckets[BUCKETS];
static Stream *streams;
static unsigned long long next_id = 1, used[MAX_DEVICES];
static int occupancy_grid = 264, occupancy_block = 256;
static _Thread_local Context *stack[STACK];
static _Thread_local int depth;

#define LIST(type, name) static struct { type *items; long count, capacity; } name
#define APPEND(list, item) do { \
        if ((list).count == (list).capacity) { \
            (list).capacity = (list).capacity ? 2 * (list).capacity : 64; \
            (list).items = must(realloc((list).items, (size_t)(list).capacity * sizeof *(list).items)); \
        } \
        (list).items[(list).count++] = (item); \
    } while (0)

LIST(stub_launch *, launches);
LIST(stub_entry, entries);
LIST(const char *, trace);
LIST(const char *, failed);
LIST(Allocation, allocations); /* by base, rising */

static void *must(void *memory)
{
    if (!memory) {
        fputs("the driver stub is out of memory\n", stderr);
        abort();
    }
    return memory;
}

static size_t bucket(const void *handle) { return ((uintptr_t)handle >> 4) % BUCKETS; }

static void *new_object(Kind kind, size_t size, Context *context)
{
    Object *object = must(calloc(1, size));
    object->kind = kind;
    object->alive = 1;
    object->context = context;
    size_t place = bucket(object);
    object->next = buckets[place];
    buckets[place] = object;
    return object;
}
#define NEW(kind, type, context) ((type *)new_object(kind, sizeof(type), context))

/* The live object of that kind at that address; NULL: none. */
static void *find(const void *handle, Kind kind)
{
    for (Object *object = buckets[bucket(handle)]; object; object = object->next)
        if (object == handle)
            return object->kind == kind && object->alive ? object : NULL;
    return NULL;
}

static long thread_id(void) { return (long)syscall(SYS_gettid); }

/* Errors: injected and sticky */

typedef struct Fault {
    struct Fault *next;
    char *name;
    int code, sticky;
    long after;
} Fault;

static Fault *faults;
static int sticky_code, tracing, watched; /* watched: any of the three asks for the slow way in */
static volatile int fast;
static volatile long fast_count;

static void watch(void) { watched = faults || sticky_code || tracing; }

/* Whether `function` is `name`, with or without its version: cuMemAlloc_v2 is cuMemAlloc. */
static int same_name(const char *function, const char *name)
{
    size_t length = strlen(name);
    return !strncmp(function, name, length) && (!function[length] || !strncmp(function + length, "_v", 2));
}

static CUresult injected(const char *function)
{
    if (tracing)
        APPEND(trace, function);
    if (sticky_code)
        return sticky_code;
    for (Fault **place = &faults; *place; place = &(*place)->next) {
        Fault *fault = *place;
        if (!same_name(function, fault->name) || fault->after-- > 0)
            continue;
        int code = fault->code;
        if (fault->sticky)
            sticky_code = code;
        *place = fault->next;
        free(fault->name);
        free(fault);
        watch();
        return code;
    }
    return SUCCESS;
}

static CUresult enter(const char *function, int anytime)
{
    pthread_mutex_lock(&lock);
    CUresult result = watched ? injected(function) : SUCCESS;
    if (!result && !initialized && !anytime)
        result = NOT_INITIALIZED;
    if (result)
        pthread_mutex_unlock(&lock);
    return result;
}

/* Every function of the driver begins with one of these, and ends with LEAVE: the lock is held between them. */
#define ENTER_WITH(anytime) do { CUresult code_ = enter(__func__, anytime); if (code_) return code_; } while (0)
#define ENTER ENTER_WITH(0)
#define LEAVE(result) do { \
        CUresult code_ = (result); \
        if (code_) \
            APPEND(failed, __func__); \
        pthread_mutex_unlock(&lock); \
        return code_; \
    } while (0)
#define CHECK(condition, error) do { if (!(condition)) LEAVE(error); } while (0)
#define TRY(expression) do { CUresult tried_ = (expression); CHECK(!tried_, tried_); } while (0)

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

static int live(const Context *context) { return context->object.alive && (!context->primary || context->active); }

static CUresult check_current(void)
{
    Context *context = current();
    return !context ? INVALID_CONTEXT : !live(context) ? CONTEXT_IS_DESTROYED : SUCCESS;
}
#define ENTER_CONTEXT ENTER; TRY(check_current()); Context *context = current()

static int valid_device(int device) { return device >= 0 && device < device_count; }

/* Streams: 0 and 1 are the legacy default stream, 2 the thread's; they belong to the current context. */

typedef struct { Stream *stream; Context *context; Graph *graph; } Target;

static CUresult to_stream(void *handle, Target *target)
{
    *target = (Target){0};
    if ((uintptr_t)handle <= 2) {
        CUresult result = check_current();
        if (result)
            return result;
        target->context = current();
        if ((uintptr_t)handle <= 1) /* the legacy stream waits for every blocking stream: not while one is captured */
            for (Stream *stream = streams; stream; stream = stream->next)
                if (stream->object.alive && stream->object.context == target->context && stream->graph
                    && !(stream->flags & 1) && stream->graph->mode != 2) {
                    stream->graph->invalid = 1;
                    return CAPTURE_IMPLICIT;
                }
        return SUCCESS;
    }
    Stream *stream = find(handle, STREAM);
    if (!stream)
        return INVALID_HANDLE;
    target->stream = stream;
    target->context = stream->object.context;
    target->graph = stream->graph;
    return target->graph && target->graph->invalid ? CAPTURE_INVALIDATED : SUCCESS;
}

/* Calls that may not happen while a stream is captured (unless its mode is relaxed). */
static CUresult not_capturing(void)
{
    for (Stream *stream = streams; stream; stream = stream->next) {
        Graph *graph = stream->object.alive ? stream->graph : NULL;
        if (!graph || graph->mode == 2 || (graph->mode == 1 && graph->thread != thread_id()))
            continue;
        graph->invalid = 1;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

static stub_entry *note(const char *api, const Target *target, void *stream)
{
    stub_entry entry = {.api = api, .launch = -1, .thread = thread_id(), .stream = stream};
    if (target) {
        entry.context = target->context;
        entry.graph = target->graph;
        if (target->graph)
            target->graph->nodes++;
    } else {
        entry.context = current();
    }
    APPEND(entries, entry);
    return &entries.items[entries.count - 1];
}

/* Start */

static void after_fork(void)
{
    forked = initialized;
    initialized = 0;
    pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void prepare(void)
{
    const char *text = getenv("CUDA_STUB_DEVICES");
    if (text)
        stub_set_devices(atoi(text));
    for (int device = 0; device < MAX_DEVICES; device++) {
        capability[device][0] = 9;
        capability[device][1] = 0;
    }
    text = getenv("CUDA_STUB_CAPABILITIES"); /* 9.0,8.0 */
    for (int device = 0; text && *text && device < MAX_DEVICES; device++) {
        int major, minor;
        if (sscanf(text, "%d.%d", &major, &minor) != 2)
            break;
        stub_set_capability(device, major, minor);
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    pthread_atfork(NULL, NULL, after_fork);
}

static Pool *new_pool(int device)
{
    Pool *pool = NEW(POOL, Pool, NULL);
    pool->device = device;
    for (int setting = 1; setting <= 3; setting++)
        pool->settings[setting] = 1;
    return pool;
}

EXPORT CUresult cuInit(unsigned flags)
{
    ENTER_WITH(1);
    CHECK(!flags, INVALID_VALUE);
    CHECK(!forked, NOT_INITIALIZED);
    CHECK(device_count, NO_DEVICE);
    for (int device = 0; device < device_count && !initialized; device++) {
        Context *context = primaries[device] = NEW(CONTEXT, Context, NULL);
        context->device = device;
        context->primary = 1;
        context->id = next_id++;
            default_pools[device] = current_pools[device] = new_pool(device);
    }
    initialized = 1;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    ENTER_WITH(1);
    CHECK(version, INVALID_VALUE);
    *version = driver_version;
    LEAVE(SUCCESS);
}

static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "the library is a stub"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "invalid kernel image"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access not supported"},
    {218, "CUDA_ERROR_INVALID_PTX", "PTX could not be compiled"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX of an unsupported version"},
    {300, "CUDA_ERROR_INVALID_SOURCE", "invalid kernel source"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "symbol of a shared object not found"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "call to the operating system failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "illegal state"},
    {500, "CUDA_ERROR_NOT_FOUND", "symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for a launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "launch timed out"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access not enabled"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "primary context in use"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host memory already registered"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory not registered"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "illegal instruction"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in a cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not ready"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is captured"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture invalidated by an earlier error"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "merge of two captures"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture not begun in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capture with work that was not joined"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency across a capture's boundary"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "implicit dependency on the legacy stream in a capture"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "not permitted on an event last recorded in a capture"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture ended by another thread"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
    {913, "CUDA_ERROR_FUNCTION_NOT_LOADED", "function not loaded"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult error_text(int code, int name, const char **text)
{
    if (!text)
        return INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *text = name ? errors[i].name : errors[i].text;
    return *text ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **text) { return error_text(code, 1, text); }

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) { return error_text(code, 0, text); }

/* Devices */

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER;
    CHECK(count, INVALID_VALUE);
    *count = device_count;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER;
    CHECK(device, INVALID_VALUE);
    CHECK(valid_device(ordinal), INVALID_DEVICE);
    *device = ordinal;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(name && length > 0, INVALID_VALUE);
    snprintf(name, (size_t)length, "Stub device %d", device);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(uuid, INVALID_VALUE);
    memset(uuid, 0x50, 16);
    uuid[15] = (unsigned char)device;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(bytes, INVALID_VALUE);
    *bytes = MEMORY;
    LEAVE(SUCCESS);
}

enum { LAST_ATTRIBUTE = 161 };
static const int attributes[LAST_ATTRIBUTE + 1] = { /* the numbers of CUdevice_attribute; those not named are 0 */
    [1] = 1024, [2] = 1024, [3] = 1024, [4] = 64, [5] = 2147483647, [6] = 65535, [7] = 65535, [8] = SHARED_DEFAULT,
    [9] = 65536, [10] = 32, [11] = 2147483647, [12] = REGISTERS, [13] = 1980000, [14] = 512, [15] = 1, [16] = SM_COUNT,
    [19] = 1, [21] = 131072, [22] = 131072, [23] = 65536, [24] = 16384, [25] = 16384, [26] = 16384, [27] = 32768,
    [28] = 32768, [29] = 2048, [30] = 512, [31] = 1, [32] = 1, [36] = 2619000, [37] = 5120, [38] = 52428800,
    [39] = 2048, [40] = 3, [41] = 1, [42] = 32768, [43] = 2048, [45] = 32768, [46] = 32768, [47] = 16384, [48] = 16384,
    [49] = 16384, [51] = 32, [52] = 32768, [53] = 32768, [54] = 2046, [55] = 32768, [56] = 131072, [57] = 65536,
    [58] = 16384, [59] = 16384, [60] = 16384, [61] = 32768, [62] = 2048, [63] = 32768, [64] = 32768, [65] = 2048,
    [66] = 32768, [67] = 32768, [68] = 2046, [69] = 268435456, [70] = 131072, [71] = 65000, [72] = 2097120,
    [73] = 32768, [74] = 32768, [77] = 32768, [78] = 1, [79] = 1, [80] = 1, [81] = SHARED_PER_SM, [82] = REGISTERS,
    [83] = 1, [87] = 2, [89] = 1, [90] = 1, [91] = 1, [92] = 1, [93] = 1, [94] = 1, [95] = 1, [97] = SHARED_OPTIN,
    [98] = 1, [99] = 1, [102] = 1, [103] = 1, [106] = 32, [107] = 1, [108] = 32768000, [109] = 134213632, [110] = 1,
    [111] = 1024, [112] = 1, [113] = 1, [114] = 1, [115] = 1, [116] = 1, [117] = 1, [118] = 100, [119] = 1, [120] = 1, [121] = 1,
    [122] = 1, [123] = 1, [124] = 1, [125] = 1, [126] = 4, [127] = 1, [129] = 1, [131] = -1,
};

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER;
    CHECK(value && attribute >= 1 && attribute <= LAST_ATTRIBUTE, INVALID_VALUE);
    CHECK(valid_device(device), INVALID_DEVICE);
    *value = attribute == 33 ? device + 1 : attribute == 75 || attribute == 76 ? capability[device][attribute - 75]
        : attributes[attribute];
    LEAVE(SUCCESS);
}

/* Memory */

static Allocation *allocation_of(CUdeviceptr pointer)
{
    long low = 0, high = allocations.count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (allocations.items[middle].base <= pointer)
            low = middle + 1;
        else
            high = middle;
    }
    Allocation *allocation = low ? &allocations.items[low - 1] : NULL;
    return allocation && pointer - allocation->base < allocation->size ? allocation : NULL;
}

static void keep(Allocation allocation)
{
    allocation.id = next_id++;
    APPEND(allocations, allocation);
    long place = allocations.count - 1;
    for (; place && allocations.items[place - 1].base > allocation.base; place--)
        allocations.items[place] = allocations.items[place - 1];
    allocations.items[place] = allocation;
}

static CUresult allocate(CUdeviceptr *pointer, unsigned long long size, Allocation allocation)
{
    if (!pointer || !size)
        return INVALID_VALUE;
    if (allocation.type == DEVICE && size > MEMORY - used[allocation.device])
        return OUT_OF_MEMORY;
    void *memory;
    if (posix_memalign(&memory, 512, size))
        return OUT_OF_MEMORY;
    allocation.base = (uintptr_t)memory;
    allocation.size = size;
    keep(allocation);
    if (allocation.type == DEVICE)
        used[allocation.device] += size;
    if (allocation.pool) {
        allocation.pool->used += size;
        if (allocation.pool->used > allocation.pool->high)
            allocation.pool->high = allocation.pool->used;
    }
    *pointer = allocation.base;
    return SUCCESS;
}

static void forget(Allocation *allocation)
{
    if (allocation->type == DEVICE)
        used[allocation->device] -= allocation->size;
    if (allocation->pool)
        allocation->pool->used -= allocation->size;
    free((void *)(uintptr_t)allocation->base);
    long place = allocation - allocations.items;
    memmove(allocation, allocation + 1, (size_t)(--allocations.count - place) * sizeof *allocation);
}

/* Frees the allocation that begins at `pointer`, if it is of that type. */
static CUresult release(CUdeviceptr pointer, int type)
{
    Allocation *allocation = allocation_of(pointer);
    if (!allocation || allocation->base != pointer || allocation->type != type)
        return INVALID_VALUE;
    forget(allocation);
    return SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
    ENTER_CONTEXT;
    TRY(not_capturing());
    LEAVE(allocate(pointer, size, (Allocation){.type = DEVICE, .device = context->device, .context = context}));
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags)
{
    ENTER_CONTEXT;
    TRY(not_capturing());
    CHECK(flags == 1 || flags == 2, INVALID_VALUE);
    LEAVE(allocate(pointer, size, (Allocation){
        .type = DEVICE, .device = context->device, .context = context, .managed = 1, .flags = flags}));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) /* in any context, or none */
{
    ENTER;
    TRY(not_capturing());
    CHECK(pointer, SUCCESS);
    TRY(release(pointer, DEVICE));
    note("cuMemFree", NULL, NULL)->destination = pointer;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemHostAlloc(void **memory, size_t size, unsigned flags)
{
    ENTER_CONTEXT;
    TRY(not_capturing());
    CHECK(memory, INVALID_VALUE);
    CUdeviceptr pointer;
    TRY(allocate(&pointer, size, (Allocation){
        .type = HOST, .device = context->device, .context = context, .flags = flags}));
    *memory = (void *)(uintptr_t)pointer;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemFreeHost(void *memory)
{
    ENTER_CONTEXT;
    (void)context;
    TRY(not_capturing());
    LEAVE(release((uintptr_t)memory, HOST));
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *memory, unsigned flags)
{
    ENTER_CONTEXT;
    (void)context;
    Allocation *allocation = allocation_of((uintptr_t)memory);
    CHECK(pointer && !flags && allocation && allocation->type == HOST, INVALID_VALUE);
    *pointer = (uintptr_t)memory;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    ENTER_CONTEXT;
    CHECK(available && total, INVALID_VALUE);
    *available = MEMORY - used[context->device];
    *total = MEMORY;
    LEAVE(SUCCESS);
}

/* Answers one CU_POINTER_ATTRIBUTE_*; for memory that the driver does not know, what cuPointerGetAttributes answers. */
static CUresult pointer_attribute(void *data, int attribute, const Allocation *allocation, CUdeviceptr pointer)
{
    static const unsigned char sizes[] = {0, 8, 4, 8, 8, 16, 1, 8, 1, 4, 1, 8, 8, 1, 8, 1, 4, 8, 8, 8, 8, 1};
    if (attribute < 1 || attribute >= (int)sizeof sizes)
        return INVALID_VALUE;
    unsigned long long value = 0;
    if (!allocation) {
        value = attribute == 9 ? (unsigned)-2 : 0;
    } else switch (attribute) {
        case 1: value = (uintptr_t)(allocation->pool ? NULL : allocation->context); break;
        case 2: value = (unsigned)allocation->type; break;
        case 3: value = pointer; break;
        case 4:
            if (allocation->type == DEVICE && !allocation->managed)
                return INVALID_VALUE;
            value = pointer;
            break;
        case 7: value = allocation->id; break;
        case 8: value = (unsigned)allocation->managed; break;
        case 9: value = (unsigned)allocation->device; break;
        case 10: value = allocation->type == DEVICE && !allocation->managed && !allocation->pool; break;
        case 11: value = allocation->base; break;
        case 12: case 18: value = allocation->size; break;
        case 13: value = 1; break;
        case 16: value = 3; break; /* readable and writable */
        case 17: value = (uintptr_t)allocation->pool; break;
        case 19: value = allocation->base; break;
        case 20: value = allocation->id; break;
        default: break;
    }
    memset(data, 0, sizes[attribute]);
    memcpy(data, &value, sizes[attribute] < 8 ? sizes[attribute] : 8); /* little-endian */
    return SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    ENTER_CONTEXT;
    (void)context;
    Allocation *allocation = allocation_of(pointer);
    CHECK(data && allocation, INVALID_VALUE);
    LEAVE(pointer_attribute(data, attribute, allocation, pointer));
}

enum { ANY, TO = 1, FROM = 2 }; /* which ends must be the driver's memory */

static int reachable(CUdeviceptr pointer, unsigned long long size)
{
    Allocation *allocation = allocation_of(pointer);
    return allocation && size <= allocation->size - (pointer - allocation->base);
}

static CUresult copy(const char *api, CUdeviceptr to, CUdeviceptr from, size_t size, int ends, int async, void *stream)
{
    Target target;
    CUresult result = to_stream(stream, &target);
    if (!result && !async)
        result = not_capturing();
    if (result)
        return result;
    if (size && (!to || !from || ((ends & TO) && !reachable(to, size)) || ((ends & FROM) && !reachable(from, size))))
        return INVALID_VALUE;
    if (size)
        memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    stub_entry *entry = note(api, &target, stream);
    entry->destination = to;
    entry->source = from;
    entry->size = size;
    return SUCCESS;
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    ENTER;
    LEAVE(copy("cuMemcpyHtoD", to, (uintptr_t)from, size, TO, 0, NULL));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, void *stream)
{
    ENTER;
    LEAVE(copy("cuMemcpyHtoDAsync", to, (uintptr_t)from, size, TO, 1, stream));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    ENTER;
    LEAVE(copy("cuMemcpyDtoH", (uintptr_t)to, from, size, FROM, 0, NULL));
}

static CUresult fill(const char *api, CUdeviceptr to, const void *value, size_t width, size_t count, int async,
                     void *stream)
{
    Target target;
    CUresult result = to_stream(stream, &target);
    if (!result && !async)
        result = not_capturing();
    if (result)
        return result;
    if (count && (to % width || !reachable(to, width * count)))
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        memcpy((char *)(uintptr_t)to + i * width, value, width);
    stub_entry *entry = note(api, &target, stream);
    entry->destination = to;
    entry->size = width * count;
    return SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void *stream)
{
    ENTER;
    LEAVE(fill("cuMemsetD8Async", to, &value, 1, count, 1, stream));
}

/* Memory pools */

typedef struct { int type, id; } Location;
typedef struct {
    int allocation, handles;
    Location location;
    void *security;
    size_t most;
    unsigned char rest[56];
} PoolProperties;
typedef struct { Location location; int flags; } Access;

static CUresult pool_allocate(const char *api, CUdeviceptr *pointer, size_t size, Pool *pool, void *stream)
{
    Target target;
    CUresult result = to_stream(stream, &target);
    if (result)
        return result;
    if (!pool)
        pool = current_pools[target.context->device];
    result = allocate(pointer, size, (Allocation){
        .type = DEVICE, .device = pool->device, .context = target.context, .pool = pool});
    if (result)
        return result;
    stub_entry *entry = note(api, &target, stream);
    entry->destination = *pointer;
    entry->size = size;
    return SUCCESS;
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size, void *pool, void *stream)
{
    ENTER;
    CHECK(find(pool, POOL), INVALID_VALUE);
    LEAVE(pool_allocate("cuMemAllocFromPoolAsync", pointer, size, pool, stream));
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, void *stream)
{
    ENTER;
    Target target;
    TRY(to_stream(stream, &target));
    TRY(release(pointer, DEVICE));
    note("cuMemFreeAsync", &target, stream)->destination = pointer;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemPoolGetAttribute(void *handle, int attribute, void *value)
{
    ENTER;
    Pool *pool = find(handle, POOL);
    CHECK(pool && value, INVALID_VALUE);
    switch (attribute) {
        case 1: case 2: case 3: *(int *)value = (int)pool->settings[attribute]; break;
        case 4: *(unsigned long long *)value = pool->threshold; break;
        case 5: case 7: *(unsigned long long *)value = pool->used; break;
        case 6: case 8: *(unsigned long long *)value = pool->high; break;
        case 9: *(int *)value = 1; break; /* pinned */
        case 10: *(int *)value = 0; break;
        case 11: *(int *)value = pool->device; break;
        case 12: *(int *)value = 1; break; /* a device */
        default: LEAVE(INVALID_VALUE);
    }
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemPoolSetAttribute(void *handle, int attribute, const void *value)
{
    ENTER;
    Pool *pool = find(handle, POOL);
    CHECK(pool && value, INVALID_VALUE);
    switch (attribute) {
        case 1: case 2: case 3: pool->settings[attribute] = *(const int *)value != 0; break;
        case 4: pool->threshold = *(const unsigned long long *)value; break;
        case 6: case 8: pool->high = pool->used; break;
        default: LEAVE(INVALID_VALUE);
    }
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceGetMemPool(void **pool, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(pool, INVALID_VALUE);
    *pool = current_pools[device];
    LEAVE(SUCCESS);
}

/* Contexts */

/* Ends all that belongs to the context: streams, events, modules, functions, memory. */
static void empty(Context *context)
{
    for (size_t place = 0; place < BUCKETS; place++)
        for (Object *object = buckets[place]; object; object = object->next)
            if (object->context == context)
                object->alive = 0;
    for (long i = allocations.count - 1; i >= 0; i--)
        if (allocations.items[i].context == context && !allocations.items[i].pool)
            forget(&allocations.items[i]);
}

static void reset(Context *context)
{
    empty(context);
    context->active = 0;
    context->id = next_id++;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(context, INVALID_VALUE);
    primaries[device]->retained++;
    primaries[device]->active = 1;
    *context = primaries[device];
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(primaries[device]->retained, INVALID_CONTEXT);
    if (!--primaries[device]->retained)
        reset(primaries[device]);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    reset(primaries[device]); /* it stays retained, and is active again when it is retained once more */
    LEAVE(SUCCESS);
}

static CUresult create_context(void **handle, unsigned flags, CUdevice device)
{
    if (!handle)
        return INVALID_VALUE;
    if (!valid_device(device))
        return INVALID_DEVICE;
    if (depth == STACK)
        return INVALID_VALUE;
    Context *context = NEW(CONTEXT, Context, NULL);
    context->device = device;
    context->flags = flags;
    context->id = next_id++;
    *handle = stack[depth++] = context;
    return SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(void **context, unsigned flags, CUdevice device)
{
    ENTER;
    LEAVE(create_context(context, flags, device));
}

EXPORT CUresult cuCtxCreate_v4(void **context, const void *parameters, unsigned flags, CUdevice device)
{
    ENTER;
    (void)parameters;
    LEAVE(create_context(context, flags, device));
}

EXPORT CUresult cuCtxDestroy_v2(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context && !context->primary, INVALID_CONTEXT);
    empty(context);
    context->object.alive = 0;
    if (current() == context)
        depth--;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(void **context)
{
    ENTER;
    CHECK(context, INVALID_VALUE);
    *context = current();
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context || !handle, INVALID_CONTEXT);
    if (!handle)
        depth -= depth > 0; /* takes the top off */
    else
        stack[depth ? depth - 1 : depth++] = context; /* replaces the top */
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent_v2(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context, INVALID_CONTEXT);
    CHECK(depth < STACK, INVALID_VALUE);
    stack[depth++] = context;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxPopCurrent_v2(void **context)
{
    ENTER;
    CHECK(depth, INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER_CONTEXT;
    CHECK(device, INVALID_VALUE);
    *device = context->device;
    LEAVE(SUCCESS);
}

/* The context given, or with NULL the current one. */
EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER_CONTEXT;
    (void)context;
    TRY(not_capturing());
    note(__func__, NULL, NULL);
    LEAVE(SUCCESS);
}

/* Code: a cubin is an ELF file with a section .text.K and a section .nv.info.K per kernel K. */

enum { INFO_REGISTERS = 0x2f, INFO_FRAME = 0x11, INFO_PARAMETER = 0x17, INFO_LONG_PARAMETER = 0x45, INFO_MAX_THREADS = 0x05, INFO_SIZE = 0x19 };

static unsigned word(const unsigned char *at, int bytes)
{
    unsigned value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

static void set_parameter(Kernel *kernel, unsigned ordinal, unsigned offset, unsigned size)
{
    if (ordinal >= kernel->parameter_count) {
        kernel->parameters = must(realloc(kernel->parameters, (ordinal + 1) * sizeof *kernel->parameters));
        memset(kernel->parameters + kernel->parameter_count, 0,
               (ordinal + 1 - kernel->parameter_count) * sizeof *kernel->parameters);
        kernel->parameter_count = ordinal + 1;
    }
    kernel->parameters[ordinal] = (stub_parameter){offset, size};
    if (offset + size > kernel->size)
        kernel->size = offset + size;
}

static Kernel *kernel_named(const Library *library, const char *name)
{
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name))
            return kernel;
    return NULL;
}

/* Reads one section of attributes: a kernel's own, or with NULL the file's, which name their kernel by symbol. */
static void read_info(Library *library, Kernel *own, const unsigned char *at, size_t size, const Elf64_Sym *symbols,
                      size_t symbol_count, const char *names)
{
    for (const unsigned char *end = at + size; at + 4 <= end;) {
        unsigned format = at[0], attribute = at[1], value = word(at + 2, 2);
        const unsigned char *data = at + 4;
        at = data + (format == 4 ? value : 0);
        if (at > end)
            return;
        if (!own && format == 4 && value == 8 && (attribute == INFO_REGISTERS || attribute == INFO_FRAME)) {
            unsigned symbol = word(data, 4);
            Kernel *kernel = symbol < symbol_count ? kernel_named(library, names + symbols[symbol].st_name) : NULL;
            if (kernel && attribute == INFO_REGISTERS)
                kernel->registers = (int)word(data + 4, 4);
            else if (kernel)
                kernel->local = word(data + 4, 4);
        } else if (own && attribute == INFO_PARAMETER && format == 4 && value >= 12) {
            set_parameter(own, word(data + 4, 2), word(data + 6, 2), word(data + 8, 4) >> 18);
        } else if (own && attribute == INFO_LONG_PARAMETER && format == 4 && value >= 12) { /* above 4 KB of parameters */
            set_parameter(own, word(data + 4, 2), word(data + 6, 2), word(data + 8, 4));
        } else if (own && attribute == INFO_SIZE && value > own->size) {
            own->size = value;
        } else if (own && attribute == INFO_MAX_THREADS && format == 4 && value >= 12) {
            int threads = (int)(word(data, 4) * word(data + 4, 4) * word(data + 8, 4));
            if (threads > 0 && threads < own->max_threads)
                own->max_threads = threads;
        }
    }
}

static const char *after_prefix(const char *text, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) ? NULL : text + length;
}

/* The size of the ELF image at `code`; 0: it is none. */
static size_t image_size(const void *code)
{
    const Elf64_Ehdr *header = code;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != 190)
        return 0; /* 190: EM_CUDA */
    size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    const Elf64_Shdr *sections = (const void *)((const char *)code + header->e_shoff);
    size = programs > size ? programs : size;
    for (unsigned i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > size)
            size = sections[i].sh_offset + sections[i].sh_size;
    return size;
}

static void add_global(Library *library, const char *name, const Elf64_Sym *symbol, const Elf64_Shdr *section)
{
    Global *global = must(calloc(1, sizeof *global));
    global->name = must(strdup(name));
    global->size = symbol->st_size;
    if (section->sh_type != SHT_NOBITS)
        global->content = library->image + section->sh_offset + symbol->st_value;
    global->next = library->globals;
    library->globals = global;
}

static CUresult load(Library **result, const void *code)
{
    size_t size = code ? image_size(code) : 0;
    if (!size)
        return code ? INVALID_IMAGE : INVALID_VALUE;
    Library *library = NEW(LIBRARY, Library, NULL);
    library->image = must(malloc(size));
    library->image_size = size;
    memcpy(library->image, code, size);
    const Elf64_Ehdr *header = (const void *)library->image;
    const Elf64_Shdr *sections = (const void *)(library->image + header->e_shoff);
    const char *names = (const char *)library->image + sections[header->e_shstrndx].sh_offset;
    const Elf64_Sym *symbols = NULL;
    const char *symbol_names = NULL;
    size_t symbol_count = 0;
    Kernel **last = &library->kernels;
    for (unsigned i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type == SHT_SYMTAB) {
            symbols = (const void *)(library->image + sections[i].sh_offset);
            symbol_count = sections[i].sh_size / sizeof *symbols;
            symbol_names = (const char *)library->image + sections[sections[i].sh_link].sh_offset;
        }
    for (size_t i = 0; i < symbol_count; i++) {
        if (!symbols[i].st_shndx || symbols[i].st_shndx >= header->e_shnum)
            continue;
        const Elf64_Shdr *section = &sections[symbols[i].st_shndx];
        const char *name = symbol_names + symbols[i].st_name, *in = names + section->sh_name;
        int type = ELF64_ST_TYPE(symbols[i].st_info);
        if (type == STT_OBJECT && (after_prefix(in, ".nv.global") || !strcmp(in, ".nv.constant3")))
            add_global(library, name, &symbols[i], section);
        if (type != STT_FUNC || !(symbols[i].st_other & 0x10)) /* 0x10: an entry */
            continue;
        Kernel *kernel = NEW(KERNEL, Kernel, NULL);
        kernel->library = library;
        kernel->name = must(strdup(name));
        kernel->max_threads = 1024;
        *last = kernel;
        last = &kernel->next;
        library->kernel_count++;
    }
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name, *rest;
        Kernel *kernel;
        if (!strcmp(name, ".nv.info"))
            read_info(library, NULL, library->image + sections[i].sh_offset, sections[i].sh_size, symbols, symbol_count,
                      symbol_names);
        else if ((rest = after_prefix(name, ".nv.info.")) && (kernel = kernel_named(library, rest)))
            read_info(library, kernel, library->image + sections[i].sh_offset, sections[i].sh_size, symbols,
                      symbol_count, symbol_names);
        else if ((rest = after_prefix(name, ".nv.shared.")) && (kernel = kernel_named(library, rest)))
            kernel->shared = (unsigned)sections[i].sh_size;
        else if (!strcmp(name, ".nv.constant3"))
            library->constant = sections[i].sh_size;
    }
    library->architecture = (int)(header->e_flags >> 8 & 0xff) >= 50 ? (int)(header->e_flags >> 8 & 0xff)
        : (int)(header->e_flags & 0xff);
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        for (int device = 0; device < MAX_DEVICES; device++) {
            kernel->values[device][8] = SHARED_DEFAULT - (int)kernel->shared;
            kernel->values[device][9] = -1; /* carveout: the driver's choice */
        }
    *result = library;
    return SUCCESS;
}

static Module *module_in(Library *library, Context *context)
{
    for (Module *module = library->modules; module; module = module->next)
        if (module->object.alive && module->object.context == context)
            return module;
    Module *module = NEW(MODULE, Module, context);
    module->library = library;
    module->next = library->modules;
    return library->modules = module;
}

static Handle *function_in(Kernel *kernel, Context *context)
{
    for (Handle *function = kernel->functions; function; function = function->next)
        if (function->object.alive && function->object.context == context)
            return function;
    Handle *function = NEW(FUNCTION, Handle, context);
    function->kernel = kernel;
    function->module = module_in(kernel->library, context);
    function->next = kernel->functions;
    return kernel->functions = function;
}

static void unload(Library *library)
{
    library->object.alive = 0;
    for (Module *module = library->modules; module; module = module->next)
        module->object.alive = 0;
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
        kernel->object.alive = 0;
        for (Handle *function = kernel->functions; function; function = function->next)
            function->object.alive = 0;
    }
    for (Global *global = library->globals; global; global = global->next)
        for (int device = 0; device < MAX_DEVICES; device++) {
            Allocation *allocation = global->place[device] ? allocation_of(global->place[device]) : NULL;
            if (allocation)
                forget(allocation);
        }
}

EXPORT CUresult cuLibraryLoadData(void **result, const void *code, int *options, void **option_values, unsigned count,
                                  int *library_options, void **library_values, unsigned library_count)
{
    ENTER;
    (void)options, (void)option_values, (void)count, (void)library_options, (void)library_values, (void)library_count;
    CHECK(result, INVALID_VALUE);
    Library *library;
    TRY(load(&library, code));
    *result = library;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryUnload(void *handle)
{
    ENTER;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    unload(library);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryGetKernel(void **result, void *handle, const char *name)
{
    ENTER;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    CHECK(result && name, INVALID_VALUE);
    Kernel *kernel = kernel_named(library, name);
    CHECK(kernel, NOT_FOUND);
    *result = kernel;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryGetModule(void **result, void *handle)
{
    ENTER_CONTEXT;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    CHECK(result, INVALID_VALUE);
    *result = module_in(library, context);
    LEAVE(SUCCESS);
}

static CUresult get_global(CUdeviceptr *pointer, size_t *size, Library *library, const char *name, Context *context)
{
    if (!name)
        return INVALID_VALUE;
    for (Global *global = library->globals; global; global = global->next) {
        if (strcmp(global->name, name))
            continue;
        CUdeviceptr *place = &global->place[context->device];
        if (!*place) {
            CUresult result = allocate(place, global->size, (Allocation){
                .type = DEVICE, .device = context->device, .context = context});
            if (result)
                return result;
            if (global->content)
                memcpy((void *)(uintptr_t)*place, global->content, global->size);
            else
                memset((void *)(uintptr_t)*place, 0, global->size);
        }
        if (pointer)
            *pointer = *place;
        if (size)
            *size = global->size;
        return SUCCESS;
    }
    return NOT_FOUND;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *size, void *handle, const char *name)
{
    ENTER_CONTEXT;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    LEAVE(get_global(pointer, size, library, name, context));
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *size, void *handle, const char *name)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module, INVALID_HANDLE);
    LEAVE(get_global(pointer, size, module->library, name, module->object.context));
}

static CUresult load_module(void **result, const void *code, Context *context)
{
    if (!result)
        return INVALID_VALUE;
    Library *library;
    CUresult code_of = load(&library, code);
    if (code_of)
        return code_of;
    Module *module = module_in(library, context);
    module->owner = 1;
    *result = module;
    return SUCCESS;
}

EXPORT CUresult cuModuleLoadData(void **result, const void *code)
{
    ENTER_CONTEXT;
    TRY(not_capturing());
    LEAVE(load_module(result, code, context));
}

EXPORT CUresult cuModuleUnload(void *handle)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module && module->owner, INVALID_HANDLE);
    unload(module->library);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuModuleGetFunction(void **result, void *handle, const char *name)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module, INVALID_HANDLE);
    CHECK(result && name, INVALID_VALUE);
    Kernel *kernel = kernel_named(module->library, name);
    CHECK(kernel, NOT_FOUND);
    *result = function_in(kernel, module->object.context);
    LEAVE(SUCCESS);
}

/* The kernel of a CUkernel or CUfunction, and of the latter the function. */
static Kernel *kernel_of(void *handle, Handle **function)
{
    *function = find(handle, FUNCTION);
    return *function ? (*function)->kernel : find(handle, KERNEL);
}

EXPORT CUresult cuKernelGetFunction(void **result, void *handle)
{
    ENTER_CONTEXT;
    Kernel *kernel = find(handle, KERNEL);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(result, INVALID_VALUE);
    *result = function_in(kernel, context);
    LEAVE(SUCCESS);
}

static CUresult parameter_info(void *handle, size_t index, size_t *offset, size_t *size)
{
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    if (!kernel)
        return INVALID_HANDLE;
    if (!offset || index >= kernel->parameter_count)
        return INVALID_VALUE;
    *offset = kernel->parameters[index].offset;
    if (size)
        *size = kernel->parameters[index].size;
    return SUCCESS;
}

EXPORT CUresult cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size)
{
    ENTER;
    LEAVE(parameter_info(function, index, offset, size));
}

static CUresult parameter_count(void *handle, size_t *count)
{
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    if (!kernel)
        return INVALID_HANDLE;
    if (!count)
        return INVALID_VALUE;
    *count = kernel->parameter_count;
    return SUCCESS;
}

EXPORT CUresult cuFuncGetParamCount(void *function, size_t *count)
{
    ENTER;
    LEAVE(parameter_count(function, count));
}

static int value_of(const Kernel *kernel, const Handle *function, int device, int attribute)
{
    switch (attribute) {
        case 0: return kernel->max_threads;
        case 1: return (int)kernel->shared;
        case 2: return (int)kernel->library->constant;
        case 3: return (int)kernel->local;
        case 4: return kernel->registers;
        case 5: case 6: return kernel->library->architecture;
        default: return function && function->set & 1u << attribute ? function->values[attribute]
            : kernel->values[device][attribute];
    }
}

static CUresult check_value(const Kernel *kernel, int attribute, int value)
{
    switch (attribute) {
        case 8: return value < 0 || value + (int)kernel->shared > SHARED_OPTIN ? INVALID_VALUE : SUCCESS;
        case 9: return value < -1 || value > 100 ? INVALID_VALUE : SUCCESS;
        case 11: case 12: case 13: return value < 0 ? INVALID_VALUE : SUCCESS;
        case 14: case 15: return SUCCESS;
        default: return INVALID_VALUE;
    }
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, void *handle, CUdevice device)
{
    ENTER;
    Kernel *kernel = find(handle, KERNEL);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(value && attribute >= 0 && attribute <= 17, INVALID_VALUE);
    *value = value_of(kernel, NULL, device, attribute);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *handle)
{
    ENTER_CONTEXT;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(value && attribute >= 0 && attribute <= 17, INVALID_VALUE);
    if (!function)
        function = function_in(kernel, context);
    *value = value_of(kernel, function, function->object.context->device, attribute);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncSetAttribute(void *handle, int attribute, int value)
{
    ENTER_CONTEXT;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    TRY(check_value(kernel, attribute, value));
    if (!function)
        function = function_in(kernel, context);
    function->values[attribute] = value;
    function->set |= 1u << attribute;
    LEAVE(SUCCESS);
}

/* Occupancy */

static int active_blocks(const Kernel *kernel, unsigned long long threads, unsigned long long shared)
{
    unsigned long long lanes = (threads + 31) / 32 * 32, registers = ((unsigned)kernel->registers + 7u) / 8 * 8;
    unsigned long long blocks = 2048 / lanes, per_registers = registers ? REGISTERS / (registers * lanes) : 32;
    unsigned long long per_shared = SHARED_PER_SM / (shared + kernel->shared + 1024);
    blocks = blocks < 32 ? blocks : 32;
    blocks = blocks < per_shared ? blocks : per_shared;
    return (int)(blocks < per_registers ? blocks : per_registers);
}

static CUresult occupancy(int *blocks, void *handle, int threads, size_t shared)
{
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    if (!kernel)
        return INVALID_HANDLE;
    if (!blocks || threads < 1)
        return INVALID_VALUE;
    *blocks = threads > kernel->max_threads ? 0 : active_blocks(kernel, (unsigned)threads, shared);
    return SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared)
{
    ENTER_CONTEXT;
    (void)context;
    LEAVE(occupancy(blocks, function, threads, shared));
}

static CUresult best_block(int *grid, int *block, void *handle, int limit)
{
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    if (!kernel)
        return INVALID_HANDLE;
    if (!grid || !block)
        return INVALID_VALUE;
    *grid = occupancy_grid;
    *block = occupancy_block;
    if (*block > kernel->max_threads)
        *block = kernel->max_threads;
    if (limit > 0 && *block > limit)
        *block = limit;
    return SUCCESS;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *function, size_t (*shared_of)(int),
                                                 size_t shared, int limit)
{
    ENTER_CONTEXT;
    (void)context, (void)shared_of, (void)shared;
    LEAVE(best_block(grid, block, function, limit));
}

/* Launches */

typedef struct {
    int id;
    char pad[4];
    union { char space[64]; int value; unsigned dimensions[3]; } value;
} LaunchAttribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;

/* Copies the parameters to `bytes`: from `values`, one pointer per parameter, or from the buffer in `extra`. */
static CUresult pack(const Kernel *kernel, unsigned char *bytes, void **values, void **extra)
{
    if (extra)
        return NOT_SUPPORTED;
    for (unsigned i = 0; i < kernel->parameter_count; i++) {
        if (!values || !values[i])
            return INVALID_VALUE;
        memcpy(bytes + kernel->parameters[i].offset, values[i], kernel->parameters[i].size);
    }
    return SUCCESS;
}

static CUresult check_size(const Kernel *kernel, const Handle *function, const LaunchConfig *config, int device,
                           int cooperative)
{
    const unsigned *grid = config->grid, *block = config->block;
    unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
    unsigned long long blocks = (unsigned long long)grid[0] * grid[1] * grid[2];
    unsigned long long registers = ((unsigned)kernel->registers + 7u) / 8 * 8 * ((threads + 31) / 32 * 32);
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535)
        return INVALID_VALUE;
    if (!threads || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > (unsigned)kernel->max_threads)
        return INVALID_VALUE;
    if (config->shared > (unsigned)value_of(kernel, function, device, 8))
        return INVALID_VALUE;
    if (registers > REGISTERS)
        return OUT_OF_RESOURCES;
    if (cooperative && blocks > (unsigned long long)active_blocks(kernel, threads, config->shared) * SM_COUNT)
        return COOPERATIVE_TOO_LARGE;
    return SUCCESS;
}

/* Without recording, a launch costs what a call and this cost; launches of several threads at once are counted if fast is 2. */
#define COUNT_IF_FAST \
    do { \
        if (fast) { \
            if (fast == 2) \
                __atomic_fetch_add(&fast_count, 1, __ATOMIC_RELAXED); \
            else \
                fast_count++; \
            return SUCCESS; \
        } \
    } while (0)

static CUresult launch(const char *api, void *handle, const LaunchConfig *config, int cooperative, void **values,
                       void **extra)
{
    CUresult result = enter(api, 0);
    if (result)
        return result;
    TRY(check_current());
    Context *context = current();
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel && (!function || function->object.context == context), INVALID_HANDLE);
    if (!function)
        function = function_in(kernel, context);
    Target target;
    TRY(to_stream(config->stream, &target));
    CHECK(target.context == context, INVALID_HANDLE);
    stub_launch made = {
        .api = api, .function = handle, .name = kernel->name, .context = context, .device = context->device,
        .shared = config->shared, .stream = config->stream, .cooperative = cooperative, .graph = target.graph,
        .parameter_count = kernel->parameter_count, .size = kernel->size, .parameters = kernel->parameters,
        .thread = thread_id(),
    };
    memcpy(made.grid, config->grid, sizeof made.grid);
    memcpy(made.block, config->block, sizeof made.block);
    for (unsigned i = 0; i < config->attribute_count; i++) {
        const LaunchAttribute *attribute = &config->attributes[i];
        if (attribute->id == 2)
            made.cooperative = attribute->value.value != 0;
        else if (attribute->id == 4)
            memcpy(made.cluster, attribute->value.dimensions, sizeof made.cluster);
    }
    TRY(check_size(kernel, function, config, context->device, made.cooperative));
    for (int axis = 0; axis < 3 && made.cluster[0]; axis++)
        CHECK(made.cluster[axis] && made.grid[axis] % made.cluster[axis] == 0, INVALID_VALUE);
    unsigned char *bytes = must(calloc(1, kernel->size + 1));
    result = pack(kernel, bytes, values, extra);
    if (result) {
        free(bytes);
        LEAVE(result);
    }
    made.bytes = bytes;
    stub_launch *kept = must(malloc(sizeof made));
    *kept = made;
    APPEND(launches, kept);
    note(api, &target, config->stream)->launch = launches.count - 1;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **values,
                               void **extra)
{
    COUNT_IF_FAST;
    const LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    return launch(__func__, function, &config, 0, values, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                          void *stream, void **values)
{
    COUNT_IF_FAST;
    const LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    return launch(__func__, function, &config, 1, values, NULL);
}

EXPORT CUresult cuLaunchKernelEx(const LaunchConfig *config, void *function, void **values, void **extra)
{
    COUNT_IF_FAST;
    if (!config)
        return INVALID_VALUE;
    return launch(__func__, function, config, 0, values, extra);
}

/* Streams and events: all work is done at once, so that nothing is ever waited for. */

EXPORT CUresult cuStreamCreate(void **result, unsigned flags)
{
    ENTER;
    TRY(check_current());
    CHECK(result && flags <= 1, INVALID_VALUE);
    Stream *stream = NEW(STREAM, Stream, current());
    stream->flags = flags;
    stream->id = next_id++;
    stream->next = streams;
    *result = streams = stream;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamDestroy_v2(void *handle)
{
    ENTER;
    Stream *stream = find(handle, STREAM);
    CHECK(stream, INVALID_HANDLE);
    stream->object.alive = 0;
    if (stream->graph)
        stream->graph->invalid = 1;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(void *stream)
{
    ENTER;
    Target target;
    TRY(to_stream(stream, &target));
    if (target.graph) {
        target.graph->invalid = 1;
        LEAVE(CAPTURE_UNSUPPORTED);
    }
    note(__func__, &target, stream);
    LEAVE(SUCCESS);
}

/* What a getter asks about: unlike work, it is answered for an invalidated capture as well. */
static CUresult look_at_stream(void *handle, Target *target)
{
    CUresult result = to_stream(handle, target);
    return result == CAPTURE_INVALIDATED ? SUCCESS : result;
}

EXPORT CUresult cuStreamGetCtx(void *stream, void **context)
{
    ENTER;
    Target target;
    TRY(look_at_stream(stream, &target));
    CHECK(context, INVALID_VALUE);
    *context = target.context;
    LEAVE(SUCCESS);
}

static int capture_status(const Graph *graph) { return !graph ? 0 : graph->invalid ? 2 : 1; }

EXPORT CUresult cuStreamIsCapturing(void *stream, int *status)
{
    ENTER;
    Target target;
    TRY(look_at_stream(stream, &target));
    CHECK(status, INVALID_VALUE);
    *status = capture_status(target.graph);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode)
{
    ENTER;
    CHECK((uintptr_t)handle > 2, CAPTURE_UNSUPPORTED); /* not of the default streams */
    Stream *stream = find(handle, STREAM);
    CHECK(stream, INVALID_HANDLE);
    CHECK(mode >= 0 && mode <= 2, INVALID_VALUE);
    CHECK(!stream->graph, ILLEGAL_STATE);
    Graph *graph = NEW(GRAPH, Graph, NULL);
    graph->mode = mode;
    graph->id = next_id++;
    graph->thread = thread_id();
    graph->origin = stream;
    stream->graph = graph;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamEndCapture(void *handle, void **result)
{
    ENTER;
    Stream *origin = find(handle, STREAM);
    CHECK(origin, INVALID_HANDLE);
    Graph *graph = origin->graph;
    CHECK(graph, ILLEGAL_STATE);
    CHECK(graph->origin == origin, CAPTURE_UNMATCHED);
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->graph == graph)
            stream->graph = NULL;
    graph->origin = NULL;
    if (result)
        *result = graph->invalid ? NULL : graph;
    if (graph->invalid)
        graph->object.alive = 0;
    LEAVE(graph->invalid ? CAPTURE_INVALIDATED : SUCCESS);
}

EXPORT CUresult cuEventCreate(void **event, unsigned flags)
{
    ENTER_CONTEXT;
    CHECK(event && flags <= 7, INVALID_VALUE);
    Event *made = NEW(EVENT, Event, context);
    made->flags = flags;
    *event = made;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(void *handle)
{
    ENTER;
    Event *event = find(handle, EVENT);
    CHECK(event, INVALID_HANDLE);
    event->object.alive = 0;
    LEAVE(SUCCESS);
}

static CUresult record(const char *api, void *handle, void *stream)
{
    Event *event = find(handle, EVENT);
    if (!event)
        return INVALID_HANDLE;
    Target target;
    CUresult result = to_stream(stream, &target);
    if (result)
        return result;
    if (target.context != event->object.context)
        return INVALID_HANDLE;
    event->recorded = 1;
    event->time = entries.count;
    event->graph = target.graph;
    note(api, &target, stream)->event = handle;
    return SUCCESS;
}

EXPORT CUresult cuEventRecord(void *event, void *stream)
{
    ENTER;
    LEAVE(record("cuEventRecord", event, stream));
}

EXPORT CUresult cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    ENTER;
    Event *event = find(handle, EVENT);
    CHECK(event, INVALID_HANDLE);
    CHECK(flags <= 1, INVALID_VALUE);
    Target target;
    TRY(to_stream(stream, &target));
    if (event->graph && event->graph->origin) { /* the stream joins the capture */
        CHECK(target.stream, CAPTURE_IMPLICIT);
        CHECK(!target.graph || target.graph == event->graph, CAPTURE_MERGE);
        target.stream->graph = target.graph = event->graph;
    }
    note(__func__, &target, stream)->event = handle;
    LEAVE(SUCCESS);
}

/* To these the stream 0 is that of each thread, CU_STREAM_PER_THREAD. */

static void *of_thread(void *stream)
{
    return stream ? stream : (void *)2;
}

static CUresult launch_of_thread(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **values,
                                 void **extra)
{
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, of_thread(stream), values,
                          extra);
}

static CUresult launch_extended_of_thread(const LaunchConfig *config, void *function, void **values, void **extra)
{
    if (!config)
        return INVALID_VALUE;
    LaunchConfig copy = *config;
    copy.stream = of_thread(copy.stream);
    return cuLaunchKernelEx(&copy, function, values, extra);
}

static CUresult record_of_thread(void *event, void *stream)
{
    return cuEventRecord(event, of_thread(stream));
}

static CUresult wait_of_thread(void *stream, void *event, unsigned flags)
{
    return cuStreamWaitEvent(of_thread(stream), event, flags);
}

static const struct { Function function, of_thread; } of_threads[] = {
    {(Function)cuLaunchKernel, (Function)launch_of_thread},
    {(Function)cuLaunchKernelEx, (Function)launch_extended_of_thread},
    {(Function)cuEventRecord, (Function)record_of_thread},
    {(Function)cuStreamWaitEvent, (Function)wait_of_thread},
};

/* The table of functions, by name and by the driver version that brought them: the latest that the caller knows. */

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                                    int *status);

static const struct Entry { const char *name; int version; Function function; } table[] = {
#define F(name) {#name, 0, (Function)name}
#define V(name, version, function) {#name, version, (Function)function}
    F(cuInit), F(cuDriverGetVersion), F(cuGetErrorName), F(cuGetErrorString),
    V(cuGetProcAddress, 12000, cuGetProcAddress_v2), F(cuDeviceGetCount), F(cuDeviceGet), F(cuDeviceGetName),
    V(cuDeviceGetUuid, 0, cuDeviceGetUuid_v2), V(cuDeviceTotalMem, 0, cuDeviceTotalMem_v2), F(cuDeviceGetAttribute),
    V(cuMemAlloc, 0, cuMemAlloc_v2), F(cuMemAllocManaged), V(cuMemFree, 0, cuMemFree_v2), F(cuMemHostAlloc),
    F(cuMemFreeHost), V(cuMemHostGetDevicePointer, 0, cuMemHostGetDevicePointer_v2),
    V(cuMemGetInfo, 0, cuMemGetInfo_v2), F(cuPointerGetAttribute), V(cuMemcpyHtoD, 0, cuMemcpyHtoD_v2),
    V(cuMemcpyHtoDAsync, 0, cuMemcpyHtoDAsync_v2), V(cuMemcpyDtoH, 0, cuMemcpyDtoH_v2), F(cuMemsetD8Async),
    F(cuMemAllocFromPoolAsync), F(cuMemFreeAsync), F(cuMemPoolGetAttribute), F(cuMemPoolSetAttribute),
    F(cuDeviceGetMemPool), F(cuDevicePrimaryCtxRetain), V(cuDevicePrimaryCtxRelease, 0, cuDevicePrimaryCtxRelease_v2),
    V(cuDevicePrimaryCtxReset, 0, cuDevicePrimaryCtxReset_v2), V(cuCtxCreate, 3020, cuCtxCreate_v2),
    V(cuCtxCreate, 12050, cuCtxCreate_v4), V(cuCtxDestroy, 0, cuCtxDestroy_v2), F(cuCtxGetCurrent), F(cuCtxSetCurrent),
    V(cuCtxPushCurrent, 0, cuCtxPushCurrent_v2), V(cuCtxPopCurrent, 0, cuCtxPopCurrent_v2), F(cuCtxGetDevice),
    F(cuCtxSynchronize), F(cuLibraryLoadData), F(cuLibraryUnload), F(cuLibraryGetKernel), F(cuLibraryGetModule),
    F(cuLibraryGetGlobal), V(cuModuleGetGlobal, 0, cuModuleGetGlobal_v2), F(cuModuleLoadData), F(cuModuleUnload),
    F(cuModuleGetFunction), F(cuKernelGetFunction), F(cuFuncGetParamInfo),
    V(cuFuncGetParamCount, 13020, cuFuncGetParamCount), F(cuKernelGetAttribute), F(cuFuncGetAttribute),
    F(cuFuncSetAttribute), F(cuOccupancyMaxActiveBlocksPerMultiprocessor), F(cuOccupancyMaxPotentialBlockSize),
    F(cuLaunchKernel), F(cuLaunchKernelEx), F(cuLaunchCooperativeKernel), F(cuStreamCreate),
    V(cuStreamDestroy, 0, cuStreamDestroy_v2), F(cuStreamSynchronize), F(cuStreamGetCtx), F(cuStreamIsCapturing),
    V(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2), F(cuStreamEndCapture), F(cuEventCreate),
    V(cuEventDestroy, 0, cuEventDestroy_v2), F(cuEventRecord), F(cuStreamWaitEvent),
#undef F
#undef V
};

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                                    int *status)
{
    ENTER_WITH(1);
    CHECK(name && function, INVALID_VALUE);
    const struct Entry *best = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name) && table[i].version <= version && table[i].version <= driver_version
            && (!best || best->version <= table[i].version))
            best = &table[i];
    if (status)
        *status = best ? 0 : 1;
    *function = NULL;
    CHECK(best, NOT_FOUND);
    memcpy(function, &best->function, sizeof *function);
    if (flags & 2) /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */
        for (size_t i = 0; i < sizeof of_threads / sizeof *of_threads; i++)
            if (best->function == of_threads[i].function)
                memcpy(function, &of_threads[i].of_thread, sizeof *function);
    LEAVE(SUCCESS);
}

/* For the tests */

int stub_set_devices(int count)
{
    if (initialized || count < 0 || count > MAX_DEVICES)
        return 0;
    device_count = count;
    return 1;
}

int stub_set_capability(int device, int major, int minor)
{
    if (initialized || device < 0 || device >= MAX_DEVICES)
        return 0;
    capability[device][0] = major;
    capability[device][1] = minor;
    return 1;
}

int stub_set_version(int version)
{
    if (initialized)
        return 0;
    driver_version = version;
    return 1;
}

void stub_set_occupancy(int grid, int block)
{
    occupancy_grid = grid;
    occupancy_block = block;
}

void stub_set_fast(int on) { fast = on; }

void stub_set_trace(int on)
{
    pthread_mutex_lock(&lock);
    tracing = on;
    watch();
    pthread_mutex_unlock(&lock);
}

void stub_fail(const char *name, int code, long after, int sticky)
{
    pthread_mutex_lock(&lock);
    Fault *fault = must(calloc(1, sizeof *fault));
    *fault = (Fault){faults, must(strdup(name)), code, sticky, after};
    faults = fault;
    watch();
    pthread_mutex_unlock(&lock);
}

void stub_reset(void)
{
    pthread_mutex_lock(&lock);
    while (faults) {
        Fault *fault = faults;
        faults = fault->next;
        free(fault->name);
        free(fault);
    }
    sticky_code = 0;
    watch();
    pthread_mutex_unlock(&lock);
}

void stub_clear(void)
{
    pthread_mutex_lock(&lock);
    for (long i = 0; i < launches.count; i++) {
        free((void *)(uintptr_t)launches.items[i]->bytes);
        free(launches.items[i]);
    }
    launches.count = entries.count = trace.count = failed.count = fast_count = 0;
    pthread_mutex_unlock(&lock);
}

/* A guarded read of one field or item. */
#define GUARDED(type, expression) do { \
        pthread_mutex_lock(&lock); \
        type value_ = (expression); \
        pthread_mutex_unlock(&lock); \
        return value_; \
    } while (0)

long stub_launch_count(void) { GUARDED(long, launches.count); }

const stub_launch *stub_launch_at(long index)
{
    GUARDED(const stub_launch *, index >= 0 && index < launches.count ? launches.items[index] : NULL);
}

long stub_fast_count(void) { return fast_count; }

long stub_entry_count(void) { GUARDED(long, entries.count); }

stub_entry stub_entry_at(long index)
{
    GUARDED(stub_entry, index >= 0 && index < entries.count ? entries.items[index] : (stub_entry){.launch = -1});
}

long stub_trace_count(void) { GUARDED(long, trace.count); }

const char *stub_trace_at(long index)
{
    GUARDED(const char *, index >= 0 && index < trace.count ? trace.items[index] : NULL);
}

long stub_failed_count(void) { GUARDED(long, failed.count); }

const char *stub_failed_at(long index)
{
    GUARDED(const char *, index >= 0 && index < failed.count ? failed.items[index] : NULL);
}

unsigned long long stub_allocate(int device, unsigned long long size)
{
    pthread_mutex_lock(&lock);
    CUdeviceptr pointer = 0;
    if (initialized && valid_device(device))
        allocate(&pointer, size, (Allocation){.type = DEVICE, .device = device, .context = primaries[device]});
    pthread_mutex_unlock(&lock);
    return pointer;
}

long stub_allocation_count(int device)
{
    pthread_mutex_lock(&lock);
    long count = 0;
    for (long i = 0; i < allocations.count; i++)
        count += allocations.items[i].type == DEVICE && allocations.items[i].device == device;
    pthread_mutex_unlock(&lock);
    return count;
}

void *stub_current_context(void) { return current(); }

void *stub_primary_context(int device)
{
    GUARDED(void *, initialized && valid_device(device) ? primaries[device] : NULL);
}

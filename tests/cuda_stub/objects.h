/* Part of libcuda.c: what lives and by which address, errors that tests inject, captures, and the driver's start. */

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
    int architecture; /* 90 */
    struct Kernel *kernels;
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
    int values[ATTRIBUTES];
    unsigned set; /* a bit per attribute set on this handle: it goes before the kernel's */
} Handle;

typedef struct Graph {
    Object object;
    int invalid;
} Graph;

typedef struct Stream {
    Object object;
    struct Stream *next;
    unsigned flags;
    Graph *graph; /* that captures it */
} Stream;

typedef struct Pool {
    Object object;
    int device;
    unsigned long long threshold;
} Pool;

enum { HOST = 1, DEVICE = 2 }; /* CUmemorytype */
typedef struct {
    CUdeviceptr base;
    unsigned long long size, id;
    int type, device, managed;
    Context *context;
    Pool *pool;
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized, forked, device_count = 2, driver_version = 13000;
static int capability[MAX_DEVICES][2];
static Context *primaries[MAX_DEVICES];
static Pool *pools[MAX_DEVICES];
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

typedef struct { Context *context; Graph *graph; } Target;

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
                    && !(stream->flags & 1)) {
                    stream->graph->invalid = 1;
                    return CAPTURE_IMPLICIT;
                }
        return SUCCESS;
    }
    Stream *stream = find(handle, STREAM);
    if (!stream)
        return INVALID_HANDLE;
    target->context = stream->object.context;
    target->graph = stream->graph;
    return target->graph && target->graph->invalid ? CAPTURE_INVALIDATED : SUCCESS;
}

/* Calls that may not happen while a stream is captured. */
static CUresult not_capturing(void)
{
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->object.alive && stream->graph) {
            stream->graph->invalid = 1;
            return CAPTURE_UNSUPPORTED;
        }
    return SUCCESS;
}

static stub_entry *note(const char *api, void *stream)
{
    stub_entry entry = {.api = api, .launch = -1, .stream = stream};
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
    for (int device = 0; device < MAX_DEVICES; device++)
        capability[device][0] = 9;
    pthread_atfork(NULL, NULL, after_fork);
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
        pools[device] = NEW(POOL, Pool, NULL);
        pools[device]->device = device;
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
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "invalid kernel image"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "illegal state"},
    {500, "CUDA_ERROR_NOT_FOUND", "symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for a launch"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in a cooperative launch"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is captured"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture invalidated by an earlier error"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "implicit dependency on the legacy stream in a capture"},
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

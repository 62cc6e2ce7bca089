/* Part of libcuda.c: launches, streams and events. */

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

static CUresult launch(const char *api, void *handle, const LaunchConfig *config, void **values, void **extra)
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
        .shared = config->shared, .stream = config->stream, .graph = target.graph,
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
    note(api, config->stream)->launch = launches.count - 1;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **values,
                               void **extra)
{
    COUNT_IF_FAST;
    const LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    return launch(__func__, function, &config, values, extra);
}

EXPORT CUresult cuLaunchKernelEx(const LaunchConfig *config, void *function, void **values, void **extra)
{
    COUNT_IF_FAST;
    if (!config)
        return INVALID_VALUE;
    return launch(__func__, function, config, values, extra);
}

/* Streams and events: all work is done at once, so that nothing is ever waited for. */

EXPORT CUresult cuStreamCreate(void **result, unsigned flags)
{
    ENTER;
    TRY(check_current());
    CHECK(result && flags <= 1, INVALID_VALUE);
    Stream *stream = NEW(STREAM, Stream, current());
    stream->flags = flags;
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
    note(__func__, stream);
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

EXPORT CUresult cuStreamIsCapturing(void *stream, int *status)
{
    ENTER;
    Target target;
    TRY(look_at_stream(stream, &target));
    CHECK(status, INVALID_VALUE);
    *status = !target.graph ? 0 : target.graph->invalid ? 2 : 1;
    LEAVE(SUCCESS);
}

/* A capture has one stream, and is of the mode CU_STREAM_CAPTURE_MODE_GLOBAL. */
EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode)
{
    ENTER;
    CHECK((uintptr_t)handle > 2, CAPTURE_UNSUPPORTED); /* not of the default streams */
    Stream *stream = find(handle, STREAM);
    CHECK(stream, INVALID_HANDLE);
    CHECK(!mode, NOT_SUPPORTED);
    CHECK(!stream->graph, ILLEGAL_STATE);
    stream->graph = NEW(GRAPH, Graph, NULL);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamEndCapture(void *handle, void **result)
{
    ENTER;
    Stream *stream = find(handle, STREAM);
    CHECK(stream, INVALID_HANDLE);
    Graph *graph = stream->graph;
    CHECK(graph, ILLEGAL_STATE);
    stream->graph = NULL;
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
    *event = NEW(EVENT, Object, context);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(void *handle)
{
    ENTER;
    Object *event = find(handle, EVENT);
    CHECK(event, INVALID_HANDLE);
    event->alive = 0;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuEventRecord(void *handle, void *stream)
{
    ENTER;
    Object *event = find(handle, EVENT);
    CHECK(event, INVALID_HANDLE);
    Target target;
    TRY(to_stream(stream, &target));
    CHECK(target.context == event->context, INVALID_HANDLE);
    note(__func__, stream)->event = handle;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    ENTER;
    CHECK(find(handle, EVENT), INVALID_HANDLE);
    CHECK(flags <= 1, INVALID_VALUE);
    Target target;
    TRY(to_stream(stream, &target));
    note(__func__, stream)->event = handle;
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

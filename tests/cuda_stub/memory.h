/* Part of libcuda.c: devices, memory and its pools. */

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
    *pointer = allocation.base;
    return SUCCESS;
}

static void forget(Allocation *allocation)
{
    if (allocation->type == DEVICE)
        used[allocation->device] -= allocation->size;
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
        .type = DEVICE, .device = context->device, .context = context, .managed = 1}));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) /* in any context, or none */
{
    ENTER;
    TRY(not_capturing());
    CHECK(pointer, SUCCESS);
    TRY(release(pointer, DEVICE));
    note("cuMemFree", NULL);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemHostAlloc(void **memory, size_t size, unsigned flags)
{
    ENTER_CONTEXT;
    (void)flags;
    TRY(not_capturing());
    CHECK(memory, INVALID_VALUE);
    CUdeviceptr pointer;
    TRY(allocate(&pointer, size, (Allocation){.type = HOST, .device = context->device, .context = context}));
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

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) /* a CU_POINTER_ATTRIBUTE_* */
{
    ENTER_CONTEXT;
    (void)context;
    Allocation *allocation = allocation_of(pointer);
    static const unsigned char sizes[] = {0, 8, 4, 8, 8, 16, 1, 8, 1, 4, 1, 8, 8, 1, 8, 1, 4, 8, 8, 8, 8, 1};
    CHECK(data && allocation && attribute >= 1 && attribute < (int)sizeof sizes, INVALID_VALUE);
    unsigned long long value = 0;
    switch (attribute) {
        case 1: value = (uintptr_t)(allocation->pool ? NULL : allocation->context); break;
        case 2: value = (unsigned)allocation->type; break;
        case 3: value = pointer; break;
        case 4:
            CHECK(allocation->type == HOST || allocation->managed, INVALID_VALUE);
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
    LEAVE(SUCCESS);
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
    note(api, stream);
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

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void *stream)
{
    ENTER;
    Target target;
    TRY(to_stream(stream, &target));
    CHECK(!count || reachable(to, count), INVALID_VALUE);
    if (count)
        memset((void *)(uintptr_t)to, value, count);
    note(__func__, stream);
    LEAVE(SUCCESS);
}

/* Memory pools */

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size, void *handle, void *stream)
{
    ENTER;
    Pool *pool = find(handle, POOL);
    CHECK(pool, INVALID_VALUE);
    Target target;
    TRY(to_stream(stream, &target));
    TRY(allocate(pointer, size, (Allocation){
        .type = DEVICE, .device = pool->device, .context = target.context, .pool = pool}));
    note(__func__, stream);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, void *stream)
{
    ENTER;
    Target target;
    TRY(to_stream(stream, &target));
    TRY(release(pointer, DEVICE));
    note(__func__, stream);
    LEAVE(SUCCESS);
}

/* Of a pool's attributes there is the release threshold alone, which cuda.core sets. */
EXPORT CUresult cuMemPoolGetAttribute(void *handle, int attribute, void *value)
{
    ENTER;
    Pool *pool = find(handle, POOL);
    CHECK(pool && value && attribute == 4, INVALID_VALUE);
    *(unsigned long long *)value = pool->threshold;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuMemPoolSetAttribute(void *handle, int attribute, const void *value)
{
    ENTER;
    Pool *pool = find(handle, POOL);
    CHECK(pool && value && attribute == 4, INVALID_VALUE);
    pool->threshold = *(const unsigned long long *)value;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDeviceGetMemPool(void **pool, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(pool, INVALID_VALUE);
    *pool = pools[device];
    LEAVE(SUCCESS);
}

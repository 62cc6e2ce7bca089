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
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906,
};

enum {
    MAX_DEVICES = 8, STACK = 64, ATTRIBUTES = 32, BUCKETS = 4096,
    SM_COUNT = 132, SHARED_DEFAULT = 49152, SHARED_OPTIN = 232448, SHARED_PER_SM = 233472, REGISTERS = 65536,
};
static const unsigned long long MEMORY = 80ull << 30;

#include "objects.h"
#include "memory.h"
#include "code.h"
#include "launches.h"

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
    V(cuFuncGetParamCount, 13020, cuFuncGetParamCount), F(cuKernelGetAttribute), F(cuKernelSetAttribute),
    F(cuFuncGetAttribute), F(cuFuncSetAttribute), F(cuOccupancyMaxActiveBlocksPerMultiprocessor), F(cuOccupancyMaxPotentialBlockSize),
    F(cuLaunchKernel), F(cuLaunchKernelEx), F(cuStreamCreate),
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

/* What the stub keeps and tells, for the C compiler and for cffi alike: plain declarations, no preprocessor lines. */

typedef struct {
    unsigned offset, size; /* bytes, in the kernel's parameter space */
} stub_parameter;

typedef struct {
    const char *api;            /* cuLaunchKernel or cuLaunchKernelEx */
    void *function;             /* the handle given: a CUfunction or a CUkernel */
    const char *name;           /* of the kernel */
    void *context;              /* current at the call */
    int device;
    unsigned grid[3], block[3];
    unsigned cluster[3];        /* zeros: none given */
    unsigned shared;            /* dynamic, bytes */
    void *stream;
    int cooperative;
    void *graph;                /* of the capture that took the launch; NULL: not captured */
    unsigned parameter_count, size;
    const stub_parameter *parameters;
    const unsigned char *bytes; /* size bytes: each parameter at its offset, the holes zero */
    long thread;
} stub_launch;

typedef struct {
    const char *api;
    void *stream, *event;
    long launch;                /* index among the launches; -1: no launch */
} stub_entry;

int stub_set_devices(int count);                             /* before cuInit; 0: refused */
int stub_set_version(int version);                           /* the driver's, 13000; before cuInit; 0: refused */
int stub_set_capability(int device, int major, int minor);
void stub_set_occupancy(int grid, int block);                /* what cuOccupancyMaxPotentialBlockSize answers */
void stub_set_fast(int on);
void stub_set_trace(int on);
void stub_fail(const char *name, int code, long after, int sticky);
void stub_reset(void);                                       /* no injected and no sticky error any more */
void stub_clear(void);                                       /* empties launches, log, trace, failed, fast count */
long stub_launch_count(void);
const stub_launch *stub_launch_at(long index);               /* valid until stub_clear */
long stub_fast_count(void);
long stub_entry_count(void);
stub_entry stub_entry_at(long index);
long stub_trace_count(void);
const char *stub_trace_at(long index);
long stub_failed_count(void);                                /* calls that failed, but for injected errors */
const char *stub_failed_at(long index);
unsigned long long stub_allocate(int device, unsigned long long size);
long stub_allocation_count(int device);
void *stub_current_context(void);
void *stub_primary_context(int device);                      /* whether or not it is retained */

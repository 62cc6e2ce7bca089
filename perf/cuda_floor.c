/* The limit of a launch: what a C extension written by hand for one CUDA kernel does with its arguments.
 *
 * A Launch is an object that is called like a kernel. It checks its arguments against one fixed signature (1-D,
 * C-contiguous float32 tensors on one device; float32 scalars of NumPy; a float and tensors), puts the parameters of the
 * kernel where the driver reads them, asks the tensors' framework for its stream and the driver for the current context,
 * and launches without the GIL. raw() launches with parameters that were packed before, and does nothing else. floor.py
 * puts the DLPack declarations and floor_table.h in front.
 *
 * It trusts the tensors' framework; the signature "checked" does not, as fastexchange does not: no exception may have been set
 * in spite of success, extents and offsets are of numbers that fit, memory is aligned.
 */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#define MAX_WORDS 512
#define DEVICES 64
#define INLINE static inline __attribute__((always_inline))

/* ---- the driver ---- */

typedef int (*LaunchKernel)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                            void *stream, void **values, void **extra);
typedef int (*WithContext)(void **context);

static LaunchKernel launch_kernel;
static WithContext get_current, pop_current;
static int (*push_current)(void *context);
static void **contexts; /* the primary one of each device */

/* use_driver(cuLaunchKernel, cuCtxGetCurrent, cuCtxPushCurrent, cuCtxPopCurrent, contexts), addresses all. */
static PyObject *use_driver(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long found[5];
    if (!PyArg_ParseTuple(args, "KKKKK", &found[0], &found[1], &found[2], &found[3], &found[4]))
        return NULL;
    launch_kernel = (LaunchKernel)(uintptr_t)found[0];
    get_current = (WithContext)(uintptr_t)found[1];
    push_current = (int (*)(void *))(uintptr_t)found[2];
    pop_current = (WithContext)(uintptr_t)found[3];
    contexts = (void **)(uintptr_t)found[4];
    Py_RETURN_NONE;
}

static PyObject *refused(int code)
{
    PyErr_Format(PyExc_RuntimeError, "CUresult %d", code);
    return NULL;
}

/* ---- parameters ---- */

typedef enum { NUMBA_CUDA, NUMBA_CUDA_MLIR } Package;

/* The parameters of a call, 8 bytes each, and where they are. */
typedef struct {
    int count;
    int device; /* -1: there is no tensor */
    const DLPackExchangeAPI *api;
    int64_t words[MAX_WORDS];
    void *values[MAX_WORDS];
} Frame;

INLINE int fail(Py_ssize_t position, const char *reason)
{
    wrong(position, reason);
    return -1;
}

INLINE void add(Frame *frame, int64_t word)
{
    frame->words[frame->count] = word;
    frame->values[frame->count] = &frame->words[frame->count];
    frame->count++;
}

INLINE int read_tensor(PyObject *object, Py_ssize_t position, Frame *frame, Package package, int is_checked)
{
    const DLPackExchangeAPI *api = api_of(object);
    DLTensor tensor;
    if (UNLIKELY(!api || api->dltensor_from_py_object_no_sync(object, &tensor)))
        return -1;
    if (is_checked && UNLIKELY(PyErr_Occurred() != NULL))
        return -1;
    if (UNLIKELY(tensor.device.device_type != kDLCUDA))
        return fail(position, "not on a CUDA device");
    if (UNLIKELY(tensor.dtype.code != kDLFloat || tensor.dtype.bits != 32 || tensor.dtype.lanes != 1))
        return fail(position, "not float32");
    if (UNLIKELY(tensor.ndim != 1))
        return fail(position, "not 1-D");
    int64_t items = tensor.shape[0];
    int64_t stride = tensor.strides ? tensor.strides[0] : 1;
    if (UNLIKELY(stride != 1 && items > 1))
        return fail(position, "not contiguous");
    if (UNLIKELY(!tensor.data && items))
        return fail(position, "without memory");
    if (frame->device < 0) {
        if (UNLIKELY(tensor.device.device_id < 0 || tensor.device.device_id >= DEVICES))
            return fail(position, "on no device");
        frame->device = tensor.device.device_id;
        frame->api = api;
    }
    if (UNLIKELY(tensor.device.device_id != frame->device))
        return fail(position, "on another device than the first");
    int64_t data = (int64_t)(uintptr_t)tensor.data + (int64_t)tensor.byte_offset;
    if (is_checked && UNLIKELY(items >> 31 || tensor.byte_offset >> 40 || data & 3))
        return fail(position, "beyond 64 bits, or not aligned");
    if (package == NUMBA_CUDA) {
        add(frame, 0);
        add(frame, 0);
        add(frame, items);
        add(frame, 4);
        add(frame, data);
        add(frame, items);
        add(frame, stride * 4);
    } else {
        add(frame, data);
        add(frame, data);
        add(frame, 0);
        add(frame, items);
        add(frame, stride);
    }
    return 0;
}

/* ---- launches ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    void *function;
    unsigned grid[3], block[3], shared;
    int is_on_stream;
    void *stream;
    int (*read)(PyObject *const *, Py_ssize_t, Frame *);
    Frame *held; /* of raw() */
} Launch;

INLINE int read_each(PyObject *const *args, Py_ssize_t first, Py_ssize_t count, Frame *frame, Package package,
                     int is_checked)
{
    if (UNLIKELY(count > MAX_WORDS / 7))
        return fail(MAX_WORDS / 7, "one too many");
    for (Py_ssize_t i = first; i < count; i++)
        if (UNLIKELY(read_tensor(args[i], i, frame, package, is_checked)))
            return -1;
    return 0;
}

INLINE int read_float_and_each(PyObject *const *args, Py_ssize_t count, Frame *frame, Package package)
{
    if (UNLIKELY(count != 3))
        return fail(count, "three are needed");
    if (UNLIKELY(Py_TYPE(args[0]) != &PyFloat_Type))
        return fail(0, "not a float");
    double factor = PyFloat_AS_DOUBLE(args[0]);
    int64_t word;
    memcpy(&word, &factor, sizeof word);
    add(frame, word);
    return read_each(args, 1, count, frame, package, 0);
}

INLINE int read_float32s(PyObject *const *args, Py_ssize_t count, Frame *frame)
{
    if (UNLIKELY(count > MAX_WORDS))
        return fail(MAX_WORDS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        if (UNLIKELY(Py_TYPE(args[i]) != &PyFloatArrType_Type))
            return fail(i, "not a numpy.float32");
        uint32_t bits;
        memcpy(&bits, &PyArrayScalar_VAL(args[i], Float), sizeof bits);
        add(frame, bits);
    }
    return 0;
}

INLINE int call_driver(Launch *launch, void *stream, Frame *frame)
{
    const unsigned *grid = launch->grid, *block = launch->block;
    return launch_kernel(launch->function, grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared, stream,
                         frame->values, NULL);
}

INLINE PyObject *start(Launch *launch, Frame *frame)
{
    void *stream = launch->stream, *current = NULL;
    int device = frame->device < 0 ? 0 : frame->device;
    if (!launch->is_on_stream && frame->api) {
        stream = NULL;
        if (UNLIKELY(frame->api->current_work_stream(kDLCUDA, device, &stream)))
            return NULL;
    }
    int code = get_current(&current);
    int is_other = current != contexts[device];
    if (UNLIKELY(code == 0 && is_other))
        code = push_current(contexts[device]);
    if (LIKELY(code == 0)) {
        Py_BEGIN_ALLOW_THREADS
        code = call_driver(launch, stream, frame);
        Py_END_ALLOW_THREADS
        if (UNLIKELY(is_other))
            pop_current(&current);
    }
    if (UNLIKELY(code))
        return refused(code);
    Py_RETURN_NONE;
}

/* What reads the arguments of a signature, and the vectorcall function for it. */
#define LAUNCH(name, read)                                                                                             \
    INLINE int read_##name(PyObject *const *args, Py_ssize_t count, Frame *frame)                                      \
    {                                                                                                                  \
        frame->count = 0, frame->device = -1, frame->api = NULL;                                                       \
        return read;                                                                                                   \
    }                                                                                                                  \
    static PyObject *launch_##name(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)            \
    {                                                                                                                  \
        Frame frame;                                                                                                   \
        if (UNLIKELY(kwnames != NULL))                                                                                 \
            return wrong(PyVectorcall_NARGS(nargsf), "by keyword");                                                    \
        return UNLIKELY(read_##name(args, PyVectorcall_NARGS(nargsf), &frame)) ? NULL : start((Launch *)self, &frame); \
    }
LAUNCH(tensors, read_each(args, 0, count, frame, NUMBA_CUDA, 0))
LAUNCH(tensors_mlir, read_each(args, 0, count, frame, NUMBA_CUDA_MLIR, 0))
LAUNCH(checked, read_each(args, 0, count, frame, NUMBA_CUDA, 1))
LAUNCH(checked_mlir, read_each(args, 0, count, frame, NUMBA_CUDA_MLIR, 1))
LAUNCH(axpy, read_float_and_each(args, count, frame, NUMBA_CUDA))
LAUNCH(axpy_mlir, read_float_and_each(args, count, frame, NUMBA_CUDA_MLIR))
LAUNCH(scalars, read_float32s(args, count, frame))

static const struct {
    const char *name, *package;
    vectorcallfunc launch;
    int (*read)(PyObject *const *, Py_ssize_t, Frame *);
} signatures[] = {
    {"tensors", "numba-cuda", launch_tensors, read_tensors},
    {"tensors", "numba-cuda-mlir", launch_tensors_mlir, read_tensors_mlir},
    {"checked", "numba-cuda", launch_checked, read_checked},
    {"checked", "numba-cuda-mlir", launch_checked_mlir, read_checked_mlir},
    {"axpy", "numba-cuda", launch_axpy, read_axpy},
    {"axpy", "numba-cuda-mlir", launch_axpy_mlir, read_axpy_mlir},
    {"scalars", "numba-cuda", launch_scalars, read_scalars},
    {"scalars", "numba-cuda-mlir", launch_scalars, read_scalars},
};

static void free_launch(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(((Launch *)self)->held);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef launch_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launch, vectorcall), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot launch_slots[] = {
    {Py_tp_members, launch_members}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_dealloc, free_launch}, {0, NULL}};
static PyType_Spec launch_spec = {"_fastexchange_cuda_floor.Launch", sizeof(Launch), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, launch_slots};
static PyTypeObject *launch_type;

/* launch(signature, package, CUfunction, grid, block, shared, CUstream or -1: the tensors' framework's) */
static PyObject *launch(PyObject *self, PyObject *args)
{
    (void)self;
    const char *name, *package;
    unsigned long long function;
    long long stream;
    unsigned grid[3], block[3], shared;
    if (!PyArg_ParseTuple(args, "ssK(III)(III)IL", &name, &package, &function, &grid[0], &grid[1], &grid[2], &block[0],
                          &block[1], &block[2], &shared, &stream))
        return NULL;
    for (size_t i = 0; i < sizeof signatures / sizeof *signatures; i++) {
        if (strcmp(name, signatures[i].name) || strcmp(package, signatures[i].package))
            continue;
        Launch *made = PyObject_New(Launch, launch_type);
        if (!made)
            return NULL;
        made->vectorcall = signatures[i].launch;
        made->read = signatures[i].read;
        made->function = (void *)(uintptr_t)function;
        memcpy(made->grid, grid, sizeof grid);
        memcpy(made->block, block, sizeof block);
        made->shared = shared;
        made->is_on_stream = stream != -1;
        made->stream = stream == -1 ? NULL : (void *)(intptr_t)stream;
        made->held = NULL;
        return (PyObject *)made;
    }
    PyErr_Format(PyExc_ValueError, "there is no signature %s of %s", name, package);
    return NULL;
}

/* hold(launch, *args): pack the parameters for raw(). The arguments have to live on; the stream is the default one. */
static PyObject *hold(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count < 1 || Py_TYPE(args[0]) != launch_type)
        return wrong(0, "not a launch");
    Launch *made = (Launch *)args[0];
    if (!made->held)
        made->held = PyMem_Malloc(sizeof(Frame));
    if (!made->held)
        return PyErr_NoMemory();
    if (made->read(args + 1, count - 1, made->held))
        return NULL;
    Py_RETURN_NONE;
}

/* raw(launch, times, without the GIL): launch with what is held, so many times. */
static PyObject *raw(PyObject *self, PyObject *args)
{
    (void)self;
    Launch *made;
    Py_ssize_t times;
    int is_released, code = 0;
    if (!PyArg_ParseTuple(args, "O!np", launch_type, &made, &times, &is_released))
        return NULL;
    if (!made->held)
        return wrong(0, "holds nothing");
    void *stream = made->is_on_stream ? made->stream : NULL;
    if (is_released)
        for (Py_ssize_t i = 0; i < times && !code; i++) {
            Py_BEGIN_ALLOW_THREADS
            code = call_driver(made, stream, made->held);
            Py_END_ALLOW_THREADS
        }
    else
        for (Py_ssize_t i = 0; i < times && !code; i++)
            code = call_driver(made, stream, made->held);
    if (code)
        return refused(code);
    Py_RETURN_NONE;
}

/* ---- __dlpack__ of tensors for tests ---- */

static void delete_copy(DLManagedTensorVersioned *managed) { free(managed); }
static void delete_legacy(DLManagedTensor *managed) { free(managed); }

static void free_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        free(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    else if (PyCapsule_IsValid(capsule, "dltensor"))
        free(PyCapsule_GetPointer(capsule, "dltensor"));
}

/* capsule(address of a DLManagedTensorVersioned, versioned or legacy): what __dlpack__ returns. The copy in it borrows
 * all that the tensor has. */
static PyObject *capsule(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long address;
    int is_versioned;
    if (!PyArg_ParseTuple(args, "Kp", &address, &is_versioned))
        return NULL;
    const DLManagedTensorVersioned *tensor = (const void *)(uintptr_t)address;
    if (is_versioned) {
        DLManagedTensorVersioned *made = malloc(sizeof *made);
        if (!made)
            return PyErr_NoMemory();
        *made = *tensor;
        made->deleter = delete_copy;
        return PyCapsule_New(made, "dltensor_versioned", free_capsule);
    }
    DLManagedTensor *made = malloc(sizeof *made);
    if (!made)
        return PyErr_NoMemory();
    *made = (DLManagedTensor){tensor->dl_tensor, NULL, delete_legacy};
    return PyCapsule_New(made, "dltensor", free_capsule);
}

static PyMethodDef methods[] = {
    {"use_driver", use_driver, METH_VARARGS, "Where the driver's functions are, and the devices' primary contexts."},
    {"launch", launch, METH_VARARGS, "A callable object that launches a kernel."},
    {"hold", (PyCFunction)(void *)hold, METH_FASTCALL, "Pack the parameters of a launch, for raw()."},
    {"raw", raw, METH_VARARGS, "Launch with packed parameters, so many times."},
    {"capsule", capsule, METH_VARARGS, "A DLPack capsule of a tensor."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastexchange_cuda_floor", NULL, -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fastexchange_cuda_floor(void)
{
    import_array1(NULL);
    launch_type = (PyTypeObject *)PyType_FromSpec(&launch_spec);
    return launch_type ? PyModule_Create(&definition) : NULL;
}

/* The limit: what a C extension written by hand for one kernel does with its arguments, and nothing else.
 *
 * The functions for kernels check their arguments against one fixed signature (any number of 1-D, C-contiguous
 * float32 arrays on the CPU, or of scalars), write them as the flat words that a Numba kernel takes per array, and call
 * an empty kernel through a pointer that the compiler cannot see through. Beside them stands NumPy's owning export, as
 * an exchange table. floor.py builds it all and puts the DLPack declarations and floor_table.h in front.
 */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#define MAX_ARGUMENTS 128

typedef struct {
    void *meminfo;
    PyObject *parent;
    int64_t nitems;
    int64_t itemsize;
    void *data;
    int64_t shape[1];
    int64_t strides[1]; /* in bytes */
} Array1D;

typedef union {
    double f;
    int64_t i;
} Word;

static void empty_kernel(void *arguments) { (void)arguments; }
static void (*volatile kernel)(void *) = empty_kernel;

static PyTypeObject *ndarray;

static PyObject *empty(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self, (void)args, (void)count;
    Py_RETURN_NONE;
}

/* ---- numpy ---- */

static PyObject *numpy(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        if (UNLIKELY(Py_TYPE(args[i]) != ndarray))
            return wrong(i, "not a numpy.ndarray");
        const PyArrayObject_fields *array = (const PyArrayObject_fields *)args[i];
        const int needed = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;
        if (UNLIKELY(array->descr->type_num != NPY_FLOAT32 || !PyArray_ISNBO(array->descr->byteorder)))
            return wrong(i, "not float32");
        if (UNLIKELY(array->nd != 1 || (array->flags & needed) != needed))
            return wrong(i, "not 1-D, C-contiguous, aligned and writable");
        frame[i].meminfo = NULL;
        frame[i].parent = args[i];
        frame[i].nitems = array->dimensions[0];
        frame[i].itemsize = 4;
        frame[i].data = array->data;
        frame[i].shape[0] = array->dimensions[0];
        frame[i].strides[0] = array->strides[0];
    }
    kernel(frame);
    Py_RETURN_NONE;
}

/* ---- the exchange table ---- */

/* NULL when the tensor is one that the kernel takes, else what is wrong with it. */
static inline const char *accept(const DLTensor *tensor, PyObject *object, Array1D *out)
{
    if (UNLIKELY(tensor->device.device_type != kDLCPU))
        return "not on the CPU";
    if (UNLIKELY(tensor->dtype.code != kDLFloat || tensor->dtype.bits != 32 || tensor->dtype.lanes != 1))
        return "not float32";
    if (UNLIKELY(tensor->ndim != 1))
        return "not 1-D";
    int64_t items = tensor->shape[0];
    int64_t stride = tensor->strides ? tensor->strides[0] : 1;
    if (UNLIKELY(stride != 1 && items > 1))
        return "not contiguous";
    if (UNLIKELY(!tensor->data && items))
        return "without memory";
    out->meminfo = NULL;
    out->parent = object;
    out->nitems = items;
    out->itemsize = 4;
    out->data = (char *)tensor->data + tensor->byte_offset;
    out->shape[0] = items;
    out->strides[0] = stride * 4;
    return NULL;
}

static PyObject *torch(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        const DLPackExchangeAPI *api = api_of(args[i]);
        DLTensor tensor;
        if (UNLIKELY(!api || api->dltensor_from_py_object_no_sync(args[i], &tensor)))
            return NULL;
        const char *reason = accept(&tensor, args[i], &frame[i]);
        if (UNLIKELY(reason != NULL))
            return wrong(i, reason);
    }
    kernel(frame);
    Py_RETURN_NONE;
}

static PyObject *torch_managed(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    DLManagedTensorVersioned *owned[MAX_ARGUMENTS];
    PyObject *result = NULL;
    Py_ssize_t exported = 0;
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (; exported < count;) {
        PyObject *object = args[exported];
        const DLPackExchangeAPI *api = api_of(object);
        if (UNLIKELY(!api || api->managed_tensor_from_py_object_no_sync(object, &owned[exported])))
            goto release;
        exported++;
        const DLManagedTensorVersioned *managed = owned[exported - 1];
        const char *reason = managed->version.major != 1 ? "of another DLPack major version"
                             : managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY
                                 ? "readonly"
                                 : accept(&managed->dl_tensor, object, &frame[exported - 1]);
        if (UNLIKELY(reason != NULL)) {
            wrong(exported - 1, reason);
            goto release;
        }
    }
    kernel(frame);
    result = Py_NewRef(Py_None);
release:
    for (Py_ssize_t i = 0; i < exported; i++)
        if (owned[i]->deleter)
            owned[i]->deleter(owned[i]);
    return result;
}

/* ---- objects with a buffer ---- */

static inline const char *accept_buffer(const Py_buffer *view, PyObject *object, Array1D *out)
{
    if (UNLIKELY(!view->format || view->format[0] != 'f' || view->format[1] || view->itemsize != 4))
        return "not float32";
    if (UNLIKELY(view->ndim != 1 || view->suboffsets))
        return "not 1-D";
    if (UNLIKELY(view->strides[0] != 4 && view->shape[0] > 1))
        return "not contiguous";
    out->meminfo = NULL;
    out->parent = object;
    out->nitems = view->shape[0];
    out->itemsize = 4;
    out->data = view->buf;
    out->shape[0] = view->shape[0];
    out->strides[0] = 4;
    return NULL;
}

static PyObject *buffer(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    Py_buffer views[MAX_ARGUMENTS];
    PyObject *result = NULL;
    Py_ssize_t taken = 0;
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (; taken < count; taken++) {
        if (UNLIKELY(PyObject_GetBuffer(args[taken], &views[taken], PyBUF_RECORDS)))
            goto release;
        const char *reason = accept_buffer(&views[taken], args[taken], &frame[taken]);
        if (UNLIKELY(reason != NULL)) {
            PyBuffer_Release(&views[taken]);
            wrong(taken, reason);
            goto release;
        }
    }
    kernel(frame);
    result = Py_NewRef(Py_None);
release:
    for (Py_ssize_t i = 0; i < taken; i++)
        PyBuffer_Release(&views[i]);
    return result;
}

/* ---- objects with __dlpack__ ---- */

static PyObject *dlpack_name, *dlpack_keywords, *dlpack_version; /* "__dlpack__", ("max_version",), (1, 3) */

/* What object.__dlpack__(max_version=(1, 3)) exports, owned; NULL with an exception set. */
static DLManagedTensorVersioned *exported(PyObject *object)
{
    PyObject *arguments[] = {object, dlpack_version};
    PyObject *capsule = PyObject_VectorcallMethod(dlpack_name, arguments, 1, dlpack_keywords);
    if (UNLIKELY(!capsule))
        return NULL;
    DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (LIKELY(managed != NULL) && UNLIKELY(PyCapsule_SetName(capsule, "used_dltensor_versioned")))
        managed = NULL;
    Py_DECREF(capsule);
    return managed;
}

static PyObject *dunder(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    DLManagedTensorVersioned *owned[MAX_ARGUMENTS];
    PyObject *result = NULL;
    Py_ssize_t taken = 0;
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    while (taken < count) {
        DLManagedTensorVersioned *managed = exported(args[taken]);
        if (UNLIKELY(!managed))
            goto release;
        owned[taken++] = managed;
        const char *reason = managed->version.major != 1 ? "of another DLPack major version"
                             : managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY
                                 ? "readonly"
                                 : accept(&managed->dl_tensor, args[taken - 1], &frame[taken - 1]);
        if (UNLIKELY(reason != NULL)) {
            wrong(taken - 1, reason);
            goto release;
        }
    }
    kernel(frame);
    result = Py_NewRef(Py_None);
release:
    for (Py_ssize_t i = 0; i < taken; i++)
        if (owned[i]->deleter)
            owned[i]->deleter(owned[i]);
    return result;
}

/* ---- NumPy's owning export ---- */

static const DLDataType dtypes[] = {
    [NPY_BOOL] = {kDLBool, 8, 1},
    [NPY_BYTE] = {kDLInt, 8, 1},
    [NPY_UBYTE] = {kDLUInt, 8, 1},
    [NPY_SHORT] = {kDLInt, 8 * sizeof(short), 1},
    [NPY_USHORT] = {kDLUInt, 8 * sizeof(short), 1},
    [NPY_INT] = {kDLInt, 8 * sizeof(int), 1},
    [NPY_UINT] = {kDLUInt, 8 * sizeof(int), 1},
    [NPY_LONG] = {kDLInt, 8 * sizeof(long), 1},
    [NPY_ULONG] = {kDLUInt, 8 * sizeof(long), 1},
    [NPY_LONGLONG] = {kDLInt, 8 * sizeof(long long), 1},
    [NPY_ULONGLONG] = {kDLUInt, 8 * sizeof(long long), 1},
    [NPY_HALF] = {kDLFloat, 16, 1},
    [NPY_FLOAT] = {kDLFloat, 32, 1},
    [NPY_DOUBLE] = {kDLFloat, 64, 1},
    [NPY_CFLOAT] = {kDLComplex, 64, 1},
    [NPY_CDOUBLE] = {kDLComplex, 128, 1},
};

static int cannot_export(const char *reason)
{
    PyErr_SetString(PyExc_BufferError, reason);
    return -1;
}

static void delete_export(DLManagedTensorVersioned *managed)
{
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)managed->manager_ctx);
    PyGILState_Release(state);
    free(managed);
}

/* One block holds the managed tensor, its shape and its strides, which DLPack counts in elements. */
static int export_array(void *object, DLManagedTensorVersioned **out)
{
    const PyArrayObject_fields *array = object;
    int type_num = array->descr->type_num;
    if (UNLIKELY(type_num < 0 || type_num >= (int)(sizeof dtypes / sizeof *dtypes) || !dtypes[type_num].bits))
        return cannot_export("no DLPack dtype");
    if (UNLIKELY(!PyArray_ISNBO(array->descr->byteorder)))
        return cannot_export("swapped byte order");
    int ndim = array->nd;
    DLManagedTensorVersioned *managed = malloc(sizeof *managed + 2 * ndim * sizeof(int64_t));
    if (UNLIKELY(!managed)) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *shape = (int64_t *)(managed + 1), *strides = shape + ndim;
    int shift = __builtin_ctz(dtypes[type_num].bits / 8); /* their item sizes are powers of two */
    for (int i = 0; i < ndim; i++) {
        shape[i] = array->dimensions[i];
        strides[i] = array->strides[i] >> shift;
        if (UNLIKELY(array->strides[i] & ((1 << shift) - 1)) && shape[i] > 1) {
            free(managed);
            return cannot_export("strides that are not whole elements");
        }
    }
    Py_INCREF(object);
    managed->version = (DLPackVersion){1, 3};
    managed->manager_ctx = object;
    managed->deleter = delete_export;
    managed->flags = array->flags & NPY_ARRAY_WRITEABLE ? 0 : DLPACK_FLAG_BITMASK_READ_ONLY;
    managed->dl_tensor = (DLTensor){array->data, {kDLCPU, 0}, ndim, dtypes[type_num], shape, strides, 0};
    *out = managed;
    return 0;
}

static const DLPackExchangeAPI numpy_table = {
    .header = {.version = {1, 3}},
    .managed_tensor_from_py_object_no_sync = export_array, /* all that export_and_delete, its only user, looks at */
};

/* export_and_delete(a table's capsule, tensor, times): the same code calls both tables, through pointers. */
static PyObject *export_and_delete(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "a table, a tensor and a number are needed");
        return NULL;
    }
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    Py_ssize_t times = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    for (Py_ssize_t i = 0; i < times; i++) {
        DLManagedTensorVersioned *managed;
        if (UNLIKELY(api->managed_tensor_from_py_object_no_sync(args[1], &managed)))
            return NULL;
        managed->deleter(managed);
    }
    Py_RETURN_NONE;
}

/* ---- scalars ---- */

static inline int small_int(PyObject *object, int64_t *out)
{
#if PY_VERSION_HEX >= 0x030C0000
    if (LIKELY(PyUnstable_Long_IsCompact((PyLongObject *)object))) {
        *out = PyUnstable_Long_CompactValue((PyLongObject *)object);
        return 0;
    }
#else
    Py_ssize_t size = Py_SIZE(object);
    if (LIKELY(size >= -1 && size <= 1)) {
        *out = size * (int64_t)((PyLongObject *)object)->ob_digit[0] * (size != 0);
        return 0;
    }
#endif
    *out = PyLong_AsLongLong(object);
    return *out == -1 && PyErr_Occurred();
}

static PyObject *scalars(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Word frame[MAX_ARGUMENTS];
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        PyTypeObject *type = Py_TYPE(args[i]);
        if (type == &PyFloat_Type)
            frame[i].f = PyFloat_AS_DOUBLE(args[i]);
        else if (type == &PyBool_Type)
            frame[i].i = args[i] == Py_True;
        else if (UNLIKELY(type != &PyLong_Type))
            return wrong(i, "not a float, int or bool");
        else if (UNLIKELY(small_int(args[i], &frame[i].i)))
            return NULL;
    }
    kernel(frame);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"empty", (PyCFunction)(void *)empty, METH_FASTCALL, "Return None at once."},
    {"numpy", (PyCFunction)(void *)numpy, METH_FASTCALL, "NumPy arrays, read from the array struct."},
    {"torch", (PyCFunction)(void *)torch, METH_FASTCALL, "Tensors borrowed with dltensor_from_py_object_no_sync."},
    {"torch_managed", (PyCFunction)(void *)torch_managed, METH_FASTCALL,
     "Tensors owned through managed_tensor_from_py_object_no_sync, released after the kernel."},
    {"buffer", (PyCFunction)(void *)buffer, METH_FASTCALL, "Objects whose buffers are taken for the call."},
    {"dunder", (PyCFunction)(void *)dunder, METH_FASTCALL, "Objects whose __dlpack__ is called."},
    {"export_and_delete", (PyCFunction)(void *)export_and_delete, METH_FASTCALL,
     "Own a tensor through a table's managed_tensor_from_py_object_no_sync and release it, so many times."},
    {"scalars", (PyCFunction)(void *)scalars, METH_FASTCALL, "Python's float, int and bool."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastexchange_floor", NULL, -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fastexchange_floor(void)
{
    import_array1(NULL);
    ndarray = &PyArray_Type;
    dlpack_name = PyUnicode_InternFromString("__dlpack__");
    dlpack_keywords = Py_BuildValue("(s)", "max_version");
    dlpack_version = Py_BuildValue("(ii)", 1, 3);
    if (!dlpack_name || !dlpack_keywords || !dlpack_version)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    PyObject *capsule = PyCapsule_New((void *)&numpy_table, "dlpack_exchange_api", NULL);
    if (!module || PyModule_AddObjectRef(module, "numpy_table", capsule))
        Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}

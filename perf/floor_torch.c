/* The limit of PyTorch's CPU tensors without their exchange table: read in memory, or told by PyTorch's stable C ABI.
 *
 * As floor.c's: one fixed signature, any number of 1-D, C-contiguous float32 tensors, and an empty kernel. The offsets in
 * memory are compile-time constants, AT_... and others, that floor.py takes from what the package has found. Both functions
 * refuse what the package refuses: tensors with other dispatch keys than plain ones, with autograd metadata, with memory
 * that PyTorch checks at each access, or that ends before the tensor.
 */
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

static void empty_kernel(void *arguments) { (void)arguments; }
static void (*volatile kernel)(void *) = empty_kernel;

static PyTypeObject *tensor_type;

static inline int64_t word(const void *object, int64_t at) { return *(const int64_t *)((const char *)object + at); }
static inline const void *pointer(const void *object, int64_t at) { return (const void *)word(object, at); }

/* NULL when the tensor is plain, else what is wrong with it. */
static inline const char *accept(PyObject *object)
{
    if (UNLIKELY(Py_TYPE(object) != tensor_type))
        return "not a torch.Tensor";
    const void *tensor = pointer(object, AT_OBJECT);
    if (UNLIKELY(word(tensor, AT_KEYS) & ODD_KEYS))
        return "not plain";
    if (UNLIKELY(word(tensor, AT_AUTOGRAD) != 0))
        return "known to autograd";
    return NULL;
}

static inline int is_short(const void *storage, const Array1D *array)
{
    int64_t start = word(storage, AT_DATA);
    return !start || (int64_t)array->data + 4 * array->nitems > start + word(storage, AT_SIZE);
}

static inline const char *fill(PyObject *object, char *data, int64_t items, int64_t stride, Array1D *out)
{
    if (UNLIKELY(stride != 1 && items > 1))
        return "not contiguous";
    out->meminfo = NULL;
    out->parent = object;
    out->nitems = items;
    out->itemsize = 4;
    out->data = data;
    out->shape[0] = items;
    out->strides[0] = stride * 4;
    if (UNLIKELY(items && is_short(pointer(pointer(object, AT_OBJECT), AT_STORAGE), out)))
        return "longer than its memory";
    return NULL;
}

static inline const char *read_in_memory(PyObject *object, Array1D *out)
{
    const char *reason = accept(object);
    if (UNLIKELY(reason != NULL))
        return reason;
    const char *tensor = pointer(object, AT_OBJECT);
    const char *storage = pointer(tensor, AT_STORAGE);
    if (UNLIKELY((word(tensor, AT_DTYPE) & 63) != FLOAT32))
        return "not float32";
    if (UNLIKELY(tensor[AT_DEVICE]))
        return "not on the CPU";
    if (UNLIKELY(storage[AT_CHECKED]))
        return "copy-on-write";
    if (UNLIKELY(word(tensor, AT_NDIM) != 1))
        return "not 1-D";
    char *data = (char *)pointer(storage, AT_DATA) + 4 * word(tensor, AT_OFFSET);
    return fill(object, data, word(tensor, AT_SIZES), word(tensor, AT_STRIDES), out);
}

static PyObject *memory(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *reason = read_in_memory(args[i], &frame[i]);
        if (UNLIKELY(reason != NULL))
            return wrong(i, reason);
    }
    kernel(frame);
    Py_RETURN_NONE;
}

/* ---- the stable C ABI ---- */

typedef int32_t (*Ask)(const void *handle, void *result);
static Ask data_ptr, dim, sizes, strides, dtype, device_type;

static inline const char *ask(PyObject *object, Array1D *out)
{
    const char *reason = accept(object);
    if (UNLIKELY(reason != NULL))
        return reason;
    const void *handle = (const char *)object + AT_OBJECT;
    void *data;
    int64_t ndim, *shape, *steps;
    int32_t type, device;
    if (UNLIKELY(dtype(handle, &type) || device_type(handle, &device) || dim(handle, &ndim) || data_ptr(handle, &data)))
        return "without an answer";
    if (UNLIKELY(sizes(handle, &shape) || strides(handle, &steps)))
        return "without an answer";
    if (UNLIKELY(type != FLOAT32))
        return "not float32";
    if (UNLIKELY(device))
        return "not on the CPU";
    if (UNLIKELY(ndim != 1))
        return "not 1-D";
    return fill(object, data, shape[0], steps[0], out);
}

static PyObject *abi(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Array1D frame[MAX_ARGUMENTS];
    if (UNLIKELY(count > MAX_ARGUMENTS))
        return wrong(MAX_ARGUMENTS, "one too many");
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *reason = ask(args[i], &frame[i]);
        if (UNLIKELY(reason != NULL))
            return wrong(i, reason);
    }
    kernel(frame);
    Py_RETURN_NONE;
}

static PyObject *use(PyObject *self, PyObject *args)
{
    (void)self;
    return PyArg_ParseTuple(args, "O!nnnnnn", &PyType_Type, &tensor_type, &data_ptr, &dim, &sizes, &strides, &dtype, &device_type)
               ? Py_NewRef(Py_None)
               : NULL;
}

static PyMethodDef methods[] = {
    {"memory", (PyCFunction)(void *)memory, METH_FASTCALL, "Tensors, read in memory."},
    {"abi", (PyCFunction)(void *)abi, METH_FASTCALL, "Tensors, told by PyTorch's stable C ABI."},
    {"use", use, METH_VARARGS, "Set the type of tensors and the addresses of the C ABI's functions."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastexchange_torch_floor", NULL, -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fastexchange_torch_floor(void) { return PyModule_Create(&definition); }

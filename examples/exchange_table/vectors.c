/* A Python module with a type of tensors, Vector, that has DLPack's C exchange table. Vectors of float32, on the CPU.
 *
 * Compile it with Python's headers, and with dlpack.h of DLPack 1.3 on the path: docs/users/producers.md says how.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "dlpack.h"

typedef struct {
    PyObject_HEAD
    float *data;
    int64_t shape[1], strides[1];
    DLManagedTensorVersioned *owner; /* whose memory it is, if it came from another library; else NULL */
} Vector;

static PyTypeObject *vector_type;

/* ---- the table ---- */
static int show(void *py_object, DLTensor *out)
{
    Vector *x = py_object;
    *out = (DLTensor){.data = x->data, .device = {kDLCPU, 0}, .ndim = 1,
                      .dtype = {kDLFloat, 32, 1}, .shape = x->shape, .strides = x->strides,
                      .byte_offset = 0};
    return 0;
}

/* from any thread, perhaps without the GIL */
static void let_go(DLManagedTensorVersioned *self)
{
    if (!Py_IsInitialized()) return; /* the interpreter has ended: leak it */
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)self->manager_ctx);
    PyGILState_Release(state);
    free(self);
}

static int export_tensor(void *py_object, DLManagedTensorVersioned **out)
{
    DLManagedTensorVersioned *made = calloc(1, sizeof *made);
    if (made == NULL) { PyErr_NoMemory(); return -1; }
    made->version = (DLPackVersion){1, 3};
    made->manager_ctx = py_object;
    made->deleter = let_go;
    show(py_object, &made->dl_tensor);
    Py_INCREF(py_object);
    *out = made;
    return 0;
}

static int import_tensor(DLManagedTensorVersioned *tensor, void **out)
{
    DLTensor *t = &tensor->dl_tensor;
    int is_packed = t->ndim == 1 && (t->shape[0] < 2 || t->strides == NULL || t->strides[0] == 1);
    if (!is_packed || t->device.device_type != kDLCPU || t->dtype.code != kDLFloat || t->dtype.bits != 32 || t->dtype.lanes != 1
        || (tensor->flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
        PyErr_SetString(PyExc_BufferError, "a Vector is a packed, writable vector of float32 on the CPU");
        return -1;
    }
    Vector *x = PyObject_New(Vector, vector_type);
    if (x == NULL) return -1;
    x->data = (float *)((char *)t->data + t->byte_offset);
    x->shape[0] = t->shape[0], x->strides[0] = 1;
    x->owner = tensor;
    *out = x;
    return 0;
}

typedef struct { DLManagedTensorVersioned managed; int64_t sizes[2 * 64]; float memory[]; } Block;

static void free_block(DLManagedTensorVersioned *self) { free(self); }

static int allocate(DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
                    void (*SetError)(void *error_ctx, const char *kind, const char *message)) /* perhaps without the GIL */
{
    DLDataType dtype = prototype->dtype;
    int is_ours = prototype->device.device_type == kDLCPU && dtype.code == kDLFloat && dtype.bits == 32 && dtype.lanes == 1;
    if (!is_ours || prototype->ndim < 0 || prototype->ndim > 64) {
        SetError(error_ctx, "BufferError", "only float32 on the CPU can be allocated");
        return -1;
    }
    size_t count = 1, limit = (SIZE_MAX - sizeof(Block)) / sizeof(float);
    for (int i = 0; i < prototype->ndim; i++)
        if (__builtin_mul_overflow(count, (size_t)prototype->shape[i], &count)) count = SIZE_MAX;
    Block *made = count > limit ? NULL : malloc(sizeof(Block) + count * sizeof(float));
    if (made == NULL) {
        SetError(error_ctx, "MemoryError", "there is not enough memory");
        return -1;
    }
    int64_t *shape = made->sizes, *strides = made->sizes + 64, step = 1;
    for (int i = prototype->ndim; i-- > 0; step *= shape[i]) shape[i] = prototype->shape[i], strides[i] = step;
    made->managed = (DLManagedTensorVersioned){
        .version = {1, 3}, .deleter = free_block,
        .dl_tensor = {.data = made->memory, .device = {kDLCPU, 0}, .ndim = prototype->ndim, .dtype = dtype, .shape = shape,
                      .strides = strides}};
    *out = &made->managed;
    return 0;
}

static int stream(DLDeviceType device_type, int32_t device_id, void **out) { *out = NULL; return 0; }

static DLPackExchangeAPI table = {
    .header = {.version = {1, 3}, .prev_api = NULL},
    .managed_tensor_allocator = allocate,
    .managed_tensor_from_py_object_no_sync = export_tensor,
    .managed_tensor_to_py_object_no_sync = import_tensor,
    .dltensor_from_py_object_no_sync = show,
    .current_work_stream = stream,
};

/* ---- __dlpack__, for consumers that do not know the table. It gives a versioned capsule, whatever `max_version` is: consumers
 * that know DLPack before 1.0 alone refuse that. ---- */
static void let_capsule_go(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return; /* a consumer has it */
    DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    managed->deleter(managed);
}

static PyObject *dlpack(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *dl_device = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO", names, &stream, &max_version, &dl_device, &copy)) return NULL;
    int device_type = kDLCPU, device_id = 0;
    int is_here = dl_device == Py_None || (PyTuple_Check(dl_device)
        && PyArg_ParseTuple(dl_device, "ii", &device_type, &device_id) && device_type == kDLCPU);
    if (!is_here || copy == Py_True || stream != Py_None) {
        PyErr_SetString(PyExc_BufferError, "a Vector is exported on the CPU, without a stream, and not copied");
        return NULL;
    }
    DLManagedTensorVersioned *managed;
    return export_tensor(self, &managed) < 0 ? NULL : PyCapsule_New(managed, "dltensor_versioned", let_capsule_go);
}

static PyObject *dlpack_device(PyObject *self, PyObject *none) { return Py_BuildValue("ii", kDLCPU, 0); }

static PyMethodDef methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))dlpack, METH_VARARGS | METH_KEYWORDS, "An export, in a capsule."},
    {"__dlpack_device__", dlpack_device, METH_NOARGS, "(kDLCPU, 0)"},
    {NULL},
};

/* ---- the type, and the module ---- */
static void dealloc(PyObject *self)
{
    Vector *x = (Vector *)self;
    if (x->owner == NULL) free(x->data);
    else if (x->owner->deleter != NULL) x->owner->deleter(x->owner);
    PyObject_Free(self);
    Py_DECREF(vector_type);
}

static PyType_Slot slots[] = {{Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"vectors.Vector", sizeof(Vector), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

static PyObject *zeros(PyObject *module, PyObject *count)
{
    Py_ssize_t n = PyLong_AsSsize_t(count);
    if (n == -1 && PyErr_Occurred()) return NULL;
    float *data = calloc(n < 1 ? 1 : n, sizeof(float));
    Vector *x = data == NULL ? (Vector *)PyErr_NoMemory() : PyObject_New(Vector, vector_type);
    if (x == NULL) { free(data); return NULL; }
    x->data = data, x->shape[0] = n < 0 ? 0 : n, x->strides[0] = 1, x->owner = NULL;
    return (PyObject *)x;
}

static PyMethodDef functions[] = {{"zeros", zeros, METH_O, "A Vector of n zeros."}, {NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "vectors", NULL, -1, functions};

PyMODINIT_FUNC PyInit_vectors(void)
{
    PyObject *module = PyModule_Create(&definition);
    vector_type = (PyTypeObject *)PyType_FromSpec(&spec);
    PyObject *capsule = PyCapsule_New(&table, "dlpack_exchange_api", NULL);
    if (module == NULL || vector_type == NULL || capsule == NULL) return NULL;
    PyObject *type = (PyObject *)vector_type;
    if (PyObject_SetAttrString(type, "__dlpack_c_exchange_api__", capsule) < 0) return NULL;
    Py_DECREF(capsule);
    Py_INCREF(vector_type);
    return PyModule_AddObject(module, "Vector", type) < 0 ? NULL : module;
}

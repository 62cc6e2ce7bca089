/* What hand-written C needs wherever tensors come from: the exchange table of their type, and errors that name an
 * argument. floor.py puts it in front of floor.c and of cuda_floor.c.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* The last type that had a table. A hand-written binding knows its framework: one entry is what it needs. */
static PyTypeObject *known_type;
static const DLPackExchangeAPI *known_api;

static PyObject *wrong(Py_ssize_t position, const char *reason)
{
    PyErr_Format(PyExc_TypeError, "argument %zd: %s", position + 1, reason);
    return NULL;
}

static const DLPackExchangeAPI *learn(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule)
        return NULL;
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (api && api->header.version.major != 1) {
        PyErr_SetString(PyExc_BufferError, "exchange table of another major version");
        return NULL;
    }
    if (api) {
        Py_INCREF(type);
        Py_XSETREF(known_type, type);
        known_api = api;
    }
    return api;
}

static inline const DLPackExchangeAPI *api_of(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    return LIKELY(type == known_type) ? known_api : learn(type);
}

// The Python module tpfused._C. It uses Python's limited C API only, so one build serves every Python from 3.11 on,
// and takes integers and strings, never torch objects.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "build_info.h"

namespace {

PyObject* build_info(PyObject*, PyObject*) {
  int nccl = 0;
  ncclResult_t result = ncclGetVersion(&nccl);
  if (result != ncclSuccess) {
    return PyErr_Format(PyExc_RuntimeError, "ncclGetVersion failed: %s", ncclGetErrorString(result));
  }
  return Py_BuildValue("{s:i,s:s,s:i,s:i}", "cuda", CUDART_VERSION, "architectures", TPFUSED_ARCHITECTURES,
                       "nccl_compiled", NCCL_VERSION_CODE, "nccl_loaded", nccl);
}

PyObject* kernel_architecture(PyObject*, PyObject* args) {
  int device = 0;
  if (!PyArg_ParseTuple(args, "i:kernel_architecture", &device)) return nullptr;
  int architecture = 0;
  cudaError_t error = tpfused::kernel_architecture(device, &architecture);
  if (error != cudaSuccess) {
    return PyErr_Format(PyExc_RuntimeError, "CUDA device %d: %s", device, cudaGetErrorString(error));
  }
  return PyLong_FromLong(architecture);
}

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS,
     "What this was compiled with, and the NCCL that was loaded; versions as the libraries' own integers."},
    {"kernel_architecture", kernel_architecture, METH_VARARGS,
     "kernel_architecture(device) -> the architecture, such as 90, of the machine code that this device runs."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tpfused._C", "The compiled part of tpfused.", 0, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&definition); }

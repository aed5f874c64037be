// The Python module tpfused._C: see methods.h.

#include "build_info.h"
#include "check.h"
#include "methods.h"

namespace {

using namespace tpfused;

PyObject* build_info(PyObject*, PyObject*) {
  return guarded([] {
    int nccl = 0;
    check(ncclGetVersion(&nccl), "ncclGetVersion");
    return Py_BuildValue("{s:i,s:s,s:s,s:i,s:i}", "cuda", CUDART_VERSION, "architectures", TPFUSED_ARCHITECTURES,
                         "sources", TPFUSED_SOURCES, "nccl_compiled", NCCL_VERSION_CODE, "nccl_loaded", nccl);
  });
}

PyObject* kernel_architecture(PyObject*, PyObject* args) {
  int device = 0;
  if (!PyArg_ParseTuple(args, "i:kernel_architecture", &device)) return nullptr;
  return guarded([&] {
    int architecture = 0;
    std::string what = "CUDA device " + std::to_string(device);
    check(tpfused::kernel_architecture(device, &architecture), what.c_str());
    return PyLong_FromLong(architecture);
  });
}

PyObject* nccl_unique_id(PyObject*, PyObject*) {
  return guarded([] {
    ncclUniqueId id;
    check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    return PyBytes_FromStringAndSize(id.internal, sizeof id.internal);
  });
}

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS,
     "What this was compiled with, and the NCCL that was loaded; versions as the libraries' own integers."},
    {"kernel_architecture", kernel_architecture, METH_VARARGS,
     "kernel_architecture(device) -> the architecture, such as 90, of the machine code that this device runs."},
    {"nccl_unique_id", nccl_unique_id, METH_NOARGS,
     "What all ranks give to `group_connect_nccl`, made by one of them."},
    {nullptr, nullptr, 0, nullptr},
};

int add_methods(PyObject* module) {
  for (PyMethodDef* more : {group_methods, operation_methods}) {
    if (PyModule_AddFunctions(module, more) < 0) return -1;
  }
  return 0;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(add_methods)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tpfused._C", "The compiled part of tpfused.", 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&definition); }

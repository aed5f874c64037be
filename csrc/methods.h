#pragma once

// For the functions of the Python module tpfused._C. It uses Python's limited C API only, so one build serves every
// Python from 3.11 on, and takes integers, strings and bytes, never torch objects: addresses, streams and handles are
// integers.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <string>

namespace tpfused {

extern PyMethodDef group_methods[], operation_methods[];

// Runs `body`, which gives a new reference, and turns what it throws into RuntimeError.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// The same without Python's lock: for what may wait for other ranks, and what other threads need not wait for.
template <typename Body>
PyObject* unlocked(Body body) {
  std::string failure;
  Py_BEGIN_ALLOW_THREADS;
  try {
    body();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (failure.empty()) return Py_NewRef(Py_None);
  PyErr_SetString(PyExc_RuntimeError, failure.c_str());
  return nullptr;
}

template <typename T>
T* at(long long address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace tpfused

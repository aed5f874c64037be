// A group's functions in Python.

#include <cstring>

#include "check.h"
#include "group.h"
#include "methods.h"

namespace tpfused {
namespace {

PyObject* group_create(PyObject*, PyObject* args) {
  int device, rank, size;
  if (!PyArg_ParseTuple(args, "iii:group_create", &device, &rank, &size)) return nullptr;
  return guarded([&] { return PyLong_FromVoidPtr(new Group(device, rank, size)); });
}

PyObject* group_connect_nccl(PyObject*, PyObject* args) {
  long long group;
  const char* bytes;
  Py_ssize_t length;
  int processors;
  if (!PyArg_ParseTuple(args, "Ly#i:group_connect_nccl", &group, &bytes, &length, &processors)) return nullptr;
  return unlocked([&] {
    ncclUniqueId id;
    if (length != sizeof id.internal) throw std::runtime_error("an NCCL id has 128 bytes");
    std::memcpy(id.internal, bytes, sizeof id.internal);
    at<Group>(group)->connect_nccl(id, processors);
  });
}

PyObject* group_destroy(PyObject*, PyObject* args) {
  long long group;
  if (!PyArg_ParseTuple(args, "L:group_destroy", &group)) return nullptr;
  return unlocked([&] { delete at<Group>(group); });
}

PyObject* group_allocate(PyObject*, PyObject* args) {
  long long address, slot_bytes;
  if (!PyArg_ParseTuple(args, "LL:group_allocate", &address, &slot_bytes)) return nullptr;
  std::string handle;
  PyObject* done = unlocked([&] {
    auto& group = *at<Group>(address);
    DeviceGuard guard(group.device);
    group.allocate(static_cast<size_t>(slot_bytes));
    handle = group.peers->handle();
  });
  if (!done) return nullptr;
  Py_DECREF(done);
  return PyBytes_FromStringAndSize(handle.data(), static_cast<Py_ssize_t>(handle.size()));
}

PyObject* group_peer_bytes(PyObject*, PyObject* args) {
  long long address;
  if (!PyArg_ParseTuple(args, "L:group_peer_bytes", &address)) return nullptr;
  return PyLong_FromSize_t(at<Group>(address)->peer_bytes);
}

PyObject* group_timeout(PyObject*, PyObject* args) {
  long long address;
  double seconds;
  if (!PyArg_ParseTuple(args, "Ld:group_timeout", &address, &seconds)) return nullptr;
  at<Group>(address)->watchdog->timeout_seconds = seconds;
  return Py_NewRef(Py_None);
}

PyObject* group_deterministic(PyObject*, PyObject* args) {
  long long address;
  int wanted;
  if (!PyArg_ParseTuple(args, "Li:group_deterministic", &address, &wanted)) return nullptr;
  at<Group>(address)->deterministic = wanted != 0;
  return Py_NewRef(Py_None);
}

PyObject* group_check_alive(PyObject*, PyObject* args) {
  long long address;
  if (!PyArg_ParseTuple(args, "L:group_check_alive", &address)) return nullptr;
  return guarded([&] {
    at<Group>(address)->check_alive();
    return Py_NewRef(Py_None);
  });
}

PyObject* group_disconnect(PyObject*, PyObject* args) {
  long long address;
  int graphs_too;
  if (!PyArg_ParseTuple(args, "Lp:group_disconnect", &address, &graphs_too)) return nullptr;
  return unlocked([&] {
    auto& group = *at<Group>(address);
    DeviceGuard guard(group.device);
    group.finish();
    group.disconnect(graphs_too != 0);
  });
}

PyObject* group_connect(PyObject*, PyObject* args) {
  long long address;
  PyObject* list;
  if (!PyArg_ParseTuple(args, "LO:group_connect", &address, &list)) return nullptr;
  auto& group = *at<Group>(address);
  std::vector<std::string> handles;
  for (int peer = 0; peer < group.size; ++peer) {
    PyObject* item = PySequence_GetItem(list, peer);
    char* bytes;
    Py_ssize_t length;
    if (!item || PyBytes_AsStringAndSize(item, &bytes, &length) < 0) {
      Py_XDECREF(item);
      return nullptr;
    }
    handles.emplace_back(bytes, length);
    Py_DECREF(item);
  }
  return unlocked([&] {
    DeviceGuard guard(group.device);
    group.peers->connect(handles);
  });
}

}  // namespace

PyMethodDef group_methods[] = {
    {"group_create", group_create, METH_VARARGS, "group_create(device, rank, size) -> group. Waits for no other rank."},
    {"group_connect_nccl", group_connect_nccl, METH_VARARGS,
     "group_connect_nccl(group, nccl_id, processors): for the NCCL tier. All ranks together."},
    {"group_destroy", group_destroy, METH_VARARGS,
     "group_destroy(group), when its operations have ended or one has been given up."},
    {"group_allocate", group_allocate, METH_VARARGS,
     "group_allocate(group, slot_bytes) -> handle of this rank's memory that peers write, for `group_connect`."},
    {"group_peer_bytes", group_peer_bytes, METH_VARARGS,
     "group_peer_bytes(group) -> of this rank's memory that peers write, also for graphs that were captured before."},
    {"group_timeout", group_timeout, METH_VARARGS,
     "group_timeout(group, seconds): after which an operation that has begun and not ended is given up."},
    {"group_deterministic", group_deterministic, METH_VARARGS,
     "group_deterministic(group, wanted): whether every tier gives the same bits from now on. On all ranks."},
    {"group_check_alive", group_check_alive, METH_VARARGS,
     "group_check_alive(group): raises where an operation was broken off or given up."},
    {"group_disconnect", group_disconnect, METH_VARARGS,
     "group_disconnect(group, graphs_too), when its operations have ended: before any rank frees the memory that peers "
     "write. Captured graphs can be replayed as long as graphs_too has not been true."},
    {"group_connect", group_connect, METH_VARARGS, "group_connect(group, handles): one of each rank, in order."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tpfused

// The Python module tpfused._C. It uses Python's limited C API only, so one build serves every Python from 3.11 on,
// and takes integers, strings and bytes, never torch objects: addresses, streams and handles are integers.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>

#include "build_info.h"
#include "check.h"
#include "group.h"
#include "operations.h"

namespace {

using namespace tpfused;

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
  if (!PyArg_ParseTuple(args, "L:group_disconnect", &address)) return nullptr;
  return unlocked([&] {
    auto& group = *at<Group>(address);
    DeviceGuard guard(group.device);
    group.finish();
    group.disconnect();
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

// Every operation's arguments begin alike, up to the weight.
struct Call {
  long long group, stream, workspace, workspace_bytes, tokens, each, batch, k, n, x, w, w_leading;
  int tier, type_code, w_transposed;

  bool parse(PyObject* args, const char* name, const char* rest, std::initializer_list<void*> more);

  Group& owner() const { return *at<Group>(group); }
  Rows rows() const { return {tokens, each, batch, owner().size}; }
  Weight weight() const { return {at<void>(w), w_leading, w_transposed != 0}; }
  Type type() const { return static_cast<Type>(type_code); }
};

#define CALL_NAMES \
  "group, tier, stream, workspace, workspace_bytes, type, tokens, each, batch, k, n, x, w, w_leading, w_transposed, "

// `rest` and `more`: the operation's own arguments, as for PyArg_ParseTuple.
bool Call::parse(PyObject* args, const char* name, const char* rest, std::initializer_list<void*> more) {
  void* own[8] = {};
  std::copy(more.begin(), more.end(), own);
  std::string format = std::string("LiLLLiLLLLLLLLi") + rest + ":" + name;
  return PyArg_ParseTuple(args, format.c_str(), &group, &tier, &stream, &workspace, &workspace_bytes, &type_code,
                          &tokens, &each, &batch, &k, &n, &x, &w, &w_leading, &w_transposed, own[0], own[1], own[2],
                          own[3], own[4], own[5], own[6], own[7]);
}

// Calls `body`, which enqueues an operation of the group on `stream`.
template <typename Body>
PyObject* enqueue(const char* name, Group& group, cudaStream_t stream, Body body) {
  return unlocked([&] {
    DeviceGuard guard(group.device);  // stream 0 is of the device that is current
    std::lock_guard<std::mutex> lock(group.mutex);
    group.check_alive();
    try {
      group.begin(name, stream);
      body();
      group.end(stream);
    } catch (const std::exception& error) {
      group.fail(std::string(name) + " was broken off: " + error.what());  // the peers count on the rest of it
      throw;
    }
  });
}

template <typename Operation>
PyObject* run(const char* name, void (*function)(Group&, Tier, const Operation&, Workspace, cudaStream_t),
              const Call& call, const Operation& operation) {
  auto stream = at<CUstream_st>(call.stream);
  return enqueue(name, call.owner(), stream, [&] {
    Workspace workspace(at<void>(call.workspace), call.workspace_bytes);
    function(call.owner(), static_cast<Tier>(call.tier), operation, workspace, stream);
  });
}

// A Python sequence of tuples of `Width` integers: what an operation does for each of several layers.
template <int Width>
bool parse_each(PyObject* sequence, std::vector<std::array<long long, Width>>* all) {
  Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    std::array<long long, Width> numbers{};
    bool right = item && PySequence_Size(item) == Width;
    for (int j = 0; j < Width && right; ++j) {
      PyObject* number = PySequence_GetItem(item, j);
      numbers[j] = number ? PyLong_AsLongLong(number) : -1;
      Py_XDECREF(number);
      right = !PyErr_Occurred();
    }
    Py_XDECREF(item);
    if (!right) {
      if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "each layer takes %d integers", Width);
      return false;
    }
    all->push_back(numbers);
  }
  return count >= 0;
}

PyObject* run_all_gather_matmul(PyObject*, PyObject* args) {
  Call c;
  long long all;
  PyObject* columns;
  std::vector<std::array<long long, 8>> each;
  if (!c.parse(args, "all_gather_matmul", "LO", {&all, &columns}) || !parse_each<8>(columns, &each)) return nullptr;
  AllGatherMatmul operation{c.rows(), c.k, at<void>(c.x), {}, c.type(), at<void>(all)};
  for (auto [n, w, leading, transposed, y, activation, bias, pre] : each) {
    operation.columns.push_back({{at<void>(w), leading, transposed != 0},
                                 n,
                                 at<void>(y),
                                 static_cast<Activation>(activation),
                                 at<void>(bias),
                                 at<void>(pre)});
  }
  return run("all_gather_matmul", all_gather_matmul, c, operation);
}

PyObject* run_matmul_reduce_scatter(PyObject*, PyObject* args) {
  Call c;
  long long y, residual, bias;
  if (!c.parse(args, "matmul_reduce_scatter", "LLL", {&y, &residual, &bias})) return nullptr;
  MatmulReduceScatter operation{
      c.rows(), c.k, c.n, at<void>(c.x), c.weight(), at<void>(y), at<void>(residual), at<void>(bias), c.type()};
  return run("matmul_reduce_scatter", matmul_reduce_scatter, c, operation);
}

PyObject* run_column_backward(PyObject*, PyObject* args) {
  Call c;
  long long dx;
  int whole, wants_dx, wants_dw;
  PyObject* columns;
  std::vector<std::array<long long, 6>> each;
  if (!c.parse(args, "column_backward", "iLiiO", {&whole, &dx, &wants_dx, &wants_dw, &columns})) return nullptr;
  if (!parse_each<6>(columns, &each)) return nullptr;
  ColumnBackward operation{
      c.rows(), c.k, at<void>(c.x), whole != 0, at<void>(dx), {}, wants_dx != 0, static_cast<Dw>(wants_dw), c.type()};
  for (auto [n, w, leading, transposed, dpre, dw] : each) {
    operation.columns.push_back({at<void>(dpre), {at<void>(w), leading, transposed != 0}, n, at<void>(dw)});
  }
  return run("column_backward", column_backward, c, operation);
}

PyObject* run_row_backward(PyObject*, PyObject* args) {
  Call c;
  long long dy, dx, dw;
  int wants_dx, wants_dw;
  if (!c.parse(args, "row_backward", "LLLii", {&dy, &dx, &dw, &wants_dx, &wants_dw})) return nullptr;
  RowBackward operation{c.rows(),   c.k,          c.n,          at<void>(dy),  at<void>(c.x),
                        c.weight(), at<void>(dx), at<void>(dw), wants_dx != 0, static_cast<Dw>(wants_dw),
                        c.type()};
  return run("row_backward", row_backward, c, operation);
}

PyObject* run_matmul_all_reduce(PyObject*, PyObject* args) {
  Call c;
  long long y, bias;
  if (!c.parse(args, "matmul_all_reduce", "LL", {&y, &bias})) return nullptr;
  MatmulAllReduce operation{
      c.rows().total(), c.k,     c.n,      at<void>(c.x), c.weight().forward(), at<void>(y), at<void>(bias),
      nullptr,          nullptr, Dw::none, c.type()};
  return run("matmul_all_reduce", matmul_all_reduce, c, operation);
}

PyObject* run_matmul_all_reduce_norm(PyObject*, PyObject* args) {
  Call c;
  long long bias, residual, sum, y, weight, norm_bias;
  double eps;
  int centered;
  if (!c.parse(args, "matmul_all_reduce_norm", "LLLLLLdi",
               {&bias, &residual, &sum, &y, &weight, &norm_bias, &eps, &centered})) {
    return nullptr;
  }
  AddNorm norm{at<void>(residual),  at<void>(sum),           at<void>(y),  at<void>(weight),
               at<void>(norm_bias), static_cast<float>(eps), centered != 0};
  MatmulAllReduce operation{
      c.rows().total(), c.k,      c.n,      at<void>(c.x), c.weight().forward(), nullptr, at<void>(bias), nullptr,
      nullptr,          Dw::none, c.type(), &norm};
  return run("matmul_all_reduce_norm", matmul_all_reduce, c, operation);
}

// k and n are the layer's, of which the matmul sums over the second.
PyObject* run_whole_input_backward(PyObject*, PyObject* args) {
  Call c;
  long long dpre, dx, dw;
  int wants_dw;
  if (!c.parse(args, "whole_input_backward", "LLLi", {&dpre, &dx, &dw, &wants_dw})) return nullptr;
  MatmulAllReduce operation{c.rows().total(), c.n,     c.k,           at<void>(dpre), c.weight().backward(),
                            at<void>(dx),     nullptr, at<void>(c.x), at<void>(dw),   static_cast<Dw>(wants_dw),
                            c.type()};
  return run("whole_input_backward", matmul_all_reduce, c, operation);
}

// n is all ranks' output features.
PyObject* run_matmul_all_gather(PyObject*, PyObject* args) {
  Call c;
  long long y, bias, pre;
  int activation;
  if (!c.parse(args, "matmul_all_gather", "LiLL", {&y, &activation, &bias, &pre})) return nullptr;
  Rows features{c.n, 1, 1, c.owner().size};
  MatmulAllGather operation{features,
                            c.rows().total(),
                            c.k,
                            at<void>(c.x),
                            c.weight(),
                            at<void>(y),
                            static_cast<Activation>(activation),
                            at<void>(bias),
                            at<void>(pre),
                            c.type()};
  return run("matmul_all_gather", matmul_all_gather, c, operation);
}

PyObject* run_all_reduce(PyObject*, PyObject* args) {
  long long address, stream, x, y, n;
  int type;
  if (!PyArg_ParseTuple(args, "LLiLLL:all_reduce", &address, &stream, &type, &n, &x, &y)) return nullptr;
  auto& group = *at<Group>(address);
  return enqueue("all_reduce", group, at<CUstream_st>(stream), [&] {
    SmallSum sum{1, n, static_cast<Type>(type), at<void>(x), nullptr, at<void>(y), nullptr, false};
    if (!is_small_sum(group, sum.rows, sum.n, sum.type)) throw std::runtime_error("not of whole 16 bytes, or too much");
    small_all_reduce(group, sum, at<CUstream_st>(stream));
  });
}

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS,
     "What this was compiled with, and the NCCL that was loaded; versions as the libraries' own integers."},
    {"kernel_architecture", kernel_architecture, METH_VARARGS,
     "kernel_architecture(device) -> the architecture, such as 90, of the machine code that this device runs."},
    {"nccl_unique_id", nccl_unique_id, METH_NOARGS,
     "What all ranks give to `group_connect_nccl`, made by one of them."},
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
     "group_disconnect(group), when its operations have ended: before any rank frees the memory that peers write."},
    {"group_connect", group_connect, METH_VARARGS, "group_connect(group, handles): one of each rank, in order."},
    {"all_gather_matmul", run_all_gather_matmul, METH_VARARGS,
     "all_gather_matmul(" CALL_NAMES
     "all, columns), each n, w, w_leading, w_transposed, y, activation, bias, pre, in place of those before; "
     "see operations.h."},
    {"matmul_reduce_scatter", run_matmul_reduce_scatter, METH_VARARGS,
     "matmul_reduce_scatter(" CALL_NAMES "y, residual, bias); see operations.h."},
    {"column_backward", run_column_backward, METH_VARARGS,
     "column_backward(" CALL_NAMES
     "whole, dx, wants_dx, wants_dw, columns), each n, w, w_leading, w_transposed, dpre, dw, in place of those "
     "before; see operations.h."},
    {"row_backward", run_row_backward, METH_VARARGS,
     "row_backward(" CALL_NAMES "dy, dx, dw, wants_dx, wants_dw); see operations.h."},
    {"matmul_all_reduce", run_matmul_all_reduce, METH_VARARGS,
     "matmul_all_reduce(" CALL_NAMES "y, bias); see operations.h."},
    {"matmul_all_reduce_norm", run_matmul_all_reduce_norm, METH_VARARGS,
     "matmul_all_reduce_norm(" CALL_NAMES
     "bias, residual, sum, y, norm_weight, norm_bias, eps, centered): a MatmulAllReduce with norm, see operations.h."},
    {"whole_input_backward", run_whole_input_backward, METH_VARARGS,
     "whole_input_backward(" CALL_NAMES "dpre, dx, dw, wants_dw): a MatmulAllReduce with dw, see operations.h."},
    {"matmul_all_gather", run_matmul_all_gather, METH_VARARGS,
     "matmul_all_gather(" CALL_NAMES "y, activation, bias, pre); see operations.h."},
    {"all_reduce", run_all_reduce, METH_VARARGS,
     "all_reduce(group, stream, type, n, x, y): a SmallSum of n numbers, see small_sums.h."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "tpfused._C",
    "The compiled part of tpfused.",
    0,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&definition); }

// The operations in Python.

#include <algorithm>
#include <array>
#include <initializer_list>

#include "check.h"
#include "group.h"
#include "methods.h"
#include "operations.h"

namespace tpfused {
namespace {

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
    std::lock_guard<std::timed_mutex> lock(group.mutex);
    group.check_alive();
    try {
      group.begin(name, stream);
      body();
      group.end(stream);
    } catch (const std::exception& error) {
      group.fail(std::string(name) + " was broken off: " + error.what());  // the peers count on the rest of it
      group.break_off(stream);
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

}  // namespace

PyMethodDef operation_methods[] = {
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

}  // namespace tpfused

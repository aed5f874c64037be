#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>

namespace tpfused {

enum class Type { float32 = 0, float16 = 1, bfloat16 = 2, tf32 = 3 };  // tf32: float32, rounded for the tensor cores

inline int64_t size_of(Type type) { return type == Type::float32 || type == Type::tf32 ? 4 : 2; }

// What a matmul does with its sums, to which it adds the bias first if there is one. gelu is its tanh form.
enum class Activation { none = 0, relu = 1, gelu = 2 };

// A row-major matrix.
struct Matrix {
  void* data;
  int64_t leading;  // entries from one row to the next
  bool transposed = false;
  int64_t stride = 0;  // entries from one of a batch to the next
};

// y[m, n] = activation(a[m, k] @ b[k, n] + bias[n])
struct Product {
  Matrix a, b, y;
  int64_t m, n, k;
  int64_t batch = 1;  // of such products, with the same bias
  Activation activation = Activation::none;
  const void* bias = nullptr;
  void* pre = nullptr;  // gelu: also receives what the activation is of
  int64_t pre_leading = 0;
  const void* add = nullptr;  // what the sums start from, in rows like y's
  bool wide = false;          // y, and what is added, are float32 whatever the type
  int64_t rows_of_all = 0;    // of the product that this is a block of, to take the algorithm that is for the whole
  int spared = 0;             // multiprocessors that something else has meanwhile: the algorithm is for the others
};

// 32 MiB is what cuBLAS itself takes on Hopper. In float32 less, for the memory of small models: whether that costs
// time was not measured.
inline size_t workspace_bytes(Type type) { return (type == Type::float32 ? 2 : 32) << 20; }

// cuBLASLt on one device, in one type: how to do a product is looked up once for each shape.
class Matmul {
 public:
  Matmul(int device, Type type);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Enqueues the product, with `workspace_bytes` of memory that is its own as long as it runs.
  void run(const Product& product, cudaStream_t stream, void* workspace);

 private:
  struct Plan;
  using Key = std::array<int64_t, 15>;
  Plan& plan_for(const Product& product);

  int device_;
  int processors_ = 0;
  Type type_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace tpfused

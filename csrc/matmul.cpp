#include "matmul.h"

#include "check.h"
#include "reduce.h"

namespace tpfused {
namespace {

constexpr size_t most_plans = 4096;  // token counts that vary would make ever more

cudaDataType_t data_type(Type type) {
  switch (type) {
    case Type::float32:
    case Type::tf32:
      return CUDA_R_32F;
    case Type::float16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

cublasLtEpilogue_t epilogue_of(const Product& product) {
  bool bias = product.bias != nullptr;
  switch (product.activation) {
    case Activation::relu:
      return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu:
      if (product.pre) return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default:
      return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

}  // namespace

// Each product is done by cuBLASLt's first algorithm. Timed in turn with others, another of its first eight took 0.92
// to 0.98 of that one's time for weights' gradients of Llama 3 and GPT-3 layers (H200, cuBLAS 13). But each alone for
// 150 ms, at the clock that its own power leaves, none was faster for 8B, and the fastest took 0.96 for 70B and GPT-3:
// what is timed between others need not be what is best among its like.
//
// cuBLASLt counts columns first: a row-major matrix is its transpose there. So y' = b' a', and "first" is b.
struct Matmul::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm;

  ~Plan() {
    if (result) cublasLtMatrixLayoutDestroy(result);
    if (second) cublasLtMatrixLayoutDestroy(second);
    if (first) cublasLtMatrixLayoutDestroy(first);
    if (operation) cublasLtMatmulDescDestroy(operation);
  }
};

Matmul::Matmul(int device, Type type) : device_(device), type_(type) {
  DeviceGuard guard(device_);
  check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cublasLtCreate(&handle_), "cublasLtCreate");
}

Matmul::~Matmul() {
  plans_.clear();
  if (handle_) cublasLtDestroy(handle_);
}

Matmul::Plan& Matmul::plan_for(const Product& p) {
  auto addresses = reinterpret_cast<uintptr_t>(p.a.data) | reinterpret_cast<uintptr_t>(p.b.data) |
                   reinterpret_cast<uintptr_t>(p.y.data) | reinterpret_cast<uintptr_t>(p.bias) |
                   reinterpret_cast<uintptr_t>(p.add);
  bool aligned = addresses % 16 == 0;
  int kind = p.a.transposed | p.b.transposed << 1 | (p.pre != nullptr) << 2 | aligned << 3 | (p.bias != nullptr) << 4;
  Key key{p.m,           p.n,           p.k,         p.batch,    kind,       static_cast<int>(p.activation),
          p.a.leading,   p.b.leading,   p.y.leading, p.a.stride, p.y.stride, p.spared,
          p.rows_of_all, p.pre_leading, p.wide};
  if (plans_.size() >= most_plans && !plans_.count(key)) plans_.clear();
  std::unique_ptr<Plan>& known = plans_[key];
  if (known) return *known;

  auto plan = std::make_unique<Plan>();
  auto data = data_type(type_);
  auto compute = type_ == Type::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  check(cublasLtMatmulDescCreate(&plan->operation, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
  auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulDescSetAttribute(plan->operation, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  };
  cublasOperation_t as_first = p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasOperation_t as_second = p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  set(CUBLASLT_MATMUL_DESC_TRANSA, as_first);
  set(CUBLASLT_MATMUL_DESC_TRANSB, as_second);
  cublasLtEpilogue_t epilogue = epilogue_of(p);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (p.bias) {
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  if (p.pre) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.pre);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.pre_leading);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, p.y.stride);  // of one layout with y, where there is a batch
  }

  if (p.spared > 0) {
    int32_t processors = processors_ - p.spared;
    set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, processors);
  }

  auto layout = [&](cublasLtMatrixLayout_t* made, int64_t rows, int64_t columns, const Matrix& matrix,
                    cudaDataType_t entries) {
    if (matrix.transposed) std::swap(rows, columns);
    check(cublasLtMatrixLayoutCreate(made, entries, columns, rows, matrix.leading), "cublasLtMatrixLayoutCreate");
    if (p.batch == 1) return;
    auto batch = static_cast<int32_t>(p.batch);
    check(cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch), "batch");
    check(cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &matrix.stride,
                                           sizeof matrix.stride),
          "stride");
  };
  auto lay_out = [&](Plan& for_rows, int64_t rows) {
    layout(&for_rows.first, p.k, p.n, p.b, data);
    layout(&for_rows.second, rows, p.k, p.a, data);
    layout(&for_rows.result, rows, p.n, p.y, p.wide ? CUDA_R_32F : data);
  };
  lay_out(*plan, p.m);

  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  size_t bytes = workspace_bytes(type_);
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
  uint32_t alignment = aligned ? 16 : static_cast<uint32_t>(size_of(type_));
  for (auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof alignment);
  }
  auto algorithm_for = [&](const Plan& layouts) {
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, plan->operation, layouts.first, layouts.second, layouts.result,
                                         layouts.result, preference, 1, &found, &count),
          "cublasLtMatmulAlgoGetHeuristic");
    if (count == 0) throw std::runtime_error("cuBLASLt has no algorithm for this matmul");
    return found.algo;
  };
  bool usable = false;
  if (p.rows_of_all > p.m) {
    Plan of_all;
    lay_out(of_all, p.rows_of_all);
    plan->algorithm = algorithm_for(of_all);
    cublasLtMatmulHeuristicResult_t result;
    usable = cublasLtMatmulAlgoCheck(handle_, plan->operation, plan->first, plan->second, plan->result, plan->result,
                                     &plan->algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
             result.workspaceSize <= bytes;
  }
  if (!usable) plan->algorithm = algorithm_for(*plan);
  cublasLtMatmulPreferenceDestroy(preference);
  known = std::move(plan);
  return *known;
}

void Matmul::run(const Product& p, cudaStream_t stream, void* workspace) {
  if (p.m == 0 || p.n == 0 || (p.k == 0 && p.add == p.y.data)) return;
  if (p.k == 0) {  // a rank's share of the input features may be empty
    for (int64_t each = 0; each < p.batch; ++each) {
      void* y = static_cast<char*>(p.y.data) + each * p.y.stride * size_of(type_);
      check(cudaMemset2DAsync(y, p.y.leading * size_of(type_), 0, p.n * size_of(type_), p.m, stream), "cudaMemset");
      if (p.bias) add_parts(y, &y, 1, p.bias, p.m, p.n, type_, stream);  // whose rows lie one after the other
    }
    return;
  }
  Plan& plan = plan_for(p);
  if (p.bias) {
    check(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof p.bias),
          "bias");
  }
  if (p.pre) {
    check(
        cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p.pre, sizeof p.pre),
        "pre-activation");
  }
  float alpha = 1, beta = p.add ? 1 : 0;
  check(cublasLtMatmul(handle_, plan.operation, &alpha, p.b.data, plan.first, p.a.data, plan.second, &beta,
                       p.add ? p.add : p.y.data, plan.result, p.y.data, plan.result, &plan.algorithm, workspace,
                       workspace_bytes(type_), stream),
        "cublasLtMatmul");
}

}  // namespace tpfused

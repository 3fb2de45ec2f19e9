// Softcap, softmax and cross-entropy of rows of logits, and their gradient in place of the logits.
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

// With s = sigmoid(2 z / cap): cap tanh(z / cap) = cap (2 s - 1), its derivative 4 s (1 - s). Bounded by cap, so the sum
// of exponentials needs no running maximum. Returns the loss of the row; `target` < 0 gives none.
template <class T>
float loss_row(T* row, int64_t count, int64_t target, float cap, float scale, bool want_grad, float* products) {
  const float inner = -2 / cap;
  const int64_t whole = count - count % LANES;
  vf total = {};
  auto one = [&](vf z, vf* slope) {
    vf s = 1.f / (1.f + exp_small(clamp(z * inner, -80.f, 80.f)));
    *slope = s * (1.f - s);
    return exp_small(cap * (2.f * s - 1.f));
  };
  vf target_slope, target_exp = one(splat(target < 0 ? 0.f : widen(row[target])), &target_slope);
  for (int64_t j = 0; j < whole; j += LANES) {
    vf slope, e = one(load(row + j), &slope);
    store(products + j, e * slope);
    total += e;
  }
  float rest = 0;
  if (whole < count) {
    vf z = {}, slope;
    for (int64_t j = whole; j < count; j++) z[j - whole] = widen(row[j]);
    vf e = one(z, &slope);
    for (int64_t j = whole; j < count; j++) {
      products[j] = e[j - whole] * slope[j - whole];
      rest += e[j - whole];
    }
  }
  const float sum = sum_of(total) + rest;
  const float loss = target < 0 ? 0.f : std::log(sum) - std::log(target_exp[0]);
  if (!want_grad) return loss;
  if (target < 0) {
    std::memset(static_cast<void*>(row), 0, size_t(count) * sizeof(T));
    return loss;
  }
  const float at_target = (target_exp[0] / sum - 1) * target_slope[0] * 4 * scale;
  const float inverse = 4 * scale / sum;
  for (int64_t j = 0; j < whole; j += LANES) store(row + j, load(products + j) * inverse);
  for (int64_t j = whole; j < count; j++) narrow(products[j] * inverse, row + j);
  narrow(at_target, row + target);
  return loss;
}

template <class T>
void loss_rows(T* logits, int64_t rows, int64_t columns, const int64_t* targets, float cap, float scale, bool want_grad,
               float* losses, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> products(size_t(columns) + LANES);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      losses[i] = loss_row(logits + i * columns, columns, targets[i], cap, scale, want_grad, products.data());
    }
  }
}

}  // namespace

// logits (rows, columns), overwritten by scale * dloss/dlogits if want_grad; targets (rows), below 0 to ignore.
LANTRAIN_API void lantrain_softcap_loss(void* logits, int is_bf16, int64_t rows, int64_t columns, const int64_t* targets,
                                      float cap, float scale, int want_grad, float* losses, int threads) {
  if (is_bf16) {
    loss_rows(static_cast<bf16*>(logits), rows, columns, targets, cap, scale, want_grad, losses, threads);
  } else {
    loss_rows(static_cast<float*>(logits), rows, columns, targets, cap, scale, want_grad, losses, threads);
  }
}

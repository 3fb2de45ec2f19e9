// Softcap, softmax and cross-entropy of rows of logits, and their gradient in place of the logits.
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

constexpr int WAYS = LANES == 16 ? 4 : 2;  // vectors at a time, as the registers allow

// cap tanh(z / cap) is bounded by cap, so the sum of exponentials needs no running maximum. Small logits keep their
// relative accuracy: with tanh = 2 sigmoid - 1 as in the twin, a fresh model left nanochat's losses a hundred times as far
// within 20 steps. Returns the loss of the row; `target` < 0 gives none.
template <class T>
float loss_row(T* row, int64_t count, int64_t target, float cap, float scale, bool want_grad, float* products) {
  const float inner = 1 / cap;
  const int64_t whole = count - count % LANES;
  vf total = {};
  auto one = [&](auto z, auto* slope) __attribute__((always_inline)) {
    const auto t = tanh_of(z * inner);
    *slope = (t - 1.f) * (t + 1.f) * -1.f;
    return exp_small(t * cap);
  };
  vf target_slope, target_exp = one(splat(target < 0 ? 0.f : widen(row[target])), &target_slope);
  int64_t start = 0;
  for (; start + WAYS * LANES <= whole; start += WAYS * LANES) {
    vectors<WAYS> z, slope;
    for (int i = 0; i < WAYS; i++) z.v[i] = load(row + start + i * LANES);
    const vectors<WAYS> e = one(z, &slope), product = e * slope;
    for (int i = 0; i < WAYS; i++) {
      store(products + start + i * LANES, product.v[i]);
      total += e.v[i];
    }
  }
  for (int64_t j = start; j < whole; j += LANES) {
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
  const float at_target = (target_exp[0] / sum - 1) * target_slope[0] * scale;
  const float inverse = scale / sum;
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

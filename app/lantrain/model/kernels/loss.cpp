// Softcap, softmax and cross-entropy of rows of logits, and their gradient in place of the logits; where the CPU
// multiplies bfloat16, with the product that makes the logits, which then never are in memory.
#include <algorithm>
#include <cmath>
#include <vector>

#include "product.h"

namespace {

constexpr int WAYS = LANES == 16 ? 4 : 2;  // vectors at a time, as the registers allow

// e^(cap tanh(z / cap)), and the slope of that softcap. V: vf or several.
template <class V>
LANTRAIN_INLINE V exp_softcapped(V z, float cap, V* slope) {
  const V t = tanh_of(z * (1 / cap));
  *slope = (t - 1.f) * (t + 1.f) * -1.f;
  return exp_small(t * cap);
}

// cap tanh(z / cap) is bounded by cap, so the sum of exponentials needs no running maximum. Small logits keep their
// relative accuracy: with tanh = 2 sigmoid - 1 as in the twin, a fresh model left nanochat's losses a hundred times as far
// within 20 steps. Returns the loss of the row; `target` < 0 gives none.
template <class T>
float loss_row(T* row, int64_t count, int64_t target, float cap, float scale, bool want_grad, float* products) {
  const int64_t whole = count - count % LANES;
  vf total = {};
  vf target_slope, target_exp = exp_softcapped(splat(target < 0 ? 0.f : widen(row[target])), cap, &target_slope);
  int64_t start = 0;
  for (; start + WAYS * LANES <= whole; start += WAYS * LANES) {
    vectors<WAYS> z, slope;
    for (int i = 0; i < WAYS; i++) z.v[i] = load(row + start + i * LANES);
    const vectors<WAYS> e = exp_softcapped(z, cap, &slope), product = e * slope;
    for (int i = 0; i < WAYS; i++) {
      store(products + start + i * LANES, product.v[i]);
      total += e.v[i];
    }
  }
  for (int64_t j = start; j < whole; j += LANES) {
    vf slope, e = exp_softcapped(load(row + j), cap, &slope);
    store(products + j, e * slope);
    total += e;
  }
  float rest = 0;
  if (whole < count) {
    vf z = {}, slope;
    for (int64_t j = whole; j < count; j++) z[j - whole] = widen(row[j]);
    vf e = exp_softcapped(z, cap, &slope);
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

#if defined(__AVX512BF16__)

namespace {

typedef NarrowProducts P;
static_assert(PANEL_VECTORS == 2);
constexpr int64_t STRIPE = 64;    // tokens that go through a panel of the weights before the next panel
constexpr int64_t COLUMNS = 128;  // of the vocabulary, that a thread takes at a time: their weights fit its L2 cache

// The head of a model and a batch for it. Of each token and block of COLUMNS: the sum of exponentials.
struct Head {
  const bf16 *hidden, *weight;  // (tokens, width), (vocabulary, width)
  int64_t tokens, width, vocabulary;
  const int64_t* targets;
  float cap;
  bf16* products;  // (tokens, vocabulary): exponential times the slope of the softcap; null: not wanted
  float *sums, *at_target;
  int64_t units() const { return width / 2; }
};

// A tile of logits z (P::ROWS, PANEL) of the tokens from i and columns from j on; totals: LANES sums for each token.
inline void take_tile(const Head& h, int64_t i, int64_t j, const float* z, float* totals) {
  constexpr int AT_ONCE = 2;
  for (int64_t r = 0; r < P::ROWS; r++) {
    const int64_t target = h.targets[i + r] - j;
    if (target >= 0 && target < PANEL) h.at_target[i + r] = z[r * PANEL + target];
  }
  for (int64_t r = 0; r < P::ROWS; r += AT_ONCE) {
    vectors<2 * AT_ONCE> x, slope;
    for (int64_t k = 0; k < 2 * AT_ONCE; k++) x.v[k] = load(z + r * PANEL + k * LANES);
    const auto e = exp_softcapped(x, h.cap, &slope);
    for (int64_t k = 0; k < AT_ONCE; k++) {
      float* total = totals + (r + k) * LANES;
      store(total, load(total) + (e.v[2 * k] + e.v[2 * k + 1]));
    }
    if (!h.products) continue;
    const auto product = e * slope;
    for (int64_t k = 0; k < 2 * AT_ONCE; k++)
      store(h.products + (i + r + k / 2) * h.vocabulary + j + k % 2 * LANES, product.v[k]);
  }
}

void take_block(const Head& h, int64_t block, uint32_t* panels) {
  const int64_t units = h.units(), first = block * COLUMNS, columns = std::min(COLUMNS, h.vocabulary - first);
  const auto* rows = reinterpret_cast<const uint32_t*>(h.hidden);
  pack_columns<P>(h.weight + first * h.width, h.width, columns, columns, h.width, panels);
  alignas(64) float z[P::ROWS * PANEL], totals[STRIPE * LANES];
  for (int64_t stripe = 0; stripe < h.tokens; stripe += STRIPE) {
    const int64_t end = std::min(h.tokens, stripe + STRIPE);
    std::fill_n(totals, STRIPE * LANES, 0.f);
    for (int64_t j = 0; j < columns; j += PANEL)
      for (int64_t i = stripe; i < end; i += P::ROWS) {
        tile_of<P>(P::ROWS, units, rows + i * units, units, 1, panels + j * units, z, PANEL, false);
        take_tile(h, i, first + j, z, totals + (i - stripe) * LANES);
      }
    for (int64_t i = stripe; i < end; i++)
      h.sums[block * h.tokens + i] = sum_of(load(totals + (i - stripe) * LANES));
  }
}

// A token's loss and, for its row of products, the factor 1 / sum that makes them gradients; 0 where it is ignored.
void finish_token(const Head& h, int64_t i, int64_t blocks, float* loss, float* factor) {
  const int64_t target = h.targets[i];
  *loss = *factor = 0;
  if (target < 0) return;
  double total = 0;
  for (int64_t block = 0; block < blocks; block++) total += h.sums[block * h.tokens + i];
  const float sum = float(total);
  vf slope, e = exp_softcapped(splat(h.at_target[i]), h.cap, &slope);
  *loss = std::log(sum) - std::log(e[0]);
  *factor = 1 / sum;
  if (h.products) narrow((e[0] - sum) * slope[0], h.products + i * h.vocabulary + target);
}

}  // namespace

// losses (tokens) of softcapped logits hidden weight^T, and with products (tokens, vocabulary) also factors (tokens):
// factor * products are dloss/dlogits. tokens, width and vocabulary multiples of 32; targets below 0 to ignore.
LANTRAIN_API void lantrain_head_loss(const void* hidden, const void* weight, int64_t tokens, int64_t width,
                                     int64_t vocabulary, const int64_t* targets, float cap, void* products,
                                     float* losses, float* factors, int threads) {
  const int64_t blocks = (vocabulary + COLUMNS - 1) / COLUMNS;
  Memory<float> sums(blocks * tokens), at_target(tokens);
  const Head h{static_cast<const bf16*>(hidden), static_cast<const bf16*>(weight), tokens, width, vocabulary, targets,
               cap, static_cast<bf16*>(products), sums.data, at_target.data};
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] P::Session session;
    Memory<uint32_t> panels(COLUMNS * h.units());
#pragma omp for schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++) take_block(h, block, panels.data);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens; i++) finish_token(h, i, blocks, losses + i, factors + i);
  }
}

#endif

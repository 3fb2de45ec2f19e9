// AdamW (arXiv 1711.05101) with the same bits on every CPU, and for rows that were left behind for some steps.
//
// Every operation is one that IEEE 754 rounds correctly, in one order: machines with and without fused multiply-add
// agree, and so does the twin in PyTorch (optim/adamw.py).
#include "simd.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

// What all steps share, and what one step adds: as floats in memory, in this order.
struct Constants {
  float beta1, rest1, beta2, rest2, eps;  // rest: 1 - beta
};
struct Step {
  float decay, size, correction;  // 1 - lr weight_decay; lr / (1 - beta1^t); (1 - beta2^t)^-1/2
};

// Smaller moments become zero. They move no weight, and numbers below the normal ones take some CPUs 150 cycles each:
// a moment of a token that is not seen for 400 steps is one.
constexpr float DUST = 0x1p-100f;

// A product that is rounded by itself. Without this the compiler makes one operation of it and a sum, where there is one.
inline vf rounded(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}

inline vf root(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// A moment as its memory keeps it.
inline vf kept(vf x, const float*) { return x; }
inline vf kept(vf x, const bf16*) { return (vf)(extended(narrowed(x)) << 16); }

inline vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }
inline vf without_dust(vf x) { return magnitude(x) < DUST ? vf{} : x; }

inline bool all(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask) == 0xff;
#else
  int32_t every = -1;
  for (int i = 0; i < LANES; i++) every &= mask[i];
  return every != 0;
#endif
}

inline vf change(vf m, vf v, const Constants& c, const Step& step) {
  return m * step.size / (rounded(root(v) * step.correction) + c.eps);
}

inline void with_gradient(vf& p, vf& m, vf& v, vf g, const Constants& c, const Step& step) {
  m = without_dust(rounded(m * c.beta1) + rounded(g * c.rest1));
  v = without_dust(rounded(v * c.beta2) + rounded(g * g * c.rest2));
  p = rounded(p * step.decay) - change(m, v, c, step);
}

// Steps whose gradient is zero. `limits`: a change of p below |p| / limit is lost in rounding, and so are those of all
// later steps; the roots and divisions, most of the work, end there.
template <class M, int N>
inline void without_gradient(vf (&p)[N], vf (&m)[N], vf (&v)[N], const Constants& c, const Step* steps,
                             const float* limits, int64_t count) {
  const M* const memory = nullptr;
  int64_t t = 0;
  for (bool moves = true; moves && t < count; t++) {
    vi still = vi{} - 1;
    for (int i = 0; i < N; i++) {
      m[i] = without_dust(m[i] * c.beta1);
      v[i] = without_dust(v[i] * c.beta2);
      const vf moved = change(m[i], v[i], c, steps[t]);
      still &= magnitude(moved) * limits[t] <= magnitude(p[i]);
      p[i] = rounded(p[i] * steps[t].decay) - moved;
      m[i] = kept(m[i], memory);
      v[i] = kept(v[i], memory);
    }
    moves = !all(still);
  }
  for (; t < count; t++) {
    for (int i = 0; i < N; i++) {
      m[i] = kept(without_dust(m[i] * c.beta1), memory);
      v[i] = kept(without_dust(v[i] * c.beta2), memory);
      p[i] = p[i] * steps[t].decay;
    }
  }
}

// For each step: later changes are at most this one's times (largest size / this size) * this correction, because
// beta1 < sqrt(beta2), with room for moments in bfloat16; p shrinks by all decays. A change is lost below 2^-26 of p; two
// more bits are for the rounding here.
std::vector<float> limits_of(const Step* steps, int64_t count) {
  std::vector<float> limits(static_cast<size_t>(count));
  float largest = 0, left = 1;
  for (int64_t t = count - 1; t >= 0; t--) {
    largest = std::max(largest, steps[t].size);
    left *= std::min(steps[t].decay, 1.f);
    const bool usable = steps[t].size > 0 && left > 0;
    limits[size_t(t)] = usable ? 0x1p28f * largest / steps[t].size * steps[t].correction / left
                               : std::numeric_limits<float>::infinity();
  }
  return limits;
}

// The last `count` steps of N vectors of a row, the last one perhaps not whole: `some` elements of it. grad: of the last
// step, or null.
template <class M, int N>
void advance(float* param, M* first, M* second, const float* grad, const Constants& c, const Step* steps,
             const float* limits, int64_t count, int64_t some) {
  vf p[N], m[N], v[N];
  for (int i = 0; i < N; i++) {
    const int64_t size = i < N - 1 ? LANES : some;
    p[i] = load_some(param + i * LANES, size);
    m[i] = load_some(first + i * LANES, size);
    v[i] = load_some(second + i * LANES, size);
  }
  without_gradient<M, N>(p, m, v, c, steps, limits, grad ? count - 1 : count);
  for (int i = 0; i < N; i++) {
    const int64_t size = i < N - 1 ? LANES : some;
    if (grad) with_gradient(p[i], m[i], v[i], load_some(grad + i * LANES, size), c, steps[count - 1]);
    store_some(param + i * LANES, p[i], size);
    store_some(first + i * LANES, m[i], size);
    store_some(second + i * LANES, v[i], size);
  }
}

template <class M>
void adamw(float* param, const float* grad, M* m, M* v, int64_t count, const Constants& c, const Step& step, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t at = 0; at < count; at += LANES) {
    const int64_t size = std::min<int64_t>(LANES, count - at);
    vf p = load_some(param + at, size), first = load_some(m + at, size), second = load_some(v + at, size);
    with_gradient(p, first, second, load_some(grad + at, size), c, step);
    store_some(param + at, p, size);
    store_some(m + at, first, size);
    store_some(v + at, second, size);
  }
}

template <class M>
void adamw_rows(float* param, M* m, M* v, const float* grad, const int64_t* ids, int64_t count, int64_t width,
                const int32_t* behind, const Constants& c, const Step* steps, int64_t total, int threads) {
  const std::vector<float> limits = limits_of(steps, total);
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = ids ? ids[i] : i, lacks = behind[row], from = total - lacks;
    if (lacks <= 0) continue;
    int64_t d = 0, at = row * width;
    auto next = [&](auto vectors, int64_t some) {
      constexpr int N = decltype(vectors)::value;
      advance<M, N>(param + at + d, m + at + d, v + at + d, grad ? grad + i * width + d : nullptr, c, steps + from,
                    limits.data() + from, lacks, some);
      d += N * LANES;
    };
    while (d + 4 * LANES <= width) next(std::integral_constant<int, 4>{}, LANES);
    while (d < width) next(std::integral_constant<int, 1>{}, std::min<int64_t>(LANES, width - d));
  }
}

}  // namespace

// One step of `count` floats, whose moments m, v are bfloat16 with is_bf16.
LANTRAIN_API void lantrain_adamw(float* param, const float* grad, void* m, void* v, int is_bf16, int64_t count,
                                 const float* constants, const float* step, int threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) M;
    adamw(param, grad, static_cast<M*>(m), static_cast<M*>(v), count, *reinterpret_cast<const Constants*>(constants),
          *reinterpret_cast<const Step*>(step), threads);
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

// The rows `ids` (count; null: the first `count`) of param, m, v (rows, width) up to the last of `steps` (total), which
// has the gradient grad (count, width), or none where that is null. behind (rows): how many of the last steps a row lacks.
LANTRAIN_API void lantrain_adamw_rows(float* param, void* m, void* v, int is_bf16, const float* grad,
                                      const int64_t* ids, int64_t count, int64_t width, const int32_t* behind,
                                      const float* constants, const float* steps, int64_t total, int threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) M;
    adamw_rows(param, static_cast<M*>(m), static_cast<M*>(v), grad, ids, count, width, behind,
               *reinterpret_cast<const Constants*>(constants), reinterpret_cast<const Step*>(steps), total, threads);
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

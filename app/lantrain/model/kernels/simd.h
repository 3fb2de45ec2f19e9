// Vectors of floats as wide as the target allows, on GCC's vector extensions: one source for AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANTRAIN_INLINE inline __attribute__((always_inline))
#define LANTRAIN_API extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int PANEL_VECTORS = 2;  // vectors side by side in a tile of the matrix product
constexpr int TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int PANEL_VECTORS = 2;
constexpr int TILE_ROWS = 6;  // 12 of 16 registers are sums
#else
constexpr int LANES = 4;
constexpr int PANEL_VECTORS = 4;
constexpr int TILE_ROWS = 6;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
// The same in memory, at any address.
typedef float vf_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    out->bits = 0x7fc0;
  } else {
    out->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_mem*>(p) = x; }
// Zeros in the upper halves.
inline vu extended(vh x) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);  // GCC 12 makes five instructions of the conversion
#else
  return __builtin_convertvector(x, vu);
#endif
}
inline vf load(const bf16* p) { return (vf)(extended(*reinterpret_cast<const vh_mem*>(p)) << 16); }
inline vh narrowed(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return __builtin_convertvector(is_nan ? (vu)((vu){} + 0x7fc0) : rounded, vh);
#endif
}
inline void store(bf16* p, vf x) { *reinterpret_cast<vh_mem*>(p) = narrowed(x); }

// The last few elements go through a vector's worth of memory of their own.
template <class T>
inline vf load_some(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  vf x = {};
  for (int64_t i = 0; i < count; i++) x[i] = widen(p[i]);
  return x;
}
template <class T>
inline void store_some(T* p, vf x, int64_t count) {
  if (count >= LANES) return store(p, x);
  for (int64_t i = 0; i < count; i++) narrow(x[i], p + i);
}

// The transpose of LANES vectors: each round interleaves the halves, which rotates the bits of every element's place.
template <class V>
inline void transpose(V (&rows)[LANES]) {
  typedef decltype(rows[0] == rows[0]) mask;
  mask low, high;
  for (int i = 0; i < LANES; i++) {
    low[i] = i / 2 + i % 2 * LANES;
    high[i] = low[i] + LANES / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < LANES; round *= 2) {
    V next[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

// Uninitialised work space on whole cache lines: a vector that lies across two costs two loads.
template <class T>
struct Memory {
  explicit Memory(int64_t count)
      : size(count), data(static_cast<T*>(::operator new(size_t(count) * sizeof(T), std::align_val_t(64)))) {}
  ~Memory() { ::operator delete(data, std::align_val_t(64)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void fill(T value) {
    for (int64_t i = 0; i < size; i++) data[i] = value;
  }
  const int64_t size;
  T* const data;
};

inline vf lane_numbers() {
  vf n;
  for (int i = 0; i < LANES; i++) n[i] = float(i);
  return n;
}

inline float sum_of(vf x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

// Not-a-number stays one.
inline vf clamp(vf x, float low, float high) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
#else
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
#endif
}

// N vectors side by side. A polynomial of one is a chain in which each step waits for the last; the steps of several
// chains, one after the other, keep the CPU busy.
template <int N>
struct vectors {
  vf v[N];
};
#define LANTRAIN_OPERATOR(op)                                          \
  template <int N>                                                     \
  LANTRAIN_INLINE vectors<N> operator op(vectors<N> x, vectors<N> y) { \
    for (int i = 0; i < N; i++) x.v[i] = x.v[i] op y.v[i];             \
    return x;                                                          \
  }                                                                    \
  template <int N>                                                     \
  LANTRAIN_INLINE vectors<N> operator op(vectors<N> x, float y) {      \
    for (int i = 0; i < N; i++) x.v[i] = x.v[i] op y;                  \
    return x;                                                          \
  }
LANTRAIN_OPERATOR(+)
LANTRAIN_OPERATOR(-)
LANTRAIN_OPERATOR(*)
#undef LANTRAIN_OPERATOR
template <int N>
LANTRAIN_INLINE vectors<N> clamp(vectors<N> x, float low, float high) {
  for (int i = 0; i < N; i++) x.v[i] = clamp(x.v[i], low, high);
  return x;
}
// 1 / x for normal x, to 1e-7 relative. A division of 16 floats takes as long as ten multiplications.
inline vf reciprocal(vf x) {
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (2.f - x * y);
#else
  return 1.f / x;
#endif
}
template <int N>
LANTRAIN_INLINE vectors<N> reciprocal(vectors<N> x) {
  for (int i = 0; i < N; i++) x.v[i] = reciprocal(x.v[i]);
  return x;
}
// p * 2^n, n in the low bits of `shifted`.
inline vf times_power(vf p, vf shifted) { return (vf)((vi)p + ((vi)shifted << 23)); }
template <int N>
LANTRAIN_INLINE vectors<N> times_power(vectors<N> p, vectors<N> shifted) {
  for (int i = 0; i < N; i++) p.v[i] = times_power(p.v[i], shifted.v[i]);
  return p;
}

// e^x to 2 ulp for |x| <= 87; beyond that clamp first. Polynomial of Cephes' expf. Not-a-number stays one. V: vf or several.
template <class V>
LANTRAIN_INLINE V exp_small(V x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: the sum's low bits are x / ln 2, rounded
  V shifted = x * 1.44269504f + magic;
  V n = shifted - magic;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  return times_power(p, shifted);
}

// tanh to a few ulp, relative, for every x (Eigen's rational approximation). Not-a-number stays one.
template <class V>
LANTRAIN_INLINE V tanh_of(V x) {
  x = clamp(x, -7.90531110763549805f, 7.90531110763549805f);
  const V y = x * x;
  V p = y * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * y + -8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  V q = y * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p * reciprocal(q);
}

}  // namespace

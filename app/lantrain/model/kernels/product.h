// Small matrix products on packed operands: C (rows x PANEL) += A * B, the inner loop of the attention.
//
// Operands are made of 32-bit units: one float, or (Bf16Products) two bfloat16 neighbours along the summed axis, which
// one instruction multiplies and adds into a float. B is packed into panels of PANEL columns: [unit of k][column].
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL = LANES * PANEL_VECTORS;

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

struct Fp32Products {
  typedef float unit;
  static constexpr int PAIR = 1;
  static vf load_b(const float* p) { return load(p); }
  static vf broadcast(float x) { return splat(x); }
  static vf multiply_add(vf sum, vf a, vf b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Bf16Products {
  typedef uint32_t unit;
  static constexpr int PAIR = 2;
  static vu load_b(const uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
  static vu broadcast(uint32_t x) { return x - vu{}; }
  static vf multiply_add(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// c (M x PANEL) = or += sum over k units of a[m * row + k * step] * b[k * PANEL + n].
template <class P, int M>
inline void tile(int64_t count, const typename P::unit* a, int64_t row, int64_t step, const typename P::unit* b, float* c,
                 int64_t ldc, bool add) {
  vf sums[M][PANEL_VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_VECTORS; n++) sums[m][n] = add ? load(c + m * ldc + n * LANES) : vf{};
  for (int64_t k = 0; k < count; k++) {
    decltype(P::load_b(b)) panel[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_VECTORS; n++) panel[n] = P::load_b(b + k * PANEL + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const auto left = P::broadcast(a[m * row + k * step]);
#pragma GCC unroll 4
      for (int n = 0; n < PANEL_VECTORS; n++) sums[m][n] = P::multiply_add(sums[m][n], left, panel[n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_VECTORS; n++) store(c + m * ldc + n * LANES, sums[m][n]);
}

// The same for any number of rows up to TILE_ROWS.
template <class P>
inline void tile_of(int rows, int64_t count, const typename P::unit* a, int64_t row, int64_t step,
                    const typename P::unit* b, float* c, int64_t ldc, bool add) {
  switch (rows) {
    case 1: return tile<P, 1>(count, a, row, step, b, c, ldc, add);
    case 2: return tile<P, 2>(count, a, row, step, b, c, ldc, add);
    case 3: return tile<P, 3>(count, a, row, step, b, c, ldc, add);
    case 4: return tile<P, 4>(count, a, row, step, b, c, ldc, add);
    case 5: return tile<P, 5>(count, a, row, step, b, c, ldc, add);
    case 6: return tile<P, 6>(count, a, row, step, b, c, ldc, add);
#if defined(__AVX512F__)
    case 7: return tile<P, 7>(count, a, row, step, b, c, ldc, add);
    case 8: return tile<P, 8>(count, a, row, step, b, c, ldc, add);
#endif
  }
}

// One float or a pair of neighbours, from values of any storage type.
inline void put(float* out, float x, float) { *out = x; }
inline void put(uint32_t* out, bf16 x, bf16 y) { *out = x.bits | uint32_t(y.bits) << 16; }
inline void put(float* out, bf16 x, bf16) { *out = widen(x); }

// LANES units that are neighbours in memory, or that take one element from each of two rows.
template <class P, class T>
inline auto units_at(const T* p) {
  if constexpr (P::PAIR == 1) return load(p);
  else return *reinterpret_cast<const vu_mem*>(p);
}
template <class P, class T>
inline auto units_of_rows(const T* low, const T* high) {
  if constexpr (P::PAIR == 1) {
    return load(low);
  } else {
    const vh zero = {};
    const vh x = *reinterpret_cast<const vh_mem*>(low), y = high ? *reinterpret_cast<const vh_mem*>(high) : zero;
    return __builtin_convertvector(x, vu) | __builtin_convertvector(y, vu) << 16;
  }
}
inline void store_units(float* p, vf x) { store(p, x); }
inline void store_units(uint32_t* p, vu x) { *reinterpret_cast<vu_mem*>(p) = x; }

// B = X: panels [columns / PANEL][padded rows / PAIR][PANEL] of x (rows, columns); rows up to `padded` become zero.
template <class P, class T>
void pack_rows(const T* x, int64_t ld, int64_t rows, int64_t padded, int64_t columns, typename P::unit* out) {
  for (int64_t panel = 0; panel < columns; panel += PANEL)
    for (int64_t k = 0; k < padded; k += P::PAIR, out += PANEL)
      for (int64_t n = 0; n < PANEL; n += LANES) {
        const T* row = x + k * ld + panel + n;
        auto units = units_of_rows<P>(k < rows ? row : x, k + 1 < rows ? row + ld : nullptr);
        if (k >= rows) units = decltype(units){};
        store_units(out + n, units);
      }
}

// B = X transposed: panels [padded rows / PANEL][columns / PAIR][PANEL] of x (rows, columns). columns: a multiple of
// LANES units.
template <class P, class T>
void pack_columns(const T* x, int64_t ld, int64_t rows, int64_t padded, int64_t columns, typename P::unit* out) {
  typedef decltype(units_at<P>(x)) units;
  for (int64_t panel = 0; panel < padded; panel += PANEL, out += columns / P::PAIR * PANEL)
    for (int64_t n = 0; n < PANEL; n += LANES)
      for (int64_t k = 0; k < columns; k += LANES * P::PAIR) {
        units block[LANES];
        for (int64_t i = 0; i < LANES; i++)
          block[i] = panel + n + i < rows ? units_at<P>(x + (panel + n + i) * ld + k) : units{};
        transpose(block);
        for (int64_t i = 0; i < LANES; i++) store_units(out + (k / P::PAIR + i) * PANEL + n, block[i]);
      }
}

// A = X as units row by row: (rows, columns / PAIR).
template <class P, class T>
void pack_units(const T* x, int64_t ld, int64_t rows, int64_t columns, typename P::unit* out) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < columns; k += P::PAIR) put(out++, x[i * ld + k], x[i * ld + k + P::PAIR - 1]);
}

}  // namespace

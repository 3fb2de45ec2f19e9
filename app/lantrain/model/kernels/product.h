// Small matrix products on packed operands: C (rows x PANEL) += A * B, the inner loop of the attention.
//
// Operands are made of 32-bit units: one float, or (Bf16Products) two bfloat16 neighbours along the summed axis, which
// one instruction multiplies and adds into a float. B is packed into panels of PANEL columns: [unit of k][column].
//
// A kind of products has ROWS, the rows that a tile computes at a time, STEP, the units of k that it takes at a time, and
// Session, which lives in a thread as long as that computes tiles. NarrowProducts are those for operands in bfloat16.
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL = LANES * PANEL_VECTORS;

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

struct Fp32Products {
  typedef float unit;
  struct Session {};
  static constexpr int PAIR = 1, ROWS = TILE_ROWS, STEP = 1;
  static vf load_b(const float* p) { return load(p); }
  static vf broadcast(float x) { return splat(x); }
  static vf multiply_add(vf sum, vf a, vf b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Bf16Products {
  typedef uint32_t unit;
  struct Session {};
  static constexpr int PAIR = 2, ROWS = TILE_ROWS, STEP = 1;
  static vu load_b(const uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
  static vu broadcast(uint32_t x) { return x - vu{}; }
  static vf multiply_add(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

#if defined(__AMX_BF16__)
// Tiles of registers: four of sums (16 x 16 floats each, two by two), two of A (16 rows of 16 units), two of B (16 units
// of k, 16 columns). The layout of B is the same.
struct AmxProducts {
  typedef uint32_t unit;
  static constexpr int PAIR = 2, ROWS = 32, STEP = 16;
  static_assert(PANEL == 32);
  struct Session {  // shape of the tiles: 16 rows of 64 bytes
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shape;
      _tile_loadconfig(&shape);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };
  // As `tile` below with 32 rows; count a multiple of 16.
  static void tile(int64_t count, const uint32_t* a, int64_t row, const uint32_t* b, float* c, int64_t ldc, bool add) {
    float* lower = c + 16 * ldc;
    if (add) {
      _tile_loadd(0, c, 4 * ldc);
      _tile_loadd(1, c + 16, 4 * ldc);
      _tile_loadd(2, lower, 4 * ldc);
      _tile_loadd(3, lower + 16, 4 * ldc);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < count; k += 16) {
      _tile_loadd(4, a + k, 4 * row);
      _tile_loadd(6, b + k * PANEL, 4 * PANEL);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + k * PANEL + 16, 4 * PANEL);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * row + k, 4 * row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * ldc);
    _tile_stored(1, c + 16, 4 * ldc);
    _tile_stored(2, lower, 4 * ldc);
    _tile_stored(3, lower + 16, 4 * ldc);
  }
};
typedef AmxProducts NarrowProducts;
#elif defined(__AVX512BF16__)
typedef Bf16Products NarrowProducts;
#else
typedef Fp32Products NarrowProducts;  // bfloat16 is widened when it is packed
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

// The same for any number of rows up to P::ROWS. Where P::STEP > 1: step must be 1, count is rounded up to P::STEP, and
// all P::ROWS rows are read and written.
template <class P>
inline void tile_of(int rows, int64_t count, const typename P::unit* a, int64_t row, int64_t step,
                    const typename P::unit* b, float* c, int64_t ldc, bool add) {
  if constexpr (P::STEP > 1) return P::tile(count, a, row, b, c, ldc, add);
  else switch (rows) {
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
    return extended(x) | extended(y) << 16;
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

// A = X as units row by row: (padded rows, columns / PAIR); rows up to `padded` become zero. columns: a multiple of LANES
// units.
template <class P, class T>
void pack_units(const T* x, int64_t ld, int64_t rows, int64_t padded, int64_t columns, typename P::unit* out) {
  for (int64_t i = 0; i < padded; i++)
    for (int64_t k = 0; k < columns; k += LANES * P::PAIR, out += LANES)
      if (i < rows) store_units(out, units_at<P>(x + i * ld + k));
      else store_units(out, decltype(units_at<P>(x)){});
}

}  // namespace

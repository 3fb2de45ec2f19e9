// Muon's step for one matrix in bfloat16, where the CPU multiplies bfloat16: what optim/muon.py does with torch's
// operators, in one call. Half of the products of Polar Express are symmetric: only their lower triangles are computed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "product.h"

#if defined(__AVX512BF16__)

namespace {

typedef NarrowProducts P;
constexpr int64_t STRIPE = 64;  // rows of a matrix product that a thread takes at a time
constexpr int64_t BLOCK = LANES;

// The matrix as Polar Express sees it, wide: (rows, columns), rows <= columns.
struct Wide {
  int64_t rows, columns;
};

// All of a matrix's work space. Every function below is called by all threads of a team and ends with a barrier.
struct Space {
  explicit Space(Wide s)
      : x(s.rows * s.columns), next(x.size), panels(x.size / 2), gram(s.rows * s.rows), polynomial(gram.size),
        gram_panels(gram.size / 2) {}
  Memory<bf16> x, next;
  Memory<uint32_t> panels;
  Memory<bf16> gram, polynomial;
  Memory<uint32_t> gram_panels;
};

// out (m, n) = finish of left (m, k) times the packed right (k, n); with `lower` only tiles on and below the diagonal.
template <class F>
void multiply(const bf16* left, const uint32_t* right, int64_t m, int64_t k, int64_t n, bool lower, bf16* out, F finish) {
  const int64_t units = k / 2, stripes = (m + STRIPE - 1) / STRIPE;
  const auto* rows = reinterpret_cast<const uint32_t*>(left);
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < n / PANEL * stripes; task++) {
    const int64_t j = task / stripes * PANEL, first = task % stripes * STRIPE;
    alignas(64) float sums[P::ROWS * PANEL];
    for (int64_t i = first; i < std::min(m, first + STRIPE); i += P::ROWS) {
      if (lower && i + P::ROWS <= j) continue;
      tile_of<P>(P::ROWS, units, rows + i * units, units, 1, right + j * units, sums, PANEL, false);
      for (int64_t r = 0; r < P::ROWS; r++)
        for (int64_t c = 0; c < PANEL; c += LANES) {
          const int64_t place = (i + r) * n + j + c;
          store(out + place, finish(load(sums + r * PANEL + c), place));
        }
    }
  }
}

inline void transpose_block(const bf16* from, bf16* to, int64_t ld) {
  vh rows[BLOCK];
  for (int64_t r = 0; r < BLOCK; r++) rows[r] = *reinterpret_cast<const vh_mem*>(from + r * ld);
  transpose(rows);
  for (int64_t r = 0; r < BLOCK; r++) *reinterpret_cast<vh_mem*>(to + r * ld) = rows[r];
}

// The upper triangle of x (n, n) from the lower one.
void mirror(bf16* x, int64_t n) {
#pragma omp for schedule(dynamic)
  for (int64_t i = BLOCK; i < n; i += BLOCK)
    for (int64_t j = 0; j < i; j += BLOCK) transpose_block(x + i * n + j, x + j * n + i, n);
}

void pack_all_columns(const bf16* x, int64_t rows, int64_t columns, uint32_t* out) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < rows; i += PANEL)
    pack_columns<P>(x + i * columns, columns, PANEL, PANEL, columns, out + i * columns / 2);
}

void pack_all_rows(const bf16* x, int64_t rows, int64_t columns, uint32_t* out) {
#pragma omp for schedule(static)
  for (int64_t j = 0; j < columns; j += PANEL) pack_rows<P>(x + j, columns, rows, rows, PANEL, out + j * rows / 2);
}

// x <- a x + (b A + c A^2) x with A = x x^T, for each of the steps; returns where the result lies.
const bf16* iterate(Space& space, Wide s, const float* coefficients, int64_t steps) {
  bf16 *x = space.x.data, *next = space.next.data;
  const bf16* gram = space.gram.data;
  for (int64_t step = 0; step < steps; step++) {
    const float a = coefficients[3 * step], b = coefficients[3 * step + 1], c = coefficients[3 * step + 2];
    pack_all_columns(x, s.rows, s.columns, space.panels.data);
    multiply(x, space.panels.data, s.rows, s.columns, s.rows, true, space.gram.data, [](vf sum, int64_t) { return sum; });
    mirror(space.gram.data, s.rows);
    // The rounded A in both terms: a finer one in b A alone doubles the error.
    pack_all_columns(gram, s.rows, s.rows, space.gram_panels.data);
    multiply(gram, space.gram_panels.data, s.rows, s.rows, s.rows, true, space.polynomial.data,
             [=](vf sum, int64_t place) { return sum * c + load(gram + place) * b; });
    mirror(space.polynomial.data, s.rows);
    pack_all_rows(x, s.rows, s.columns, space.panels.data);
    multiply(space.polynomial.data, space.panels.data, s.rows, s.rows, s.columns, false, next,
             [=](vf sum, int64_t place) { return sum + load(x + place) * a; });
    std::swap(x, next);
  }
  return x;
}

struct Step {
  int64_t rows, columns;
  float momentum, beta2, rate, decay;
  bool tall() const { return rows > columns; }
  Wide wide() const { return tall() ? Wide{columns, rows} : Wide{rows, columns}; }
};

inline vf lerp(vf from, vf to, float weight) { return from + (to - from) * weight; }

// average moves towards grad; out = Nesterov's direction, rounded; squares: its sum of squares by row.
void direction(const Step& s, const float* grad, float* average, bf16* out, float* squares) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s.rows; i++) {
    vf sum = {};
    for (int64_t at = i * s.columns; at < (i + 1) * s.columns; at += LANES) {
      const vf g = load(grad + at), mean = lerp(load(average + at), g, 1 - s.momentum);
      store(average + at, mean);
      store(out + at, lerp(g, mean, s.momentum));
      const vf rounded = load(out + at);
      sum += rounded * rounded;
    }
    squares[i] = sum_of(sum);
  }
}

// x = from with every row at the mean row norm, divided by 1.01 times the whole norm; transposed where it is tall.
void equilibrate(const Step& s, const bf16* from, const float* squares, bf16* x) {
  float total = 0;
  for (int64_t i = 0; i < s.rows; i++) total += squares[i];
  const float norm = std::sqrt(total), scale = norm / std::sqrt(float(s.rows)) / (norm * 1.01f + 1e-6f);
  auto factor = [=](int64_t i) { return scale / std::max(std::sqrt(squares[i]), 1e-6f); };
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s.rows; i += BLOCK)
    for (int64_t j = 0; j < s.columns; j += BLOCK) {
      vh block[BLOCK];
      for (int64_t r = 0; r < BLOCK; r++) block[r] = narrowed(load(from + (i + r) * s.columns + j) * factor(i + r));
      if (s.tall()) transpose(block);
      bf16* to = s.tall() ? x + j * s.rows + i : x + i * s.columns + j;
      for (int64_t r = 0; r < BLOCK; r++) *reinterpret_cast<vh_mem*>(to + r * s.wide().columns) = block[r];
    }
}

// Sums of squares of x (rows, columns) along the shorter side of the matrix: by column, or by row of a square one.
void sum_squares(Wide s, const bf16* x, float* sums) {
  if (s.rows == s.columns) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s.rows; i++) {
      vf sum = {};
      for (int64_t j = 0; j < s.columns; j += LANES) sum += load(x + i * s.columns + j) * load(x + i * s.columns + j);
      sums[i] = sum_of(sum);
    }
  } else {
#pragma omp for schedule(static)
    for (int64_t j = 0; j < s.columns; j += LANES) {
      vf sum = {};
      for (int64_t i = 0; i < s.rows; i++) sum += load(x + i * s.columns + j) * load(x + i * s.columns + j);
      store(sums + j, sum);
    }
  }
}

// From the sums of squares and the running second moment (one entry along the longer side): factors of the update.
void reduce_variance(const Step& s, const float* sums, float* second, float* factors) {
  const Wide wide = s.wide();
  const int64_t count = wide.columns;  // entries of the second moment; each is a mean over wide.rows elements
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += sums[i];
  const float scale = std::sqrt(float(wide.rows)) / std::max(float(std::sqrt(total)), 1e-6f);
  double norm = 0, new_norm = 0;
  for (int64_t i = 0; i < count; i++) {
    const float mean = sums[i] * scale * scale / float(wide.rows);
    second[i] += (mean - second[i]) * (1 - s.beta2);
    factors[i] = 1 / std::sqrt(std::max(second[i], 1e-10f));
    norm += mean;
    new_norm += mean * factors[i] * factors[i];
  }
  const double rows = double(wide.rows);
  const float keep = scale * float(std::sqrt(norm * rows) / std::max(std::sqrt(new_norm * rows), 1e-10));
  for (int64_t i = 0; i < count; i++) factors[i] *= keep;
}

// param -= rate * (update + decay * param where the update does not work against it).
inline void descend(const Step& s, float* param, vf update) {
  const vf p = load(param);
  const vf decayed = update + p * s.decay;
  store(param, p - (update * p >= 0.f ? decayed : update) * s.rate);
}

void apply(const Step& s, const bf16* x, const float* factors, float* param) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < s.rows; i += BLOCK)
    for (int64_t j = 0; j < s.columns; j += BLOCK) {
      vf block[BLOCK];
      const bf16* from = s.tall() ? x + j * s.rows + i : x + i * s.columns + j;
      for (int64_t r = 0; r < BLOCK; r++) block[r] = load(from + r * s.wide().columns);
      if (s.tall()) transpose(block);
      for (int64_t r = 0; r < BLOCK; r++) {
        const vf update = block[r] * (s.rows < s.columns ? load(factors + j) : splat(factors[i + r]));
        descend(s, param + (i + r) * s.columns + j, update);
      }
    }
}

}  // namespace

// x (rows, columns), wide, rows and columns multiples of 32, is replaced; coefficients (steps, 3).
LANTRAIN_API void lantrain_polar_express(void* x, int64_t rows, int64_t columns, const float* coefficients, int64_t steps,
                                         int threads) {
  const Wide s{rows, columns};
  Space space(s);
  bf16* data = static_cast<bf16*>(x);
  std::copy(data, data + rows * columns, space.x.data);
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] P::Session session;
    const bf16* result = iterate(space, s, coefficients, steps);
#pragma omp single
    std::copy(result, result + rows * columns, data);
  }
}

// param, average, grad (rows, columns) float; second (the longer side) float; settings: momentum, beta2, learning rate,
// weight decay; coefficients (steps, 3). rows and columns multiples of 32.
LANTRAIN_API void lantrain_muon_update(float* param, const float* grad, float* average, float* second, int64_t rows,
                                       int64_t columns, const float* settings, const float* coefficients, int64_t steps,
                                       int threads) {
  const Step s{rows, columns, settings[0], settings[1], settings[2], settings[3]};
  const Wide wide = s.wide();
  Space space(wide);
  std::vector<float> squares(size_t(std::max(rows, columns))), factors(squares.size());
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] P::Session session;
    direction(s, grad, average, space.next.data, squares.data());
    equilibrate(s, space.next.data, squares.data(), space.x.data);
    const bf16* result = iterate(space, wide, coefficients, steps);
    sum_squares(wide, result, squares.data());
#pragma omp single
    reduce_variance(s, squares.data(), second, factors.data());
    apply(s, result, factors.data(), param);
  }
}

#endif

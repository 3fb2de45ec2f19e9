// Causal attention with a sliding window, forward and backward, for queries and keys of bounded length.
//
// A block of queries meets all the keys that it sees (chunks of them, in long sequences), so that a window costs what it
// shows. There is no running maximum: normed queries and keys bound the scores (|score| <= 1.44 sqrt(head_dim), 16.3 for
// 128), so the exponentials neither overflow nor vanish. Scores are clamped at 80 for the sake of other callers.
#include <algorithm>

#include "product.h"

namespace {

template <class P>
constexpr int64_t QUERIES = P::STEP > 1 ? 128 : 48;  // of a block: whole tiles of 6, 8 and 32 rows
constexpr int64_t CHUNK_KEYS = 512;  // a block's scores, and the keys and values of a chunk, stay in the L2 cache

struct Shape {
  int64_t batch, heads, kv_heads, length, width, window;
  int64_t padded() const { return round_up(length, PANEL); }
};

// Steps between batches, heads and positions of a tensor; channels are neighbours.
struct Layout {
  int64_t batch, head, position;
};

template <class T>
struct View {
  T* data;
  Layout layout;
  T* at(int64_t batch, int64_t head, int64_t position = 0) const {
    return data + batch * layout.batch + head * layout.head + position * layout.position;
  }
  int64_t step() const { return layout.position; }
};

struct Range {
  int64_t first, last;
  int64_t size() const { return last - first; }
};

// The keys that a run of queries sees, in whole panels, of those in `within`.
inline Range visible(const Shape& s, int64_t first_query, int64_t queries, Range within) {
  const int64_t first = std::max<int64_t>(0, first_query - s.window) / PANEL * PANEL;
  const int64_t last = std::min(s.padded(), round_up(first_query + queries, PANEL));
  return {std::max(first, within.first), std::min(last, within.last)};
}

// A block of queries: tiles of rows, each with its own visible keys. Tiles are whole where their products need it.
template <class P>
struct Block {
  Block(int64_t first, int64_t left) : first(first), count(std::min(QUERIES<P>, left)) {}
  int rows(int64_t i) const { return int(std::min<int64_t>(P::ROWS, count - i)); }
  int64_t padded() const { return P::STEP > 1 ? round_up(count, P::ROWS) : count; }
  // Those that row i's tile sees.
  Range keys(const Shape& s, int64_t i, Range within) const {
    i = i / P::ROWS * P::ROWS;
    return visible(s, first + i, rows(i), within);
  }
  const int64_t first, count;
};

// scores (block, chunk) = left (block, width) times the packed transposed right; only panels that a tile sees.
template <class P>
void products_with_keys(const Block<P>& block, const typename P::unit* left, const typename P::unit* right,
                        const Shape& s, Range chunk, float* scores, int64_t ld) {
  const int64_t units = s.width / P::PAIR;
  for (int64_t j = chunk.first; j < chunk.last; j += PANEL)
    for (int64_t i = 0; i < block.count; i += P::ROWS) {
      const Range seen = block.keys(s, i, chunk);
      if (j < seen.first || j >= seen.last) continue;
      tile_of<P>(block.rows(i), units, left + i * units, units, 1, right + j * units, scores + i * ld + (j - chunk.first),
                 ld, false);
    }
}

// out (block, width) += weights (block, chunk) times the packed rows of keys or values.
template <class P>
void sum_over_keys(const Block<P>& block, const typename P::unit* weights, const typename P::unit* right, const Shape& s,
                   Range chunk, int64_t ld, float* out) {
  const int64_t panel_units = s.padded() / P::PAIR * PANEL;
  for (int64_t d = 0; d < s.width; d += PANEL)
    for (int64_t i = 0; i < block.count; i += P::ROWS) {
      const Range seen = block.keys(s, i, chunk);
      if (seen.size() <= 0) continue;
      tile_of<P>(block.rows(i), seen.size() / P::PAIR, weights + (i * ld + seen.first - chunk.first) / P::PAIR,
                 ld / P::PAIR, 1, right + d / PANEL * panel_units + seen.first / P::PAIR * PANEL, out + i * s.width + d,
                 s.width, true);
    }
}

// out (keys, width) += transposed weights (chunk, block) times the packed rows of the block's queries or gradients.
// weights are units of neighbouring queries: (block / PAIR, chunk), or (chunk, QUERIES / PAIR) for whole tiles.
template <class P>
void sum_over_queries(const Block<P>& block, const typename P::unit* weights, const typename P::unit* right,
                      const Shape& s, Range chunk, int64_t ld, float* out) {
  const int64_t along_keys = P::STEP > 1 ? QUERIES<P> / P::PAIR : 1, along_queries = P::STEP > 1 ? 1 : ld;
  for (int64_t j = chunk.first; j < chunk.last; j += PANEL) {
    int64_t first = block.count, last = 0;  // the queries whose tiles see this panel: a run
    for (int64_t i = 0; i < block.count; i += P::ROWS) {
      const Range seen = block.keys(s, i, chunk);
      if (j < seen.first || j >= seen.last) continue;
      first = std::min(first, i);
      last = i + block.rows(i);
    }
    if (first >= last) continue;
    const int64_t units = (last - first + P::PAIR - 1) / P::PAIR;
    for (int64_t key = j; key < j + PANEL; key += P::ROWS) {
      const int rows = int(std::min<int64_t>(P::ROWS, j + PANEL - key));
      const typename P::unit* left = weights + first / P::PAIR * along_queries + (key - chunk.first) * along_keys;
      for (int64_t d = 0; d < s.width; d += PANEL)
        tile_of<P>(rows, units, left, along_keys, along_queries,
                   right + d / PANEL * (QUERIES<P> / P::PAIR * PANEL) + first / P::PAIR * PANEL, out + key * s.width + d,
                   s.width, true);
    }
  }
}

// e^(scale * score) of one query and LANES keys, zero where it does not see them.
inline vf seen_exponential(const Shape& s, vf score, float scale, int64_t query, int64_t key) {
  const vf e = exp_small(clamp(score * scale, -80.f, 80.f));
  if (key + LANES - 1 <= query && key >= query - s.window) return e;
  const vf distance = float(query - key) - lane_numbers();
  return (distance >= 0.f) & (distance <= float(s.window)) ? e : vf{};
}

// The exponentials of scores (block, chunk) as units along the keys: in place of floats, pairs of bfloat16 in `out`. The
// rows' sums are added to `sums`.
template <class P>
const typename P::unit* exponentials(const Block<P>& block, const Shape& s, Range chunk, float* scores, int64_t ld,
                                     float scale, float* sums, typename P::unit* out) {
  for (int64_t i = 0; i < block.count; i++) {
    const Range seen = block.keys(s, i, chunk);
    vf total = {};
    for (int64_t j = seen.first; j < seen.last; j += LANES) {
      const int64_t at = i * ld + (j - chunk.first);
      const vf e = seen_exponential(s, load(scores + at), scale, block.first + i, j);
      if constexpr (P::PAIR == 1) store(scores + at, e);
      else store(reinterpret_cast<bf16*>(out) + at, e);
      total += e;
    }
    sums[i] += sum_of(total);
  }
  if constexpr (P::PAIR == 1) return scores;
  else return out;
}

// What a thread needs for a block in the backward pass. As floats, weights and slopes serve both sums.
template <class P>
struct Scratch {
  typedef typename P::unit unit;
  static constexpr bool FLOATS = P::PAIR == 1;
  explicit Scratch(int64_t ld, int64_t width)
      : weights(QUERIES<P> * ld), slopes(weights.size), deltas(QUERIES<P>), grad_q(QUERIES<P> * width),
        left(grad_q.size), left_grad(left.size), rows(left.size), rows_grad(left.size),
        pairs(FLOATS ? 0 : 3 * weights.size / 2), by_query_weights(FLOATS ? as_units(weights) : pairs.data),
        by_query_slopes(FLOATS ? as_units(slopes) : pairs.data + weights.size / 2),
        by_key_slopes(FLOATS ? as_units(slopes) : pairs.data + weights.size) {}
  Memory<float> weights, slopes, deltas, grad_q;
  Memory<unit> left, left_grad, rows, rows_grad, pairs;
  unit *const by_query_weights, *const by_query_slopes, *const by_key_slopes;

 private:
  static unit* as_units(Memory<float>& x) { return reinterpret_cast<unit*>(x.data); }
};

inline vu pair_of(vf low, vf high) { return extended(narrowed(low)) | extended(narrowed(high)) << 16; }

// From scores (x.weights) and the products of the output's gradient with the values (x.slopes): weights, e^(scale *
// score) / sum of the row, and slopes, the gradient of the scores before their scale, weight * (product - delta of the
// row) * scale. Both as units along the queries, an odd last row paired with zeros; the slopes as units along the keys.
template <class P>
void score_gradients(const Block<P>& block, const Shape& s, Range chunk, int64_t ld, float scale,
                     const float* inverse_sums, Scratch<P>& x) {
  auto row = [&](int64_t i, int64_t j, vf* weight, vf* slope) {
    const int64_t at = i * ld + j;
    *weight = seen_exponential(s, load(x.weights.data + at), scale, block.first + i, chunk.first + j) * inverse_sums[i];
    *slope = *weight * (load(x.slopes.data + at) - x.deltas.data[i]) * scale;
  };
  if constexpr (P::PAIR == 1) {
    for (int64_t i = 0; i < block.count; i++) {
      const Range seen = block.keys(s, i, chunk);
      for (int64_t j = seen.first - chunk.first; j < seen.last - chunk.first; j += LANES) {
        vf weight, slope;
        row(i, j, &weight, &slope);
        store(x.weights.data + i * ld + j, weight);
        store(x.slopes.data + i * ld + j, slope);
      }
    }
  } else {
    bf16* by_key = reinterpret_cast<bf16*>(x.by_key_slopes);
    auto two_rows = [&](int64_t i, int64_t j, vu* weights, vu* slopes) {
      vf weight[2] = {}, slope[2] = {};
      for (int64_t r = 0; r < 2 && i + r < block.count; r++) {
        row(i + r, j, weight + r, slope + r);
        store(by_key + (i + r) * ld + j, slope[r]);
      }
      *weights = pair_of(weight[0], weight[1]);
      *slopes = pair_of(slope[0], slope[1]);
    };
    for (int64_t i = 0; i < block.padded(); i += 2 * P::STEP) {  // rows of one tile: P::ROWS is even
      const Range seen = block.keys(s, i, chunk);
      for (int64_t j = seen.first - chunk.first; j < seen.last - chunk.first; j += LANES) {
        vu weights[P::STEP], slopes[P::STEP];
        for (int64_t k = 0; k < P::STEP; k++) two_rows(i + 2 * k, j, weights + k, slopes + k);
        if constexpr (P::STEP == 1) {
          store_units(x.by_query_weights + i / 2 * ld + j, weights[0]);
          store_units(x.by_query_slopes + i / 2 * ld + j, slopes[0]);
        } else {
          transpose(weights);
          transpose(slopes);
          for (int64_t k = 0; k < P::STEP; k++) {
            store_units(x.by_query_weights + (j + k) * (QUERIES<P> / 2) + i / 2, weights[k]);
            store_units(x.by_query_slopes + (j + k) * (QUERIES<P> / 2) + i / 2, slopes[k]);
          }
        }
      }
    }
  }
}

template <class T>
void write_rows(const float* from, int64_t rows, int64_t width, T* to, int64_t step) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t d = 0; d < width; d += LANES) store(to + i * step + d, load(from + i * width + d));
}

template <class P, class T>
void forward(const Shape& s, View<const T> q, View<const T> k, View<const T> v, View<T> out, float* inverse_sums,
             float scale, int threads) {
  typedef typename P::unit unit;
  const int64_t padded = s.padded(), head_units = padded * s.width / P::PAIR;
  Memory<unit> keys(s.batch * s.kv_heads * head_units), values(keys.size);
  const int64_t blocks = (s.length + QUERIES<P> - 1) / QUERIES<P>, heads = s.batch * s.heads;
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] typename P::Session session;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < s.batch * s.kv_heads; n++) {
      const int64_t b = n / s.kv_heads, h = n % s.kv_heads;
      pack_columns<P>(k.at(b, h), k.step(), s.length, padded, s.width, keys.data + n * head_units);
      pack_rows<P>(v.at(b, h), v.step(), s.length, padded, s.width, values.data + n * head_units);
    }
    const int64_t ld = std::min(padded, CHUNK_KEYS);
    Memory<float> scores(QUERIES<P> * ld), result(QUERIES<P> * s.width), sums(QUERIES<P>);
    Memory<unit> queries(QUERIES<P> * s.width), weights(scores.size);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < heads * blocks; n++) {
      // The last blocks see most keys: they come first, so that the threads end together.
      const int64_t first = (blocks - 1 - n / heads) * QUERIES<P>, b = n % heads / s.heads, h = n % s.heads;
      const int64_t kv = (b * s.kv_heads + h / (s.heads / s.kv_heads)) * head_units;
      const Block<P> block(first, s.length - first);
      pack_units<P>(q.at(b, h, first), q.step(), block.count, block.padded(), s.width, queries.data);
      sums.fill(0);
      result.fill(0);
      const Range all = visible(s, first, block.count, {0, padded});
      for (int64_t chunk = all.first; chunk < all.last; chunk += ld) {
        const Range part{chunk, std::min(all.last, chunk + ld)};
        products_with_keys<P>(block, queries.data, keys.data + kv, s, part, scores.data, ld);
        const unit* ready = exponentials<P>(block, s, part, scores.data, ld, scale, sums.data, weights.data);
        sum_over_keys<P>(block, ready, values.data + kv, s, part, ld, result.data);
      }
      float* inverse = inverse_sums + (b * s.heads + h) * s.length + first;
      for (int64_t i = 0; i < block.count; i++) {
        inverse[i] = 1 / sums.data[i];
        float* row = result.data + i * s.width;
        for (int64_t d = 0; d < s.width; d += LANES) store(row + d, load(row + d) * inverse[i]);
      }
      write_rows(result.data, block.count, s.width, out.at(b, h, first), out.step());
    }
  }
}

template <class P, class T>
void backward(const Shape& s, View<const T> q, View<const T> k, View<const T> v, View<const T> out, View<const T> grad,
              const float* inverse_sums, View<T> grad_q, View<T> grad_k, View<T> grad_v, float scale, int threads) {
  typedef typename P::unit unit;
  const int64_t padded = s.padded(), head_units = padded * s.width / P::PAIR, group = s.heads / s.kv_heads;
  const int64_t blocks = (s.length + QUERIES<P> - 1) / QUERIES<P>, heads = s.batch * s.heads;
  // Gradients of keys and values are summed over the queries: each part of the queries of a head has its own sums.
  const int64_t parts = std::clamp<int64_t>((2 * threads + heads - 1) / heads, 1, blocks), size = padded * s.width;
  Memory<unit> keys(s.batch * s.kv_heads * head_units), key_rows(keys.size), values(keys.size);
  Memory<float> sums(2 * heads * parts * size);
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] typename P::Session session;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < s.batch * s.kv_heads; n++) {
      const int64_t b = n / s.kv_heads, h = n % s.kv_heads;
      pack_columns<P>(k.at(b, h), k.step(), s.length, padded, s.width, keys.data + n * head_units);
      pack_rows<P>(k.at(b, h), k.step(), s.length, padded, s.width, key_rows.data + n * head_units);
      pack_columns<P>(v.at(b, h), v.step(), s.length, padded, s.width, values.data + n * head_units);
    }
    const int64_t ld = std::min(padded, CHUNK_KEYS);
    Scratch<P> x(ld, s.width);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < heads * parts; n++) {
      const int64_t b = n / parts / s.heads, h = n / parts % s.heads;
      const int64_t kv = (b * s.kv_heads + h / group) * head_units;
      float* sums_k = sums.data + 2 * n * size;
      float* sums_v = sums_k + size;
      std::fill(sums_k, sums_v + size, 0.f);
      for (int64_t first = n % parts * QUERIES<P>; first < s.length; first += parts * QUERIES<P>) {
        const Block<P> block(first, s.length - first);
        pack_units<P>(q.at(b, h, first), q.step(), block.count, block.padded(), s.width, x.left.data);
        pack_units<P>(grad.at(b, h, first), grad.step(), block.count, block.padded(), s.width, x.left_grad.data);
        pack_rows<P>(q.at(b, h, first), q.step(), block.count, QUERIES<P>, s.width, x.rows.data);
        pack_rows<P>(grad.at(b, h, first), grad.step(), block.count, QUERIES<P>, s.width, x.rows_grad.data);
        for (int64_t i = 0; i < block.count; i++) {
          vf dot = {};
          for (int64_t d = 0; d < s.width; d += LANES)
            dot += load(grad.at(b, h, first + i) + d) * load(out.at(b, h, first + i) + d);
          x.deltas.data[i] = sum_of(dot);
        }
        x.grad_q.fill(0);
        const float* inverse = inverse_sums + (b * s.heads + h) * s.length + first;
        const Range all = visible(s, first, block.count, {0, padded});
        for (int64_t chunk = all.first; chunk < all.last; chunk += ld) {
          const Range part{chunk, std::min(all.last, chunk + ld)};
          products_with_keys<P>(block, x.left.data, keys.data + kv, s, part, x.weights.data, ld);
          products_with_keys<P>(block, x.left_grad.data, values.data + kv, s, part, x.slopes.data, ld);
          score_gradients<P>(block, s, part, ld, scale, inverse, x);
          sum_over_queries<P>(block, x.by_query_weights, x.rows_grad.data, s, part, ld, sums_v);
          sum_over_queries<P>(block, x.by_query_slopes, x.rows.data, s, part, ld, sums_k);
          sum_over_keys<P>(block, x.by_key_slopes, key_rows.data + kv, s, part, ld, x.grad_q.data);
        }
        write_rows(x.grad_q.data, block.count, s.width, grad_q.at(b, h, first), grad_q.step());
      }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s.batch * s.kv_heads * s.length; row++) {
      const int64_t b = row / s.length / s.kv_heads, h = row / s.length % s.kv_heads, t = row % s.length;
      for (int64_t d = 0; d < s.width; d += LANES) {
        vf total_k = {}, total_v = {};
        for (int64_t n = 0; n < group * parts; n++) {  // heads of a group are neighbours
          const float* from = sums.data + 2 * ((b * s.heads + h * group) * parts + n) * size + t * s.width + d;
          total_k += load(from);
          total_v += load(from + size);
        }
        store(grad_k.at(b, h, t) + d, total_k);
        store(grad_v.at(b, h, t) + d, total_v);
      }
    }
  }
}

template <class T, int N>
View<T> view(void* const (&data)[N], const int64_t* layouts, int index) {
  const int64_t* l = layouts + 3 * index;
  return {static_cast<T*>(data[index]), {l[0], l[1], l[2]}};
}

template <class P, class T>
void forward_of(const Shape& s, void* const (&x)[4], const int64_t* layouts, float* inverse, float scale, int threads) {
  forward<P, T>(s, view<const T>(x, layouts, 0), view<const T>(x, layouts, 1), view<const T>(x, layouts, 2),
                view<T>(x, layouts, 3), inverse, scale, threads);
}

template <class P, class T>
void backward_of(const Shape& s, void* const (&x)[8], const int64_t* layouts, const float* inverse, float scale,
                 int threads) {
  backward<P, T>(s, view<const T>(x, layouts, 0), view<const T>(x, layouts, 1), view<const T>(x, layouts, 2),
                 view<const T>(x, layouts, 3), view<const T>(x, layouts, 4), inverse, view<T>(x, layouts, 5),
                 view<T>(x, layouts, 6), view<T>(x, layouts, 7), scale, threads);
}

}  // namespace

// width: a multiple of 64. shape: batch, heads, kv_heads, length, width, window. Tensors are (batch, heads or kv_heads,
// length, width) with three steps each in `layouts`, in the order of the arguments. inverse: (batch, heads, length),
// what the backward pass needs of the forward.
LANTRAIN_API void lantrain_attention_forward(void* q, void* k, void* v, void* out, float* inverse, const int64_t* shape,
                                           const int64_t* layouts, int is_bf16, float scale, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  void* const x[4] = {q, k, v, out};
  if (is_bf16) {
    forward_of<NarrowProducts, bf16>(s, x, layouts, inverse, scale, threads);
  } else {
    forward_of<Fp32Products, float>(s, x, layouts, inverse, scale, threads);
  }
}

LANTRAIN_API void lantrain_attention_backward(void* q, void* k, void* v, void* out, void* grad, void* grad_q, void* grad_k,
                                            void* grad_v, const float* inverse, const int64_t* shape,
                                            const int64_t* layouts, int is_bf16, float scale, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  void* const x[8] = {q, k, v, out, grad, grad_q, grad_k, grad_v};
  if (is_bf16) {
    backward_of<NarrowProducts, bf16>(s, x, layouts, inverse, scale, threads);
  } else {
    backward_of<Fp32Products, float>(s, x, layouts, inverse, scale, threads);
  }
}

// Passes over activations that PyTorch would make in several steps, or slowly in bfloat16. All sums are in float.
#include <cmath>

#include "simd.h"

namespace {

// Queries or keys of `heads` heads a position: rotated, RMS-normed, times qk_scale. scales: one factor a head.
template <class T>
void rotary_norm(const T* x, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t length,
                 int64_t width, float eps, float qk_scale, T* out, float* scales, int threads) {
  const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const T* cosine = cosines + row % length * half;
    const T* sine = sines + row % length * half;
    for (int64_t h = row * heads; h < (row + 1) * heads; h++) {
      const T* from = x + h * width;
      vf squares = {};
      for (int64_t d = 0; d < width; d += LANES) squares += load(from + d) * load(from + d);
      const float scale = qk_scale / std::sqrt(sum_of(squares) / float(width) + eps);
      scales[h] = scale;
      for (int64_t d = 0; d < half; d += LANES) {
        const vf x1 = load(from + d) * scale, x2 = load(from + half + d) * scale;
        const vf c = load(cosine + d), s = load(sine + d);
        store(out + h * width + d, x1 * c + x2 * s);
        store(out + h * width + half + d, x2 * c - x1 * s);
      }
    }
  }
}

template <class T>
void rotary_norm_backward(const T* grad, const T* out, const float* scales, const T* cosines, const T* sines,
                          int64_t rows, int64_t heads, int64_t length, int64_t width, float qk_scale, T* grad_x,
                          int threads) {
  const int64_t half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const T* cosine = cosines + row % length * half;
    const T* sine = sines + row % length * half;
    for (int64_t h = row * heads; h < (row + 1) * heads; h++) {
      const T* g = grad + h * width;
      const T* y = out + h * width;
      vf dot = {};
      for (int64_t d = 0; d < width; d += LANES) dot += load(g + d) * load(y + d);
      const float along = sum_of(dot) / float(width) / (qk_scale * qk_scale), scale = scales[h];
      for (int64_t d = 0; d < half; d += LANES) {
        const vf g1 = (load(g + d) - load(y + d) * along) * scale;
        const vf g2 = (load(g + half + d) - load(y + half + d) * along) * scale;
        const vf c = load(cosine + d), s = load(sine + d);
        store(grad_x + h * width + d, g1 * c - g2 * s);
        store(grad_x + h * width + half + d, g2 * c + g1 * s);
      }
    }
  }
}

template <class T, class F>
void each(int64_t count, int threads, F f) {
  const int64_t block = 4096;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t start = 0; start < count; start += block) {
    const int64_t stop = start + block < count ? start + block : count;
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) f(i, i + LANES);
    if (i < stop) f(i, stop);
  }
}

template <class T>
void squared_relu(T* hidden, T* squared, int64_t count, int threads) {
  each<T>(count, threads, [=](int64_t i, int64_t stop) {
    vf x = load_some(hidden + i, stop - i);
    x = x < 0.f ? vf{} : x;
    store_some(hidden + i, x, stop - i);
    store_some(squared + i, x * x, stop - i);
  });
}

template <class T>
void squared_relu_backward(T* grad, const T* hidden, int64_t count, int threads) {
  each<T>(count, threads, [=](int64_t i, int64_t stop) {
    store_some(grad + i, 2.f * load_some(grad + i, stop - i) * load_some(hidden + i, stop - i), stop - i);
  });
}

void rms_norm(const bf16* x, int64_t rows, int64_t width, float eps, bf16* out, float* inverses, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const bf16* from = x + row * width;
    vf squares = {};
    for (int64_t d = 0; d < width; d += LANES) squares += load(from + d) * load(from + d);
    const float inverse = 1 / std::sqrt(sum_of(squares) / float(width) + eps);
    inverses[row] = inverse;
    for (int64_t d = 0; d < width; d += LANES) store(out + row * width + d, load(from + d) * inverse);
  }
}

void rms_norm_backward(const bf16* grad, const bf16* x, const float* inverses, int64_t rows, int64_t width,
                       bf16* grad_x, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const bf16* g = grad + row * width;
    const bf16* from = x + row * width;
    vf dot = {};
    for (int64_t d = 0; d < width; d += LANES) dot += load(g + d) * load(from + d);
    const float inverse = inverses[row], along = sum_of(dot) / float(width) * inverse * inverse * inverse;
    for (int64_t d = 0; d < width; d += LANES)
      store(grad_x + row * width + d, load(g + d) * inverse - load(from + d) * along);
  }
}

void residual_mix_backward(const bf16* grad, const bf16* x, const bf16* x0, int64_t rows, int64_t width, float a, float b,
                           bf16* grad_x, bf16* grad_x0, float* dots, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    vf dot = {}, dot0 = {};
    for (int64_t i = row * width; i < (row + 1) * width; i += LANES) {
      const vf g = load(grad + i);
      dot += g * load(x + i);
      dot0 += g * load(x0 + i);
      store(grad_x + i, g * a);
      store(grad_x0 + i, g * b);
    }
    dots[row] = sum_of(dot);
    dots[rows + row] = sum_of(dot0);
  }
}

}  // namespace

// bfloat16 alone, for these three: in float32 they must round as PyTorch does (model/functions.py). width: a multiple
// of 16; x (rows, width), inverses (rows).
LANTRAIN_API void lantrain_rms_norm(const void* x, int64_t rows, int64_t width, float eps, void* out, float* inverses,
                                    int threads) {
  rms_norm(static_cast<const bf16*>(x), rows, width, eps, static_cast<bf16*>(out), inverses, threads);
}

LANTRAIN_API void lantrain_rms_norm_backward(const void* grad, const void* x, const float* inverses, int64_t rows,
                                             int64_t width, void* grad_x, int threads) {
  rms_norm_backward(static_cast<const bf16*>(grad), static_cast<const bf16*>(x), inverses, rows, width,
                    static_cast<bf16*>(grad_x), threads);
}

// grad_x = a grad, grad_x0 = b grad; dots (2, rows): sums of grad * x and grad * x0 over each row.
LANTRAIN_API void lantrain_residual_mix_backward(const void* grad, const void* x, const void* x0, int64_t rows,
                                                 int64_t width, float a, float b, void* grad_x, void* grad_x0,
                                                 float* dots, int threads) {
  residual_mix_backward(static_cast<const bf16*>(grad), static_cast<const bf16*>(x), static_cast<const bf16*>(x0), rows,
                        width, a, b, static_cast<bf16*>(grad_x), static_cast<bf16*>(grad_x0), dots, threads);
}

// x, out (rows, heads, width), cosines, sines (length, width / 2) of one dtype, rows a multiple of length; scales
// (rows, heads) float.
LANTRAIN_API void lantrain_rotary_norm(const void* x, const void* cosines, const void* sines, const int64_t* shape,
                                       int is_bf16, float eps, float qk_scale, void* out, float* scales, int threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) T;
    rotary_norm(static_cast<const T*>(x), static_cast<const T*>(cosines), static_cast<const T*>(sines), shape[0],
                shape[1], shape[2], shape[3], eps, qk_scale, static_cast<T*>(out), scales, threads);
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

LANTRAIN_API void lantrain_rotary_norm_backward(const void* grad, const void* out, const float* scales,
                                                const void* cosines, const void* sines, const int64_t* shape,
                                                int is_bf16, float qk_scale, void* grad_x, int threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) T;
    rotary_norm_backward(static_cast<const T*>(grad), static_cast<const T*>(out), scales,
                         static_cast<const T*>(cosines), static_cast<const T*>(sines), shape[0], shape[1], shape[2],
                         shape[3], qk_scale, static_cast<T*>(grad_x), threads);
  };
  is_bf16 ? run(bf16{}) : run(float{});
}

// hidden = relu(hidden), squared = hidden^2, in one pass.
LANTRAIN_API void lantrain_squared_relu(void* hidden, void* squared, int64_t count, int is_bf16, int threads) {
  if (is_bf16) {
    squared_relu(static_cast<bf16*>(hidden), static_cast<bf16*>(squared), count, threads);
  } else {
    squared_relu(static_cast<float*>(hidden), static_cast<float*>(squared), count, threads);
  }
}

// grad = 2 * grad * hidden.
LANTRAIN_API void lantrain_squared_relu_backward(void* grad, const void* hidden, int64_t count, int is_bf16,
                                                 int threads) {
  if (is_bf16) {
    squared_relu_backward(static_cast<bf16*>(grad), static_cast<const bf16*>(hidden), count, threads);
  } else {
    squared_relu_backward(static_cast<float*>(grad), static_cast<const float*>(hidden), count, threads);
  }
}

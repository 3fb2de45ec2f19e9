// The C++ operations against plain loops in double, with no Python about: runs under an emulator of another CPU too.
// Prints the worst difference of each; the exit code is 1 when one is too large.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" {
void lantrain_softcap_loss(void*, int, int64_t, int64_t, const int64_t*, float, float, int, float*, int);
void lantrain_attention_forward(void*, void*, void*, void*, float*, const int64_t*, const int64_t*, int, float, int);
void lantrain_attention_backward(void*, void*, void*, void*, void*, void*, void*, void*, const float*, const int64_t*,
                                 const int64_t*, int, float, int);
void lantrain_squared_relu(void*, void*, int64_t, int, int);
void lantrain_adamw(float*, const float*, void*, void*, int, int64_t, const float*, const float*, int);
void lantrain_adamw_rows(float*, void*, void*, int, const float*, const int64_t*, int64_t, int64_t, const int32_t*,
                         const float*, const float*, int64_t, int);
}

static std::vector<float> random_floats(int64_t count, double size) {
  std::vector<float> x(count);
  for (auto& value : x) value = float(size * (rand() / double(RAND_MAX) * 2 - 1));
  return x;
}

static double loss_difference() {
  const int64_t rows = 5, columns = 301;
  auto logits = random_floats(rows * columns, 8);
  const auto before = logits;
  const std::vector<int64_t> targets = {0, 300, -1, 7, 55};
  std::vector<float> losses(rows);
  lantrain_softcap_loss(logits.data(), 0, rows, columns, targets.data(), 15, 0.5, 1, losses.data(), 2);
  double worst = 0;
  for (int64_t i = 0; i < rows; i++) {
    const float* z = &before[i * columns];
    double sum = 0;
    for (int64_t j = 0; j < columns; j++) sum += exp(15 * tanh(z[j] / 15));
    for (int64_t j = 0; j < columns; j++) {
      const double t = tanh(z[j] / 15), p = exp(15 * t) / sum;
      const double expected = targets[i] < 0 ? 0 : 0.5 * (p - (targets[i] == j)) * (1 - t * t);
      worst = fmax(worst, fabs(expected - logits[i * columns + j]));
    }
    const double expected = targets[i] < 0 ? 0 : log(sum) - 15 * tanh(z[targets[i]] / 15);
    worst = fmax(worst, fabs(expected - losses[i]) / 10);
  }
  return worst;
}

static double attention_difference(int64_t window) {
  const int64_t heads = 2, length = 77, width = 64, shape[] = {1, heads, 1, length, width, window};
  auto q = random_floats(heads * length * width, 1), k = random_floats(length * width, 1);
  auto v = random_floats(length * width, 1), grad = random_floats(heads * length * width, 1);
  std::vector<float> out(q.size()), grad_q(q.size()), grad_k(k.size()), grad_v(v.size()), inverse(heads * length);
  const int64_t wide[] = {0, width, heads * width}, narrow[] = {0, 0, width};
  const int64_t* order[] = {wide, narrow, narrow, wide, wide, wide, narrow, narrow};
  int64_t steps[24];
  for (int i = 0; i < 24; i++) steps[i] = order[i / 3][i % 3];
  lantrain_attention_forward(q.data(), k.data(), v.data(), out.data(), inverse.data(), shape, steps, 0, 0.125, 2);
  lantrain_attention_backward(q.data(), k.data(), v.data(), out.data(), grad.data(), grad_q.data(), grad_k.data(),
                              grad_v.data(), inverse.data(), shape, steps, 0, 0.125, 2);
  std::vector<double> sum_k(k.size()), sum_v(v.size());
  double worst = 0;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < length; i++) {
      const int64_t at = (i * heads + h) * width, first = i > window ? i - window : 0;
      std::vector<double> p(length), y(width), slope_q(width);
      double sum = 0, delta = 0;
      for (int64_t j = first; j <= i; j++) {
        double score = 0;
        for (int64_t d = 0; d < width; d++) score += double(q[at + d]) * k[j * width + d];
        sum += p[j] = exp(0.125 * score);
      }
      for (int64_t j = first; j <= i; j++) {
        p[j] /= sum;
        for (int64_t d = 0; d < width; d++) y[d] += p[j] * v[j * width + d];
      }
      for (int64_t d = 0; d < width; d++) {
        delta += y[d] * grad[at + d];
        worst = fmax(worst, fabs(y[d] - out[at + d]));
      }
      for (int64_t j = first; j <= i; j++) {
        double slope = -delta;
        for (int64_t d = 0; d < width; d++) slope += double(grad[at + d]) * v[j * width + d];
        slope *= p[j] * 0.125;
        for (int64_t d = 0; d < width; d++) {
          slope_q[d] += slope * k[j * width + d];
          sum_k[j * width + d] += slope * q[at + d];
          sum_v[j * width + d] += p[j] * grad[at + d];
        }
      }
      for (int64_t d = 0; d < width; d++) worst = fmax(worst, fabs(slope_q[d] - grad_q[at + d]));
    }
  for (size_t i = 0; i < k.size(); i++)
    worst = fmax(worst, fmax(fabs(sum_k[i] - grad_k[i]), fabs(sum_v[i] - grad_v[i])));
  return worst;
}

static double squared_relu_difference() {
  auto x = random_floats(1003, 2);
  const auto before = x;
  std::vector<float> squared(x.size());
  lantrain_squared_relu(x.data(), squared.data(), int64_t(x.size()), 0, 2);
  double worst = 0;
  for (size_t i = 0; i < x.size(); i++) {
    const double expected = before[i] > 0 ? before[i] : 0;
    worst = fmax(worst, fmax(fabs(expected - x[i]), fabs(expected * expected - squared[i])));
  }
  return worst;
}

// One element's step, each operation rounded by itself: volatile keeps the compiler from joining two.
static void adamw_step(float& p, float& m, float& v, float g, const float* c, const float* s) {
  volatile float kept = m * c[0], added = g * c[1], kept2 = v * c[2], square = g * g;
  volatile float added2 = square * c[3];
  m = kept + added;
  v = kept2 + added2;
  if (fabsf(m) < 0x1p-100f) m = 0;
  if (fabsf(v) < 0x1p-100f) v = 0;
  volatile float root = sqrtf(v), decayed = p * s[0], size = m * s[1];
  volatile float scaled = root * s[2];
  volatile float below = scaled + c[4];
  volatile float change = size / below;
  p = decayed - change;
}

// Bits that differ: rows that wait for their steps, then one with a gradient; and single steps of odd length.
static double adamw_difference() {
  const int64_t rows = 3, width = 77, count = 90, ids[] = {2, 0};
  const float constants[] = {0.8f, float(1 - 0.8), 0.995f, float(1 - 0.995), 1e-10f};
  const int32_t behind[] = {90, 5, 7};
  auto p = random_floats(rows * width, 1), m = random_floats(rows * width, 1e-3), v = random_floats(rows * width, 1e-4);
  auto grad = random_floats(2 * width, 1e-2);
  for (auto& value : v) value = fabsf(value);
  std::vector<float> steps;
  for (int64_t t = 0; t < count; t++) {
    steps.push_back(1 - 1e-4f * float(t));
    steps.push_back(0.01f * float(t % 40));
    steps.push_back(1 + 1 / float(t + 1));
  }
  auto p2 = p, m2 = m, v2 = v;
  double different = 0;
  auto compare = [&] {
    for (size_t i = 0; i < p.size(); i++) different += p[i] != p2[i] || m[i] != m2[i] || v[i] != v2[i];
  };
  lantrain_adamw_rows(p.data(), m.data(), v.data(), 0, grad.data(), ids, 2, width, behind, constants, steps.data(), count, 2);
  for (int64_t i = 0; i < 2; i++)
    for (int64_t t = count - behind[ids[i]]; t < count; t++)
      for (int64_t d = 0; d < width; d++) {
        const int64_t at = ids[i] * width + d;
        adamw_step(p2[at], m2[at], v2[at], t == count - 1 ? grad[i * width + d] : 0, constants, &steps[3 * t]);
      }
  compare();
  lantrain_adamw(p.data(), grad.data(), m.data(), v.data(), 0, 2 * width, constants, &steps[30], 2);
  for (int64_t i = 0; i < 2 * width; i++) adamw_step(p2[i], m2[i], v2[i], grad[i], constants, &steps[30]);
  compare();
  return different;
}

static bool within(const char* name, double difference, double limit) {
  printf("%s: %.1e\n", name, difference);
  return difference < limit;
}

int main() {
  bool good = within("loss", loss_difference(), 2e-6);
  for (int64_t window : {3, 40, 200}) good &= within("attention", attention_difference(window), 1e-5);
  good &= within("squared relu", squared_relu_difference(), 1e-6);
  good &= within("adamw", adamw_difference(), 0.5);
  return good ? 0 : 1;
}

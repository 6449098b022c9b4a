// What a drafter does to rows of bfloat16 between its products, each in one call: of the few rows of
// a proposal an operator of PyTorch's takes longer to be found than to be computed.
#include <bit>
#include <cmath>
#include <cstdint>

namespace {

using Cell = std::uint16_t;

inline float widened(Cell cell) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(cell) << 16);
}

// To the nearest, to even between two; NaN stays NaN.
inline Cell rounded(float number) {
  const auto bits = std::bit_cast<std::uint32_t>(number);
  const auto nearest = static_cast<Cell>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return number != number ? Cell{0x7fc0} : nearest;
}

inline float inverse_root_mean(const Cell* x, std::int64_t size, float epsilon) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    sum += widened(x[i]) * widened(x[i]);
  }
  return 1 / std::sqrt(sum / static_cast<float>(size) + epsilon);
}

}  // namespace

// x [rows, size] / root of its mean square, times weight [size].
extern "C" void flashduet_rms_norm(
    const Cell* x, const Cell* weight, std::int64_t rows, std::int64_t size, float epsilon,
    Cell* to) {
  for (std::int64_t row = 0; row < rows; ++row, x += size, to += size) {
    const float factor = inverse_root_mean(x, size, epsilon);
    for (std::int64_t i = 0; i < size; ++i) {
      to[i] = rounded(widened(x[i]) * factor * widened(weight[i]));
    }
  }
}

// In place: norms and turns the heads [size] at `offsets` of each row of x [rows, width]; weights are
// [heads, size], cos and sin [rows, size], halves that are turned into each other alike.
extern "C" void flashduet_norm_and_rotate(
    Cell* x, std::int64_t rows, std::int64_t width, const std::int64_t* offsets,
    std::int64_t heads, std::int64_t size, const Cell* weights, float epsilon, const Cell* cos,
    const Cell* sin) {
  const std::int64_t half = size / 2;
  for (std::int64_t row = 0; row < rows; ++row, x += width, cos += size, sin += size) {
    for (std::int64_t head = 0; head < heads; ++head) {
      Cell* first = x + offsets[head];
      Cell* second = first + half;
      const Cell* weight = weights + head * size;
      const float factor = inverse_root_mean(first, size, epsilon);
#pragma omp simd
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = widened(first[i]) * factor * widened(weight[i]);
        const float b = widened(second[i]) * factor * widened(weight[i + half]);
        first[i] = rounded(a * widened(cos[i]) - b * widened(sin[i]));
        second[i] = rounded(b * widened(cos[i + half]) + a * widened(sin[i + half]));
      }
    }
  }
}

// cos and sin [rows, 2 * half] of positions times frequencies [half], twice side by side.
extern "C" void flashduet_angles(
    const std::int64_t* positions, std::int64_t rows, const float* frequencies, std::int64_t half,
    float scale, Cell* cos, Cell* sin) {
  for (std::int64_t row = 0; row < rows; ++row, cos += 2 * half, sin += 2 * half) {
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(positions[row]) * frequencies[i];
      cos[i] = cos[i + half] = rounded(std::cos(angle) * scale);
      sin[i] = sin[i + half] = rounded(std::sin(angle) * scale);
    }
  }
}

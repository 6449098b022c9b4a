// Small matrix products of packed words, and how keys, values, queries and weights are packed.
//
// A word is 4 bytes: two neighbouring bfloat16 numbers along the summed dimension where the
// processor multiplies such pairs (`Pairs`), else one float (`Singles`).
#pragma once

#include <algorithm>
#include <type_traits>

#include <c10/util/BFloat16.h>

#include "lanes.h"

namespace flashduet {

// Keys that are scored and weighed at once.
constexpr int kBlockKeys = 64;

// Any element type, computed with in float.
template <class T>
struct Singles {
  using Element = T;
  using Word = float;

  // Words that so many numbers of the summed dimension take.
  static int words(int numbers) {
    return numbers;
  }

  static Lanes multiply_add(Lanes total, Word left, const Word* right) {
    return total + left * load(right);
  }

  static void pack_row(const T* row, int size, Word* to) {
    for (int d = 0; d < size; ++d) {
      to[d] = static_cast<float>(row[d]);
    }
  }

  // [count][size] to [words(size)][kBlockKeys]; columns that no key takes are zero.
  static void pack_keys(const T* const* keys, int count, int size, Word* to) {
    const int columns = round_up(count, kLanes);
    for (int d = 0; d < size; ++d) {
      std::fill(to + d * kBlockKeys + count, to + d * kBlockKeys + columns, 0.0f);
    }
    for (int k = 0; k < count; ++k) {
      for (int d = 0; d < size; ++d) {
        to[d * kBlockKeys + k] = static_cast<float>(keys[k][d]);
      }
    }
  }

  // [count][size] to [words(count)][width]; from `size` on zero.
  static void pack_values(const T* const* values, int count, int size, int width, Word* to) {
    for (int k = 0; k < count; ++k, to += width) {
      pack_row(values[k], size, to);
      std::fill(to + size, to + width, 0.0f);
    }
  }

  // [kBlockKeys] to [words(kBlockKeys)].
  static void pack_weights(const Lanes* weights, Word* to) {
    std::memcpy(to, weights, kBlockKeys * sizeof(float));
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct Pairs {
  using Element = c10::BFloat16;
  using Word = std::uint32_t;

  static int words(int numbers) {
    return (numbers + 1) / 2;
  }

  static Lanes multiply_add(Lanes total, Word left, const Word* right) {
    const __m512i pairs = _mm512_set1_epi32(static_cast<int>(left));
    return reinterpret_cast<Lanes>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(total),
        reinterpret_cast<__m512bh>(pairs),
        reinterpret_cast<__m512bh>(_mm512_loadu_si512(right))));
  }

  static void pack_row(const Element* row, int size, Word* to) {
    to[words(size) - 1] = 0;
    std::memcpy(to, row, size * sizeof(Element));
  }

  static void pack_keys(const Element* const* keys, int count, int size, Word* to) {
    for (int k = 0; k < count; k += kLanes) {
      for (int d = 0; d < size; d += 2 * kLanes) {
        const int left = size - d;
        const __mmask32 there = left >= 32 ? ~0u : (1u << left) - 1;
        __m512i rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = k + i < count ? _mm512_maskz_loadu_epi16(there, keys[k + i] + d)
                                  : _mm512_setzero_si512();
        }
        transpose(rows);
        const int columns = std::min(words(left), kLanes);
        for (int i = 0; i < columns; ++i) {
          _mm512_storeu_si512(to + (d / 2 + i) * kBlockKeys + k, rows[i]);
        }
      }
    }
  }

  static void pack_values(const Element* const* values, int count, int size, int width, Word* to) {
    for (int k = 0; k < count; k += 2, to += width) {
      const Element* first = values[k];
      if (k + 1 < count) {
        const Element* second = values[k + 1];
        for (int d = 0; d < size; ++d) {
          to[d] = first[d].x | static_cast<Word>(second[d].x) << 16;
        }
      } else {
        std::transform(first, first + size, to, [](Element number) { return Word{number.x}; });
      }
      std::fill(to + size, to + width, 0);
    }
  }

  static void pack_weights(const Lanes* weights, Word* to) {
    for (int i = 0; i < kBlockKeys / kLanes; i += 2) {
      const __m512bh both = _mm512_cvtne2ps_pbh(
          reinterpret_cast<__m512>(weights[i + 1]), reinterpret_cast<__m512>(weights[i]));
      _mm512_storeu_si512(to + i * kLanes / 2, reinterpret_cast<__m512i>(both));
    }
  }

 private:
  // 16 rows of 16 words. Within 4 by 4 lanes of 128 bits, then the lanes themselves.
  static void transpose(__m512i (&rows)[16]) {
    __m512i mixed[16];
    for (int i = 0; i < 16; i += 4) {
      const __m512i low0 = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      const __m512i high0 = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
      const __m512i low1 = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]);
      const __m512i high1 = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
      mixed[i] = _mm512_unpacklo_epi64(low0, low1);
      mixed[i + 1] = _mm512_unpackhi_epi64(low0, low1);
      mixed[i + 2] = _mm512_unpacklo_epi64(high0, high1);
      mixed[i + 3] = _mm512_unpackhi_epi64(high0, high1);
    }
    for (int i = 0; i < 4; ++i) {
      const __m512i even0 = _mm512_shuffle_i32x4(mixed[i], mixed[i + 4], 0x88);
      const __m512i odd0 = _mm512_shuffle_i32x4(mixed[i], mixed[i + 4], 0xdd);
      const __m512i even1 = _mm512_shuffle_i32x4(mixed[i + 8], mixed[i + 12], 0x88);
      const __m512i odd1 = _mm512_shuffle_i32x4(mixed[i + 8], mixed[i + 12], 0xdd);
      rows[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
      rows[i + 8] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
      rows[i + 4] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
      rows[i + 12] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
  }
};
#endif

// Calls `use` with a number 1..kTileRows as a constant.
template <class Use>
void as_constant(int number, Use use) {
  static_assert(kTileRows == 4 && kTileVectors <= 4);
  switch (number) {
    case 1: return use(std::integral_constant<int, 1>{});
    case 2: return use(std::integral_constant<int, 2>{});
    case 3: return use(std::integral_constant<int, 3>{});
    default: return use(std::integral_constant<int, 4>{});
  }
}

template <class Unit, int kRows, int kVectors>
void multiply_tile(
    const typename Unit::Word* left, int left_stride,
    const typename Unit::Word* right, int right_stride,
    int depth, const float* kept, float* to, int to_stride) {
  Lanes totals[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      totals[r][v] = kept ? load(to + r * to_stride + v * kLanes) * kept[r] : Lanes{};
    }
  }
  for (int s = 0; s < depth; ++s, right += right_stride) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        totals[r][v] =
            Unit::multiply_add(totals[r][v], left[r * left_stride + s], right + v * kLanes);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(to + r * to_stride + v * kLanes, totals[r][v]);
    }
  }
}

// to[rows][columns] = kept[rows] * to + left[rows][depth] * right[depth][columns], in words.
// Without `kept` what `to` holds does not count. `columns` is a multiple of kLanes.
template <class Unit>
void multiply(
    const typename Unit::Word* left, int left_stride, int rows,
    const typename Unit::Word* right, int right_stride, int columns,
    int depth, const float* kept, float* to, int to_stride) {
  constexpr int kWide = kTileVectors * kLanes;
  for (int c = 0; c < columns; c += kWide) {
    as_constant(std::min(columns - c, kWide) / kLanes, [&](auto vectors) {
      if constexpr (vectors() <= kTileVectors) {
        for (int r = 0; r < rows; r += kTileRows) {
          as_constant(std::min(rows - r, kTileRows), [&](auto some) {
            multiply_tile<Unit, some(), vectors()>(
                left + r * left_stride, left_stride, right + c, right_stride, depth,
                kept ? kept + r : nullptr, to + r * to_stride + c, to_stride);
          });
        }
      }
    });
  }
}

}  // namespace flashduet

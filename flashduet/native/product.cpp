// The product for Python: see product.h. Needs nothing of PyTorch but its OpenMP.
#include "product.h"

extern "C" int flashduet_supported() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return 1;
#else
  return 0;
#endif
}

extern "C" void flashduet_product(
    const void* x, std::int64_t rows, std::int64_t in, const void* weights, void* to,
    std::int64_t out, int threads) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  flashduet::multiply_weights(x, rows, in, weights, to, out, threads);
#endif
}

/* Vectors of float32 on x86, with AVX-512 or with AVX2 and FMA, and functions of them. */

#pragma once

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#ifdef __AVX512F__
typedef __m512 vec;
typedef __m512i ints;
#define WIDTH 16
#define load(p) _mm512_loadu_ps(p)
#define store(p, v) _mm512_storeu_ps(p, v)
#define all(x) _mm512_set1_ps(x)
#define fma_(a, b, c) _mm512_fmadd_ps(a, b, c)
#define add(a, b) _mm512_add_ps(a, b)
#define sub(a, b) _mm512_sub_ps(a, b)
#define mul(a, b) _mm512_mul_ps(a, b)
#define divide(a, b) _mm512_div_ps(a, b)
#define max_(a, b) _mm512_max_ps(a, b)
#define min_(a, b) _mm512_min_ps(a, b)
#define nearest(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define to_ints(a) _mm512_cvtps_epi32(a)
#define power_of_two(n) \
  _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23))
#define zero_below(a, limit, v) \
  _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, all(limit), _CMP_NLT_UQ), v)
#define ROWS_AT_ONCE 16
#define ACCUMULATORS 24
#else
typedef __m256 vec;
typedef __m256i ints;
#define WIDTH 8
#define load(p) _mm256_loadu_ps(p)
#define store(p, v) _mm256_storeu_ps(p, v)
#define all(x) _mm256_set1_ps(x)
#define fma_(a, b, c) _mm256_fmadd_ps(a, b, c)
#define add(a, b) _mm256_add_ps(a, b)
#define sub(a, b) _mm256_sub_ps(a, b)
#define mul(a, b) _mm256_mul_ps(a, b)
#define divide(a, b) _mm256_div_ps(a, b)
#define max_(a, b) _mm256_max_ps(a, b)
#define min_(a, b) _mm256_min_ps(a, b)
#define nearest(a) _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define to_ints(a) _mm256_cvtps_epi32(a)
#define power_of_two(n) \
  _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23))
#define zero_below(a, limit, v) _mm256_and_ps(_mm256_cmp_ps(a, all(limit), _CMP_NLT_UQ), v)
#define ROWS_AT_ONCE 12
#define ACCUMULATORS 12
#endif

#define SMALLEST_EXPONENT -87.33f

/* e^x; 0 below SMALLEST_EXPONENT, infinity from 88.4 on, NaN of NaN (of two numbers that can't be compared,
 * the instructions for minimum and maximum give the second). Cephes' reduction and polynomial. */
INLINE vec exponential(vec x) {
  vec bounded = min_(all(89.0f), max_(all(SMALLEST_EXPONENT), x));
  vec n = nearest(mul(bounded, all(1.44269504088896341f)));
  vec r = fma_(n, all(-0.693359375f), bounded);
  r = fma_(n, all(2.12194440e-4f), r);
  vec p = all(1.9875691500e-4f);
  p = fma_(p, r, all(1.3981999507e-3f));
  p = fma_(p, r, all(8.3334519073e-3f));
  p = fma_(p, r, all(4.1665795894e-2f));
  p = fma_(p, r, all(1.6666665459e-1f));
  p = fma_(p, r, all(5.0000001201e-1f));
  p = add(fma_(p, mul(r, r), r), all(1.0f));
  return zero_below(x, SMALLEST_EXPONENT, mul(p, power_of_two(to_ints(n))));
}

/* The numbers of a vector, added up in one order. */
INLINE float sum_of(vec v) {
  float lanes[WIDTH], sum = 0;
  store(lanes, v);
  for (int i = 0; i < WIDTH; i++) sum += lanes[i];
  return sum;
}

INLINE float largest_of(vec v) {
  float lanes[WIDTH], largest = -INFINITY;
  store(lanes, v);
  for (int i = 0; i < WIDTH; i++) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

/* As many float32 lanes as a register has, by GCC's and Clang's vector extensions: wider ones would go through memory. */
#ifndef OUTRIDER_VECTORS_H
#define OUTRIDER_VECTORS_H

#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define OCTETS (4 * LANES) /* bytes of a register */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t octets __attribute__((vector_size(OCTETS), aligned(1), may_alias));
typedef uint16_t pairs __attribute__((vector_size(OCTETS), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE floats load(const float *from) { return *(const floats *)from; }
INLINE void store(float *to, floats value) { *(floats *)to = value; }
INLINE floats all(float value) { return value - (floats){}; }

/* bfloat16 numbers are the upper halves of float32 numbers: nothing is rounded. */
INLINE floats widen(const uint16_t *from) {
    return (floats)(__builtin_convertvector(*(const halves *)from, words) << 16);
}

/* Compilers know one instruction for this, and take many where they are not told. */
INLINE floats from_bytes(const int8_t *from) {
#if defined(__AVX512F__)
    integers wide = (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)from));
#elif defined(__AVX2__)
    integers wide = (integers)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
    integers wide = __builtin_convertvector(*(const bytes *)from, integers);
#endif
    return __builtin_convertvector(wide, floats);
}

/* float16 numbers, of which none is infinite. Without an instruction for it their bits are those of a float32 number
   that is 2^112 times too small. */
INLINE floats from_halves(const uint16_t *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)from));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)from));
#else
    words wide = __builtin_convertvector(*(const halves *)from, words);
    floats size = (floats)((wide & 0x7fff) << 13) * all(0x1p112f);
    return (floats)((words)size | (wide & 0x8000) << 16);
#endif
}

INLINE octets load_octets(const void *from) { return *(const octets *)from; }
INLINE void store_octets(void *to, octets value) { *(octets *)to = value; }

/* Shifts by pairs of bytes: bits that come from a byte's neighbour are the caller's to mask. */
INLINE octets shift_left(octets value, int by) { return (octets)((pairs)value << by); }
INLINE octets shift_right(octets value, int by) { return (octets)((pairs)value >> by); }

/* For each byte from 0 to 15 that of the table. */
#if defined(__AVX512F__)
INLINE octets look_up(const int8_t table[16], octets at) {
    __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u *)table));
    return (octets)_mm512_shuffle_epi8(entries, (__m512i)at);
}
#elif defined(__AVX2__)
INLINE octets look_up(const int8_t table[16], octets at) {
    __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)table));
    return (octets)_mm256_shuffle_epi8(entries, (__m256i)at);
}
#elif defined(__aarch64__)
INLINE octets look_up(const int8_t table[16], octets at) {
    return (octets)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)at);
}
#else
static __attribute__((noinline)) octets look_up(const int8_t table[16], octets at) {
    octets found;
    for (int lane = 0; lane < OCTETS; lane++) found[lane] = (uint8_t)table[at[lane]];
    return found;
}
#endif

/* Lanes of `yes` where the mask is set, of `no` elsewhere. */
INLINE floats choose(integers mask, floats yes, floats no) {
    return (floats)(((integers)yes & mask) | ((integers)no & ~mask));
}

/* The sum of the lanes, always in the same order. */
INLINE float sum(floats value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

INLINE floats add_neighbours(floats left, floats right) {
    return __builtin_shufflevector(left, right, EVEN) + __builtin_shufflevector(left, right, ODD);
}

/* The sums of LANES vectors' lanes, each in the same order; changes them. */
INLINE floats sums_of(floats vectors[LANES]) {
#pragma GCC unroll 4
    for (int count = LANES / 2; count; count /= 2)
#pragma GCC unroll 8
        for (int at = 0; at < count; at++) vectors[at] = add_neighbours(vectors[2 * at], vectors[2 * at + 1]);
    return vectors[0];
}

/* e to the power of each lane, to about two units in the last place; below -87 about 1e-38. */
INLINE floats exponential(floats x) {
    const floats magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = choose(x < all(-87.0f), all(-87.0f), x);
    x = choose(x > all(88.0f), all(88.0f), x);
    floats count = (x * all(1.44269504f) + magic) - magic;
    floats rest = x - count * all(0.693359375f) + count * all(2.12194440e-4f);
    floats power = all(1.9875691e-4f);
    power = power * rest + all(1.3981999e-3f);
    power = power * rest + all(8.3334519e-3f);
    power = power * rest + all(4.1665796e-2f);
    power = power * rest + all(1.6666666e-1f);
    power = power * rest + all(0.5f);
    power = power * rest * rest + rest + all(1.0f);
    integers exponent = __builtin_convertvector(count, integers) << 23;
    return (floats)((integers)power + exponent);
}

/* The hyperbolic tangent of each lane, to about two units in the last place: by a polynomial near 0, where the
   exponential would cancel. */
INLINE floats tangent(floats x) {
    const integers sign = (integers)x & (integers)all(-0.0f);
    floats size = (floats)((integers)x ^ sign), square = x * x;
    floats near = all(-5.70498872745e-3f);
    near = near * square + all(2.06390887954e-2f);
    near = near * square + all(-5.37397155531e-2f);
    near = near * square + all(1.33314422036e-1f);
    near = near * square + all(-3.33332819422e-1f);
    near = near * square * size + size;
    floats far = all(1.0f) - all(2.0f) / (exponential(size + size) + all(1.0f));
    return (floats)((integers)choose(size < all(0.625f), near, far) | sign);
}

/* Scores and logits that come no further than `cap` from 0. */
INLINE floats soft_cap(floats x, float cap) { return tangent(x / all(cap)) * all(cap); }

#endif

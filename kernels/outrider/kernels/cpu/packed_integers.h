/* Rows of integers times quantised weights (packed.h). Each 32 inputs of a row become integers of 16 bits and what they
   are multiplied with: the largest becomes WIDEST, so that no input moves by more than half a 1 of these. Codes are integers
   already; their products are added up exactly, so that no order and no processor changes a sum. What is added in
   float32 is one number for all inputs that share a scale, in ascending order. */
#ifndef OUTRIDER_PACKED_INTEGERS_H
#define OUTRIDER_PACKED_INTEGERS_H

#include "packed.h"

#define WIDEST 32512     /* the largest of which both bytes, the lower one rounded to, are signed */
#define FAINTEST 1e-30f  /* where no input is larger, all become 0 */

/* Rows are read into all lanes where they are wanted: compilers would keep each so, and registers are fewer. */
#define READ_AGAIN() __asm__ volatile("" : : : "memory")

/* 32 inputs of a row. */
typedef struct {
#ifdef __AVX512VNNI__
    int8_t upper[STEP_IN], lower[STEP_IN]; /* an integer is 256 * upper + lower */
#else
    int16_t evens[PART_IN], odds[PART_IN]; /* integers 0, 2, ... and 1, 3, ... */
#endif
    uint32_t wholes[2]; /* sums of each 16, of signed ones */
    float scale;
} Rounded;

INLINE float largest(const float *x) {
    floats most = {};
    for (int at = 0; at < STEP_IN; at += LANES) {
        floats size = (floats)((integers)load(x + at) & 0x7fffffff);
        most = choose(size > most, size, most);
    }
    float lanes[LANES];
    store(lanes, most);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
    return lanes[0];
}

/* x: [32]. What is no number makes the scale none, and its integers are whatever they are: sums wrap around. */
INLINE void round_inputs(const float *x, Rounded *out) {
    const floats magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    float most = largest(x), factor = most > FAINTEST ? WIDEST / most : 0.0f;
    int32_t whole[STEP_IN];
    floats spoiled = {};
    for (int at = 0; at < STEP_IN; at += LANES) {
        floats rounded = (load(x + at) * all(factor) + magic) - magic;
        spoiled += load(x + at) * all(0.0f);
        *(integers *)(whole + at) = __builtin_convertvector(rounded, integers);
    }
    out->scale = (most > FAINTEST ? most / WIDEST : 0.0f) + sum(spoiled);
    for (int part = 0; part < 2; part++) {
        uint32_t total = 0;
        for (int k = 0; k < PART_IN; k++) total += (uint32_t)whole[part * PART_IN + k];
        out->wholes[part] = total;
    }
#ifdef __AVX512VNNI__
    for (int k = 0; k < STEP_IN; k++) out->upper[k] = (int8_t)((whole[k] + 128) >> 8), out->lower[k] = (int8_t)whole[k];
#else
    for (int k = 0; k < PART_IN; k++)
        out->evens[k] = (int16_t)whole[2 * k], out->odds[k] = (int16_t)whole[2 * k + 1];
#endif
}

/* A sum of products of codes and integers. */
typedef struct {
    words total;
#ifdef __AVX512VNNI__
    words upper;
#endif
} Whole;

INLINE int32_t word_from(const void *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Adds the products of four codes of each output, one a byte, and the row's integers 4 * quad to 4 * quad + 3. */
INLINE void add_quad(Whole *sum, words codes, const Rounded *x, const int quad) {
#ifdef __AVX512VNNI__
    __m512i lower = _mm512_set1_epi32(word_from(x->lower + quad * 4)), upper;
    upper = _mm512_set1_epi32(word_from(x->upper + quad * 4));
    sum->total = (words)_mm512_dpbusd_epi32((__m512i)sum->total, (__m512i)codes, lower);
    sum->upper = (words)_mm512_dpbusd_epi32((__m512i)sum->upper, (__m512i)codes, upper);
#elif defined(__SSE2__)
    words evens = codes & 0x00ff00ff, odds = codes >> 8 & 0x00ff00ff;
    int32_t first = word_from(x->evens + quad * 2), second = word_from(x->odds + quad * 2);
#if defined(__AVX512BW__)
    sum->total += (words)_mm512_madd_epi16((__m512i)evens, _mm512_set1_epi32(first));
    sum->total += (words)_mm512_madd_epi16((__m512i)odds, _mm512_set1_epi32(second));
#elif defined(__AVX2__)
    sum->total += (words)_mm256_madd_epi16((__m256i)evens, _mm256_set1_epi32(first));
    sum->total += (words)_mm256_madd_epi16((__m256i)odds, _mm256_set1_epi32(second));
#else
    sum->total += (words)_mm_madd_epi16((__m128i)evens, _mm_set1_epi32(first));
    sum->total += (words)_mm_madd_epi16((__m128i)odds, _mm_set1_epi32(second));
#endif
#else
    for (int half = 0; half < 2; half++) {
        sum->total += (codes >> half * 16 & 255) * (uint32_t)x->evens[quad * 2 + half];
        sum->total += (codes >> (half * 16 + 8) & 255) * (uint32_t)x->odds[quad * 2 + half];
    }
#endif
}

INLINE words total_of(const Whole *sum) {
#ifdef __AVX512VNNI__
    return (sum->upper << 8) + sum->total;
#else
    return sum->total;
#endif
}

/* Codes of 6 bits alone have scales of 16 inputs. */
INLINE int inputs_scaled(const int kind) { return kind == SIX ? PART_IN : STEP_IN; }

/* Some rows times one panel. x: [rows][steps] */
INLINE void multiply_rounded(const int kind, const int rows, const Packing *packing, const char *panel, int64_t inputs,
                             const Rounded *x, Results *out) {
    floats totals[FEW_ROWS][VECTORS] = {};
    Span span __attribute__((aligned(64))) = {};
    Step step __attribute__((aligned(64))) = {};
    const int64_t steps = inputs / STEP_IN;
    const int together = inputs_scaled(kind);
    start_spans(packing, &span);
    for (int64_t at_step = 0; at_step < steps; at_step++, x++, panel += code_bytes(kind)) {
        panel = read_step(packing, panel, &span, &step);
#pragma GCC unroll 16
        for (int64_t line = 0; line < code_bytes(kind); line += 64) FETCH_ONCE(panel + line + FETCHED_AHEAD);
#pragma GCC unroll 2
        for (int first = 0; first < STEP_IN; first += together)
#pragma GCC unroll 8
            for (int at = 0; at < VECTORS; at++) {
                Whole sums[FEW_ROWS] = {};
                READ_AGAIN();
#pragma GCC unroll 8
                for (int quad = first / 4; quad < (first + together) / 4; quad++) {
                    words codes = quad_at(kind, packing->table, panel, quad, at * LANES);
#pragma GCC unroll 4
                    for (int row = 0; row < rows; row++) add_quad(sums + row, codes, x + row * steps, quad);
                }
                words zeros = *(const words *)(span.zeros + at * LANES);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    const Rounded *own = x + row * steps;
                    uint32_t whole = together == STEP_IN ? own->wholes[0] + own->wholes[1] : own->wholes[first / PART_IN];
                    integers sum = (integers)(total_of(sums + row) - zeros * whole);
                    floats scale = load(step.scales[first / PART_IN] + at * LANES) * all(own->scale);
                    totals[row][at] += __builtin_convertvector(sum, floats) * scale;
                }
            }
        if (!packing->has_minima) continue;
        for (int row = 0; row < rows; row++) {
            const Rounded *own = x + row * steps;
            float whole = (float)(int32_t)(own->wholes[0] + own->wholes[1]) * own->scale;
            for (int at = 0; at < VECTORS; at++) totals[row][at] -= all(whole) * load(step.minima + at * LANES);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int at = 0; at < VECTORS; at++) store(out[row] + at * LANES, totals[row][at]);
}

#define ROUNDED_CASE(kind, rows)                                                                                       \
    case kind * 16 + rows:                                                                                             \
        multiply_rounded(kind, rows, packing, panel, inputs, x, out);                                                  \
        break;
#if FEW_ROWS == 4
#define ROUNDED_CASES(kind)                                                                                            \
    ROUNDED_CASE(kind, 1) ROUNDED_CASE(kind, 2) ROUNDED_CASE(kind, 3) ROUNDED_CASE(kind, 4)
#elif FEW_ROWS == 3
#define ROUNDED_CASES(kind) ROUNDED_CASE(kind, 1) ROUNDED_CASE(kind, 2) ROUNDED_CASE(kind, 3)
#else
#define ROUNDED_CASES(kind) ROUNDED_CASE(kind, 1) ROUNDED_CASE(kind, 2)
#endif

/* All rows times one panel, a few at a time. x: [rows][steps] */
static void multiply_integers(const Packing *packing, const char *panel, int64_t inputs, const Rounded *x, int64_t count,
                              Results *out) {
    for (int64_t some; count; count -= some, x += some * (inputs / STEP_IN), out += some) {
        some = count < FEW_ROWS ? count : FEW_ROWS;
        switch (packing->codes * 16 + some) {
            ROUNDED_CASES(BY_TABLE)
            ROUNDED_CASES(FOUR)
            ROUNDED_CASES(FIVE)
            ROUNDED_CASES(SIX)
            ROUNDED_CASES(EIGHT)
        }
    }
}

#endif

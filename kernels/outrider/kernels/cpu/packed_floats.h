/* Rows of float32 numbers times quantised weights (packed.h).

   A code needs no shift: it becomes a float32 number where it stands, too large by a power of two, by which the
   input is made smaller. No bit of the product is another by that. Every output is one sum: over 16 inputs in ascending
   order, less what the zero takes of it, times their scale, added in ascending order; after each step less the minimum.
   So a row's bits depend on no other row. */
#ifndef OUTRIDER_PACKED_FLOATS_H
#define OUTRIDER_PACKED_FLOATS_H

#include "packed.h"

/* Numbers that are to be read from memory into all lanes, which costs nothing beside: in registers they would have to
   be spread. */
#define IN_MEMORY(array) __asm__("" : "+m"(array))

/* Bits where a code may stand: what is higher would be a negative number to processors without unsigned ones. */
#ifdef __AVX512F__
#define CODE_BITS 32
#define TO_FLOATS(found) __builtin_convertvector(found, floats)
#else
#define CODE_BITS 31
#define TO_FLOATS(found) __builtin_convertvector((integers)(found), floats)
#endif

/* Where the code of input k stands, in bits from the lowest, when it becomes a number. */
INLINE int place_of(const int k) { return k % 4 * 8 + 8 > CODE_BITS ? 0 : k % 4 * 8; }

/* The codes of input k, of outputs from `at` on, times 2 to the power of their place. */
INLINE floats codes_at(const int kind, const int8_t *table, const char *codes, const int k, const int at) {
    words found = quad_at(kind, table, codes, k / 4, at);
    if (place_of(k) != k % 4 * 8) return TO_FLOATS(found >> k % 4 * 8);
    return TO_FLOATS(found & 255u << place_of(k));
}

/* By how much inputs are made smaller. out: [32 inputs][rows] */
INLINE void powers_of(const int rows, float *out) {
    for (int k = 0; k < STEP_IN; k++)
        for (int row = 0; row < rows; row++) out[k * rows + row] = 1.0f / (float)(1u << place_of(k));
}

/* The sums of 16 inputs of each row, which are added in one order however many rows there are. x: [16 inputs][rows] */
INLINE void sum_inputs(const int rows, const float *x, float *sums) {
    float halves[PART_IN / 2 * MOST_ROWS];
    for (int at = 0; at < PART_IN / 2 * rows; at++) halves[at] = x[at] + x[PART_IN / 2 * rows + at];
#pragma GCC unroll 4
    for (int count = PART_IN / 4; count; count /= 2)
        for (int at = 0; at < count * rows; at++) halves[at] += halves[count * rows + at];
    for (int row = 0; row < rows; row++) sums[row] = halves[row];
}

/* Adds a part's sums, less what the zero takes of them. Each product has one sum to be fused with: all compilers' bits
   are those of one another's loops. */
INLINE floats add_scaled(floats total, floats sums, float whole, const Span *span, const float *scales, const int at) {
    sums -= all(whole) * __builtin_convertvector(*(const integers *)(span->zeros + at * LANES), floats);
    return total + sums * load(scales + at * LANES);
}

/* Adds to `totals` one part of a step, or two side by side, so that no sum waits for itself. x: [32 inputs][rows], made
   smaller; whole: sums of it as it was, of both parts. */
INLINE void add_parts(const int kind, const int rows, const int first, const int count, const int8_t *table,
                      const char *codes, const float *x, float whole[2][FEW_ROWS], const Span *span, const Step *step,
                      floats totals[FEW_ROWS][VECTORS]) {
    floats sums[2][FEW_ROWS][VECTORS] = {};
#pragma GCC unroll 16
    for (int k = 0; k < PART_IN; k++)
#pragma GCC unroll 2
        for (int part = 0; part < count; part++)
#pragma GCC unroll 8
            for (int at = 0; at < VECTORS; at++) {
                const int input = (first + part) * PART_IN + k;
                floats weights = codes_at(kind, table, codes, input, at * LANES);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) sums[part][row][at] += all(x[input * rows + row]) * weights;
            }
#pragma GCC unroll 2
    for (int part = 0; part < count; part++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int at = 0; at < VECTORS; at++)
                totals[row][at] = add_scaled(totals[row][at], sums[part][row][at], whole[first + part][row], span,
                                             step->scales[first + part], at);
}

/* The inputs of a step of some of a group's rows: as they are, and made smaller. x: [32 inputs][stride] */
INLINE void take_inputs(const int rows, const float *x, int64_t stride, const float *powers, float *own,
                        float *scaled) {
    for (int k = 0; k < STEP_IN; k++)
        for (int row = 0; row < rows; row++) own[k * rows + row] = x[k * stride + row];
    for (int at = 0; at < STEP_IN * rows; at++) scaled[at] = own[at] * powers[at];
}

/* A few rows times one panel. x: [inputs][stride] */
INLINE void multiply_few(const int kind, const int rows, const Packing *packing, const char *panel, int64_t inputs,
                         const float *x, int64_t stride, Results *out) {
    floats totals[FEW_ROWS][VECTORS] = {};
    float powers[STEP_IN * FEW_ROWS], own[STEP_IN * FEW_ROWS], scaled[STEP_IN * FEW_ROWS], whole[2][FEW_ROWS];
    Span span __attribute__((aligned(64))) = {};
    Step step __attribute__((aligned(64))) = {};
    start_spans(packing, &span);
    powers_of(rows, powers);
    for (int64_t k = 0; k < inputs; k += STEP_IN, panel += code_bytes(kind)) {
        panel = read_step(packing, panel, &span, &step);
#pragma GCC unroll 16
        for (int64_t line = 0; line < code_bytes(kind); line += 64) FETCH_ONCE(panel + line + FETCHED_AHEAD);
        take_inputs(rows, x + k * stride, stride, powers, own, scaled);
        IN_MEMORY(scaled);
        sum_inputs(rows, own, whole[0]), sum_inputs(rows, own + PART_IN * rows, whole[1]);
        if (rows * VECTORS <= 4) {
            add_parts(kind, rows, 0, 2, packing->table, panel, scaled, whole, &span, &step, totals);
        } else {
            add_parts(kind, rows, 0, 1, packing->table, panel, scaled, whole, &span, &step, totals);
            add_parts(kind, rows, 1, 1, packing->table, panel, scaled, whole, &span, &step, totals);
        }
        if (!packing->has_minima) continue;
        for (int row = 0; row < rows; row++)
            for (int at = 0; at < VECTORS; at++)
                totals[row][at] -= all(whole[0][row] + whole[1][row]) * load(step.minima + at * LANES);
    }
    for (int row = 0; row < rows; row++)
        for (int at = 0; at < VECTORS; at++) store(out[row] + at * LANES, totals[row][at]);
}

#define FEW_CASE(kind, rows)                                                                                           \
    case kind * 16 + rows:                                                                                             \
        multiply_few(kind, rows, packing, panel, inputs, x, stride, out);                                              \
        break;
#if FEW_ROWS == 4
#define FEW_CASES(kind) FEW_CASE(kind, 1) FEW_CASE(kind, 2) FEW_CASE(kind, 3) FEW_CASE(kind, 4)
#elif FEW_ROWS == 3
#define FEW_CASES(kind) FEW_CASE(kind, 1) FEW_CASE(kind, 2) FEW_CASE(kind, 3)
#else
#define FEW_CASES(kind) FEW_CASE(kind, 1) FEW_CASE(kind, 2)
#endif

static void multiply_some(int64_t rows, const Packing *packing, const char *panel, int64_t inputs, const float *x,
                          int64_t stride, Results *out) {
    switch (packing->codes * 16 + rows) {
        FEW_CASES(BY_TABLE)
        FEW_CASES(FOUR)
        FEW_CASES(FIVE)
        FEW_CASES(SIX)
        FEW_CASES(EIGHT)
    }
}

/* All rows times one panel, a few at a time: the panel stays in a cache, and to make numbers of its codes again costs
   less than to keep them. */
static void multiply_packed(const Packing *packing, const char *panel, int64_t inputs, const float *x, int64_t rows,
                            Results *out) {
    for (int64_t group = 0; group < num_groups(rows); group++) {
        int64_t start = group_start(group, rows), size = group_start(group + 1, rows) - start;
        for (int64_t row = 0, some; row < size; row += some) {
            some = size - row < FEW_ROWS ? size - row : FEW_ROWS;
            multiply_some(some, packing, panel, inputs, x + start * inputs + row, size, out + start + row);
        }
    }
}

#endif

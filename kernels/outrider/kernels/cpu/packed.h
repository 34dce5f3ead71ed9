/* Quantised weights, which stay packed in memory. A number is scale * (code - zero) - minimum, where a code has 4, 5, 6
   or 8 bits. A panel of 32 outputs is spans of inputs that share a scale; a span is what is said once of each output, and
   steps of 32 inputs:

       span: scales [32], minima [32] if there are any, zeros [2][32], twice the same, if each span has its own
       step: scales of 8 bits [parts][32], minima of 8 bits [32], if there are any, by which the span's are multiplied;
             codes [32 inputs][32 outputs]

   Codes of 8 bits are signed. Of others the first 512 bytes hold four bits of each: those of the first 16 inputs low,
   those of the others high. Then come the fifth bits, of 4 inputs in each bit of 128 bytes, or the fifth and sixth, of 8
   inputs in each two bits of 256 bytes.

   Every output is one sum: over 16 inputs in ascending order, times their scale, added in ascending order; the minima's
   part after each step. So a row's bits depend on no other row. */
#ifndef OUTRIDER_PACKED_H
#define OUTRIDER_PACKED_H

#include "panels.h"

#define STEP_IN 32             /* inputs of a step */
#define PART_IN (STEP_IN / 2)  /* inputs that are added up before they are scaled */
#define CODES (STEP_IN * PANEL)
#define FETCHED_AHEAD 2048 /* bytes */

enum { SINGLES, HALF_NUMBERS, UPPER_HALVES }; /* a span's scales and minima: float32, float16, bfloat16 */

typedef struct {
    int64_t bits;             /* of a code */
    int64_t span;             /* inputs: a multiple of STEP_IN */
    int64_t numbers;          /* of a span */
    int64_t has_minima;       /* of the span, and of steps where they have scales */
    int64_t parts;            /* scales of an output in a step: 0, 1 or 2 */
    int64_t has_zeros, zero;  /* each span's own, or the one of all */
    const int8_t *table;      /* [16]: what codes of 4 bits stand for, or none */
} Packing;

/* What holds for a span. */
typedef struct {
    float scales[PANEL], minima[PANEL];
    int8_t zeros[2 * PANEL]; /* twice the same: as far as a register reaches */
} Span;

/* What is read of a step. */
typedef struct {
    const int8_t *codes; /* [32 inputs][32 outputs] */
    float scales[2][PANEL], minima[PANEL];
    int8_t unpacked[CODES] __attribute__((aligned(64)));
} Step;

INLINE int64_t head_bytes(const Packing *packing) {
    int64_t size = packing->numbers == SINGLES ? 4 : 2;
    return PANEL * size * (1 + packing->has_minima) + (packing->has_zeros ? 2 * PANEL : 0);
}

INLINE int64_t step_bytes(const Packing *packing) {
    int64_t eighths = packing->parts + (packing->parts && packing->has_minima);
    return PANEL * eighths + CODES / 8 * packing->bits;
}

INLINE int64_t packed_bytes(const Packing *packing, int64_t inputs) {
    return inputs / packing->span * head_bytes(packing) + inputs / STEP_IN * step_bytes(packing);
}

INLINE const char *read_numbers(int64_t kind, const char *from, float *to) {
    for (int at = 0; at < PANEL; at += LANES) {
        if (kind == SINGLES)
            store(to + at, load((const float *)from + at));
        else if (kind == HALF_NUMBERS)
            store(to + at, from_halves((const uint16_t *)from + at));
        else
            store(to + at, widen((const uint16_t *)from + at));
    }
    return from + PANEL * (kind == SINGLES ? 4 : 2);
}

INLINE const char *read_span(const Packing *packing, const char *from, Span *span) {
    from = read_numbers(packing->numbers, from, span->scales);
    if (packing->has_minima) from = read_numbers(packing->numbers, from, span->minima);
    if (!packing->has_zeros) {
        memset(span->zeros, (int)packing->zero, sizeof span->zeros);
        return from;
    }
    memcpy(span->zeros, from, sizeof span->zeros);
    return from + sizeof span->zeros;
}

/* The span's numbers times a step's of 8 bits. */
INLINE const char *scale_numbers(const float *numbers, const char *from, float *to) {
    for (int at = 0; at < PANEL; at += LANES)
        store(to + at, load(numbers + at) * from_bytes((const int8_t *)from + at));
    return from + PANEL;
}

/* Codes of fewer than 8 bits, less what stands for 0, or by their table. zeros: [2][32 outputs]. */
INLINE void unpack_codes(const int bits, const uint8_t *from, const int8_t *zeros, const int8_t *table, int8_t *to) {
    const uint8_t *above = from + CODES / 2;
    const int shared = bits == 5 ? CODES / 8 : CODES / 4; /* bytes that hold the upper bits of all codes */
#pragma GCC unroll 64
    for (int at = 0; at < CODES; at += OCTETS) {
        octets codes = load_octets(from + at % (CODES / 2));
        codes = (at < CODES / 2 ? codes : shift_right(codes, 4)) & 15;
        if (bits > 4) {
            int place = at / shared * (bits - 4);
            octets upper = load_octets(above + at % shared);
            upper = place < 4 ? shift_left(upper, 4 - place) : shift_right(upper, place - 4);
            codes |= upper & (uint8_t)(bits == 5 ? 16 : 48);
        }
        if (table)
            store_octets(to + at, look_up(table, codes));
        else
            store_octets(to + at, codes - load_octets(zeros));
    }
}

/* Returns what comes after the step. */
static const char *read_step(const Packing *packing, const Span *span, const char *from, Step *step) {
    for (int64_t line = 0; line < step_bytes(packing); line += 64) FETCH_ONCE(from + line + FETCHED_AHEAD);
    for (int64_t part = 0; part < packing->parts; part++) from = scale_numbers(span->scales, from, step->scales[part]);
    if (packing->parts < 2) memcpy(step->scales[1], packing->parts ? step->scales[0] : span->scales, sizeof span->scales);
    if (!packing->parts) memcpy(step->scales[0], span->scales, sizeof span->scales);
    if (packing->has_minima && packing->parts)
        from = scale_numbers(span->minima, from, step->minima);
    else if (packing->has_minima)
        memcpy(step->minima, span->minima, sizeof span->minima);
    step->codes = step->unpacked;
    if (packing->bits == 8)
        step->codes = (const int8_t *)from;
    else if (packing->bits == 6)
        unpack_codes(6, (const uint8_t *)from, span->zeros, NULL, step->unpacked);
    else if (packing->bits == 5)
        unpack_codes(5, (const uint8_t *)from, span->zeros, NULL, step->unpacked);
    else if (packing->table)
        unpack_codes(4, (const uint8_t *)from, span->zeros, packing->table, step->unpacked);
    else
        unpack_codes(4, (const uint8_t *)from, span->zeros, NULL, step->unpacked);
    return from + CODES / 8 * packing->bits;
}

/* Adds to `out` what a step is to the rows, but for the minima. Parts that leave registers free are added up side by
   side, so that no sum waits for itself. x: [32 inputs][rows]; codes: [32][32] of 8 bits, or floats. */
INLINE void add_step(const int rows, const int kind, const float *x, const void *codes, const Step *step,
                     Results *out) {
    const int together = rows * VECTORS <= 4 ? 2 : 1;
    for (int first = 0; first < 2; first += together) {
        floats sums[2][MOST_ROWS][VECTORS] = {};
#pragma GCC unroll 4
        for (int k = 0; k < PART_IN; k++)
#pragma GCC unroll 2
            for (int part = first; part < first + together; part++)
#pragma GCC unroll 8
                for (int at = 0; at < VECTORS; at++) {
                    floats weights = weights_at(kind, codes, (part * PART_IN + k) * PANEL + at * LANES);
#pragma GCC unroll 12
                    for (int row = 0; row < rows; row++)
                        sums[part - first][row][at] += all(x[(part * PART_IN + k) * rows + row]) * weights;
                }
#pragma GCC unroll 2
        for (int part = first; part < first + together; part++)
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
                for (int at = 0; at < VECTORS; at++) {
                    floats total = load(out[row] + at * LANES);
                    total += sums[part - first][row][at] * load(step->scales[part] + at * LANES);
                    store(out[row] + at * LANES, total);
                }
    }
}

/* Takes from `out` the minima times the sum of each row's inputs, which are added in one order however many rows there
   are. x: [32 inputs][rows] */
INLINE void take_minima(const int rows, const float *x, const float *minima, Results *out) {
    float sums[PART_IN * MOST_ROWS];
    for (int at = 0; at < PART_IN * rows; at++) sums[at] = x[at] + x[PART_IN * rows + at];
#pragma GCC unroll 4
    for (int count = PART_IN / 2; count; count /= 2)
        for (int at = 0; at < count * rows; at++) sums[at] += sums[count * rows + at];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int at = 0; at < VECTORS; at++) {
            floats total = load(out[row] + at * LANES);
            total -= all(sums[row]) * load(minima + at * LANES);
            store(out[row] + at * LANES, total);
        }
}

#define ADD_CASE(rows)                                                                                                 \
    case rows:                                                                                                         \
        if (wide)                                                                                                      \
            add_step(rows, FLOATS, x, wide, step, out);                                                                \
        else                                                                                                           \
            add_step(rows, BYTES, x, step->codes, step, out);                                                          \
        if (has_minima) take_minima(rows, x, step->minima, out);                                                       \
        break;

static void add_rows(int64_t rows, const float *x, const float *wide, const Step *step, int64_t has_minima,
                     Results *out) {
    switch (rows) {
        ADD_CASE(1)
        ADD_CASE(2) ADD_CASE(3)
#if MOST_ROWS > 3
            ADD_CASE(4) ADD_CASE(5) ADD_CASE(6) ADD_CASE(7) ADD_CASE(8) ADD_CASE(9) ADD_CASE(10) ADD_CASE(11)
                ADD_CASE(12)
#endif
    }
}

/* All rows times one panel. Codes that several groups of rows need are widened once. */
static void multiply_packed(const Packing *packing, const char *panel, int64_t inputs, const float *x, int64_t rows,
                            Results *out) {
    int64_t groups = num_groups(rows);
    float numbers[CODES] __attribute__((aligned(64)));
    Span span;
    Step step;
    memset(out, 0, (size_t)rows * sizeof(Results));
    for (int64_t k = 0; k < inputs; k += STEP_IN) {
        if (k % packing->span == 0) panel = read_span(packing, panel, &span);
        panel = read_step(packing, &span, panel, &step);
        for (int at = 0; groups > 1 && at < CODES; at += LANES) store(numbers + at, from_bytes(step.codes + at));
        for (int64_t group = 0; group < groups; group++) {
            int64_t start = group_start(group, rows), size = group_start(group + 1, rows) - start;
            add_rows(size, x + start * inputs + k * size, groups > 1 ? numbers : NULL, &step, packing->has_minima,
                     out + start);
        }
    }
}

/* The numbers of one output, of a panel. out: [inputs] */
static void unpack_output(const Packing *packing, const char *panel, int64_t inputs, int64_t output, float *out) {
    Span span;
    Step step;
    for (int64_t k = 0; k < inputs; k++) {
        if (k % packing->span == 0) panel = read_span(packing, panel, &span);
        if (k % STEP_IN == 0) panel = read_step(packing, &span, panel, &step);
        int64_t at = k % STEP_IN;
        float number = step.scales[at / PART_IN][output] * step.codes[at * PANEL + output];
        out[k] = packing->has_minima ? number - step.minima[output] : number;
    }
}

#endif

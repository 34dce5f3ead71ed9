/* Quantised weights, which stay packed in memory. A number is scale * (code - zero) - minimum, where a code has 4, 5, 6
   or 8 bits and is not negative. A panel of 32 outputs is spans of inputs that share a scale; a span is what is said
   once of each output, and steps of 32 inputs:

       span: scales [32], minima [32] if there are any, zeros less 128 [64] bytes if it has its own, of which half are
             used
       step: scales of 8 bits [parts][32] and minima of 8 bits [32], if there are any, which are times the span's;
             words [as many as a code has bits][32 outputs] of 32 bits

   A word holds the codes of 4 inputs of 8 bits, of 8 of 4 bits, of 6 of 5 bits, or of 5 of 6 bits, the first one
   lowest. Two bits are left over in each word of the last two kinds: together these are the last codes.

   A code needs no shift: it becomes a float32 number where it stands, too large by a power of two, by which the
   input is made smaller. No bit of the product is another by that. Every output is one sum: over 16 inputs in ascending
   order, less what the zero takes of it, times their scale, added in ascending order; after each step less the minimum.
   So a row's bits depend on no other row. */
#ifndef OUTRIDER_PACKED_H
#define OUTRIDER_PACKED_H

#include "panels.h"

#define STEP_IN 32            /* inputs of a step */
#define PART_IN (STEP_IN / 2) /* inputs that are added up before they are scaled */
#define CODES (STEP_IN * PANEL)
#define FETCHED_AHEAD 4096 /* bytes */
/* For as many rows a code is made a number once: their sums leave registers free. */
#if defined(__SANITIZE_ADDRESS__) || defined(__aarch64__) /* with which compilers take long for more */
#define FEW_ROWS 2
#elif MOST_ROWS > 3
#define FEW_ROWS 4
#else
#define FEW_ROWS 3
#endif

/* Numbers that are to be read from memory into all lanes, which costs nothing beside: in registers they would have to
   be spread. */
#define IN_MEMORY(array) __asm__("" : "+m"(array))

enum { SINGLES, HALF_NUMBERS, UPPER_HALVES }; /* a span's scales and minima: float32, float16, bfloat16 */
enum { BY_TABLE = 3, FOUR, FIVE, SIX, EIGHT = 8 }; /* codes: of 4 bits by a table, or as many bits */

typedef struct {
    int64_t codes;           /* one of those above */
    int64_t span;            /* inputs: a multiple of STEP_IN */
    int64_t numbers;         /* of a span */
    int64_t has_minima;      /* of the span, and of steps where they have scales */
    int64_t parts;           /* scales of an output in a step: 0, 1 or 2 */
    int64_t has_zeros, zero; /* each span's own, or the one of all */
    int8_t table[16];        /* what codes of 4 bits stand for, from 0 on, or none */
} Packing;

/* What an output's numbers are made with. */
typedef struct {
    float scales[PANEL], minima[PANEL], zeros[PANEL];
    int64_t left; /* inputs of it */
} Span;

typedef struct {
    float scales[2][PANEL], minima[PANEL]; /* of the parts of a step; of all of it */
} Step;

INLINE int64_t code_bytes(const int64_t codes) { return CODES / 8 * (codes == BY_TABLE ? 4 : codes); }

INLINE int64_t head_bytes(const Packing *packing) {
    int64_t size = packing->numbers == SINGLES ? 4 : 2;
    return PANEL * size * (1 + packing->has_minima) + (packing->has_zeros ? 2 * PANEL : 0);
}

INLINE int64_t packed_bytes(const Packing *packing, int64_t inputs) {
    int64_t eighths = packing->parts + (packing->parts && packing->has_minima);
    int64_t step = PANEL * eighths + code_bytes(packing->codes);
    return inputs / packing->span * head_bytes(packing) + inputs / STEP_IN * step;
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
    for (int at = 0; at < PANEL; at += LANES) {
        floats zeros = all((float)packing->zero);
        if (packing->has_zeros) zeros = from_bytes((const int8_t *)from + at) + all(128.0f);
        store(span->zeros + at, zeros);
    }
    return packing->has_zeros ? from + 2 * PANEL : from;
}

/* The span's numbers times a step's of 8 bits. */
INLINE const char *scale_numbers(const float *numbers, const char *from, float *to) {
    for (int at = 0; at < PANEL; at += LANES)
        store(to + at, load(numbers + at) * from_bytes((const int8_t *)from + at));
    return from + PANEL;
}

INLINE void copy_numbers(const float *from, float *to) {
    for (int at = 0; at < PANEL; at += LANES) store(to + at, load(from + at));
}

/* What stands before the codes of the next step, of which the address is returned. */
INLINE const char *read_step(const Packing *packing, const char *from, Span *span, Step *step) {
    if (!span->left) from = read_span(packing, from, span), span->left = packing->span;
    span->left -= STEP_IN;
    if (!packing->parts) {
        copy_numbers(span->scales, step->scales[0]), copy_numbers(span->scales, step->scales[1]);
        if (packing->has_minima) copy_numbers(span->minima, step->minima);
        return from;
    }
    from = scale_numbers(span->scales, from, step->scales[0]);
    if (packing->parts == 2)
        from = scale_numbers(span->scales, from, step->scales[1]);
    else
        copy_numbers(step->scales[0], step->scales[1]);
    return packing->has_minima ? scale_numbers(span->minima, from, step->minima) : from;
}

INLINE words word_at(const char *codes, const int word, const int at) {
    return *(const words *)((const uint32_t *)codes + word * PANEL + at);
}

/* The code of 5 or 6 bits that is spread over the upper two bits of words from `first` on. */
INLINE words spread_code(const int kind, const char *codes, const int first, const int at) {
    if (kind == SIX)
        return word_at(codes, first, at) >> 30 | word_at(codes, first + 1, at) >> 30 << 2 |
               word_at(codes, first + 2, at) >> 30 << 4;
    words shared = word_at(codes, 2, at) >> (first ? 31 : 30) & 1; /* the third word's bits serve both */
    return word_at(codes, first, at) >> 30 | word_at(codes, first + 1, at) >> 30 << 2 | shared << 4;
}

/* Bits where a code may stand: what is higher would be a negative number to processors without unsigned ones. */
#ifdef __AVX512F__
#define CODE_BITS 32
#define TO_FLOATS(found) __builtin_convertvector(found, floats)
#else
#define CODE_BITS 31
#define TO_FLOATS(found) __builtin_convertvector((integers)(found), floats)
#endif

/* Codes that are together in a word, and words whose left over bits are one. */
INLINE int codes_in_word(const int kind) { return kind == BY_TABLE ? 8 : 32 / kind; }
INLINE int is_spread(const int kind, const int k) {
    return (kind == SIX && k % PART_IN == 15) || (kind == FIVE && k >= 30);
}

INLINE int word_of(const int kind, const int k) {
    return kind == SIX ? k / PART_IN * 3 + k % PART_IN / 5 : k / codes_in_word(kind);
}

/* Where the code of input k stands, in bits from the lowest, before it is moved there from too high. */
INLINE int place_in_word(const int kind, const int k) {
    if (is_spread(kind, k)) return 0;
    return kind == BY_TABLE ? k % 8 / 2 * 8 : (kind == SIX ? k % PART_IN : k) % codes_in_word(kind) * kind;
}

INLINE int place_of(const int kind, const int k) {
    const int place = place_in_word(kind, k);
    return kind != BY_TABLE && place + kind > CODE_BITS ? 0 : place;
}

/* The codes of input k, of outputs from `at` on, times 2 to the power of their place. */
INLINE floats codes_at(const int kind, const int8_t *table, const char *codes, const int k, const int at) {
    const uint32_t mask = kind == BY_TABLE ? 255 : (1u << kind) - 1;
    if (is_spread(kind, k)) return TO_FLOATS(spread_code(kind, codes, k < PART_IN || k == 30 ? 0 : 3, at));
    words found = word_at(codes, word_of(kind, k), at);
    if (kind == BY_TABLE)
        found = (words)look_up(table, (k % 2 ? shift_right((octets)found, 4) : (octets)found) & 15);
    if (place_in_word(kind, k) != place_of(kind, k)) return TO_FLOATS(found >> place_in_word(kind, k));
    return TO_FLOATS(found & mask << place_of(kind, k));
}

/* By how much inputs are made smaller. out: [32 inputs][rows] */
INLINE void powers_of(const int kind, const int rows, float *out) {
    for (int k = 0; k < STEP_IN; k++)
        for (int row = 0; row < rows; row++) out[k * rows + row] = 1.0f / (float)(1u << place_of(kind, k));
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
    sums -= all(whole) * load(span->zeros + at * LANES);
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
    Span span __attribute__((aligned(64))) = {.left = 0};
    Step step __attribute__((aligned(64))) = {};
    powers_of(kind, rows, powers);
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

/* The codes of a step as numbers, [32 inputs][32 outputs]. */
INLINE void widen_codes(const int kind, const int8_t *table, const char *codes, float *out) {
#pragma GCC unroll 32
    for (int k = 0; k < STEP_IN; k++)
        for (int at = 0; at < PANEL; at += LANES) {
            const float power = 1.0f / (float)(1u << place_of(kind, k));
            store(out + k * PANEL + at, codes_at(kind, table, codes, k, at) * all(power));
        }
}

static void widen_step(const Packing *packing, const char *codes, float *out) {
    if (packing->codes == BY_TABLE)
        widen_codes(BY_TABLE, packing->table, codes, out);
    else if (packing->codes == FOUR)
        widen_codes(FOUR, packing->table, codes, out);
    else if (packing->codes == FIVE)
        widen_codes(FIVE, packing->table, codes, out);
    else if (packing->codes == SIX)
        widen_codes(SIX, packing->table, codes, out);
    else
        widen_codes(EIGHT, packing->table, codes, out);
}

/* The numbers of one output, of a panel. out: [inputs] */
static void unpack_output(const Packing *packing, const char *panel, int64_t inputs, int64_t output, float *out) {
    float codes[CODES] __attribute__((aligned(64)));
    Span span __attribute__((aligned(64))) = {.left = 0};
    Step step __attribute__((aligned(64))) = {};
    for (int64_t k = 0; k < inputs; k += STEP_IN, panel += code_bytes(packing->codes)) {
        panel = read_step(packing, panel, &span, &step);
        widen_step(packing, panel, codes);
        for (int64_t at = 0; at < STEP_IN; at++) {
            float number = (codes[at * PANEL + output] - span.zeros[output]) * step.scales[at / PART_IN][output];
            out[k + at] = packing->has_minima ? number - step.minima[output] : number;
        }
    }
}

#endif

/* Quantised weights, which stay packed in memory. A number is scale * (code - zero) - minimum, where a code has 4, 5, 6
   or 8 bits and is not negative. A panel of 32 outputs is spans of inputs that share a scale; a span is what is said once
   of each output, and steps of 32 inputs:

       span: scales [32], minima [32] if there are any, zeros less 128 [64] bytes, of which half are used, if it has its own
       step: scales of 8 bits [parts][32], minima of 8 bits [32], if there are any, by which the span's are multiplied;
             codes: words [as many as a code has bits][32 outputs] of 32 bits

   A word holds the codes of 4 inputs of 8 bits, of 8 of 4 bits, of 6 of 5 bits, or of 5 of 6 bits, the first one lowest.
   Two bits are left over in each word of the last two kinds: together these are a code, the last of 16.

   A code needs no shift: it becomes a float32 number where it stands, too large by a power of two, by which the input is
   made smaller. No bit of the product is another by that. Every output is one sum: over 16 inputs in ascending order,
   less what the zero takes of it, times their scale, added in ascending order; after each step less the minimum. So a
   row's bits depend on no other row. */
#ifndef OUTRIDER_PACKED_H
#define OUTRIDER_PACKED_H

#include "panels.h"

#define STEP_IN 32              /* inputs of a step */
#define PART_IN (STEP_IN / 2)   /* inputs that are added up before they are scaled */
#define CODES (STEP_IN * PANEL)
#define FETCHED_AHEAD 4096      /* bytes */
/* For these a code becomes a number where it is needed; for more rows, all of a step beforehand. */
#if defined(__AVX512F__)
#define FEW_ROWS 4
#elif defined(__AVX2__)
#define FEW_ROWS 2
#else
#define FEW_ROWS 1
#endif

/* Numbers that are read from memory into all lanes, which costs nothing beside: compilers would keep some in registers. */
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

/* A few rows times one panel. x: [inputs][rows] */
INLINE void multiply_few(const int kind, const int rows, const Packing *packing, const char *panel, int64_t inputs,
                         const float *x, Results *out) {
    floats totals[FEW_ROWS][VECTORS] = {};
    float powers[STEP_IN * FEW_ROWS], scaled[STEP_IN * FEW_ROWS], whole[2][FEW_ROWS];
    Span span __attribute__((aligned(64))) = {.left = 0};
    Step step __attribute__((aligned(64))) = {};
    powers_of(kind, rows, powers);
    for (int64_t k = 0; k < inputs; k += STEP_IN, x += STEP_IN * rows, panel += code_bytes(kind)) {
        panel = read_step(packing, panel, &span, &step);
#pragma GCC unroll 16
        for (int64_t line = 0; line < code_bytes(kind); line += 64) FETCH_ONCE(panel + line + FETCHED_AHEAD);
        for (int at = 0; at < STEP_IN * rows; at++) scaled[at] = x[at] * powers[at];
        IN_MEMORY(scaled);
        sum_inputs(rows, x, whole[0]), sum_inputs(rows, x + PART_IN * rows, whole[1]);
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

/* Adds to `out` a step's codes, [32 inputs][32 outputs], times more rows: the sums of `multiply_few`. powers: [32] */
INLINE void add_step(const int rows, const float *x, const float *codes, const float *powers, int64_t has_minima,
                     const Span *span, const Step *step, Results *out) {
    float whole[2][MOST_ROWS], scaled[STEP_IN * MOST_ROWS];
    for (int k = 0; k < STEP_IN; k++)
        for (int row = 0; row < rows; row++) scaled[k * rows + row] = x[k * rows + row] * powers[k];
    sum_inputs(rows, x, whole[0]), sum_inputs(rows, x + PART_IN * rows, whole[1]);
    for (int part = 0; part < 2; part++) {
        floats sums[MOST_ROWS][VECTORS] = {};
        for (int k = part * PART_IN; k < (part + 1) * PART_IN; k++)
#pragma GCC unroll 8
            for (int at = 0; at < VECTORS; at++) {
                floats weights = load(codes + k * PANEL + at * LANES);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) sums[row][at] += all(scaled[k * rows + row]) * weights;
            }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int at = 0; at < VECTORS; at++) {
                floats total = load(out[row] + at * LANES);
                total = add_scaled(total, sums[row][at], whole[part][row], span, step->scales[part], at);
                store(out[row] + at * LANES, total);
            }
    }
    for (int row = 0; has_minima && row < rows; row++)
        for (int at = 0; at < VECTORS; at++) {
            floats total = load(out[row] + at * LANES);
            total -= all(whole[0][row] + whole[1][row]) * load(step->minima + at * LANES);
            store(out[row] + at * LANES, total);
        }
}

/* The codes of a step as numbers, [32 inputs][32 outputs], times 2 to the power of their place. */
INLINE void widen_codes(const int kind, const int8_t *table, const char *codes, float *out) {
#pragma GCC unroll 32
    for (int k = 0; k < STEP_IN; k++)
#pragma GCC unroll 8
        for (int at = 0; at < PANEL; at += LANES)
            store(out + k * PANEL + at, codes_at(kind, table, codes, k, at));
}

#define BY_KIND(kind, doing)                                                                                           \
    switch (kind) {                                                                                                    \
        case BY_TABLE: doing(BY_TABLE); break;                                                                         \
        case FOUR: doing(FOUR); break;                                                                                 \
        case FIVE: doing(FIVE); break;                                                                                 \
        case SIX: doing(SIX); break;                                                                                   \
        default: doing(EIGHT);                                                                                         \
    }

static void widen_step(const Packing *packing, const char *codes, float *out) {
#define WIDEN(kind) widen_codes(kind, packing->table, codes, out)
    BY_KIND(packing->codes, WIDEN)
}

/* By how much the inputs of a step are made smaller, [32]. */
static void powers_for(const Packing *packing, float *powers) {
#define POWERS(kind) powers_of(kind, 1, powers)
    BY_KIND(packing->codes, POWERS)
}

#define STEP_CASE(rows)                                                                                                \
    case rows:                                                                                                         \
        add_step(rows, x, codes, powers, has_minima, span, step, out);                                                 \
        break;

static void add_rows(int64_t rows, const float *x, const float *codes, const float *powers, int64_t has_minima,
                     const Span *span, const Step *step, Results *out) {
    switch (rows) {
        STEP_CASE(1)
        STEP_CASE(2) STEP_CASE(3)
#if MOST_ROWS > 3
            STEP_CASE(4) STEP_CASE(5) STEP_CASE(6) STEP_CASE(7) STEP_CASE(8) STEP_CASE(9) STEP_CASE(10) STEP_CASE(11)
                STEP_CASE(12)
#endif
    }
}

/* Many rows times one panel: the codes of a step become numbers once, for all groups of rows. */
static void multiply_many(const Packing *packing, const char *panel, int64_t inputs, const float *x, int64_t rows,
                          Results *out) {
    float codes[CODES] __attribute__((aligned(64))), powers[STEP_IN];
    Span span __attribute__((aligned(64))) = {.left = 0};
    Step step __attribute__((aligned(64))) = {};
    powers_for(packing, powers);
    memset(out, 0, (size_t)rows * sizeof(Results));
    for (int64_t k = 0; k < inputs; k += STEP_IN, panel += code_bytes(packing->codes)) {
        panel = read_step(packing, panel, &span, &step);
        for (int64_t line = 0; line < code_bytes(packing->codes); line += 64) FETCH_ONCE(panel + line + FETCHED_AHEAD);
        widen_step(packing, panel, codes);
        for (int64_t group = 0; group < num_groups(rows); group++) {
            int64_t start = group_start(group, rows), size = group_start(group + 1, rows) - start;
            add_rows(size, x + start * inputs + k * size, codes, powers, packing->has_minima, &span, &step,
                     out + start);
        }
    }
}

#define FEW_CASE(kind, rows)                                                                                           \
    case kind * 16 + rows:                                                                                             \
        multiply_few(kind, rows, packing, panel, inputs, x, out);                                                      \
        break;
#if FEW_ROWS == 4
#define FEW_CASES(kind) FEW_CASE(kind, 1) FEW_CASE(kind, 2) FEW_CASE(kind, 3) FEW_CASE(kind, 4)
#elif FEW_ROWS == 2
#define FEW_CASES(kind) FEW_CASE(kind, 1) FEW_CASE(kind, 2)
#else
#define FEW_CASES(kind) FEW_CASE(kind, 1)
#endif

/* All rows times one panel. */
static void multiply_packed(const Packing *packing, const char *panel, int64_t inputs, const float *x, int64_t rows,
                            Results *out) {
    switch (rows <= FEW_ROWS ? packing->codes * 16 + rows : 0) {
        FEW_CASES(BY_TABLE)
        FEW_CASES(FOUR)
        FEW_CASES(FIVE)
        FEW_CASES(SIX)
        FEW_CASES(EIGHT)
        default:
            multiply_many(packing, panel, inputs, x, rows, out);
    }
}

/* The numbers of one output, of a panel. out: [inputs] */
static void unpack_output(const Packing *packing, const char *panel, int64_t inputs, int64_t output, float *out) {
    float codes[CODES] __attribute__((aligned(64))), powers[STEP_IN];
    Span span __attribute__((aligned(64))) = {.left = 0};
    Step step __attribute__((aligned(64))) = {};
    powers_for(packing, powers);
    for (int64_t k = 0; k < inputs; k += STEP_IN, panel += code_bytes(packing->codes)) {
        panel = read_step(packing, panel, &span, &step);
        widen_step(packing, panel, codes);
        for (int64_t at = 0; at < STEP_IN; at++) {
            float code = codes[at * PANEL + output] * powers[at] - span.zeros[output];
            out[k + at] = code * step.scales[at / PART_IN][output] - (packing->has_minima ? step.minima[output] : 0.0f);
        }
    }
}

#endif

/* Quantised weights, which stay packed in memory. A number is scale * (code - zero) - minimum, where a code has 4, 5, 6
   or 8 bits and is not negative. A panel of 32 outputs is spans of inputs that share a scale; a span is what is said
   once of each output, and steps of 32 inputs:

       span: scales [32], minima [32] if there are any, zeros less 128 [64] bytes if it has its own, of which half are
             used
       step: scales of 8 bits [parts][32] and minima of 8 bits [32], if there are any, which are times the span's;
             words [as many as a code has bits][32 outputs] of 32 bits

   A word holds the codes of 4 inputs of 8 bits, one a byte, or of 8 inputs: in the lower halves of its bytes the lower 4
   bits of the first four's, in the upper halves those of the others'. Of 5 or 6 bits the rest is in the words behind
   these four: a byte has for each four inputs a bit, or two of every second four. */
#ifndef OUTRIDER_PACKED_H
#define OUTRIDER_PACKED_H

#include "panels.h"

#define STEP_IN 32            /* inputs of a step */
#define PART_IN (STEP_IN / 2) /* inputs that are added up before they are scaled */
#define CODES (STEP_IN * PANEL)
#define FETCHED_AHEAD 4096 /* bytes */
/* For as many rows codes are taken apart once: their sums leave registers free. */
#if defined(__SANITIZE_ADDRESS__) || defined(__aarch64__) /* with which compilers take long for more */
#define FEW_ROWS 2
#elif MOST_ROWS > 3
#define FEW_ROWS 4
#else
#define FEW_ROWS 3
#endif

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
    float scales[PANEL], minima[PANEL];
    int32_t zeros[PANEL];
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
    if (!packing->has_zeros) return from;
    for (int at = 0; at < PANEL; at++) span->zeros[at] = ((const int8_t *)from)[at] + 128;
    return from + 2 * PANEL;
}

/* Before the first one. */
INLINE void start_spans(const Packing *packing, Span *span) {
    span->left = 0;
    for (int at = 0; at < PANEL; at++) span->zeros[at] = (int32_t)packing->zero;
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

/* The codes of inputs 4 * quad to 4 * quad + 3, one a byte, of outputs from `at` on. */
INLINE words quad_at(const int kind, const int8_t *table, const char *codes, const int quad, const int at) {
    if (kind == EIGHT) return word_at(codes, quad, at);
    words found = word_at(codes, quad / 2, at);
    found = (quad % 2 ? found >> 4 : found) & 0x0f0f0f0f;
    if (kind == BY_TABLE) return (words)look_up(table, (octets)found);
    if (kind == FOUR) return found;
    words rest = word_at(codes, kind == SIX ? 4 + quad / 4 : 4, at);
    const int left = kind == SIX ? 4 - quad % 4 * 2 : 4 - quad;
    return found | ((left < 0 ? rest >> (left < 0 ? -left : 0) : rest << (left < 0 ? 0 : left)) &
                    (kind == SIX ? 0x30303030 : 0x10101010));
}

INLINE void widen_codes(const int kind, const int8_t *table, const char *codes, float *out) {
#pragma GCC unroll 32
    for (int k = 0; k < STEP_IN; k++)
        for (int at = 0; at < PANEL; at += LANES) {
            words code = quad_at(kind, table, codes, k / 4, at) >> k % 4 * 8 & 255;
            store(out + k * PANEL + at, __builtin_convertvector((integers)code, floats));
        }
}

/* The codes of a step as numbers, [32 inputs][32 outputs]. */
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
    Span span __attribute__((aligned(64))) = {};
    Step step __attribute__((aligned(64))) = {};
    start_spans(packing, &span);
    for (int64_t k = 0; k < inputs; k += STEP_IN, panel += code_bytes(packing->codes)) {
        panel = read_step(packing, panel, &span, &step);
        widen_step(packing, panel, codes);
        for (int64_t at = 0; at < STEP_IN; at++) {
            float number = (codes[at * PANEL + output] - (float)span.zeros[output]) * step.scales[at / PART_IN][output];
            out[k + at] = packing->has_minima ? number - step.minima[output] : number;
        }
    }
}

#endif

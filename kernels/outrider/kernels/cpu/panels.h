/* What all products share: panels of 32 outputs, and groups of the rows that are multiplied together. */
#ifndef OUTRIDER_PANELS_H
#define OUTRIDER_PANELS_H

#include <string.h>

#include "vectors.h"

#define PANEL 32
#define VECTORS (PANEL / LANES)
#ifdef __AVX512F__
#define MOST_ROWS 12 /* 24 of 32 registers hold sums */
#else
#define MOST_ROWS 3 /* 12 of 16, or 24 of NEON's 32 */
#endif
/* Weights of few bits are read once in a pass: what is fetched need not stay in the outer caches. */
#define FETCH_ONCE(at) __builtin_prefetch(at, 0, 0)

enum { FLOATS, HALVES, TILES, BYTES, PACKED, SECTIONS, FLOAT16 }; /* how weights lie; HALVES are bfloat16 */

typedef float Results[PANEL]; /* of one row and panel */

/* As many numbers of a panel as a register has, from number `at` on. */
INLINE floats weights_at(const int kind, const void *panel, int64_t at) {
    if (kind == HALVES) return widen((const uint16_t *)panel + at);
    if (kind == FLOAT16) return from_halves((const uint16_t *)panel + at);
    if (kind == BYTES) return from_bytes((const int8_t *)panel + at);
    return load((const float *)panel + at);
}

/* Groups of about equal size: how many, and where each starts. */
INLINE int64_t num_groups(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
INLINE int64_t group_start(int64_t group, int64_t rows) { return rows * group / num_groups(rows); }

#endif

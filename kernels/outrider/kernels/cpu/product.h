/* y = x W^T + b for few rows x. The weights lie in panels of 32 outputs, [in][32] each, as float32 or as the upper
   halves of float32 numbers whose lower halves are zero. The rows lie in tiles of up to MOST_ROWS, [in][rows of the
   tile] each: so all that one step of a sum reads lies together. Every output is one sum over the inputs in ascending
   order: its bits depend neither on the other rows nor on the threads. */
#ifndef OUTRIDER_PRODUCT_H
#define OUTRIDER_PRODUCT_H

#include <string.h>

#include "vectors.h"

#define PANEL 32
#ifdef __AVX512F__
#define MOST_ROWS 12 /* 24 of 32 registers hold sums */
#else
#define MOST_ROWS 3
#endif
#define PART 128           /* inputs whose weights are widened together: 16 KiB */
#define AHEAD (32 * PANEL) /* numbers fetched before they are needed */

typedef struct {
    const void *panels; /* [ceil(outputs / 32)][inputs][32] */
    const float *bias;  /* [outputs], or none */
    int64_t outputs, inputs, is_half;
} Matrix;

typedef float Tile[MOST_ROWS][PANEL];

/* Adds to `out` the sums over `inputs` inputs. */
INLINE void multiply(const int rows, const int is_half, const float *x, const void *panel, int64_t inputs, Tile out) {
    floats sums[MOST_ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) sums[row][0] = load(out[row]), sums[row][1] = load(out[row] + LANES);
    for (int64_t k = 0; k < inputs; k++, x += rows) {
        floats low, high;
        if (is_half) {
            const uint16_t *at = (const uint16_t *)panel + k * PANEL;
            __builtin_prefetch(at + AHEAD);
            low = widen(at), high = widen(at + LANES);
        } else {
            const float *at = (const float *)panel + k * PANEL;
            __builtin_prefetch(at + AHEAD), __builtin_prefetch(at + AHEAD + LANES);
            low = load(at), high = load(at + LANES);
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            sums[row][0] += all(x[row]) * low;
            sums[row][1] += all(x[row]) * high;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        store(out[row], sums[row][0]);
        store(out[row] + LANES, sums[row][1]);
    }
}

#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        if (is_half)                                                                                                   \
            multiply(rows, 1, x, weights, inputs, out);                                                                \
        else                                                                                                           \
            multiply(rows, 0, x, weights, inputs, out);                                                                \
        break;

static void multiply_rows(int64_t rows, int64_t is_half, const float *x, const void *weights, int64_t inputs,
                          Tile out) {
    switch (rows) {
        CASE(1)
        CASE(2) CASE(3)
#if MOST_ROWS > 3
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* Tiles of about equal size: how many, and where each starts. */
INLINE int64_t num_tiles(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
INLINE int64_t tile_start(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }

/* Where a row begins in tiled memory; its numbers are `stride` apart. */
INLINE float *tiled(float *base, int64_t row, int64_t rows, int64_t inputs, int64_t *stride) {
    int64_t tile = ((row + 1) * num_tiles(rows) - 1) / rows, start = tile_start(tile, rows);
    *stride = tile_start(tile + 1, rows) - start;
    return base + start * inputs + row - start;
}

/* All tiles of x times one panel, and its bias. Weights that several tiles need are widened once, a part at a time that
   stays in the first-level cache. */
static void product_panel(const Matrix *matrix, int64_t panel, const float *x, int64_t rows, Tile *out) {
    int64_t inputs = matrix->inputs, tiles = num_tiles(rows), first = panel * PANEL;
    float bias[PANEL] = {0}, wide[PART * PANEL] __attribute__((aligned(64)));
    for (int64_t at = 0; matrix->bias && at < PANEL && first + at < matrix->outputs; at++)
        bias[at] = matrix->bias[first + at];
    memset(out, 0, (size_t)tiles * sizeof(Tile));
    int64_t widens = matrix->is_half && tiles > 1, part = widens ? PART : inputs;
    for (int64_t k = 0; k < inputs; k += part) {
        int64_t count = inputs - k < part ? inputs - k : part, place = first * inputs + k * PANEL;
        const void *weights = matrix->is_half ? (const void *)((const uint16_t *)matrix->panels + place)
                                              : (const void *)((const float *)matrix->panels + place);
        if (widens) {
            for (int64_t at = 0; at < count * PANEL; at += LANES) {
                if (at % PANEL == 0) __builtin_prefetch((const uint16_t *)weights + at + AHEAD);
                store(wide + at, widen((const uint16_t *)weights + at));
            }
            weights = wide;
        }
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t start = tile_start(tile, rows), size = tile_start(tile + 1, rows) - start;
            multiply_rows(size, matrix->is_half && !widens, x + start * inputs + k * size, weights, count, out[tile]);
        }
    }
    if (matrix->bias)
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t row = 0; row < MOST_ROWS; row++)
                for (int64_t at = 0; at < PANEL; at++) out[tile][row][at] += bias[at];
}

INLINE int64_t num_panels(const Matrix *matrix) { return (matrix->outputs + PANEL - 1) / PANEL; }

#endif

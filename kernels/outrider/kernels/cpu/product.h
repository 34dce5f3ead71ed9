/* y = x W^T + b for few rows x. The weights lie in panels of 32 outputs, [in][32] each, as float32, as bfloat16, which
   are the upper halves of float32 numbers, as float16, or as integers of 8 bits, with a scale for each output, by which its sum is
   multiplied; those of quantised checkpoints as packed.h has them. The rows lie in groups of up to MOST_ROWS, [in][rows of the group] each: so all that one step of a sum
   reads lies together. Every output is one sum over the inputs in ascending order: its bits depend neither on the other
   rows nor on the threads. Where the processor multiplies tiles of bfloat16 numbers, weights and rows lie as tiles.h has
   them. */
#ifndef OUTRIDER_PRODUCT_H
#define OUTRIDER_PRODUCT_H

#include "packed_floats.h"
#include "packed_integers.h"
#include "panels.h"
#include "tiles.h"

#define PART 128           /* inputs whose weights are widened together: 16 KiB */
#define AHEAD (32 * PANEL) /* numbers fetched before they are needed */

typedef struct Matrix {
    const void *panels;  /* [ceil(outputs / 32)] of [inputs][32], of [steps][2][16][16][2], or as packed.h has them */
    const float *bias;   /* [outputs], or none */
    const float *scales; /* [outputs] of bytes, or none */
    int64_t outputs, inputs, kind;
    const Packing *packing;        /* of packed ones, or none */
    const struct Matrix *sections; /* [num_sections], or none: matrices of several kinds, one below the other, each of */
    int64_t num_sections;          /* whole panels but the last; none is of tiles */
    int64_t rounds;                /* rows are multiplied as integers (packed_integers.h), by all sections */
} Matrix;

/* Asks for the line or lines of a panel with the numbers of one input, from number `at` on. */
INLINE void fetch(const int kind, const void *panel, int64_t at) {
    if (kind == HALVES || kind == FLOAT16) FETCH_ONCE((const uint16_t *)panel + at);
    if (kind == BYTES) FETCH_ONCE((const int8_t *)panel + at);
    if (kind == FLOATS)
        __builtin_prefetch((const float *)panel + at), __builtin_prefetch((const float *)panel + at + PANEL / 2);
}

/* Adds to `out` the sums over `inputs` inputs. */
INLINE void multiply(const int rows, const int kind, const float *x, const void *panel, int64_t inputs,
                     Results *out) {
    floats sums[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) sums[row][part] = load(out[row] + part * LANES);
    for (int64_t k = 0; k < inputs; k++, x += rows) {
        fetch(kind, panel, k * PANEL + AHEAD);
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) {
            floats weights = weights_at(kind, panel, k * PANEL + part * LANES);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) sums[row][part] += all(x[row]) * weights;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) store(out[row] + part * LANES, sums[row][part]);
}

#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        if (kind == HALVES)                                                                                            \
            multiply(rows, HALVES, x, weights, inputs, out);                                                           \
        else if (kind == FLOAT16)                                                                                      \
            multiply(rows, FLOAT16, x, weights, inputs, out);                                                          \
        else if (kind == BYTES)                                                                                        \
            multiply(rows, BYTES, x, weights, inputs, out);                                                            \
        else                                                                                                           \
            multiply(rows, FLOATS, x, weights, inputs, out);                                                           \
        break;

static void multiply_rows(int64_t rows, int64_t kind, const float *x, const void *weights, int64_t inputs,
                          Results *out) {
    switch (rows) {
        CASE(1)
        CASE(2) CASE(3)
#if MOST_ROWS > 3
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* Floats that rows take where a product reads them. */
INLINE int64_t placed_size(int64_t inputs, int64_t rows) {
    int64_t tiled = num_row_tiles(rows) * num_steps(inputs) * TILE / 2, grouped = rows * inputs;
    return tiled > grouped ? tiled : grouped;
}

/* How many numbers of a row are put in their place together. */
INLINE int64_t placed_together(const Matrix *matrix) { return matrix->rounds ? STEP_IN : LANES; }

/* Puts `count` numbers of a row, from column `at` on, where the product with `matrix` reads them. Both are multiples of
   what is put there together, or the row ends there. */
INLINE void place(const Matrix *matrix, int64_t rows, int64_t row, int64_t at, int64_t count, const float *from,
                  float *x) {
    if (matrix->kind == TILES) {
        int64_t past = at + count == matrix->inputs ? num_steps(matrix->inputs) * TILE_IN : at + count;
        for (int64_t end = at + count; at < past; at += LANES, from += LANES) {
            floats values = {};
            if (at + LANES <= end)
                values = load(from);
            else
                for (int64_t lane = 0; at + lane < end; lane++) values[lane] = from[lane];
            split_into((uint16_t *)x, matrix->inputs, row, at, values);
        }
        return;
    }
    if (matrix->rounds) {
        Rounded *to = (Rounded *)x + (row * matrix->inputs + at) / STEP_IN;
        for (int64_t k = 0; k < count; k += STEP_IN) round_inputs(from + k, to++);
        return;
    }
    int64_t group = ((row + 1) * num_groups(rows) - 1) / rows, start = group_start(group, rows);
    int64_t stride = group_start(group + 1, rows) - start;
    float *to = x + start * matrix->inputs + row - start + at * stride;
    for (int64_t index = 0; index < count; index++) to[index * stride] = from[index];
}

INLINE int64_t number_bytes(int64_t kind) { return kind == BYTES ? 1 : kind == FLOATS ? 4 : 2; }

/* The numbers of `count` inputs. */
INLINE void widen_part(const int kind, const void *weights, int64_t count, float *wide) {
    for (int64_t at = 0; at < count * PANEL; at += LANES) {
        if (at % PANEL == 0) fetch(kind, weights, at + AHEAD);
        store(wide + at, weights_at(kind, weights, at));
    }
}

/* All rows times one panel of floats, halves, float16 numbers or bytes. Weights that several groups need are widened once, a part at a
   time that stays in the first-level cache. */
static void multiply_groups(const Matrix *matrix, int64_t panel, const float *x, int64_t rows, Results *out) {
    int64_t inputs = matrix->inputs, groups = num_groups(rows), kind = matrix->kind;
    int64_t widens = kind != FLOATS && groups > 1, part = widens ? PART : inputs;
    float wide[PART * PANEL] __attribute__((aligned(64)));
    memset(out, 0, (size_t)rows * sizeof(Results));
    for (int64_t k = 0; k < inputs; k += part) {
        int64_t count = inputs - k < part ? inputs - k : part;
        const void *weights = (const char *)matrix->panels + (panel * inputs + k) * PANEL * number_bytes(kind);
        if (widens) {
            if (kind == HALVES)
                widen_part(HALVES, weights, count, wide);
            else if (kind == FLOAT16)
                widen_part(FLOAT16, weights, count, wide);
            else
                widen_part(BYTES, weights, count, wide);
            weights = wide;
        }
        for (int64_t group = 0; group < groups; group++) {
            int64_t start = group_start(group, rows), size = group_start(group + 1, rows) - start;
            multiply_rows(size, widens ? FLOATS : kind, x + start * inputs + k * size, weights, count, out + start);
        }
    }
}

INLINE int64_t panel_bytes(const Matrix *matrix) {
    if (matrix->kind == TILES) return num_steps(matrix->inputs) * 2 * TILE * (int64_t)sizeof(uint16_t);
    if (matrix->kind == PACKED) return packed_bytes(matrix->packing, matrix->inputs);
    return matrix->inputs * PANEL * number_bytes(matrix->kind);
}

INLINE int64_t num_panels(const Matrix *matrix) { return (matrix->outputs + PANEL - 1) / PANEL; }

/* The matrix that a panel is of, which is a section where there are any; `panel` becomes its number there. */
INLINE const Matrix *owner_of(const Matrix *matrix, int64_t *panel) {
    const Matrix *section = matrix->sections;
    if (!section) return matrix;
    for (; *panel >= num_panels(section); section++) *panel -= num_panels(section);
    return section;
}

/* All rows of x times one panel, its scales and its bias. out: [rows] */
static void product_panel(const Matrix *matrix, int64_t panel, const float *x, int64_t rows, Results *out) {
    matrix = owner_of(matrix, &panel);
    int64_t first = panel * PANEL;
    const char *weights = (const char *)matrix->panels + panel * panel_bytes(matrix);
    if (matrix->kind == TILES)
        multiply_tiles((const uint16_t *)x, (const uint16_t *)weights, matrix->inputs, rows, out);
    else if (matrix->rounds)
        multiply_integers(matrix->packing, weights, matrix->inputs, (const Rounded *)x, rows, out);
    else if (matrix->kind == PACKED)
        multiply_packed(matrix->packing, weights, matrix->inputs, x, rows, out);
    else
        multiply_groups(matrix, panel, x, rows, out);
    int64_t left = matrix->outputs - first, width = left < PANEL ? left : PANEL;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t at = 0; matrix->scales && at < width; at++) out[row][at] *= matrix->scales[first + at];
        for (int64_t at = 0; matrix->bias && at < width; at++) out[row][at] += matrix->bias[first + at];
    }
}

#endif

/* What all layers do with rows: norms, products, the gate's activation. */
#ifndef OUTRIDER_ROWS_H
#define OUTRIDER_ROWS_H

#include <math.h>

#include "low_rank.h"
#include "product.h"
#include "team.h"

static float rms_factor(const float *x, int64_t dim, float eps) {
    floats squares = {};
    for (int64_t at = 0; at < dim; at += LANES) squares += load(x + at) * load(x + at);
    return 1.0f / sqrtf(sum(squares) / (float)dim + eps);
}

/* Of the first rows of x, or of those that `chosen` names. out: placed for the product with `next`; kept, too, for
   adapters. */
static void norm_rows(Thread *thread, const float *x, const int64_t *chosen, const float *weight, int64_t rows,
                      float eps, const Matrix *next, const Adapters *adapters, float *out) {
    int64_t dim = next->inputs, width = placed_together(next);
    for (CLAIM(row, rows)) {
        const float *from = x + (chosen ? chosen[row] : row) * dim;
        floats factor = all(rms_factor(from, dim, eps));
        for (int64_t first = 0; first < dim; first += width) {
            float normed[STEP_IN];
            for (int64_t at = 0; at < width; at += LANES)
                store(normed + at, load(from + first + at) * factor * load(weight + first + at));
            place(next, rows, row, first, width, normed, out);
            keep_input(adapters, dim, row, first, width, normed);
        }
    }
    meet(thread);
}

/* x: placed; out: [rows][outputs], set, or added to. `next`: the matrix that is read after this one. */
static void product(Thread *thread, const Matrix *matrix, const float *x, int64_t rows, int adds, const Change *change,
                    float *out, const Matrix *next) {
    if (change->adapters) multiply_down(thread, change, rows, matrix->inputs);
    for (CLAIM(panel, num_panels(matrix))) {
        int64_t first = panel * PANEL, left = matrix->outputs - first, width = left < PANEL ? left : PANEL;
        product_panel(matrix, panel, x, rows, thread->results);
        if (change->adapters) add_low_rank(change, panel, matrix->outputs, rows, thread->results);
        for (int64_t row = 0; row < rows; row++) {
            float *to = out + row * matrix->outputs + first, *result = thread->results[row];
            for (int64_t at = 0; at < width; at++) to[at] = adds ? to[at] + result[at] : result[at];
        }
    }
    look_ahead(thread, next);
    meet(thread);
}

/* x * sigmoid(x); or x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is x / 2 * (1 + tanh(half of that)). */
INLINE floats activated(floats x, int64_t is_gelu) {
    floats slope = x;
    if (is_gelu) slope *= all(1.5957691216f) + all(0.0713548162f) * x * x;
    return x / (all(1.0f) + exponential(-slope));
}

#endif

/* What adapters add to a pass: y += scaling * up (down x), of each row its own adapter's (LoRA, Hu et al., arXiv
   2106.09685). down x is one sum over the inputs for every rank, up times that one sum over the ranks for every output,
   both in a fixed order: a row's bits depend neither on other rows nor on threads. Steps without adapters run none of
   this. */
#ifndef OUTRIDER_LOW_RANK_H
#define OUTRIDER_LOW_RANK_H

#include "team.h"

#define MOST_RANK 64
#define TOGETHER 4 /* ranks that one reading of a row serves */
/* Rows of one adapter that one reading of its factors serves, as far as there are registers. */
#ifdef __AVX512F__
#define ROW_BLOCK 4
#elif defined(__AVX2__)
#define ROW_BLOCK 2
#else
#define ROW_BLOCK 1
#endif
#define INNER (3 * MOST_RANK) /* numbers of a row between the two factors */

/* Of one projection; rank 0: nothing. */
typedef struct {
    const float *down; /* [rank][inputs] */
    const float *up;   /* [rank][outputs] */
    int64_t rank, outputs;
    float scaling;
} LowRank;

enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PROJECTIONS };

typedef struct {
    LowRank of[PROJECTIONS];
} LayerAdapter;

typedef struct {
    const LayerAdapter *const *adapters; /* [slots]: [layers] each */
    const int32_t *slots;                /* [rows]; -1: none */
    float *inputs;                       /* [rows][widest input of a product] */
    float *inner;                        /* [rows][INNER] */
    const int64_t *outputs;              /* [PROJECTIONS]: of each */
} Adapters;

/* What adapters change of a product: the projections that its outputs are, one after the other. */
typedef struct {
    const Adapters *adapters; /* or none */
    int64_t layer;
    int first, count;
} Change;

static const Change UNCHANGED = {0};
static const int PLACES[PROJECTIONS] = {0, 1, 2, 0, 0, 1, 0}; /* of each projection in `inner` */

INLINE const LowRank *low_rank_of(const Change *change, int64_t row, int projection) {
    return change->adapters->adapters[change->adapters->slots[row]][change->layer].of + projection;
}

INLINE float *inner_of(const Change *change, int64_t row, int projection) {
    return change->adapters->inner + row * INNER + PLACES[projection] * MOST_RANK;
}

INLINE int has_adapter(const Adapters *adapters, int64_t row) { return adapters && adapters->slots[row] >= 0; }

/* Keeps `count` numbers of a row's input, from column `at` on, as they are. */
INLINE void keep_input(const Adapters *adapters, int64_t inputs, int64_t row, int64_t at, int64_t count,
                       const float *from) {
    if (has_adapter(adapters, row))
        memcpy(adapters->inputs + row * inputs + at, from, (size_t)count * sizeof(float));
}

/* Rows from `row` on, before `end`, that have the adapter of the first. */
INLINE int64_t run_of(const Adapters *adapters, int64_t row, int64_t end) {
    int64_t next = row + 1;
    while (next < end && adapters->slots[next] == adapters->slots[row]) next++;
    return next - row;
}

/* x: [rows][inputs]. Of each row `count` products with rows of `down`, times scaling; out: [rows][INNER]. */
INLINE void dot_rows(const int rows, const int count, const float *down, const float *x, int64_t inputs, float scaling,
                     float *out) {
    floats sums[ROW_BLOCK][TOGETHER] = {};
    int64_t at = 0;
    for (; at + LANES <= inputs; at += LANES)
#pragma GCC unroll 4
        for (int rank = 0; rank < count; rank++) {
            floats weights = load(down + rank * inputs + at);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) sums[row][rank] += load(x + row * inputs + at) * weights;
        }
    for (int row = 0; row < rows; row++)
        for (int rank = 0; rank < count; rank++) {
            float total = sum(sums[row][rank]);
            for (int64_t rest = at; rest < inputs; rest++) total += x[row * inputs + rest] * down[rank * inputs + rest];
            out[row * INNER + rank] = total * scaling;
        }
}

/* Of one row, or of ROW_BLOCK rows of one adapter, and a projection the ranks from `first` up to `end`. */
INLINE void multiply_ranks(const int rows, const Change *change, int64_t row, int projection, int64_t inputs,
                           int64_t first, int64_t end) {
    const LowRank *own = low_rank_of(change, row, projection);
    const float *x = change->adapters->inputs + row * inputs;
    float *out = inner_of(change, row, projection);
    if (end > own->rank) end = own->rank;
    for (; first + TOGETHER <= end; first += TOGETHER)
        dot_rows(rows, TOGETHER, own->down + first * inputs, x, inputs, own->scaling, out + first);
    for (; first < end; first++) dot_rows(rows, 1, own->down + first * inputs, x, inputs, own->scaling, out + first);
}

/* Before a product: what was kept of the inputs of all rows that have an adapter, times `down`. Few rows are shared out
   by their ranks, too. */
static void multiply_down(Thread *thread, const Change *change, int64_t rows, int64_t inputs) {
    int64_t wanted = (rows + ROW_BLOCK - 1) / ROW_BLOCK * change->count;
    int64_t step = wanted < 4 * thread->size ? TOGETHER : MOST_RANK, parts = MOST_RANK / step;
    for (CLAIM(piece, wanted * parts)) {
        int64_t row = piece / parts / change->count * ROW_BLOCK, first = piece % parts * step;
        int64_t end = row + ROW_BLOCK < rows ? row + ROW_BLOCK : rows;
        int projection = change->first + (int)(piece / parts % change->count);
        if (has_adapter(change->adapters, row) && run_of(change->adapters, row, end) == ROW_BLOCK) {
            multiply_ranks(ROW_BLOCK, change, row, projection, inputs, first, first + step);
            continue;
        }
        for (; row < end; row++)
            if (has_adapter(change->adapters, row))
                multiply_ranks(1, change, row, projection, inputs, first, first + step);
    }
    meet(thread);
}

/* Adds to a row's results, which are `width` outputs from `first` on, what `up` of a projection makes of the ranks;
   `start` is the projection's first output. */
INLINE void add_part(const LowRank *own, const float *inner, int64_t start, int64_t first, int64_t width,
                     float *result) {
    int64_t end = start + own->outputs < first + width ? start + own->outputs : first + width;
    for (int64_t output = first > start ? first : start; output < end; output++) {
        const float *up = own->up + output - start;
        float total = 0.0f;
        for (int64_t rank = 0; rank < own->rank; rank++) total += inner[rank] * up[rank * own->outputs];
        result[output - first] += total;
    }
}

/* The same of a whole panel, whose first output is the projection's output `at`; inner: [rows][INNER]. */
INLINE void add_panel(const int rows, const LowRank *own, const float *inner, int64_t at, Results *results) {
    floats sums[ROW_BLOCK][VECTORS] = {};
    for (int64_t rank = 0; rank < own->rank; rank++) {
        const float *up = own->up + rank * own->outputs + at;
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) {
            floats weights = load(up + part * LANES);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) sums[row][part] += all(inner[row * INNER + rank]) * weights;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++)
            store(results[row] + part * LANES, load(results[row] + part * LANES) + sums[row][part]);
}

/* The rows' adapters' part in one panel of a projection, which begins at output `start`. */
static void add_projection(const Change *change, int projection, int64_t start, int64_t first, int64_t width,
                           int64_t rows, Results *results) {
    for (int64_t row = 0, done; row < rows; row += done) {
        done = 1;
        if (!has_adapter(change->adapters, row)) continue;
        const LowRank *own = low_rank_of(change, row, projection);
        const float *inner = inner_of(change, row, projection);
        if (!own->rank) continue;
        if (start > first || first + PANEL > start + own->outputs) {
            add_part(own, inner, start, first, width, results[row]);
        } else if (run_of(change->adapters, row, row + ROW_BLOCK < rows ? row + ROW_BLOCK : rows) == ROW_BLOCK) {
            add_panel(ROW_BLOCK, own, inner, first - start, results + row);
            done = ROW_BLOCK;
        } else {
            add_panel(1, own, inner, first - start, results + row);
        }
    }
}

/* Adds to the rows' results of one panel what their adapters make of it. A panel lies in one projection, or across the
   border of two, for every row alike. */
static void add_low_rank(const Change *change, int64_t panel, int64_t outputs, int64_t rows, Results *results) {
    int64_t first = panel * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL, start = 0;
    for (int projection = change->first; projection < change->first + change->count; projection++) {
        int64_t end = start + change->adapters->outputs[projection];
        if (start < first + width && first < end) add_projection(change, projection, start, first, width, rows, results);
        start = end;
    }
}

#endif

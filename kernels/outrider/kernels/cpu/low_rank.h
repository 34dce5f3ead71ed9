/* What adapters add to a pass: y += scaling * up (down x), of each row its own adapter's (LoRA, Hu et al., arXiv
   2106.09685). down x is one sum over the inputs for every rank, up times that one sum over the ranks for every output,
   both in a fixed order: a row's bits depend neither on other rows nor on threads. Steps without adapters run none of
   this. */
#ifndef OUTRIDER_LOW_RANK_H
#define OUTRIDER_LOW_RANK_H

#include "team.h"

#define MOST_RANK 64
#define TOGETHER 4 /* ranks that one reading of a row serves */

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
    float *inner;                        /* [rows][3][MOST_RANK] */
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
    return change->adapters->inner + (row * 3 + PLACES[projection]) * MOST_RANK;
}

INLINE int has_adapter(const Adapters *adapters, int64_t row) { return adapters && adapters->slots[row] >= 0; }

/* Keeps `count` numbers of a row's input, from column `at` on, as they are. */
INLINE void keep_input(const Adapters *adapters, int64_t inputs, int64_t row, int64_t at, int64_t count,
                       const float *from) {
    if (has_adapter(adapters, row))
        memcpy(adapters->inputs + row * inputs + at, from, (size_t)count * sizeof(float));
}

/* `count` products of x with rows of `down`, times scaling. */
INLINE void dot_rows(const int count, const float *down, const float *x, int64_t inputs, float scaling, float *out) {
    floats sums[TOGETHER] = {};
    int64_t at = 0;
    for (; at + LANES <= inputs; at += LANES) {
        floats numbers = load(x + at);
#pragma GCC unroll 4
        for (int rank = 0; rank < count; rank++) sums[rank] += numbers * load(down + rank * inputs + at);
    }
    for (int rank = 0; rank < count; rank++) {
        float total = sum(sums[rank]);
        for (int64_t rest = at; rest < inputs; rest++) total += x[rest] * down[rank * inputs + rest];
        out[rank] = total * scaling;
    }
}

/* Of a row and a projection the ranks from `first` up to `end`, TOGETHER at once. */
static void multiply_ranks(const Change *change, int64_t row, int projection, int64_t inputs, int64_t first,
                           int64_t end) {
    const LowRank *own = low_rank_of(change, row, projection);
    const float *x = change->adapters->inputs + row * inputs;
    float *out = inner_of(change, row, projection);
    if (end > own->rank) end = own->rank;
    for (; first + TOGETHER <= end; first += TOGETHER)
        dot_rows(TOGETHER, own->down + first * inputs, x, inputs, own->scaling, out + first);
    for (; first < end; first++) dot_rows(1, own->down + first * inputs, x, inputs, own->scaling, out + first);
}

/* Before a product: what was kept of the inputs of all rows that have an adapter, times `down`. Few rows are shared out
   by their ranks, too. */
static void multiply_down(Thread *thread, const Change *change, int64_t rows, int64_t inputs) {
    int64_t wanted = rows * change->count, step = wanted < 4 * thread->size ? TOGETHER : MOST_RANK;
    int64_t parts = MOST_RANK / step;
    for (CLAIM(piece, wanted * parts)) {
        int64_t row = piece / parts / change->count, first = piece % parts * step;
        int projection = change->first + (int)(piece / parts % change->count);
        if (has_adapter(change->adapters, row)) multiply_ranks(change, row, projection, inputs, first, first + step);
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

/* The same of a whole panel, whose first output is the projection's output `at`. */
INLINE void add_panel(const LowRank *own, const float *inner, int64_t at, float *result) {
    floats sums[VECTORS] = {};
    for (int64_t rank = 0; rank < own->rank; rank++) {
        const float *up = own->up + rank * own->outputs + at;
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) sums[part] += all(inner[rank]) * load(up + part * LANES);
    }
#pragma GCC unroll 8
    for (int part = 0; part < VECTORS; part++)
        store(result + part * LANES, load(result + part * LANES) + sums[part]);
}

/* Adds to the rows' results of one panel what their adapters make of it. A panel lies in one projection, or across the
   border of two, for every row alike. */
static void add_low_rank(const Change *change, int64_t panel, int64_t outputs, int64_t rows, Results *results) {
    int64_t first = panel * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
    for (int64_t row = 0; row < rows; row++) {
        if (!has_adapter(change->adapters, row)) continue;
        int64_t start = 0;
        for (int projection = change->first; projection < change->first + change->count; projection++) {
            const LowRank *own = low_rank_of(change, row, projection);
            const float *inner = inner_of(change, row, projection);
            if (own->rank && start <= first && first + PANEL <= start + own->outputs)
                add_panel(own, inner, first - start, results[row]);
            else if (own->rank && start < first + width && first < start + own->outputs)
                add_part(own, inner, start, first, width, results[row]);
            start += own->outputs;
        }
    }
}

#endif

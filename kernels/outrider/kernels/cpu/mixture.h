/* A mixture of experts: a router sends each row to some of them, and what they give is added up by the router's weights,
   in ascending order of the experts. Rows are grouped by expert, whose matrices are read once for all of them. An expert
   that all rows go to stands behind the others; the router's last output, through a sigmoid, is its weight. A row's bits
   depend neither on other rows nor on threads: each product is a row's own, and so is the order of its sum. */
#ifndef OUTRIDER_MIXTURE_H
#define OUTRIDER_MIXTURE_H

#include "rows.h"

typedef struct {
    Matrix gate, up, down;
} Expert;

typedef struct {
    Matrix router;         /* an output for each expert */
    const Expert *experts; /* [num_experts + has_shared] */
    int64_t num_experts, num_chosen, normalised, has_shared; /* normalised: the weights of the chosen ones sum to 1 */
    int64_t hidden, widest;                                  /* most outputs of a gate */
    float slope, limit; /* of gpt-oss's gate: see `clamped`; limit 0: none */
} Mixture;

/* Which rows an expert has. */
typedef struct {
    int64_t expert, first, count;   /* places in `members` */
    int64_t inputs, wide, panels;   /* where its rows lie, placed, before and behind the gate; panels of all before it */
} Woken;

typedef struct {
    float *flat, *scores, *weights; /* [rows][hidden], [rows][outputs of the router], [rows][ways] */
    int32_t *chosen;                /* [rows][ways], ascending but for the shared one, which is last */
    int32_t *members, *places;      /* [pairs]: a row, by expert; which of `woken` it is of */
    float *shares;                  /* [pairs]: its weight */
    Woken *woken;                   /* [experts that have rows], and behind them one that has none */
    int64_t *of_expert;             /* [experts]: rows, then the next place in `members` */
    float *inputs, *wide;
} Mixing;

INLINE int64_t num_ways(const Mixture *mixture) { return mixture->num_chosen + mixture->has_shared; }
INLINE int64_t all_experts(const Mixture *mixture) { return mixture->num_experts + mixture->has_shared; }

/* Floats of `pairs` rows placed for the experts' products, however they are shared out. */
static int64_t spread_size(const Mixture *mixture, int64_t inputs, int64_t pairs) {
    int64_t woken = pairs < all_experts(mixture) ? pairs : all_experts(mixture);
    return woken * placed_size(inputs, 1) + placed_size(inputs, pairs);
}

#define ALIGNED(size) (((size) + 15) / 16 * 16) /* floats of whole lines of the cache */

/* The next `size` floats of the scratch, where there is one. */
static void *cut(float *scratch, int64_t *at, int64_t size) {
    float *here = scratch ? scratch + *at : NULL;
    *at += ALIGNED(size);
    return here;
}

/* Cuts the scratch up; the floats that are needed. */
static int64_t cut_mixing(const Mixture *mixture, int64_t rows, float *scratch, Mixing *out) {
    int64_t pairs = rows * num_ways(mixture), experts = all_experts(mixture) + 1, at = 0;
    out->flat = cut(scratch, &at, rows * mixture->hidden);
    out->scores = cut(scratch, &at, rows * mixture->router.outputs);
    out->weights = cut(scratch, &at, pairs);
    out->shares = cut(scratch, &at, pairs);
    out->chosen = cut(scratch, &at, pairs);
    out->members = cut(scratch, &at, pairs);
    out->places = cut(scratch, &at, pairs);
    out->woken = cut(scratch, &at, experts * (int64_t)(sizeof(Woken) / sizeof(float)));
    out->of_expert = cut(scratch, &at, experts * (int64_t)(sizeof(int64_t) / sizeof(float)));
    out->inputs = cut(scratch, &at, spread_size(mixture, mixture->hidden, pairs));
    out->wide = cut(scratch, &at, spread_size(mixture, mixture->widest, pairs));
    return at;
}

static int64_t mixture_scratch(const Mixture *mixture, int64_t rows) {
    Mixing unused;
    return cut_mixing(mixture, rows, NULL, &unused) + 16; /* it may not begin with a line */
}

/* The norms of rows, one after the other, and placed for the router. */
static void norm_flat(Thread *thread, const Mixture *mixture, const float *hidden, const float *weight, float eps,
                      int64_t rows, float *flat, float *placed) {
    int64_t dim = mixture->hidden;
    for (CLAIM(row, rows)) {
        const float *from = hidden + row * dim;
        float *to = flat + row * dim;
        floats factor = all(rms_factor(from, dim, eps));
        for (int64_t at = 0; at < dim; at += LANES) store(to + at, load(from + at) * factor * load(weight + at));
        place(&mixture->router, rows, row, 0, dim, to, placed);
    }
    meet(thread);
}

/* The experts with the highest of a row's scores, of equal ones the lowest; their weights of the softmax over all. */
static void choose_experts(const Mixture *mixture, const float *scores, int32_t *chosen, float *weights) {
    int64_t count = mixture->num_chosen, experts = mixture->num_experts;
    float highest = scores[0], total = 0.0f, kept = 0.0f;
    for (int64_t expert = 1; expert < experts; expert++) highest = scores[expert] > highest ? scores[expert] : highest;
    for (int64_t expert = 0; expert < experts; expert++) total += expf(scores[expert] - highest);
    /* Those before it in the order of their scores, ties by number: an expert that has fewer than `count` is chosen. */
    int64_t at = 0;
    for (int64_t expert = 0; expert < experts && at < count; expert++) {
        int64_t before = 0;
        for (int64_t other = 0; other < experts && before < count; other++)
            before += scores[other] > scores[expert] || (scores[other] == scores[expert] && other < expert);
        if (before >= count) continue;
        chosen[at] = (int32_t)expert;
        weights[at] = expf(scores[expert] - highest) / total;
        kept += weights[at++];
    }
    for (int64_t way = 0; way < at && mixture->normalised; way++) weights[way] /= kept;
    if (mixture->has_shared) {
        chosen[count] = (int32_t)experts;
        weights[count] = 1.0f / (1.0f + expf(-scores[experts]));
    }
}

/* Which rows each expert has, in their order, and where they lie. Returns how many have any, the shared one apart. */
static int64_t group(const Mixture *mixture, int64_t rows, Mixing *mixing) {
    int64_t ways = num_ways(mixture), pairs = rows * ways, experts = all_experts(mixture);
    Woken next = {0}, *woken = mixing->woken;
    memset(mixing->of_expert, 0, (size_t)experts * sizeof(int64_t));
    for (int64_t pair = 0; pair < pairs; pair++) mixing->of_expert[mixing->chosen[pair]]++;
    for (int64_t expert = 0; expert < experts; expert++) {
        next.expert = expert, next.count = mixing->of_expert[expert];
        mixing->of_expert[expert] = next.first;
        if (!next.count) continue;
        for (int64_t pair = 0; pair < next.count; pair++)
            mixing->places[next.first + pair] = (int32_t)(woken - mixing->woken);
        *woken++ = next;
        next.first += next.count;
        next.inputs += placed_size(mixture->hidden, next.count);
        next.wide += placed_size(mixture->widest, next.count);
        next.panels += num_panels(&mixture->experts[expert].gate);
    }
    next.count = 0;
    *woken = next;
    for (int64_t pair = 0; pair < pairs; pair++) {
        int64_t at = mixing->of_expert[mixing->chosen[pair]]++;
        mixing->members[at] = (int32_t)(pair / ways);
        mixing->shares[at] = mixing->weights[pair];
    }
    return woken - mixing->woken - mixture->has_shared;
}

/* (up + 1) * gate * sigmoid(slope * gate), of a gate of at most `limit` and an up of at most that size. */
INLINE floats clamped(floats gate, floats up, float slope, float limit) {
    gate = choose(gate > all(limit), all(limit), gate);
    up = choose(up > all(limit), all(limit), choose(up < all(-limit), all(-limit), up));
    return (up + all(1.0f)) * gate / (all(1.0f) + exponential(-all(slope) * gate));
}

/* One panel of an expert's gate, for all of its rows, placed for what comes behind it. */
static void gate_panel(Thread *thread, const Mixture *mixture, int64_t is_gelu, const Mixing *mixing,
                       const Woken *woken, int64_t panel) {
    const Expert *expert = mixture->experts + woken->expert;
    Results *gates = thread->results, *ups = gates + woken->count;
    const float *x = mixing->inputs + woken->inputs;
    int64_t outputs = expert->gate.outputs, first = panel * PANEL;
    int64_t width = outputs - first < PANEL ? outputs - first : PANEL;
    product_panel(&expert->gate, panel, x, woken->count, gates);
    product_panel(&expert->up, panel, x, woken->count, ups);
    for (int64_t row = 0; row < woken->count; row++) {
        for (int64_t at = 0; at < PANEL; at += LANES) {
            floats gate = load(gates[row] + at), up = load(ups[row] + at);
            if (mixture->limit != 0.0f)
                gate = clamped(gate, up, mixture->slope, mixture->limit);
            else
                gate = activated(gate, is_gelu) * up;
            store(gates[row] + at, gate);
        }
        place(&expert->down, woken->count, row, first, width, gates[row], mixing->wide + woken->wide);
    }
}

/* hidden += what the experts give for the norm of it. `placed` has room for the rows before the router, `scratch` for
   `mixture_scratch`. */
static void mix(Thread *thread, const Mixture *mixture, int64_t is_gelu, const float *norm, float eps, int64_t rows,
                float *hidden, float *placed, float *scratch, const Matrix *next) {
    Mixing mixing;
    cut_mixing(mixture, rows, scratch + (16 - (uintptr_t)scratch / sizeof(float) % 16) % 16, &mixing);
    int64_t ways = num_ways(mixture), dim = mixture->hidden;
    norm_flat(thread, mixture, hidden, norm, eps, rows, mixing.flat, placed);
    product(thread, &mixture->router, placed, rows, 0, &UNCHANGED, mixing.scores, &mixture->router);
    for (CLAIM(row, rows))
        choose_experts(mixture, mixing.scores + row * mixture->router.outputs, mixing.chosen + row * ways,
               mixing.weights + row * ways);
    meet(thread);
    if (thread->index == 0) thread->team->num_woken += group(mixture, rows, &mixing);
    meet(thread);
    for (CLAIM(pair, rows * ways)) {
        const Woken *own = mixing.woken + mixing.places[pair];
        place(&mixture->experts[own->expert].gate, own->count, pair - own->first, 0, dim,
              mixing.flat + mixing.members[pair] * dim, mixing.inputs + own->inputs);
    }
    meet(thread);
    const Woken *end = mixing.woken;
    while (end->count) end++;
    for (CLAIM(piece, end->panels)) {
        const Woken *own = mixing.woken;
        while (own[1].panels <= piece) own++;
        gate_panel(thread, mixture, is_gelu, &mixing, own, piece - own->panels);
    }
    meet(thread);
    for (CLAIM(panel, (dim + PANEL - 1) / PANEL)) {
        int64_t first = panel * PANEL, width = dim - first < PANEL ? dim - first : PANEL;
        for (const Woken *own = mixing.woken; own < end; own++) {
            product_panel(&mixture->experts[own->expert].down, panel, mixing.wide + own->wide, own->count,
                          thread->results);
            for (int64_t row = 0; row < own->count; row++) {
                float *to = hidden + mixing.members[own->first + row] * dim + first;
                float share = mixing.shares[own->first + row];
                for (int64_t at = 0; at < width; at++) to[at] += share * thread->results[row][at];
            }
        }
    }
    look_ahead(thread, next);
    meet(thread);
}

/* The products of as many experts as a row goes to, of all rows each. in: placed; out: room for the widest. */
static void mixture_products(Thread *thread, const Mixture *mixture, const float *in, int64_t rows, float *out) {
    product(thread, &mixture->router, in, rows, 0, &UNCHANGED, out, &mixture->router);
    for (int64_t way = 0; way < num_ways(mixture); way++) {
        const Expert *expert = mixture->experts + all_experts(mixture) - 1 - way;
        const Matrix *matrices[] = {&expert->gate, &expert->up, &expert->down};
        for (int at = 0; at < 3; at++) product(thread, matrices[at], in, rows, 0, &UNCHANGED, out, matrices[at]);
    }
}

#endif

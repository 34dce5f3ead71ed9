/* Causal attention of one sequence's rows over the paged cache, for the query heads that share one key-value head. A
   row meets its keys in order of position, whatever else is in the batch. */
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include "vectors.h"

#define MOST_DIM 256

typedef struct {
    int64_t heads, kv_heads, head_dim, block_size, window; /* window 0: all keys */
    float scale, softcap;                                  /* softcap 0: none */
} AttentionShape;

/* The slots of up to sixteen keys that lie together, from position `at` up to `end`. */
typedef struct {
    int64_t slot, count;
} Run;

INLINE Run run_at(const AttentionShape *shape, const int64_t *table, int64_t at, int64_t end) {
    int64_t size = shape->block_size, offset = at % size, count = size - offset;
    if (count > LANES) count = LANES;
    return (Run){table[at / size] * size + offset, count < end - at ? count : end - at};
}

/* scores: of the keys from `first` to `end`, with room for fifteen more. */
INLINE void score(const AttentionShape *shape, const float *query, const float *keys, const int64_t *table,
                  int64_t first, int64_t end, float *scores) {
    int64_t dim = shape->head_dim, stride = shape->kv_heads * dim;
    Run run;
    for (int64_t at = first; at < end; at += run.count) {
        run = run_at(shape, table, at, end);
        floats products[LANES] = {};
        for (int64_t index = 0; index < run.count; index++) {
            const float *key = keys + (run.slot + index) * stride;
            floats product = load(query) * load(key);
            for (int64_t i = LANES; i < dim; i += LANES) product += load(query + i) * load(key + i);
            products[index] = product;
        }
        floats found = sums_of(products) * all(shape->scale);
        store(scores + (at - first), shape->softcap != 0.0f ? soft_cap(found, shape->softcap) : found);
    }
}

/* scores: as many as there are keys, and up to 15 more. Turns them into e^(score - greatest), 0 past the last key;
   returns their sum. */
INLINE float exponentials(float *scores, int64_t count) {
    float most = scores[0];
    for (int64_t key = 1; key < count; key++) most = scores[key] > most ? scores[key] : most;
    floats total = {};
    for (int64_t key = 0; key < count; key += LANES) {
        floats value = exponential(load(scores + key) - all(most));
        store(scores + key, value);
        for (int64_t past = count; past < key + LANES; past++) scores[past] = 0.0f;
        total += load(scores + key);
    }
    return sum(total);
}

/* out: the values of the keys from `first` to `end`, weighted by their scores, over `total`. */
INLINE void average(const AttentionShape *shape, const float *scores, float total, const float *values,
                    const int64_t *table, int64_t first, int64_t end, float *out) {
    int64_t dim = shape->head_dim, stride = shape->kv_heads * dim;
    for (int64_t i = 0; i < dim; i += 4 * LANES) { /* up to four registers of sums at a time */
        floats sums[4] = {};
        int64_t parts = (dim - i) / LANES < 4 ? (dim - i) / LANES : 4;
        Run run;
        for (int64_t at = first; at < end; at += run.count) {
            run = run_at(shape, table, at, end);
            for (int64_t index = 0; index < run.count; index++) {
                const float *value = values + (run.slot + index) * stride + i;
                floats weight = all(scores[at - first + index]);
                if (parts == 4)
                    for (int64_t part = 0; part < 4; part++) sums[part] += weight * load(value + part * LANES);
                else
                    for (int64_t part = 0; part < parts; part++) sums[part] += weight * load(value + part * LANES);
            }
        }
        for (int64_t part = 0; part < parts; part++) store(out + i + part * LANES, sums[part] / all(total));
    }
}

/* One row at `position`, one query head. keys and values: [blocks][block_size][kv_heads][head_dim], of this head on. */
static void attend(const AttentionShape *shape, const float *query, const float *keys, const float *values,
                   const int64_t *table, int64_t position, float *scores, float *out) {
    int64_t end = position + 1, first = shape->window && end > shape->window ? end - shape->window : 0;
    score(shape, query, keys, table, first, end, scores);
    float total = exponentials(scores, end - first);
    average(shape, scores, total, values, table, first, end, out);
}

#endif

/* Attention over the paged cache, for query heads that share one key-value head. Up to MOST_QUERIES of them go through
   the keys together, since what they read is the same; each meets its keys in order of position and adds up what it
   would alone, whatever else is in the batch. */
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include <math.h>

#include "vectors.h"

#define MOST_DIM 256
#define MOST_QUERIES 4
#define LINE 16 /* floats of a line of the cache */

typedef struct {
    int64_t heads, kv_heads, head_dim, block_size, window; /* window 0: all keys */
    float scale, softcap;                                  /* softcap 0: none */
} AttentionShape;

/* Where the keys of a row lie, by position. */
typedef struct {
    const int64_t *table; /* blocks */
    int64_t shared;       /* from this position on, `path` has the slots */
    const int64_t *path;  /* of the ancestors of a drafted tree's row, and its own */
} Places;

/* The slots of up to LANES keys that lie together, from position `at` up to `end`. */
typedef struct {
    int64_t slot, count;
} Run;

INLINE Run run_at(const AttentionShape *shape, const Places *places, int64_t at, int64_t end) {
    if (at >= places->shared) return (Run){places->path[at - places->shared], at < end};
    int64_t size = shape->block_size, offset = at % size, count = size - offset;
    if (end > places->shared) end = places->shared;
    if (count > LANES) count = LANES;
    return (Run){places->table[at / size] * size + offset, count < end - at ? count : end - at};
}

/* One row's head. */
typedef struct {
    const float *vector;  /* [head_dim] */
    int64_t first, end;   /* positions of the keys that it sees */
    float *scores, total; /* of the keys that any of those together sees, with room for LANES - 1 more; their sum */
    float *out;           /* [head_dim] */
    float sink;           /* a score of no key, that takes its part of the sum; -infinity: none */
} Query;

/* The scores of all keys from `first` to `end`. Keys are fetched a run ahead, values before `average` wants them: what
   one head reads of a token is too short for the processor to see a pattern. */
INLINE void score(const int count, const AttentionShape *shape, const Query *queries, const float *keys,
                  const float *values, const Places *places, int64_t first, int64_t end) {
    int64_t dim = shape->head_dim, stride = shape->kv_heads * dim;
    Run run, next = run_at(shape, places, first, end);
    for (int64_t at = first; at < end; at += run.count) {
        run = next;
        next = run_at(shape, places, at + run.count < end ? at + run.count : at, end);
        floats products[MOST_QUERIES][LANES] = {};
        for (int64_t index = 0; index < run.count; index++) {
            const float *key = keys + (run.slot + index) * stride;
            for (int64_t i = 0; i < dim; i += LINE) {
                __builtin_prefetch(keys + (next.slot + index) * stride + i);
                __builtin_prefetch(values + (run.slot + index) * stride + i, 0, 2);
            }
            floats sums[MOST_QUERIES];
            for (int query = 0; query < count; query++) sums[query] = load(queries[query].vector) * load(key);
            for (int64_t i = LANES; i < dim; i += LANES) {
                floats part = load(key + i);
                for (int query = 0; query < count; query++) sums[query] += load(queries[query].vector + i) * part;
            }
            for (int query = 0; query < count; query++) products[query][index] = sums[query];
        }
        for (int query = 0; query < count; query++) {
            floats found = sums_of(products[query]) * all(shape->scale);
            store(queries[query].scores + (at - first),
                  shape->softcap != 0.0f ? soft_cap(found, shape->softcap) : found);
        }
    }
}

/* scores: as many as there are keys, and up to LANES - 1 more. Turns them into e^(score - greatest), 0 past the last
   key; returns their sum, with the sink's. */
INLINE float exponentials(float *scores, int64_t count, float sink) {
    float most = scores[0] > sink ? scores[0] : sink;
    for (int64_t key = 1; key < count; key++) most = scores[key] > most ? scores[key] : most;
    floats total = {};
    for (int64_t key = 0; key < count; key += LANES) {
        floats value = exponential(load(scores + key) - all(most));
        store(scores + key, value);
        for (int64_t past = count; past < key + LANES; past++) scores[past] = 0.0f;
        total += load(scores + key);
    }
    return sink == -INFINITY ? sum(total) : sum(total) + expf(sink - most);
}

/* The values of the keys from `first` to `end`, weighted by the scores. */
INLINE void average(const int count, const AttentionShape *shape, const Query *queries, const float *values,
                    const Places *places, int64_t first, int64_t end) {
    int64_t dim = shape->head_dim, stride = shape->kv_heads * dim;
    for (int64_t i = 0; i < dim; i += 4 * LANES) { /* up to four registers of sums for each at a time */
        floats sums[MOST_QUERIES][4] = {};
        int64_t parts = (dim - i) / LANES < 4 ? (dim - i) / LANES : 4;
        Run run;
        for (int64_t at = first; at < end; at += run.count) {
            run = run_at(shape, places, at, end);
            for (int64_t index = 0; index < run.count; index++) {
                const float *value = values + (run.slot + index) * stride + i;
                for (int query = 0; query < count; query++) {
                    floats weight = all(queries[query].scores[at - first + index]);
                    if (parts == 4)
                        for (int64_t part = 0; part < 4; part++)
                            sums[query][part] += weight * load(value + part * LANES);
                    else
                        for (int64_t part = 0; part < parts; part++)
                            sums[query][part] += weight * load(value + part * LANES);
                }
            }
        }
        for (int query = 0; query < count; query++)
            for (int64_t part = 0; part < parts; part++)
                store(queries[query].out + i + part * LANES, sums[query][part] / all(queries[query].total));
    }
}

/* keys and values: [blocks][block_size][kv_heads][head_dim], of this head on. */
INLINE void attend(const int count, const AttentionShape *shape, Query *queries, const float *keys, const float *values,
                   const Places *places) {
    int64_t first = queries[0].first, end = queries[0].end;
    for (int query = 1; query < count; query++) {
        if (queries[query].first < first) first = queries[query].first;
        if (queries[query].end > end) end = queries[query].end;
    }
    score(count, shape, queries, keys, values, places, first, end);
    for (int index = 0; index < count; index++) {
        Query *query = queries + index;
        for (int64_t key = first; key < query->first; key++) query->scores[key - first] = 0.0f;
        query->total = exponentials(query->scores + (query->first - first), query->end - query->first, query->sink);
        for (int64_t key = query->end; key < end; key++) query->scores[key - first] = 0.0f;
    }
    average(count, shape, queries, values, places, first, end);
}

static void attend_together(int count, const AttentionShape *shape, Query *queries, const float *keys,
                            const float *values, const Places *places) {
    switch (count) {
        case 1: attend(1, shape, queries, keys, values, places); break;
        case 2: attend(2, shape, queries, keys, values, places); break;
        case 3: attend(3, shape, queries, keys, values, places); break;
        case 4: attend(4, shape, queries, keys, values, places); break;
    }
}

#endif

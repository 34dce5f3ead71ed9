/* The threads of a pass: between two meetings each does its share of the work, and then what is left of the others'. Which
   thread does what changes no bit. */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#include "product.h"

#define SPINS 1000
#define MOST_THREADS 256
#define MOST_AHEAD (256 << 10) /* bytes of weights fetched while a thread waits: they stay in its second-level cache */

/* How many pieces of a thread's share are taken; alone in its line of the cache. */
typedef struct {
    atomic_long count;
    char rest[64 - sizeof(atomic_long)];
} Taken;

typedef struct {
    atomic_long arrived;
    Taken taken[2][MOST_THREADS]; /* of this stretch of work between two meetings, and of the next */
    int64_t num_woken;            /* experts that rows went to, over all layers; the first thread's */
} Team;

typedef struct {
    int64_t index, size;
    long meetings;
    Team *team;
    Results *results; /* of two panels for every row */
    float *scores;    /* of MOST_QUERIES queries, each with room for 15 more */
    const char *ahead, *ahead_end; /* weights that it reads next */
} Thread;

/* All threads of the team have come here. They share out what there is to do and come close together, so none sleeps at
   first: who waits fetches weights, for the memory would rest meanwhile. */
static void meet(Thread *thread) {
    /* All have left the stretch before this one: what was taken there is free for the one after. */
    atomic_store_explicit(&thread->team->taken[++thread->meetings & 1][thread->index].count, 0, memory_order_relaxed);
    if (thread->size == 1) return;
    long all_here = thread->meetings * (long)thread->size;
    atomic_fetch_add_explicit(&thread->team->arrived, 1, memory_order_acq_rel);
    for (long spins = 0; atomic_load_explicit(&thread->team->arrived, memory_order_acquire) < all_here; spins++) {
        if (thread->ahead < thread->ahead_end)
            __builtin_prefetch(thread->ahead, 0, 2), thread->ahead += 64;
        else if (spins > SPINS)
            sched_yield();
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    }
}

/* What to fetch in all meetings until the product with `matrix`: the beginning of this thread's share, as far as it is
   of one section. */
static void look_ahead(Thread *thread, const Matrix *matrix) {
    int64_t count = num_panels(matrix);
    int64_t start = count * thread->index / thread->size, end = count * (thread->index + 1) / thread->size;
    thread->ahead = thread->ahead_end = NULL;
    if (start == end) return;
    int64_t first = start;
    const Matrix *owner = owner_of(matrix, &first);
    int64_t left = num_panels(owner) - first, wanted = end - start < left ? end - start : left;
    int64_t bytes = wanted * panel_bytes(owner);
    thread->ahead = (const char *)owner->panels + first * panel_bytes(owner);
    thread->ahead_end = thread->ahead + (bytes < MOST_AHEAD ? bytes : MOST_AHEAD);
}

static int64_t take(Thread *thread, int64_t owner) {
    return atomic_fetch_add_explicit(&thread->team->taken[thread->meetings & 1][owner].count, 1, memory_order_relaxed);
}

/* The next of `count` pieces for this thread: of its own share, then of what a slower one has left, for threads may
   have a core for themselves or not. -1: none is left. `passed` starts at 0: shares that are used up. */
static int64_t claim(Thread *thread, int64_t count, int64_t *passed) {
    for (; *passed < thread->size; ++*passed) {
        int64_t owner = (thread->index + *passed) % thread->size;
        int64_t start = count * owner / thread->size, end = count * (owner + 1) / thread->size;
        int64_t piece = start + take(thread, owner);
        if (piece < end) return piece;
    }
    return -1;
}

#define CLAIM(variable, count)                                                                                         \
    int64_t variable, variable##_passed = 0;                                                                           \
    (variable = claim(thread, count, &variable##_passed)) >= 0;

#endif

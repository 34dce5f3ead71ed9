/* Products of bfloat16 weights and float32 rows on a processor's matrix unit (AMX), which multiplies bfloat16 numbers and
   adds in float32. A float32 number is the sum of three bfloat16 numbers, and each product of two such is a float32
   number: nothing is rounded but the sums, as in the other kernels. So a row becomes three, and its result is the sum of
   theirs; each of them is one sum over the inputs in a fixed order, whatever else is in the batch. */
#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include "vectors.h"

#define SPLIT 3      /* rows that stand for one */
#define TILE_ROWS 16 /* of the unit's registers */
#define TILE_IN 32   /* inputs that one instruction adds up */
#define TILE (TILE_ROWS * TILE_IN)

INLINE int64_t num_row_tiles(int64_t rows) { return (SPLIT * rows + TILE_ROWS - 1) / TILE_ROWS; }
INLINE int64_t num_steps(int64_t inputs) { return (inputs + TILE_IN - 1) / TILE_IN; }

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Asks the system for the unit's registers, once per process; whether they may be used. */
int64_t tiles_allowed(void) {
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

/* Every thread: before its first product, and after its last. */
static void tiles_begin(void) {
    struct __attribute__((packed)) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int at = 0; at < 8; at++) shapes.row_bytes[at] = 64, shapes.rows[at] = TILE_ROWS;
    _tile_loadconfig(&shapes);
}

static void tiles_end(void) { _tile_release(); }

/* Puts sixteen numbers of a row, from column `at` on, where the products read them.
   x: [tiles of 16 rows][steps][16][32] bfloat16. */
INLINE void split_into(uint16_t *x, int64_t inputs, int64_t row, int64_t at, floats values) {
    for (int64_t part = 0; part < SPLIT; part++) {
        int64_t line = SPLIT * row + part, tile = line / TILE_ROWS * num_steps(inputs) + at / TILE_IN;
        uint16_t *to = x + tile * TILE + line % TILE_ROWS * TILE_IN + at % TILE_IN;
        _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
        values -= widen(to);
    }
}

#ifdef __SANITIZE_ADDRESS__ /* which does not see what the unit reads by itself */
void __asan_loadN(const void *from, size_t bytes);
#define load_tile(tile, from) do { __asan_loadN(from, 2 * TILE); _tile_loadd(tile, from, 64); } while (0)
#else
#define load_tile(tile, from) _tile_loadd(tile, from, 64)
#endif

/* One or two tiles of rows times a panel. weights: [steps][2][16 pairs of inputs][16 outputs][2]; sums: [together][2]
   [16][16]. Meanwhile `fetched` bytes a step of what comes next are brought into the second-level cache. */
INLINE void multiply_together(const int together, const uint16_t *x, const uint16_t *weights, int64_t steps,
                              const char *next, int64_t fetched, float *sums) {
    const uint16_t *second = x + steps * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, x += TILE, second += TILE, weights += 2 * TILE, next += fetched) {
        for (int64_t line = 0; line < fetched; line += 64) __builtin_prefetch(next + line, 0, 2);
        load_tile(4, x);
        load_tile(6, weights);
        load_tile(7, weights + TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (together == 1) continue;
        load_tile(5, second);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* All rows times one panel of 32 outputs. out: [rows][32]. */
static void multiply_tiles(const uint16_t *x, const uint16_t *weights, int64_t inputs, int64_t rows, float (*out)[32]) {
    int64_t steps = num_steps(inputs), tiles = num_row_tiles(rows), row = 0, part = 0;
    int64_t fetched = 2 * TILE * 2 / ((tiles + 1) / 2) / 64 * 64; /* all of the next panel, over all tiles */
    const char *next = (const char *)(weights + steps * 2 * TILE);
    float sums[4 * 256] __attribute__((aligned(64)));
    for (int64_t tile = 0; tile < tiles; tile += 2, next += steps * fetched) {
        const uint16_t *lines = x + tile * steps * TILE;
        int64_t together = tiles - tile > 1 ? 2 : 1;
        if (together == 2)
            multiply_together(2, lines, weights, steps, next, fetched, sums);
        else
            multiply_together(1, lines, weights, steps, next, fetched, sums);
        for (int64_t line = 0; line < together * TILE_ROWS && row < rows; line++) {
            const float *from = sums + line / TILE_ROWS * 512 + line % TILE_ROWS * 16;
            floats low = load(from), high = load(from + 256);
            if (part) low += load(out[row]), high += load(out[row] + 16);
            store(out[row], low), store(out[row] + 16, high);
            if (++part == SPLIT) part = 0, row++;
        }
    }
}

#else

int64_t tiles_allowed(void) { return 0; }
static void tiles_begin(void) {}
static void tiles_end(void) {}
INLINE void split_into(uint16_t *x, int64_t inputs, int64_t row, int64_t at, floats values) {}
static void multiply_tiles(const uint16_t *x, const uint16_t *weights, int64_t inputs, int64_t rows, float (*out)[32]) {
}

#endif
#endif

/* Exponential noise by token id: Philox 4x32-10 over counters of four ids each, and a logarithm, both in vectors. */

#include <stdint.h>
#include <string.h>

#define GROUPS 64 /* counters at once: their words stay in the first-level cache */
#define ROUNDS 10

typedef struct {
    uint32_t words[4][GROUPS];
} Counters;

static void philox(Counters *c, uint32_t key_low, uint32_t key_high) {
    for (int round = 0; round < ROUNDS; round++) {
        for (int at = 0; at < GROUPS; at++) {
            uint64_t first = (uint64_t)c->words[0][at] * 0xD2511F53u, second = (uint64_t)c->words[2][at] * 0xCD9E8D57u;
            c->words[0][at] = (uint32_t)(second >> 32) ^ c->words[1][at] ^ key_low;
            c->words[2][at] = (uint32_t)(first >> 32) ^ c->words[3][at] ^ key_high;
            c->words[1][at] = (uint32_t)second;
            c->words[3][at] = (uint32_t)first;
        }
        key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
    }
}

/* The natural logarithm of y in (0, 1), to a few units in the last place of a double: 2 artanh((m - 1) / (m + 1)) of
   the mantissa m between sqrt(1/2) and sqrt(2), by its series, and the exponent times ln 2. */
static inline double logarithm(double y) {
    int64_t bits;
    memcpy(&bits, &y, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000;
    double m;
    memcpy(&m, &bits, sizeof m);
    int32_t above = m > 1.4142135623730951;
    m = above ? 0.5 * m : m;
    double s = (m - 1) / (m + 1), z = s * s;
    double series = 1.0 / 23;
    for (int odd = 21; odd > 0; odd -= 2) series = series * z + 1.0 / odd;
    return (double)(exponent + above) * 0.6931471805599453 + 2 * s * series;
}

/* seeds, positions, completions: [rows]; noise: [rows][columns]. Word x of an id gives -log(1 - (x + 1/2) / 2^32), whose
   argument a double holds exactly. */
void exponential_noise(const int64_t *seeds, const int64_t *positions, const int64_t *completions, int64_t purpose,
                       int64_t rows, int64_t columns, float *noise) {
    for (int64_t row = 0; row < rows; row++, noise += columns) {
        for (int64_t first = 0; first < columns; first += 4 * GROUPS) {
            Counters c;
            float block[4 * GROUPS];
            for (int at = 0; at < GROUPS; at++) {
                c.words[0][at] = (uint32_t)(first / 4 + at);
                c.words[1][at] = (uint32_t)positions[row];
                c.words[2][at] = (uint32_t)purpose << 28;
                c.words[3][at] = (uint32_t)completions[row];
            }
            philox(&c, (uint32_t)seeds[row], (uint32_t)((uint64_t)seeds[row] >> 32));
            for (int lane = 0; lane < 4; lane++)
                for (int at = 0; at < GROUPS; at++)
                    block[4 * at + lane] = (float)-logarithm(1 - (c.words[lane][at] + 0.5) * 0x1p-32);
            int64_t width = columns - first < 4 * GROUPS ? columns - first : 4 * GROUPS;
            memcpy(noise + first, block, (size_t)width * sizeof *noise);
        }
    }
}

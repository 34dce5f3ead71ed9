/* The ids of the greatest numbers of rows: few of many, in one reading. */

#include "vectors.h"

#define MOST_BEST 64

/* x: [rows][columns]; ids: [rows][count], the greatest first, of equal ones the lowest id; -1 where no finite number is
   left. Numbers that are none, or infinite, are passed over. */
void best_ids(const float *x, int64_t rows, int64_t columns, int64_t count, int64_t *ids) {
    const float none = -__builtin_inff();
    for (int64_t row = 0; row < rows; row++, x += columns, ids += count) {
        float best[MOST_BEST];
        for (int64_t at = 0; at < count; at++) best[at] = none, ids[at] = -1;
        for (int64_t first = 0; first < columns; first += LANES) {
            int64_t width = columns - first < LANES ? columns - first : LANES;
            if (width == LANES) {
                integers above = load(x + first) > all(best[count - 1]);
                int32_t any = 0;
                for (int lane = 0; lane < LANES; lane++) any |= above[lane];
                if (!any) continue;
            }
            for (int64_t column = first; column < first + width; column++) {
                float value = x[column];
                if (!(value > best[count - 1]) || value == -none) continue;
                int64_t at = count - 1;
                for (; at > 0 && value > best[at - 1]; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
                best[at] = value, ids[at] = column;
            }
        }
    }
}

/* Rows of x in `fast` numerics: every 32 values become bytes and one scale. Written by `round.c`, read by
 * `matmul_fast.c`.
 *
 * Rows lie in tiles of TILE (the last one of what is left), and in a tile group by group: what is multiplied with one
 * group of weights is one run of memory, a cache line a row. A value is `value[i] * scale`; sums are of `value`. */
#define TILE 8
#define GROUP_VALUES 32

struct rounded {
  int8_t value[GROUP_VALUES];
  float scale;
  float sum, left_sum, right_sum;       /* of all 32 and of each half, times the scale */
  int32_t total, left_total, right_total; /* the same without the scale */
  int32_t unused;
};

INLINE u64 tile_width(u64 tokens, u64 first) { return tokens - first < TILE ? tokens - first : TILE; }

/* Rows of x in `fast` numerics: every 32 values become bytes, with a scale for each half. Written by `round.c`, read by
 * `matmul_fast.c`.
 *
 * Rows lie in tiles of TILE (the last one of what is left), and in a tile group by group: what is multiplied with one
 * group of weights is one run of memory, a cache line a row. A value is `value[i]` times its half's scale. */
#define TILE 8
#define GROUP_VALUES 32

struct rounded {
  int8_t value[GROUP_VALUES];
  float left_scale, right_scale;
  float left_sum, right_sum, sum;  /* of the values of each half and of both */
  int32_t left_total, right_total; /* of the bytes */
  int32_t unused;
};

INLINE u64 tile_width(u64 tokens, u64 first) { return tokens - first < TILE ? tokens - first : TILE; }

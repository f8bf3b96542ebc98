/* As `matmul.c`, for weights that `pack.c` has laid out: sixteen rows a vector, so nothing is summed across lanes and
 * a scale is read once for sixteen blocks. A group's raw numbers are multiplied with x first, then with the scale.
 *
 * Each group is added up in four strands (left and right half, even and odd numbers), which hides the latency of one
 * addition behind the others; one row of x and many do it in the same order and give the same bits. */
#define STRANDS 4
#define TILE 4
#define GROUP_VALUES 32

struct product {
  float *out;
  const float *x;
  const uint8_t *weight;
  u64 rows, columns, tokens, out_stride;
  const float *bias, *residual;
  const float *sums; /* of x, by halves of groups: (tokens, columns / 16) */
};

/* What `sum` makes of each of sixteen vectors at x. */
INLINE void sum_sixteen(float *made, const float *x) {
  floats v[LANES];
#pragma clang loop unroll(full)
  for (int i = 0; i < LANES; i++) v[i % 4 * 4 + i / 4] = load(x + i * LANES);
  store(made, sums(v));
}

INLINE floats add_up(floats total, const floats *strand, const struct scales *s, const float *sums) {
#if defined(PER_HALF)
  total += (strand[0] + strand[2]) * s->left;
  total += (strand[1] + strand[3]) * s->right;
#if defined(HAS_MINIMUM)
  total += s->left_minimum * sums[0];
  total += s->right_minimum * sums[1];
#endif
#else
  total += ((strand[0] + strand[2]) + (strand[1] + strand[3])) * s->left;
#if defined(HAS_MINIMUM)
  total += s->left_minimum * (sums[0] + sums[1]);
#endif
#endif
  return total;
}

INLINE void finish(const struct product *p, u64 token, u64 row, floats total) {
  store_rows(p->out, p->bias, p->residual, row, p->rows, token * p->out_stride + row, total);
}

INLINE void one_token(const struct product *p, u64 row) {
  const u64 blocks = p->columns / (GROUP_VALUES * GROUPS);
  const uint8_t *w = p->weight + row / LANES * blocks * BLOCK_BYTES * LANES;
  const float *x = p->x, *sums = p->sums;
  floats total = {0};
  for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES * LANES) {
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++, x += GROUP_VALUES, sums += 2) {
      const struct scales s = begin(w, g);
      floats strand[STRANDS] = {{0}, {0}, {0}, {0}};
#pragma clang loop unroll(full)
      for (int i = 0; i < GROUP_VALUES / 2; i++) {
        floats left, right;
        pair(w, g, i, &left, &right);
        strand[i % 2 * 2] += left * x[i];
        strand[i % 2 * 2 + 1] += right * x[i + 16];
      }
      total = add_up(total, strand, &s, sums);
    }
  }
  finish(p, 0, row, total);
}

INLINE void tile(const struct product *p, const float *panel, const struct scales *scales, u64 row, u64 token, int tokens) {
  const u64 groups = p->columns / GROUP_VALUES;
  floats total[TILE];
  for (int t = 0; t < tokens; t++) total[t] = (floats){0};
  for (u64 group = 0; group < groups; group++, panel += GROUP_VALUES * LANES) {
    const float *x = p->x + token * p->columns + group * GROUP_VALUES;
    floats strand[TILE][STRANDS];
    for (int t = 0; t < tokens; t++)
      for (int i = 0; i < STRANDS; i++) strand[t][i] = (floats){0};
#pragma clang loop unroll_count(4)
    for (int i = 0; i < GROUP_VALUES / 2; i += 2)
#pragma clang loop unroll(full)
      for (int k = 0; k < STRANDS; k++) {
        const int c = i + k / 2 + k % 2 * 16;
        const floats w = load(panel + c * LANES);
#pragma clang loop unroll(full)
        for (int t = 0; t < tokens; t++) strand[t][k] += w * x[t * p->columns + c];
      }
    for (int t = 0; t < tokens; t++)
      total[t] = add_up(total[t], strand[t], scales + group, p->sums + (token + t) * (p->columns / LANES) + 2 * group);
  }
  for (int t = 0; t < tokens; t++) finish(p, token + t, row, total[t]);
}

INLINE void many_tokens(const struct product *p, float *panel, u64 row) {
  const u64 blocks = p->columns / (GROUP_VALUES * GROUPS);
  const uint8_t *w = p->weight + row / LANES * blocks * BLOCK_BYTES * LANES;
  struct scales *scales = (struct scales *)(panel + p->columns * LANES), *next = scales;
  float *values = panel;
  for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES * LANES)
#pragma clang loop unroll(disable)
    for (int g = 0; g < GROUPS; g++, values += GROUP_VALUES * LANES) {
      *next++ = begin(w, g);
#pragma clang loop unroll(full)
      for (int i = 0; i < GROUP_VALUES / 2; i++) {
        floats left, right;
        pair(w, g, i, &left, &right);
        store(values + i * LANES, left);
        store(values + (i + 16) * LANES, right);
      }
    }
  u64 token = 0;
  for (; token + TILE <= p->tokens; token += TILE) {
    fetch_share(w, blocks * BLOCK_BYTES * LANES, token / TILE, p->tokens / TILE);
    tile(p, panel, scales, row, token, TILE);
  }
  for (; token < p->tokens; token++) tile(p, panel, scales, row, token, 1);
}

/* a: as `matmul.c`; the scratch is 18 * columns + tokens * columns / 16 floats a thread. */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  struct product p = {(float *)a[0], (const float *)a[1], (const uint8_t *)a[2], a[3], a[4],
                      a[5],          a[6],                (const float *)a[7],   (const float *)a[8]};
  float *panel = (float *)a[9] + thread * (18 * p.columns + p.tokens * p.columns / LANES);
  float *sums = panel + 18 * p.columns;
  p.sums = sums;
#if defined(HAS_MINIMUM)
  const u64 halves = p.tokens * p.columns / LANES;
  u64 i = 0;
  for (; i + LANES <= halves; i += LANES) sum_sixteen(sums + i, p.x + i * LANES);
  for (; i < halves; i++) sums[i] = sum(load(p.x + i * LANES));
#endif
  u64 first, last;
  share((p.rows + LANES - 1) / LANES, part, end, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    if (p.tokens == 1) one_token(&p, unit * LANES);
    else many_tokens(&p, panel, unit * LANES);
  }
}

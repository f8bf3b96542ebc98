/* As `matmul_lanes.c` in `fast` numerics: x rounded to bytes by `round.c`, weights laid out with quads, products and sums
 * of a group in integers, which are exact, and only then the scales. One row and many add up groups in the same order. */
struct product {
  float *out;
  const struct rounded *x;
  const uint8_t *weight;
  u64 rows, columns, tokens, out_stride;
  const float *bias, *residual;
};

INLINE ints first_total(int32_t total) { return (ints){0} - OFFSET * total; }

/* Adds one group's products, `values` giving its eight quads. */
INLINE floats add_group(floats total, const quads *values, const struct scales *s, const struct rounded *x) {
  ints left = first_total(x->left_total), right = first_total(x->right_total);
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; j++) {
    left = dot(left, values[j], x->value + 4 * j);
    right = dot(right, values[j + 4], x->value + 4 * j + LANES);
  }
  const floats left_product = __builtin_convertvector(left, floats) * x->left_scale;
#if defined(PER_HALF)
  total += left_product * s->left;
  total += __builtin_convertvector(right, floats) * x->right_scale * s->right;
#if defined(HAS_MINIMUM)
  total += s->left_minimum * x->left_sum;
  total += s->right_minimum * x->right_sum;
#endif
#else
  const floats product = left_product + __builtin_convertvector(right, floats) * x->right_scale;
  total += product * s->left;
#if defined(HAS_MINIMUM)
  total += s->left_minimum * x->sum;
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
  const struct rounded *x = p->x;
  floats total = {0};
  for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES * LANES) {
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++, x++) {
      const struct scales s = begin(w, g);
      quads values[8];
#pragma clang loop unroll(full)
      for (int j = 0; j < 8; j++) values[j] = raw(w, g, j);
      total = add_group(total, values, &s, x);
    }
  }
  finish(p, 0, row, total);
}

/* `tokens` rows of x, the first at x, of a tile that is `width` rows wide. */
INLINE void tile(const struct product *p, const quads *panel, const struct scales *scales, const struct rounded *x,
                 u64 width, u64 row, u64 token, int tokens) {
  floats total[TILE];
  for (int t = 0; t < tokens; t++) total[t] = (floats){0};
  for (u64 group = p->columns / GROUP_VALUES; group; group--, panel += 8, scales++, x += width)
#pragma clang loop unroll(full)
    for (int t = 0; t < tokens; t++) total[t] = add_group(total[t], panel, scales, x + t);
  for (int t = 0; t < tokens; t++) finish(p, token + t, row, total[t]);
}

INLINE void many_tokens(const struct product *p, quads *panel, u64 row) {
  const u64 groups = p->columns / GROUP_VALUES, blocks = groups / GROUPS;
  const uint8_t *w = p->weight + row / LANES * blocks * BLOCK_BYTES * LANES;
  struct scales *scales = (struct scales *)(panel + groups * 8), *next = scales;
  quads *values = panel;
  for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES * LANES)
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++) {
      *next++ = begin(w, g);
#pragma clang loop unroll(full)
      for (int j = 0; j < 8; j++) *values++ = raw(w, g, j);
    }
  u64 token = 0;
  for (; token + TILE <= p->tokens; token += TILE) {
    fetch_share(w, blocks * BLOCK_BYTES * LANES, token / TILE, p->tokens / TILE);
    tile(p, panel, scales, p->x + token * groups, TILE, row, token, TILE);
  }
  const struct rounded *x = p->x + token * groups;
  const u64 width = p->tokens - token;
  for (; token + 3 < p->tokens; token += 4, x += 4) tile(p, panel, scales, x, width, row, token, 4);
  for (; token < p->tokens; token++, x++) tile(p, panel, scales, x, width, row, token, 1);
}

/* a: as `matmul.c`, but x as `round.c` made it; the scratch is 18 * columns floats a thread at least. */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  struct product p = {(float *)a[0], (const struct rounded *)a[1], (const uint8_t *)a[2], a[3], a[4],
                      a[5],          a[6],                         (const float *)a[7],   (const float *)a[8]};
  float *panel = (float *)a[9] + thread * (18 * p.columns + p.tokens * p.columns / LANES);
  u64 first, last;
  share((p.rows + LANES - 1) / LANES, part, end, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    if (p.tokens == 1) one_token(&p, unit * LANES);
    else many_tokens(&p, (quads *)panel, unit * LANES);
  }
}

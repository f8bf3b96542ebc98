/* out[t][r] = sum over c of weight[r][c] * x[t][c], plus bias[r], plus residual[t][r].
 *
 * One row of x: each block of weights is unpacked straight into the products. Many rows: PANEL rows of weights
 * are unpacked once into `scratch` and used for all of them. Both add up in the same order, so a prompt that is
 * computed in chunks gives the very bits of one computed token by token. */

#define TILE 4
/* Of more than WIDE columns, SPAN are unpacked at a time, so that they stay in the nearest cache. It does not pay where
 * a tile's sums have too few registers as it is. */
#define SPAN 512
#if defined(__AVX512F__)
#define WIDE 1536
#else
#define WIDE ~(u64)0
#endif

#if PANEL == TILE
typedef float fours __attribute__((vector_size(16), aligned(4)));

/* PANEL rows' results of TILE rows of x, those of one row of x together. */
INLINE void finish_rows(const struct product *p, u64 row, u64 token, floats made) {
  const union { floats all; fours of[TILE]; } result = {made};
#pragma clang loop unroll(full)
  for (int t = 0; t < TILE; t++) {
    const u64 at = (token + t) * p->out_stride + row;
    fours value = result.of[t], tails;
    for (int k = 0; k < PANEL; k++) tails[k] = rest(p, row + k, p->x + (token + t) * p->columns);
    value += tails;
    if (p->bias) value += *(const fours *)(p->bias + row);
    if (p->residual) value += *(const fours *)(p->residual + at);
    *(fours *)(p->out + at) = value;
  }
}
#endif

/* Adds `count` columns, the first of them `column`, of `tokens` rows of x times `rows` rows in `panel`. */
INLINE void add_up(const struct product *p, floats (*total)[TILE], const float *panel, u64 column, u64 count, int rows,
                   u64 token, int tokens) {
  const float *x = p->x + token * p->columns + column;
  for (u64 c = 0; c < count; c += LANES) {
#pragma clang loop unroll(full)
    for (int k = 0; k < rows; k++) {
      floats w = load(panel + k * count + c);
#pragma clang loop unroll(full)
      for (int t = 0; t < tokens; t++) total[k][t] += w * load(x + t * p->columns + c);
    }
  }
}

INLINE void finish_tile(const struct product *p, floats (*total)[TILE], u64 row, int rows, u64 token, int tokens) {
#if PANEL == TILE
  if (rows == PANEL && tokens == TILE) {
    finish_rows(p, row, token, sums(&total[0][0]));
    return;
  }
#endif
  for (int k = 0; k < rows; k++)
    for (int t = 0; t < tokens; t++) {
      float tail = rest(p, row + k, p->x + (token + t) * p->columns);
      finish(p, token + t, row + k, sum(total[k][t]) + tail);
    }
}

INLINE void clear(floats (*total)[TILE], int rows, int tokens) {
  for (int k = 0; k < rows; k++)
    for (int t = 0; t < tokens; t++) total[k][t] = (floats){0};
}

INLINE void copy(floats (*to)[TILE], floats (*from)[TILE], int rows, int tokens) {
  for (int k = 0; k < rows; k++)
    for (int t = 0; t < tokens; t++) to[k][t] = from[k][t];
}

/* A tile's products with `count` columns; `kept` has its sums from one span of columns to the next. */
INLINE void tile(const struct product *p, const float *panel, floats (*kept)[TILE], u64 column, u64 count, u64 row,
                 int rows, u64 token, int tokens) {
  floats total[PANEL][TILE];
  if (column) copy(total, kept, rows, tokens);
  else clear(total, rows, tokens);
  add_up(p, total, panel, column, count, rows, token, tokens);
  if (column + count + GROUP_VALUES > p->columns) finish_tile(p, total, row, rows, token, tokens);
  else copy(kept, total, rows, tokens);
}

INLINE void unpack_panel(const struct product *p, float *panel, u64 row, int rows, u64 block, u64 blocks) {
  for (int k = 0; k < rows; k++) {
    const uint8_t *w = p->weight + (row + k) * row_bytes(p->columns) + block * BLOCK_BYTES;
    for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES) {
#pragma clang loop unroll(full)
      for (int g = 0; g < GROUPS; g++, panel += GROUP_VALUES) {
        floats a, c;
        unpack(w, g, &a, &c);
        store(panel, a);
        store(panel + LANES, c);
      }
    }
  }
}

INLINE void many_tokens(const struct product *p, float *panel, u64 row, int rows) {
  const u64 block_values = GROUPS * GROUP_VALUES, blocks = p->columns / block_values;
  const u64 span = p->columns > WIDE ? SPAN / block_values : blocks, tiles = p->tokens / TILE;
  const u64 steps = tiles * (span ? (blocks + span - 1) / span : 1), size = row_bytes(p->columns) * rows;
  const uint8_t *next = p->weight + row_bytes(p->columns) * row + size;
  floats(*kept)[TILE] = (floats(*)[TILE])(panel + PANEL * SPAN);
  u64 block = 0, step = 0;
  do {
    const u64 here = blocks - block < span ? blocks - block : span, column = block * block_values;
    unpack_panel(p, panel, row, rows, block, here);
    u64 token = 0, place = 0;
    for (; token + TILE <= p->tokens; token += TILE, place += PANEL) {
      fetch_share(next, size, step++, steps);
      tile(p, panel, kept + place, column, here * block_values, row, rows, token, TILE);
    }
    for (; token < p->tokens; token++, place += PANEL)
      tile(p, panel, kept + place, column, here * block_values, row, rows, token, 1);
    block += here;
  } while (block < blocks);
}

/* a: out, x, weight, rows, columns, tokens, out_stride, bias or 0, residual or 0, scratch (18 * columns +
 * tokens * columns / 16 floats a thread). */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  struct product p = {(float *)a[0], (const float *)a[1], (const uint8_t *)a[2], a[3], a[4],
                      a[5],          a[6],                (const float *)a[7],   (const float *)a[8]};
  float *panel = (float *)a[9] + thread * (18 * p.columns + p.tokens * p.columns / LANES);
  u64 first, last;
  share((p.rows + PANEL - 1) / PANEL, part, end, parts, &first, &last);
  for (u64 row = first * PANEL; row < last * PANEL && row < p.rows; row += PANEL) {
    if (row + PANEL <= p.rows) {
      if (p.tokens == 1) one_token(&p, row, PANEL);
      else many_tokens(&p, panel, row, PANEL);
    } else {
      for (u64 single = row; single < p.rows; single++) {
        if (p.tokens == 1) one_token(&p, single, 1);
        else many_tokens(&p, panel, single, 1);
      }
    }
  }
}

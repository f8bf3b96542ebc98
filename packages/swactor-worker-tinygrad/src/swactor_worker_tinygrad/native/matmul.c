/* out[t][r] = sum over c of weight[r][c] * x[t][c], plus bias[r], plus residual[t][r].
 *
 * One row of x: each block of weights is unpacked straight into the products. Many rows: PANEL rows of weights
 * are unpacked once into `scratch` and used for all of them. Both add up in the same order, so a prompt that is
 * computed in chunks gives the very bits of one computed token by token. */

#define TILE 4

#if PANEL == TILE
typedef float fours __attribute__((vector_size(16), aligned(4)));

/* PANEL rows' results of TILE rows of x, those of one row of x together. */
INLINE void finish_tile(const struct product *p, u64 row, u64 token, floats made) {
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

INLINE void tile(const struct product *p, const float *panel, u64 row, int rows, u64 token, int tokens) {
  const u64 groups = p->columns / GROUP_VALUES;
  floats total[PANEL][TILE];
  for (int k = 0; k < rows; k++)
    for (int t = 0; t < tokens; t++) total[k][t] = (floats){0};
  for (u64 c = 0; c < groups * GROUP_VALUES; c += LANES) {
#pragma clang loop unroll(full)
    for (int k = 0; k < rows; k++) {
      floats w = load(panel + k * p->columns + c);
#pragma clang loop unroll(full)
      for (int t = 0; t < tokens; t++) total[k][t] += w * load(p->x + (token + t) * p->columns + c);
    }
  }
#if PANEL == TILE
  if (rows == PANEL && tokens == TILE) {
    finish_tile(p, row, token, sums(&total[0][0]));
    return;
  }
#endif
  for (int k = 0; k < rows; k++)
    for (int t = 0; t < tokens; t++) {
      float tail = rest(p, row + k, p->x + (token + t) * p->columns);
      finish(p, token + t, row + k, sum(total[k][t]) + tail);
    }
}

INLINE void many_tokens(const struct product *p, float *panel, u64 row, int rows) {
  const u64 stride = row_bytes(p->columns), blocks = p->columns / (GROUP_VALUES * GROUPS);
  for (int k = 0; k < rows; k++) {
    const uint8_t *w = p->weight + (row + k) * stride;
    float *values = panel + k * p->columns;
    for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES) {
#pragma clang loop unroll(full)
      for (int g = 0; g < GROUPS; g++, values += GROUP_VALUES) {
        floats a, c;
        unpack(w, g, &a, &c);
        store(values, a);
        store(values + LANES, c);
      }
    }
  }
  const uint8_t *next = p->weight + (row + rows) * stride;
  u64 token = 0;
  for (; token + TILE <= p->tokens; token += TILE) {
    fetch_share(next, rows * stride, token / TILE, p->tokens / TILE);
    tile(p, panel, row, rows, token, TILE);
  }
  for (; token < p->tokens; token++) tile(p, panel, row, rows, token, 1);
}

/* a: out, x, weight, rows, columns, tokens, out_stride, bias or 0, residual or 0, scratch (PANEL * columns floats
 * a thread). */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  struct product p = {(float *)a[0], (const float *)a[1], (const uint8_t *)a[2], a[3], a[4],
                      a[5],          a[6],                (const float *)a[7],   (const float *)a[8]};
  float *panel = (float *)a[9] + thread * PANEL * p.columns;
  u64 first, last;
  share((p.rows + PANEL - 1) / PANEL, part, parts, &first, &last);
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

/* One row of x times a few rows of weights, each block unpacked straight into the products. */

#if defined(__AVX512F__) || defined(__aarch64__)
#define PANEL 4
#else
#define PANEL 2
#endif
#define PAGE 4096 /* bytes: where the processor's own prefetching ends */
#define GROUP_VALUES 32

struct product {
  float *out;
  const float *x;
  const uint8_t *weight;
  u64 rows, columns, tokens, out_stride;
  const float *bias, *residual;
};

INLINE u64 row_bytes(u64 columns) {
#ifdef VALUE_BYTES
  return columns * VALUE_BYTES;
#else
  return columns / (GROUP_VALUES * GROUPS) * BLOCK_BYTES;
#endif
}

/* Float types may have rows that are no multiple of 32; the rest is added value by value. */
INLINE float rest(const struct product *p, u64 row, const float *x) {
  float total = 0;
#ifdef VALUE_BYTES
  const uint8_t *w = p->weight + row * row_bytes(p->columns);
  for (u64 c = p->columns / GROUP_VALUES * GROUP_VALUES; c < p->columns; c++) total += one(w + c * VALUE_BYTES) * x[c];
#endif
  return total;
}

INLINE void finish(const struct product *p, u64 token, u64 row, float value) {
  u64 at = token * p->out_stride + row;
  if (p->bias) value += p->bias[row];
  if (p->residual) value += p->residual[at];
  p->out[at] = value;
}

/* Panels lie one behind the other: what is read a panel or a page later is asked for in the order of the file. A weight
   is read once a token, so it passes by the caches in which the next process has its code and data. */
INLINE void fetch_ahead(const uint8_t *p, int size) {
  for (int at = 0; at < size; at += 64) __builtin_prefetch(p + at, 0, 0);
}

INLINE void one_token(const struct product *p, u64 row, int count) {
  const u64 stride = row_bytes(p->columns), blocks = p->columns / (GROUP_VALUES * GROUPS);
  const uint8_t *w = p->weight + row * stride, *ahead = w + (PANEL * stride > PAGE ? PANEL * stride : PAGE);
  const float *x = p->x;
  floats total[PANEL];
  for (int k = 0; k < count; k++) total[k] = (floats){0};
  for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES) {
#pragma clang loop unroll(full)
    for (int g = 0; g < GROUPS; g++, x += GROUP_VALUES) {
      floats left = load(x), right = load(x + LANES);
      if (g == 0) fetch_ahead(ahead + b * (u64)(count * BLOCK_BYTES), count * BLOCK_BYTES);
#pragma clang loop unroll(full)
      for (int k = 0; k < count; k++) {
        floats a, c;
        unpack(w + (u64)k * stride, g, &a, &c);
        total[k] += a * left;
        total[k] += c * right;
      }
    }
  }
  for (int k = 0; k < count; k++) finish(p, 0, row + k, sum(total[k]) + rest(p, row + k, p->x));
}

/* Causal attention of `tokens` rows over the cache: row t sees the cache's rows up to position + t, or with a window
 * the last `window` of those.
 *
 * Up to QUERIES queries that share a key head (heads of one group, neighbouring rows) go over the cache together.
 * Keys lie in tiles of sixteen rows, (kv_heads, context / 16, key_dim, 16), so that sixteen scores come out of one
 * vector without summing across lanes; values lie as (kv_heads, context, value_dim).
 *
 * a: out (tokens, heads, value_dim), q (tokens, heads, key_dim), key cache, value cache, address of the position,
 * tokens, heads, kv_heads, key_dim, value_dim, context (a multiple of 16), scale (bits of an f32), scratch (QUERIES *
 * context floats a thread), window or 0, cap of the scores (bits of an f32) or 0. */
#define QUERIES 4
#define WIDE 4
/* how many of many queries take how many tiles of keys at once: their sums stay in registers */
#if defined(__AVX512F__)
#define SCORED 4
#define TOGETHER 4
#elif defined(__AVX__) || defined(__aarch64__)
#define SCORED 4
#define TOGETHER 1
#else
#define SCORED 2
#define TOGETHER 1
#endif

/* Scores of `count` queries with every key of `wide` tiles. */
INLINE void score_tiles(float *shares, u64 stride, const float *const *q, const float *keys, u64 width, int count,
                        int wide, float scale) {
  floats total[QUERIES][WIDE];
  for (int i = 0; i < count; i++)
    for (int t = 0; t < wide; t++) total[i][t] = (floats){0};
  for (u64 d = 0; d < width; d++)
#pragma clang loop unroll(full)
    for (int t = 0; t < wide; t++) {
      const floats key = load(keys + (t * width + d) * LANES);
#pragma clang loop unroll(full)
      for (int i = 0; i < count; i++) total[i][t] += key * q[i][d];
    }
  for (int i = 0; i < count; i++)
    for (int t = 0; t < wide; t++) store(shares + i * stride + t * LANES, total[i][t] * scale);
}

/* Scores of `count` queries with every key of the first `tiles` tiles, `wide` tiles at a time: the same sums, without
 * waiting for each. */
INLINE void score(float *shares, u64 stride, const float *const *q, const float *keys, u64 width, u64 tiles, int count,
                  int wide, float scale) {
  const u64 size = width * LANES;
  u64 tile = 0;
  for (; tile + wide <= tiles; tile += wide, keys += wide * size, shares += wide * LANES)
    score_tiles(shares, stride, q, keys, width, count, wide, scale);
  if (wide > 2 && tile + 2 <= tiles) {
    score_tiles(shares, stride, q, keys, width, count, 2, scale);
    tile += 2, keys += 2 * size, shares += 2 * LANES;
  }
  for (; tile < tiles; tile++, keys += size, shares += LANES)
    score_tiles(shares, stride, q, keys, width, count, 1, scale);
}

INLINE floats greater(floats a, floats b) {
  const ints more = b > a;
  return (floats)(((ints)b & more) | ((ints)a & ~more));
}

INLINE float greatest(floats v) {
  v = greater(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = greater(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = greater(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = greater(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

/* Makes those of a tile's scores, the first being that of row `row`, minus infinity that are not of from..seen. */
INLINE void hide(float *shares, u64 row, u64 from, u64 seen) {
  const ints place = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)row;
  const ints out = (place < (int32_t)from) | (place >= (int32_t)seen);
  const floats none = (floats){0} - __builtin_inff();
  store(shares + row, (floats)(((ints)load(shares + row) & ~out) | ((ints)none & out)));
}

/* Turns the scores from..seen into exponentials and gives one over their sum; those before and after, in the tiles
 * from the first on, count as nothing. */
INLINE float weigh(float *shares, u64 from, u64 seen, u64 first, u64 tiles, float cap) {
  if (cap != 0)
    for (u64 j = first * LANES; j < tiles * LANES; j += LANES) store(shares + j, capped(load(shares + j), cap));
  for (u64 j = first * LANES; j < from; j += LANES) hide(shares, j, from, seen);
  for (u64 j = seen / LANES * LANES; j < tiles * LANES; j += LANES) hide(shares, j, from, seen);
  floats most = load(shares + first * LANES), totals = {0};
  for (u64 j = (first + 1) * LANES; j < tiles * LANES; j += LANES) most = greater(most, load(shares + j));
  const float top = greatest(most);
  for (u64 j = first * LANES; j < tiles * LANES; j += LANES) {
    const floats e = exponential_below(load(shares + j) - top); /* a NaN among the scores stays one */
    store(shares + j, e);
    totals += e;
  }
  return 1.0f / sum(totals);
}

/* Adds up `wide` vectors of the values for `count` queries, weighted by their shares. */
INLINE void mix(float *const *out, const float *shares, u64 stride, const float *values, u64 width, u64 seen, int count,
                int wide, const float *scale) {
  floats total[QUERIES][WIDE];
  for (int i = 0; i < count; i++)
    for (int c = 0; c < wide; c++) total[i][c] = (floats){0};
  for (u64 j = 0; j < seen; j++, values += width) {
#pragma clang loop unroll(full)
    for (int c = 0; c < wide; c++) {
      const floats value = load(values + c * LANES);
#pragma clang loop unroll(full)
      for (int i = 0; i < count; i++) total[i][c] += value * shares[i * stride + j];
    }
  }
  for (int i = 0; i < count; i++)
    for (int c = 0; c < wide; c++) store(out[i] + c * LANES, total[i][c] * scale[i]);
}

INLINE void attend(const u64 *a, u64 head, u64 query, int count, float *shares) {
  const u64 position = *(const u64 *)a[4], heads = a[6], group = heads / a[7];
  const u64 key_dim = a[8], value_dim = a[9], context = a[10];
  union { uint32_t u; float f; } scale = {(uint32_t)a[11]};
  const float *keys = (const float *)a[2] + head * context * key_dim;
  const float *values = (const float *)a[3] + head * context * value_dim;
  const float *q[QUERIES];
  float *out[QUERIES], whole[QUERIES];
  for (int i = 0; i < count; i++) {
    const u64 row = (query + i) / group * heads + head * group + (query + i) % group;
    q[i] = (const float *)a[1] + row * key_dim;
    out[i] = (float *)a[0] + row * value_dim;
  }
  const u64 window = a[13] ? a[13] : context;
  union { uint32_t u; float f; } cap = {(uint32_t)a[14]};
  u64 from[QUERIES], seen[QUERIES];
  for (int i = 0; i < count; i++) {
    seen[i] = position + (query + i) / group + 1;
    from[i] = seen[i] > window ? seen[i] - window : 0;
  }
  /* whole tiles, from the first row that the first query sees to the last that the last one does */
  const u64 first = from[0] / LANES, most = seen[count - 1], tiles = (most + LANES - 1) / LANES;
  keys += first * LANES * key_dim;
  values += first * LANES * value_dim;
#pragma clang loop unroll(full)
  for (int i = 0; i < count; i += SCORED) {
    const int some = count - i < SCORED ? count - i : SCORED;
    score(shares + i * context + first * LANES, context, q + i, keys, key_dim, tiles - first, some,
          some == 1 ? WIDE : TOGETHER, scale.f);
  }
  for (int i = 0; i < count; i++) whole[i] = weigh(shares + i * context, from[i], seen[i], first, tiles, cap.f);
  shares += first * LANES;
  const u64 length = most - first * LANES;
  u64 c = 0;
  for (; c + WIDE * LANES <= value_dim; c += WIDE * LANES) {
    mix(out, shares, context, values + c, value_dim, length, count, WIDE, whole);
    for (int i = 0; i < count; i++) out[i] += WIDE * LANES;
  }
  for (; c + LANES <= value_dim; c += LANES) {
    mix(out, shares, context, values + c, value_dim, length, count, 1, whole);
    for (int i = 0; i < count; i++) out[i] += LANES;
  }
  for (; c < value_dim; c++)
    for (int i = 0; i < count; i++) {
      float total = 0;
      for (u64 j = 0; j < length; j++) total += values[j * value_dim + c] * shares[i * context + j];
      *out[i]++ = total * whole[i];
    }
}

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const u64 kv_heads = a[7], queries = a[5] * (a[6] / kv_heads);
  float *shares = (float *)a[12] + thread * QUERIES * a[10];
  u64 first, last;
  share(kv_heads * queries, part, end, parts, &first, &last);
  while (first < last) {
    const u64 head = first / queries, query = first % queries, here = queries - query, left = last - first;
    switch (left < here ? left : here) {
      case 1: attend(a, head, query, 1, shares), first += 1; break;
      case 2: attend(a, head, query, 2, shares), first += 2; break;
      case 3: attend(a, head, query, 3, shares), first += 3; break;
      default: attend(a, head, query, QUERIES, shares), first += QUERIES;
    }
  }
}

/* Turns pairs of queries (in place) and keys (into the cache), and puts the values into the cache, both as
 * `attention.c` reads them. A pair is elements 2i and 2i + 1, or i and i + rope_dims / 2 with `halves`.
 * a: q (tokens, heads, key_dim), k, v, cosines (context, rope_dims / 2), sines, key cache, value cache, address of
 * the position, tokens, heads, kv_heads, key_dim, value_dim, context, rope_dims, halves, cosines and sines of the
 * queries (or 0: those of the keys). */
INLINE void turn(float *to, u64 stride, const float *from, const float *cosines, const float *sines, u64 pairs,
                 u64 width, u64 step, u64 gap) {
  for (u64 i = 0; i < pairs; i++) {
    float a = from[i * step], b = from[i * step + gap];
    to[i * step * stride] = a * cosines[i] - b * sines[i];
    to[(i * step + gap) * stride] = a * sines[i] + b * cosines[i];
  }
  for (u64 i = 2 * pairs; i < width; i++) to[i * stride] = from[i];
}

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  float *q = (float *)a[0];
  const float *k = (const float *)a[1], *v = (const float *)a[2];
  float *keys = (float *)a[5], *values = (float *)a[6];
  const u64 position = *(const u64 *)a[7], heads = a[9], kv_heads = a[10], key_dim = a[11], value_dim = a[12];
  const u64 context = a[13], pairs = a[14] / 2, all = heads + 2 * kv_heads;
  u64 first, last;
  share(a[8] * all, part, end, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const u64 t = unit / all, place = position + t;
    u64 h = unit % all;
    const u64 table = h < heads && a[16] ? 16 : 3;
    const float *cosines = (const float *)a[table] + place * pairs, *sines = (const float *)a[table + 1] + place * pairs;
    if (h < heads) {
      float *own = q + (t * heads + h) * key_dim;
      if (a[15]) turn(own, 1, own, cosines, sines, pairs, key_dim, 1, pairs);
      else turn(own, 1, own, cosines, sines, pairs, key_dim, 2, 1);
    } else if ((h -= heads) < kv_heads) {
      float *tile = keys + (h * context + place / LANES * LANES) * key_dim + place % LANES;
      const float *given = k + (t * kv_heads + h) * key_dim;
      if (a[15]) turn(tile, LANES, given, cosines, sines, pairs, key_dim, 1, pairs);
      else turn(tile, LANES, given, cosines, sines, pairs, key_dim, 2, 1);
    } else {
      h -= kv_heads;
      for (u64 i = 0; i < value_dim; i++)
        values[(h * context + place) * value_dim + i] = v[(t * kv_heads + h) * value_dim + i];
    }
  }
}

/* Turns adjacent pairs of queries (in place) and keys (into the cache), and puts the values into the cache.
 * a: q (tokens, heads, key_dim), k, v, cosines (context, rope_dims / 2), sines, key cache (context, kv_heads,
 * key_dim), value cache, address of the position, tokens, heads, kv_heads, key_dim, value_dim, rope_dims. */
INLINE void turn(float *to, const float *from, const float *cosines, const float *sines, u64 pairs, u64 width) {
  for (u64 i = 0; i < pairs; i++) {
    float even = from[2 * i], odd = from[2 * i + 1];
    to[2 * i] = even * cosines[i] - odd * sines[i];
    to[2 * i + 1] = even * sines[i] + odd * cosines[i];
  }
  for (u64 i = 2 * pairs; i < width; i++) to[i] = from[i];
}

void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  float *q = (float *)a[0];
  const float *k = (const float *)a[1], *v = (const float *)a[2];
  float *keys = (float *)a[5], *values = (float *)a[6];
  const u64 position = *(const u64 *)a[7], tokens = a[8], heads = a[9], kv_heads = a[10];
  const u64 key_dim = a[11], value_dim = a[12], pairs = a[13] / 2, all = heads + 2 * kv_heads;
  u64 first, last;
  share(tokens * all, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const u64 t = unit / all, place = position + t;
    const float *cosines = (const float *)a[3] + place * pairs, *sines = (const float *)a[4] + place * pairs;
    u64 h = unit % all;
    if (h < heads) {
      float *own = q + (t * heads + h) * key_dim;
      turn(own, own, cosines, sines, pairs, key_dim);
    } else if ((h -= heads) < kv_heads) {
      turn(keys + (place * kv_heads + h) * key_dim, k + (t * kv_heads + h) * key_dim, cosines, sines, pairs, key_dim);
    } else {
      h -= kv_heads;
      for (u64 i = 0; i < value_dim; i++)
        values[(place * kv_heads + h) * value_dim + i] = v[(t * kv_heads + h) * value_dim + i];
    }
  }
}

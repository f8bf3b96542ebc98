/* Causal attention of `tokens` queries over the cache: query t sees the rows 0..position + t.
 * a: out (tokens, heads, value_dim), q (tokens, heads, key_dim), key cache (context, kv_heads, key_dim), value
 * cache, address of the position, tokens, heads, kv_heads, key_dim, value_dim, scale (bits of an f32), scratch
 * (context rounded up to 16 floats a thread), that count. */
#define WIDE 4

INLINE float dot(const float *x, const float *y, u64 width) {
  const u64 whole = width / LANES * LANES;
  floats total = {0};
  for (u64 c = 0; c < whole; c += LANES) total += load(x + c) * load(y + c);
  float result = sum(total);
  for (u64 c = whole; c < width; c++) result += x[c] * y[c];
  return result;
}

/* Adds up count vectors of the values, weighted by their shares. */
INLINE void mix(float *out, const float *shares, const float *values, u64 stride, u64 seen, int count, float scale) {
  floats total[WIDE];
  for (int i = 0; i < count; i++) total[i] = (floats){0};
  for (u64 j = 0; j < seen; j++, values += stride)
#pragma clang loop unroll(full)
    for (int i = 0; i < count; i++) total[i] += load(values + i * LANES) * shares[j];
  for (int i = 0; i < count; i++) store(out + i * LANES, total[i] * scale);
}

void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const u64 position = *(const u64 *)a[4], tokens = a[5], heads = a[6], kv_heads = a[7];
  const u64 key_dim = a[8], value_dim = a[9], group = heads / kv_heads;
  union { uint32_t u; float f; } scale = {(uint32_t)a[10]};
  float *shares = (float *)a[11] + thread * a[12];
  u64 first, last;
  share(tokens * heads, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const u64 t = unit / heads, h = unit % heads, seen = position + t + 1;
    const u64 key_stride = kv_heads * key_dim, value_stride = kv_heads * value_dim;
    const float *q = (const float *)a[1] + unit * key_dim;
    const float *keys = (const float *)a[2] + h / group * key_dim;
    const float *values = (const float *)a[3] + h / group * value_dim;
    float *out = (float *)a[0] + unit * value_dim;
    float most = -__builtin_inff();
    for (u64 j = 0; j < seen; j++) {
      shares[j] = dot(q, keys + j * key_stride, key_dim) * scale.f;
      /* written so that a NaN score is kept and reaches the output */
      if (!(shares[j] <= most)) most = shares[j];
    }
    for (u64 j = seen; j % LANES; j++) shares[j] = -__builtin_inff();
    floats totals = {0};
    for (u64 j = 0; j < seen; j += LANES) {
      floats e = exponential(load(shares + j) - most);
      store(shares + j, e);
      totals += e;
    }
    const float whole = 1.0f / sum(totals);
    u64 c = 0;
    for (; c + WIDE * LANES <= value_dim; c += WIDE * LANES)
      mix(out + c, shares, values + c, value_stride, seen, WIDE, whole);
    for (; c + LANES <= value_dim; c += LANES) mix(out + c, shares, values + c, value_stride, seen, 1, whole);
    for (; c < value_dim; c++) {
      float total = 0;
      for (u64 j = 0; j < seen; j++) total += values[j * value_stride + c] * shares[j];
      out[c] = total * whole;
    }
  }
}

/* gate[i] = f(gate[i]) * up[i], f being x / (1 + exp(-x)) (SiLU), or with `gelu` the tanh form of GELU, which is the
 * same of another argument: x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 x^3))). Between -10 and 10 argument and
 * value of GELU are rounded to f16, as in the table that llama.cpp looks it up in. a: gate, up, count, gelu. */
INLINE floats gelued(floats x) {
  const ints low = x <= -10.0f, high = x >= 10.0f;
  const floats h = to_half(x);
  const floats y = to_half(h / (exponential(-1.5957691216057308f * (h + 0.044715f * h * h * h)) + 1.0f));
  return (floats)(((ints)y & ~(low | high)) | ((ints)x & high));
}

INLINE floats gated(floats x, u64 gelu) { return gelu ? gelued(x) : x / (exponential(-x) + 1.0f); }

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  float *gate = (float *)a[0];
  const float *up = (const float *)a[1];
  u64 first, last;
  share((a[2] + LANES - 1) / LANES, part, end, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    u64 at = unit * LANES;
    if (at + LANES <= a[2]) {
      store(gate + at, gated(load(gate + at), a[3]) * load(up + at));
    } else {
      floats g = {0};
      for (u64 i = 0; at + i < a[2]; i++) g[i] = gate[at + i];
      g = gated(g, a[3]);
      for (u64 i = 0; at + i < a[2]; i++) gate[at + i] = g[i] * up[at + i];
    }
  }
}

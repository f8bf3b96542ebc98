/* gate[i] = silu(gate[i]) * up[i]. a: gate, up, count. */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  float *gate = (float *)a[0];
  const float *up = (const float *)a[1];
  u64 first, last;
  share((a[2] + LANES - 1) / LANES, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    u64 at = unit * LANES;
    if (at + LANES <= a[2]) {
      floats g = load(gate + at);
      store(gate + at, g / (exponential(-g) + 1.0f) * load(up + at));
    } else {
      floats g = {0};
      for (u64 i = 0; at + i < a[2]; i++) g[i] = gate[at + i];
      g = g / (exponential(-g) + 1.0f);
      for (u64 i = 0; at + i < a[2]; i++) gate[at + i] = g[i] * up[at + i];
    }
  }
}

/* x[i] = cap * tanh(x[i] / cap). a: x, count, cap (the bits of an f32). */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  float *x = (float *)a[0];
  union { uint32_t u; float f; } cap = {(uint32_t)a[2]};
  u64 first, last;
  share((a[1] + LANES - 1) / LANES, part, end, parts, &first, &last);
  for (u64 at = first * LANES; at < last * LANES && at < a[1]; at += LANES) {
    if (at + LANES <= a[1]) {
      store(x + at, capped(load(x + at), cap.f));
    } else {
      floats rest = {0};
      for (u64 i = 0; at + i < a[1]; i++) rest[i] = x[at + i];
      rest = capped(rest, cap.f);
      for (u64 i = 0; at + i < a[1]; i++) x[at + i] = rest[i];
    }
  }
}

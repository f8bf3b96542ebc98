/* RMS norm: out[t] = x[t] / sqrt(mean of squares + epsilon) * weight. a: out, x, weight, width, tokens, epsilon
 * (the bits of an f32). */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const float *weight = (const float *)a[2];
  const u64 width = a[3], whole = width / LANES * LANES;
  union { uint32_t u; float f; } epsilon = {(uint32_t)a[5]};
  u64 first, last;
  share(a[4], part, parts, &first, &last);
  for (u64 t = first; t < last; t++) {
    const float *x = (const float *)a[1] + t * width;
    float *out = (float *)a[0] + t * width;
    floats squares = {0};
    for (u64 c = 0; c < whole; c += LANES) squares += load(x + c) * load(x + c);
    float total = sum(squares);
    for (u64 c = whole; c < width; c++) total += x[c] * x[c];
    float scale = 1.0f / __builtin_sqrtf(total / (float)width + epsilon.f);
    for (u64 c = 0; c < whole; c += LANES) store(out + c, load(x + c) * scale * load(weight + c));
    for (u64 c = whole; c < width; c++) out[c] = x[c] * scale * weight[c];
  }
}

/* RMS norm: out[t] = x[t] / sqrt(mean of squares + epsilon) * weight, plus residual[t]; out may be x or residual.
 * a: out, x, weight, width, tokens, epsilon (the bits of an f32), residual or 0. */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const float *weight = (const float *)a[2];
  const u64 width = a[3], whole = width / LANES * LANES;
  union { uint32_t u; float f; } epsilon = {(uint32_t)a[5]};
  u64 first, last;
  share(a[4], part, end, parts, &first, &last);
  for (u64 t = first; t < last; t++) {
    const float *x = (const float *)a[1] + t * width;
    const float *residual = a[6] ? (const float *)a[6] + t * width : 0;
    float *out = (float *)a[0] + t * width;
    floats squares = {0};
    for (u64 c = 0; c < whole; c += LANES) squares += load(x + c) * load(x + c);
    float total = sum(squares);
    for (u64 c = whole; c < width; c++) total += x[c] * x[c];
    float scale = 1.0f / __builtin_sqrtf(total / (float)width + epsilon.f);
    for (u64 c = 0; c < whole; c += LANES) {
      floats made = load(x + c) * scale * load(weight + c);
      store(out + c, residual ? made + load(residual + c) : made);
    }
    for (u64 c = whole; c < width; c++) {
      float made = x[c] * scale * weight[c];
      out[c] = residual ? made + residual[c] : made;
    }
  }
}

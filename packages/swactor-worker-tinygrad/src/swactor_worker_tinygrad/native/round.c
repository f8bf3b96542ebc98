/* Rounds rows of x to bytes in halves of groups of 32: scale = the greatest magnitude / 127, value = x * (127 /
 * greatest), to the nearest, half to even. Magnitudes below 1e-36 count as zero. A half that holds a NaN or an infinity
 * gets NaN as its scale, and so does everything that is computed from it.
 * a: out (columns / 32 groups a row), x, columns (a multiple of 32), tokens. */
INLINE ints magnitude(floats v) { return (ints)v & 0x7fffffff; }

INLINE int32_t total(ints v) {
  int32_t made = 0;
  for (int i = 0; i < LANES; i++) made += v[i];
  return made;
}

INLINE ints nearest(floats v, float inverse) {
  const floats scaled = v * inverse;
  const floats shifted = scaled + 12582912.0f; /* two statements: fused they would round once less */
  return (ints)shifted - 0x4b400000;
}

/* Writes the bytes of sixteen values, and gives their scale. */
INLINE float write_half(int8_t *to, int32_t *bytes_total, const float *x) {
  const floats values = load(x);
  const ints size = magnitude(values);
  /* as integers, magnitudes have the order of their values, and infinities and NaN come last */
  union { int32_t i; float f; } greatest = {0};
  for (int i = 0; i < LANES; i++) greatest.i = size[i] > greatest.i ? size[i] : greatest.i;
  const int is_number = greatest.i < 0x7f800000, is_zero = greatest.f < 1e-36f;
  ints made = {0};
  if (is_number && !is_zero) made = nearest(values, 127.0f / greatest.f);
  *(chars *)to = __builtin_convertvector(made, chars);
  *bytes_total = total(made);
  return !is_number ? __builtin_nanf("") : is_zero ? 0 : greatest.f / 127.0f;
}

INLINE void write(struct rounded *to, const float *x) {
  to->left_scale = write_half(to->value, &to->left_total, x);
  to->right_scale = write_half(to->value + LANES, &to->right_total, x + LANES);
  to->left_sum = (float)to->left_total * to->left_scale;
  to->right_sum = (float)to->right_total * to->right_scale;
  to->sum = to->left_sum + to->right_sum;
  to->unused = 0;
}

void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const u64 columns = a[2], tokens = a[3], groups = columns / GROUP_VALUES;
  u64 first, last;
  share(tokens, part, parts, &first, &last);
  for (u64 t = first; t < last; t++) {
    const u64 begin = t / TILE * TILE, width = tile_width(tokens, begin);
    struct rounded *to = (struct rounded *)a[0] + begin * groups + (t - begin);
    const float *x = (const float *)a[1] + t * columns;
    for (u64 g = 0; g < groups; g++, to += width, x += GROUP_VALUES) write(to, x);
  }
}

/* Rounds rows of x to bytes in halves of groups of 32: scale = the greatest magnitude / 127, value = x * (127 /
 * greatest), to the nearest, half to even. Magnitudes below 1e-36 count as zero. A half that holds a NaN or an infinity
 * gets NaN as its scale, and so does everything that is computed from it.
 * a: out (columns / 32 groups a row), x, columns (a multiple of 32), tokens. */
#define TOGETHER (LANES / 2)

INLINE ints magnitude(floats v) { return (ints)v & 0x7fffffff; }

INLINE ints greater(ints a, ints b) {
  const ints more = b > a;
  return (b & more) | (a & ~more);
}

ACROSS(greatest, ints, greater)
ACROSS(totals, ints, ADDED)

INLINE ints nearest(floats v, float inverse) {
  const floats scaled = v * inverse;
  const floats shifted = scaled + 12582912.0f; /* two statements: fused they would round once less */
  return (ints)shifted - 0x4b400000;
}

/* Where `ACROSS` takes half h from. */
INLINE int place(int h) { return h % 4 * 4 + h / 4; }

/* Writes `count` groups at x, TOGETHER at most, to every `width`th at `to`; two lanes have a group's halves. */
INLINE void write(struct rounded *to, u64 width, const float *x, int count) {
  floats values[LANES];
  ints made[LANES], size[LANES];
#pragma clang loop unroll(full)
  for (int h = 0; h < LANES; h++) {
    values[h] = h < 2 * count ? load(x + h * LANES) : (floats){0};
    size[place(h)] = magnitude(values[h]);
  }
  /* as integers, magnitudes have the order of their values, and infinities and NaN come last */
  const ints most = greatest(size), no_number = most >= 0x7f800000, nothing = (floats)most < 1e-36f;
  const union { ints all; int32_t of[LANES]; } kept = {~(no_number | nothing)};
  const union { floats all; float of[LANES]; } inverse = {127.0f / (floats)most}; /* used where it is kept */
#pragma clang loop unroll(full)
  for (int h = 0; h < LANES; h++) {
    made[place(h)] = nearest(values[h], inverse.of[h]) & kept.of[h];
    if (h < 2 * count)
      *(chars *)(to[h / 2 * width].value + h % 2 * LANES) = __builtin_convertvector(made[place(h)], chars);
  }
  const union { ints all; int32_t of[LANES]; } total = {totals(made)};
  const ints not_a_number = 0x7fc00000 & no_number;
  const union { floats all; float of[LANES]; } scale = {
      (floats)(((ints)((floats)most / 127.0f) & kept.all) | not_a_number)};
  const union { floats all; float of[LANES]; } sum = {__builtin_convertvector(total.all, floats) * scale.all};
  for (int g = 0; g < count; g++) {
    struct rounded *one = to + g * width;
    one->left_scale = scale.of[2 * g];
    one->right_scale = scale.of[2 * g + 1];
    one->left_sum = sum.of[2 * g];
    one->right_sum = sum.of[2 * g + 1];
    one->sum = one->left_sum + one->right_sum;
    one->left_total = total.of[2 * g];
    one->right_total = total.of[2 * g + 1];
    one->unused = 0;
  }
}

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const u64 columns = a[2], tokens = a[3], groups = columns / GROUP_VALUES;
  u64 first, last;
  share(tokens, part, end, parts, &first, &last);
  for (u64 t = first; t < last; t++) {
    const u64 begin = t / TILE * TILE, width = tile_width(tokens, begin);
    struct rounded *to = (struct rounded *)a[0] + begin * groups + (t - begin);
    const float *x = (const float *)a[1] + t * columns;
    u64 g = 0;
    for (; g + TOGETHER <= groups; g += TOGETHER) write(to + g * width, width, x + g * GROUP_VALUES, TOGETHER);
    if (g < groups) write(to + g * width, width, x + g * GROUP_VALUES, (int)(groups - g));
  }
}

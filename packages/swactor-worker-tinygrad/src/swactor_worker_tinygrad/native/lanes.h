/* The quantised types once more, for blocks laid side by side by `pack.c`: what `types.h` reads from one row, this
 * reads from sixteen at once. `lane(p, i)` is byte i of the sixteen blocks at p.
 *
 * A group of 32 values is raw numbers times a scale, plus a minimum where the type has one; `PER_HALF` types have
 * them for each half of the group. `begin` gives scales and minima, `pair` the raw numbers i and i + 16. */
struct scales {
  floats left, right, left_minimum, right_minimum;
};

INLINE bytes lane(const uint8_t *p, int i) { return load_bytes(p + i * LANES); }
INLINE floats lane_half(const uint8_t *p, int i) {
  words h = __builtin_convertvector(lane(p, i), words) | __builtin_convertvector(lane(p, i + 1), words) << 8;
  floats magnitude = (floats)((h & 0x7fff) << 13) * 0x1p112f;
  return (floats)((words)magnitude | (h & 0x8000) << 16);
}
INLINE bytes bits(bytes v, int shift, uint8_t mask) { return v >> (uint8_t)shift & mask; }

#if defined(TYPE_Q4_0)
#define GROUPS 1
#define BLOCK_BYTES 18
INLINE struct scales begin(const uint8_t *p, int g) { return (struct scales){.left = lane_half(p, 0)}; }
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 2 + i);
  *a = of_chars((chars)(q & 15) - 8);
  *b = of_chars((chars)(q >> 4) - 8);
}

#elif defined(TYPE_Q4_1)
#define GROUPS 1
#define BLOCK_BYTES 20
#define HAS_MINIMUM
INLINE struct scales begin(const uint8_t *p, int g) {
  return (struct scales){.left = lane_half(p, 0), .left_minimum = lane_half(p, 2)};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 4 + i);
  *a = of_bytes(q & 15);
  *b = of_bytes(q >> 4);
}

#elif defined(TYPE_Q5_0)
#define GROUPS 1
#define BLOCK_BYTES 22
INLINE struct scales begin(const uint8_t *p, int g) { return (struct scales){.left = lane_half(p, 0)}; }
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 6 + i), fifth_a = lane(p, 2 + i / 8), fifth_b = lane(p, 4 + i / 8);
  *a = of_chars((chars)((q & 15) | bits(fifth_a, i % 8, 1) << 4) - 16);
  *b = of_chars((chars)(q >> 4 | bits(fifth_b, i % 8, 1) << 4) - 16);
}

#elif defined(TYPE_Q5_1)
#define GROUPS 1
#define BLOCK_BYTES 24
#define HAS_MINIMUM
INLINE struct scales begin(const uint8_t *p, int g) {
  return (struct scales){.left = lane_half(p, 0), .left_minimum = lane_half(p, 2)};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 8 + i), fifth_a = lane(p, 4 + i / 8), fifth_b = lane(p, 6 + i / 8);
  *a = of_bytes((q & 15) | bits(fifth_a, i % 8, 1) << 4);
  *b = of_bytes(q >> 4 | bits(fifth_b, i % 8, 1) << 4);
}

#elif defined(TYPE_Q8_0)
#define GROUPS 1
#define BLOCK_BYTES 34
INLINE struct scales begin(const uint8_t *p, int g) { return (struct scales){.left = lane_half(p, 0)}; }
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  *a = of_chars((chars)lane(p, 2 + i));
  *b = of_chars((chars)lane(p, 18 + i));
}

#elif defined(TYPE_Q2_K)
#define GROUPS 8
#define BLOCK_BYTES 84
#define HAS_MINIMUM
#define PER_HALF
INLINE struct scales begin(const uint8_t *p, int g) {
  floats d = lane_half(p, 80), m = -lane_half(p, 82);
  bytes a = lane(p, 2 * g), b = lane(p, 2 * g + 1);
  return (struct scales){d * of_bytes(a & 15), d * of_bytes(b & 15), m * of_bytes(a >> 4), m * of_bytes(b >> 4)};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  const int at = 16 + g / 4 * 32 + i, shift = 2 * (g % 4);
  *a = of_bytes(bits(lane(p, at), shift, 3));
  *b = of_bytes(bits(lane(p, at + 16), shift, 3));
}

#elif defined(TYPE_Q3_K)
#define GROUPS 8
#define BLOCK_BYTES 110
#define PER_HALF
INLINE floats third_scale(const uint8_t *p, int i) {
  bytes nibble = bits(lane(p, 96 + i % 8), i / 8 * 4, 15), top = bits(lane(p, 104 + i % 4), i / 4 * 2, 3);
  return of_chars((chars)(nibble | top << 4) - 32);
}
INLINE struct scales begin(const uint8_t *p, int g) {
  floats d = lane_half(p, 108);
  return (struct scales){.left = d * third_scale(p, 2 * g), .right = d * third_scale(p, 2 * g + 1)};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  const int at = 32 + g / 4 * 32 + i, shift = 2 * (g % 4);
  *a = of_chars((chars)(bits(lane(p, at), shift, 3) | bits(lane(p, i), g, 1) << 2) - 4);
  *b = of_chars((chars)(bits(lane(p, at + 16), shift, 3) | bits(lane(p, 16 + i), g, 1) << 2) - 4);
}

#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
#define GROUPS 8
#define HAS_MINIMUM
INLINE struct scales begin(const uint8_t *p, int g) {
  floats d = lane_half(p, 0), m = -lane_half(p, 2);
  bytes scale, minimum;
  if (g < 4) {
    scale = lane(p, 4 + g) & 63;
    minimum = lane(p, 8 + g) & 63;
  } else {
    bytes both = lane(p, 8 + g);
    scale = (both & 15) | lane(p, g) >> 6 << 4;
    minimum = both >> 4 | lane(p, 4 + g) >> 6 << 4;
  }
  return (struct scales){.left = d * of_bytes(scale), .left_minimum = m * of_bytes(minimum)};
}
#if defined(TYPE_Q4_K)
#define BLOCK_BYTES 144
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  const int at = 16 + g / 2 * 32 + i, shift = g % 2 * 4;
  *a = of_bytes(bits(lane(p, at), shift, 15));
  *b = of_bytes(bits(lane(p, at + 16), shift, 15));
}
#else
#define BLOCK_BYTES 176
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  const int at = 48 + g / 2 * 32 + i, shift = g % 2 * 4;
  *a = of_bytes(bits(lane(p, at), shift, 15) | bits(lane(p, 16 + i), g, 1) << 4);
  *b = of_bytes(bits(lane(p, at + 16), shift, 15) | bits(lane(p, 32 + i), g, 1) << 4);
}
#endif

#elif defined(TYPE_Q6_K)
#define GROUPS 8
#define BLOCK_BYTES 210
#define PER_HALF
INLINE struct scales begin(const uint8_t *p, int g) {
  floats d = lane_half(p, 208);
  return (struct scales){.left = d * of_chars((chars)lane(p, 192 + 2 * g)),
                         .right = d * of_chars((chars)lane(p, 193 + 2 * g))};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  const int k = g % 4, at = g / 4 * 64 + k % 2 * 32 + i, top = 128 + g / 4 * 32 + i, shift = k / 2 * 4;
  *a = of_chars((chars)(bits(lane(p, at), shift, 15) | bits(lane(p, top), 2 * k, 3) << 4) - 32);
  *b = of_chars((chars)(bits(lane(p, at + 16), shift, 15) | bits(lane(p, top + 16), 2 * k, 3) << 4) - 32);
}

#elif defined(TYPE_IQ4_NL)
#define GROUPS 1
#define BLOCK_BYTES 18
INLINE struct scales begin(const uint8_t *p, int g) { return (struct scales){.left = lane_half(p, 0)}; }
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 2 + i);
  *a = of_chars(nonlinear(q & 15));
  *b = of_chars(nonlinear(q >> 4));
}

#elif defined(TYPE_IQ4_XS)
#define GROUPS 8
#define BLOCK_BYTES 136
INLINE struct scales begin(const uint8_t *p, int g) {
  bytes nibble = bits(lane(p, 4 + g / 2), g % 2 * 4, 15), top = bits(lane(p, 2 + g / 4), g % 4 * 2, 3);
  return (struct scales){.left = lane_half(p, 0) * of_chars((chars)(nibble | top << 4) - 32)};
}
INLINE void pair(const uint8_t *p, int g, int i, floats *a, floats *b) {
  bytes q = lane(p, 8 + g * 16 + i);
  *a = of_chars(nonlinear(q & 15));
  *b = of_chars(nonlinear(q >> 4));
}
#endif

/* Sixteen rows' results at `at` of `out`, those that there are of `rows`, plus bias[row] and residual[at] where given. */
INLINE void store_rows(float *out, const float *bias, const float *residual, u64 row, u64 rows, u64 at, floats total) {
  if (row + LANES <= rows) {
    if (bias) total += load(bias + row);
    if (residual) total += load(residual + at);
    store(out + at, total);
  } else {
    for (u64 i = 0; row + i < rows; i++) {
      float value = total[i];
      if (bias) value += bias[row + i];
      if (residual) value += residual[at + i];
      out[at + i] = value;
    }
  }
}

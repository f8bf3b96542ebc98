/* How weights are stored (ggml's block formats): one type is chosen by its macro.
 *
 * GROUPS groups of 32 values in a block of BLOCK_BYTES; `unpack` gives group g of the block at p as two vectors,
 * exactly the values that dequantising the block gives (up to the rounding of a fused multiply-add). */

INLINE bytes low(const uint8_t *p) { return load_bytes(p) & 15; }
INLINE bytes high(const uint8_t *p) { return load_bytes(p) >> 4; }

/* Makes a and b what `made` is of n, n being the low and the high halves of the sixteen bytes at q. Where one
 * instruction looks sixteen values up, it is made of the sixteen that n may be, once for both. */
#if defined(__AVX512F__)
INLINE floats look_up(floats table, words index) {
  floats found; /* by the lowest four bits of the index */
  __asm__("vpermps %2, %1, %0" : "=v"(found) : "v"(index), "v"(table));
  return found;
}
#define OF_NIBBLES(a, b, q, n, made)                                                        \
  do {                                                                                      \
    const floats n = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, table_ = made; \
    const words both_ = __builtin_convertvector(load_bytes(q), words);                      \
    *(a) = look_up(table_, both_);                                                          \
    *(b) = look_up(table_, both_ >> 4);                                                     \
  } while (0)
#else
#define OF_NIBBLES(a, b, q, n, made) \
  do {                               \
    floats n = of_bytes(low(q));     \
    *(a) = made;                     \
    n = of_bytes(high(q));           \
    *(b) = made;                     \
  } while (0)
#endif

/* 16 where the bit of a lane is set in `mask`, else 0. */
INLINE bytes fifth_bit(const uint8_t *mask) {
  const bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8_t a = mask[0], b = mask[1];
  bytes spread = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
  return (bytes)((spread & bit) != 0) & 16;
}

/* The 6-bit scale and minimum of group g in the 12 bytes of a Q4_K or Q5_K block. */
INLINE void scale_and_minimum(const uint8_t *q, int g, float *scale, float *minimum) {
  if (g < 4) {
    *scale = q[g] & 63;
    *minimum = q[g + 4] & 63;
  } else {
    *scale = (q[g + 4] & 15) | (q[g - 4] >> 6) << 4;
    *minimum = (q[g + 4] >> 4) | (q[g] >> 6) << 4;
  }
}

#if defined(TYPE_F32)
#define GROUPS 1
#define BLOCK_BYTES 128
#define VALUE_BYTES 4
INLINE float one(const uint8_t *p) { float v; __builtin_memcpy(&v, p, 4); return v; }
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  *a = load((const float *)p);
  *b = load((const float *)p + 16);
}

#elif defined(TYPE_F16)
#define GROUPS 1
#define BLOCK_BYTES 64
#define VALUE_BYTES 2
INLINE float one(const uint8_t *p) { return half(p); }
INLINE floats halves(const uint8_t *p) {
  words h = __builtin_convertvector(*(const shorts *)p, words);
  floats magnitude = (floats)((h & 0x7fff) << 13) * 0x1p112f;
  return (floats)((words)magnitude | (h & 0x8000) << 16);
}
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  *a = halves(p);
  *b = halves(p + 32);
}

#elif defined(TYPE_BF16)
#define GROUPS 1
#define BLOCK_BYTES 64
#define VALUE_BYTES 2
INLINE float one(const uint8_t *p) {
  union { uint32_t u; float f; } v = {((uint32_t)p[0] | (uint32_t)p[1] << 8) << 16};
  return v.f;
}
INLINE floats brains(const uint8_t *p) {
  return (floats)(__builtin_convertvector(*(const shorts *)p, words) << 16);
}
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  *a = brains(p);
  *b = brains(p + 32);
}

#elif defined(TYPE_Q4_0)
#define GROUPS 1
#define BLOCK_BYTES 18
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p);
  OF_NIBBLES(a, b, p + 2, n, (n - 8.0f) * d);
}

#elif defined(TYPE_Q4_1)
#define GROUPS 1
#define BLOCK_BYTES 20
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p), m = half(p + 2);
  OF_NIBBLES(a, b, p + 4, n, n * d + m);
}

#elif defined(TYPE_Q5_0)
#define GROUPS 1
#define BLOCK_BYTES 22
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p);
  *a = of_chars((chars)(low(p + 6) | fifth_bit(p + 2)) - 16) * d;
  *b = of_chars((chars)(high(p + 6) | fifth_bit(p + 4)) - 16) * d;
}

#elif defined(TYPE_Q5_1)
#define GROUPS 1
#define BLOCK_BYTES 24
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p), m = half(p + 2);
  *a = of_bytes(low(p + 8) | fifth_bit(p + 4)) * d + m;
  *b = of_bytes(high(p + 8) | fifth_bit(p + 6)) * d + m;
}

#elif defined(TYPE_Q8_0)
#define GROUPS 1
#define BLOCK_BYTES 34
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p);
  *a = of_chars((chars)load_bytes(p + 2)) * d;
  *b = of_chars((chars)load_bytes(p + 18)) * d;
}

#elif defined(TYPE_Q2_K)
#define GROUPS 8
#define BLOCK_BYTES 84
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p + 80), m = half(p + 82);
  const uint8_t *s = p + g * 2, *q = p + 16 + (g / 4) * 32;
  uint8_t shift = 2 * (g % 4);
  *a = of_bytes(load_bytes(q) >> shift & 3) * (d * (s[0] & 15)) - m * (s[0] >> 4);
  *b = of_bytes(load_bytes(q + 16) >> shift & 3) * (d * (s[1] & 15)) - m * (s[1] >> 4);
}

#elif defined(TYPE_Q3_K)
#define GROUPS 8
#define BLOCK_BYTES 110
INLINE float third_scale(const uint8_t *s, int i) {
  int nibble = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
  return (float)((nibble | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32);
}
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p + 108);
  const uint8_t *q = p + 32 + (g / 4) * 32, *s = p + 96;
  uint8_t shift = 2 * (g % 4);
  bytes top_a = (bytes)((load_bytes(p) & (uint8_t)(1 << g)) == 0) & 4;
  bytes top_b = (bytes)((load_bytes(p + 16) & (uint8_t)(1 << g)) == 0) & 4;
  *a = of_chars((chars)((load_bytes(q) >> shift & 3) - top_a)) * (d * third_scale(s, 2 * g));
  *b = of_chars((chars)((load_bytes(q + 16) >> shift & 3) - top_b)) * (d * third_scale(s, 2 * g + 1));
}

#elif defined(TYPE_Q4_K)
#define GROUPS 8
#define BLOCK_BYTES 144
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float scale, minimum;
  scale_and_minimum(p + 4, g, &scale, &minimum);
  float d = half(p) * scale, m = half(p + 2) * minimum;
  const uint8_t *q = p + 16 + (g / 2) * 32;
  *a = of_bytes(g % 2 ? high(q) : low(q)) * d - m;
  *b = of_bytes(g % 2 ? high(q + 16) : low(q + 16)) * d - m;
}

#elif defined(TYPE_Q5_K)
#define GROUPS 8
#define BLOCK_BYTES 176
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float scale, minimum;
  scale_and_minimum(p + 4, g, &scale, &minimum);
  float d = half(p) * scale, m = half(p + 2) * minimum;
  const uint8_t *q = p + 48 + (g / 2) * 32;
  bytes top_a = (load_bytes(p + 16) >> (uint8_t)g & 1) << 4, top_b = (load_bytes(p + 32) >> (uint8_t)g & 1) << 4;
  *a = of_bytes((g % 2 ? high(q) : low(q)) | top_a) * d - m;
  *b = of_bytes((g % 2 ? high(q + 16) : low(q + 16)) | top_b) * d - m;
}

#elif defined(TYPE_Q6_K)
#define GROUPS 8
#define BLOCK_BYTES 210
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p + 208);
  uint8_t k = g % 4;
  const uint8_t *q = p + (g / 4) * 64 + (k % 2) * 32, *h = p + 128 + (g / 4) * 32;
  const int8_t *scales = (const int8_t *)p + 192 + g * 2;
  bytes low_a = k / 2 ? high(q) : low(q), low_b = k / 2 ? high(q + 16) : low(q + 16);
  bytes top_a = (load_bytes(h) >> (uint8_t)(2 * k) & 3) << 4, top_b = (load_bytes(h + 16) >> (uint8_t)(2 * k) & 3) << 4;
  *a = of_chars((chars)(low_a | top_a) - 32) * (d * scales[0]);
  *b = of_chars((chars)(low_b | top_b) - 32) * (d * scales[1]);
}

#elif defined(TYPE_IQ4_NL)
#define GROUPS 1
#define BLOCK_BYTES 18
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  float d = half(p);
  *a = of_chars(nonlinear(low(p + 2))) * d;
  *b = of_chars(nonlinear(high(p + 2))) * d;
}

#elif defined(TYPE_IQ4_XS)
#define GROUPS 8
#define BLOCK_BYTES 136
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  int top = ((uint32_t)p[2] | (uint32_t)p[3] << 8) >> (2 * g) & 3;
  int scale = (p[4 + g / 2] >> (4 * (g % 2)) & 15) | top << 4;
  float d = half(p) * (float)(scale - 32);
  *a = of_chars(nonlinear(low(p + 8 + g * 16))) * d;
  *b = of_chars(nonlinear(high(p + 8 + g * 16))) * d;
}
#elif defined(TYPE_MXFP4)
#define GROUPS 1
#define BLOCK_BYTES 17
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const union { uint32_t u; float f; } d = {p[0] < 2 ? 0x200000u << p[0] : (uint32_t)(p[0] - 1) << 23};
  *a = of_chars(e2m1(low(p + 1))) * d.f;
  *b = of_chars(e2m1(high(p + 1))) * d.f;
}

#elif defined(TYPE_NVFP4)
#define GROUPS 2
#define BLOCK_BYTES 36
INLINE float scale_of(uint8_t s) {
  const union { uint32_t u; float f; } d = {s == 127 ? 0 : (uint32_t)(s & 127) << 20};
  return d.f * 0x1p119f;
}
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const bytes q = load_bytes(p + 4 + g * 16), lows = q & 15, highs = q >> 4;
  *a = of_chars(e2m1(__builtin_shufflevector(lows, highs, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)));
  *b = of_chars(e2m1(__builtin_shufflevector(lows, highs, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)));
  *a *= scale_of(p[2 * g]);
  *b *= scale_of(p[2 * g + 1]);
}

#elif defined(TYPE_TQ1_0)
#define GROUPS 8
#define BLOCK_BYTES 54
/* Half h of the block's groups: each byte holds five ternary digits or four, those of a half the same one. */
INLINE floats digits(const uint8_t *p, int h) {
  const uint8_t power[5] = {1, 3, 9, 27, 81};
  bytes q;
  if (h < 15) {
    q = load_bytes(p + (h < 10 ? h % 2 * 16 : 32)) * power[h < 10 ? h / 2 : h - 10];
  } else {
    typedef uint8_t narrow __attribute__((vector_size(4)));
    const bytes powers = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    narrow four;
    __builtin_memcpy(&four, p + 48, 4);
    q = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3) * powers;
  }
  return __builtin_convertvector(__builtin_convertvector(q, shorts) * 3 >> 8, floats) - 1.0f;
}
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const float d = half(p + 52);
  *a = digits(p, 2 * g) * d;
  *b = digits(p, 2 * g + 1) * d;
}

#elif defined(TYPE_TQ2_0)
#define GROUPS 8
#define BLOCK_BYTES 66
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const float d = half(p + 64);
  const uint8_t *q = p + g / 4 * 32, shift = 2 * (g % 4);
  *a = of_chars((chars)(load_bytes(q) >> shift & 3) - 1) * d;
  *b = of_chars((chars)(load_bytes(q + 16) >> shift & 3) - 1) * d;
}

#elif defined(TYPE_Q1_0)
#define GROUPS 4
#define BLOCK_BYTES 18
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const float d = half(p);
  *a = of_chars((chars)(fifth_bit(p + 2 + g * 4) >> 3) - 1) * d;
  *b = of_chars((chars)(fifth_bit(p + 4 + g * 4) >> 3) - 1) * d;
}
#endif

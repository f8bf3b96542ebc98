/* The types whose blocks hold indices into a codebook (`codebooks.h`), as `types.h` says of the others: GROUPS groups of
 * 32 values in a block of BLOCK_BYTES, and `unpack`.
 *
 * An entry of a codebook is whole numbers of a byte; those of a group make one vector, which gets its signs before it
 * becomes floats. Times the scale each is exact in f32. */
typedef int8_t group __attribute__((vector_size(32)));
typedef u64 four_entries __attribute__((vector_size(32)));
typedef uint32_t eight_entries __attribute__((vector_size(32)));

#define GROUPS 8

INLINE uint32_t two_bytes(const uint8_t *p) {
  uint16_t v;
  __builtin_memcpy(&v, p, 2);
  return v;
}
INLINE uint32_t four_bytes(const uint8_t *p) {
  uint32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

#define FOUR_ENTRIES(a, b, c, d) (group)(four_entries){codebook[a], codebook[b], codebook[c], codebook[d]}

/* Where these instructions are there without AVX-512 they may be slow. */
#if defined(__BMI2__) && defined(__AVX512F__)
#define MOVES_BITS
#endif

/* The signs of 32 values of four times seven bits, eighth ones making their number even. */
INLINE uint32_t even_signs(uint32_t v) {
#if defined(MOVES_BITS)
  const uint32_t seven = __builtin_ia32_pdep_si(v, 0x7f7f7f7f);
#else
  const uint32_t seven = (v & 0x7f) | (v & 0x3f80) << 1 | (v & 0x1fc000) << 2 | (v & 0xfe00000) << 3;
#endif
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return seven | (odd & 0x01010101) << 7;
}

/* v, and -v where a bit of `signs` is set. */
INLINE group with_signs(group v, uint32_t signs) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  __asm__("vpsubb %1, %2, %0 %{%3%}" : "+v"(v) : "v"(v), "v"((group){0}), "Yk"(signs));
  return v;
#else
  typedef uint8_t narrow __attribute__((vector_size(4)));
  typedef uint8_t wide __attribute__((vector_size(32)));
  const wide bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                    1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  narrow four;
  __builtin_memcpy(&four, &signs, 4);
  const wide spread = __builtin_shufflevector(four, four, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2,
                                              2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const group negative = (group)((spread & bit) != 0);
  return (v ^ negative) - negative;
#endif
}

INLINE void scaled(group v, float left, float right, floats *a, floats *b) {
  *a = of_chars(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) * left;
  *b = of_chars(__builtin_shufflevector(v, v, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)) * right;
}

#if defined(TYPE_IQ2_XXS)
#define BLOCK_BYTES 66
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 8;
  const uint32_t last = four_bytes(q + 4);
  const float d = half(p) * 0.25f * (0.5f + (float)(int)(last >> 28));
  scaled(with_signs(FOUR_ENTRIES(q[0], q[1], q[2], q[3]), even_signs(last)), d, d, a, b);
}

#elif defined(TYPE_IQ2_XS)
#define BLOCK_BYTES 74
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 8, scale = p[66 + g];
  const float d = half(p) * 0.25f;
  const uint32_t i = two_bytes(q), j = two_bytes(q + 2), k = two_bytes(q + 4), l = two_bytes(q + 6);
#if defined(MOVES_BITS)
  u64 all;
  __builtin_memcpy(&all, q, 8);
  const uint32_t signs = even_signs((uint32_t)__builtin_ia32_pext_di(all, 0xfe00fe00fe00fe00));
#else
  const uint32_t signs = even_signs(i >> 9 | j >> 9 << 7 | k >> 9 << 14 | l >> 9 << 21);
#endif
  scaled(with_signs(FOUR_ENTRIES(i & 511, j & 511, k & 511, l & 511), signs), d * (0.5f + (float)(scale & 15)),
         d * (0.5f + (float)(scale >> 4)), a, b);
}

#elif defined(TYPE_IQ2_S)
#define BLOCK_BYTES 82
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 4, scale = p[74 + g];
  const uint32_t top = p[66 + g];
  const float d = half(p) * 0.25f;
  const group v = FOUR_ENTRIES(q[0] | (top << 8 & 768), q[1] | (top << 6 & 768), q[2] | (top << 4 & 768),
                               q[3] | (top << 2 & 768));
  scaled(with_signs(v, four_bytes(p + 34 + g * 4)), d * (0.5f + (float)(scale & 15)), d * (0.5f + (float)(scale >> 4)),
         a, b);
}

#elif defined(TYPE_IQ3_XXS)
#define BLOCK_BYTES 98
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 8;
  const uint32_t last = four_bytes(p + 66 + g * 4);
  const float d = half(p) * 0.5f * (0.5f + (float)(int)(last >> 28));
  const group v = (group)(eight_entries){codebook[q[0]], codebook[q[1]], codebook[q[2]], codebook[q[3]],
                                         codebook[q[4]], codebook[q[5]], codebook[q[6]], codebook[q[7]]};
  scaled(with_signs(v, even_signs(last)), d, d, a, b);
}

#elif defined(TYPE_IQ3_S)
#define BLOCK_BYTES 110
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 8;
  const uint32_t top = p[66 + g];
  const float d = half(p) * (float)(1 + 2 * (p[106 + g / 2] >> 4 * (g % 2) & 15));
#if defined(MOVES_BITS)
  u64 all;
  __builtin_memcpy(&all, q, 8);
  const u64 eight = 0x00ff00ff00ff00ff, ninth = 0x0100010001000100;
  const u64 index[2] = {__builtin_ia32_pdep_di(all, eight) | __builtin_ia32_pdep_di(top, ninth),
                        __builtin_ia32_pdep_di(all >> 32, eight) | __builtin_ia32_pdep_di(top >> 4, ninth)};
#define NINE(i) codebook[index[(i) / 4] >> 16 * ((i) % 4) & 511]
#else
#define NINE(i) codebook[q[i] | (top << (8 - (i)) & 256)]
#endif
  const group v = (group)(eight_entries){NINE(0), NINE(1), NINE(2), NINE(3), NINE(4), NINE(5), NINE(6), NINE(7)};
  scaled(with_signs(v, four_bytes(p + 74 + g * 4)), d, d, a, b);
}

#elif defined(TYPE_IQ1_S)
#define BLOCK_BYTES 50
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + 2 + g * 4;
  const uint32_t top = two_bytes(p + 34 + g * 2);
  const float d = half(p) * 0.125f * (float)(int)(2 * (top >> 12 & 7) + 1);
  const group v = FOUR_ENTRIES(q[0] | (top << 8 & 1792), q[1] | (top << 5 & 1792), q[2] | (top << 2 & 1792),
                               q[3] | (top >> 1 & 1792));
  scaled(v + (int8_t)(1 - (int)(top >> 14 & 2)), d, d, a, b);
}

#elif defined(TYPE_IQ1_M)
#define BLOCK_BYTES 56
INLINE void unpack(const uint8_t *p, int g, floats *a, floats *b) {
  const uint8_t *q = p + g * 4, *s = p + 48;
  const uint32_t top = two_bytes(p + 32 + g * 2), scale = two_bytes(s + g / 2 * 2) >> 6 * (g % 2);
  const uint8_t whole[2] = {s[1] >> 4 | (s[3] & 240), s[5] >> 4 | (s[7] & 240)};
  const float d = half(whole) * 0.125f;
  const group v = FOUR_ENTRIES(q[0] | (top << 8 & 1792), q[1] | (top << 4 & 1792), q[2] | (top & 1792),
                               q[3] | (top >> 4 & 1792));
  const uint32_t less = (top >> 3 & 1) | (top << 1 & 0x100) | (top << 5 & 0x10000) | (top << 9 & 0x1000000);
  const group offset = with_signs((group){0} + 1, less * 255);
  scaled(v + offset, d * (float)(int)(2 * (scale & 7) + 1), d * (float)(int)(2 * (scale >> 3 & 7) + 1), a, b);
}
#endif

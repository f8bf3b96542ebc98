/* The quantised types once more, as bytes for products of bytes: in blocks laid out by `pack.c` with quads, four
 * neighbouring bytes of one row stay together and those of sixteen rows make a vector, `quad(p, i)` being bytes i to
 * i + 3 of the sixteen blocks at p. Scales are those of `lanes.h`.
 *
 * `raw` gives columns 4j to 4j + 3 of group g, each a byte of what the weight is times its scale, plus OFFSET: without a
 * sign, as the processors' products of bytes want one side to be. */
typedef uint8_t quads __attribute__((vector_size(64), aligned(1)));

INLINE quads quad(const uint8_t *p, int i) { return *(const quads *)(p + i * LANES); }
INLINE quads cut(quads v, int shift, uint8_t mask) { return (quads)((words)v >> (uint32_t)shift) & mask; }

/* Bit 4j + k of each row's 32, as 16 or 0 in byte k. */
INLINE quads fifth(quads v, int j) {
  const words four = (words)v >> (uint32_t)(4 * j) & 15;
  return (quads)((four * 0x204081 & 0x1010101) << 4);
}

#if defined(TYPE_Q4_0)
#define OFFSET 8
INLINE quads raw(const uint8_t *p, int g, int j) { return cut(quad(p, 2 + j % 4 * 4), j / 4 * 4, 15); }

#elif defined(TYPE_Q4_1)
#define OFFSET 0
INLINE quads raw(const uint8_t *p, int g, int j) { return cut(quad(p, 4 + j % 4 * 4), j / 4 * 4, 15); }

#elif defined(TYPE_Q5_0)
#define OFFSET 16
INLINE quads raw(const uint8_t *p, int g, int j) {
  return cut(quad(p, 6 + j % 4 * 4), j / 4 * 4, 15) | fifth(quad(p, 2), j);
}

#elif defined(TYPE_Q5_1)
#define OFFSET 0
INLINE quads raw(const uint8_t *p, int g, int j) {
  return cut(quad(p, 8 + j % 4 * 4), j / 4 * 4, 15) | fifth(quad(p, 4), j);
}

#elif defined(TYPE_Q8_0)
#define OFFSET 128
INLINE quads raw(const uint8_t *p, int g, int j) { return quad(p, 2 + 4 * j) ^ 128; }

#elif defined(TYPE_Q2_K)
#define OFFSET 0
INLINE quads raw(const uint8_t *p, int g, int j) { return cut(quad(p, 16 + g / 4 * 32 + 4 * j), 2 * (g % 4), 3); }

#elif defined(TYPE_Q3_K)
#define OFFSET 4
INLINE quads raw(const uint8_t *p, int g, int j) {
  return cut(quad(p, 32 + g / 4 * 32 + 4 * j), 2 * (g % 4), 3) | cut(quad(p, 4 * j), g, 1) << 2;
}

#elif defined(TYPE_Q4_K)
#define OFFSET 0
INLINE quads raw(const uint8_t *p, int g, int j) { return cut(quad(p, 16 + g / 2 * 32 + 4 * j), g % 2 * 4, 15); }

#elif defined(TYPE_Q5_K)
#define OFFSET 0
INLINE quads raw(const uint8_t *p, int g, int j) {
  return cut(quad(p, 48 + g / 2 * 32 + 4 * j), g % 2 * 4, 15) | cut(quad(p, 16 + 4 * j), g, 1) << 4;
}

#elif defined(TYPE_Q6_K)
#define OFFSET 32
INLINE quads raw(const uint8_t *p, int g, int j) {
  const int k = g % 4, at = g / 4 * 64 + k % 2 * 32 + 4 * j, top = 128 + g / 4 * 32 + 4 * j;
  return cut(quad(p, at), k / 2 * 4, 15) | cut(quad(p, top), 2 * k, 3) << 4;
}
#endif

/* total[i] += the sum over k of u[4i + k] * x[k], exact. As assembly, because compilers' names for these instructions
 * differ by version. */
#if defined(__AVX512VNNI__)
INLINE ints dot(ints total, quads u, const int8_t *x) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(u), "m"(*(const int32_t *)x));
  return total;
}

#elif defined(__AVX2__)
/* As many bytes as one instruction takes. */
#if defined(__AVX512BW__)
#define PIECE 64
#else
#define PIECE 32
#endif
typedef uint8_t piece_bytes __attribute__((vector_size(PIECE)));
typedef int16_t piece_shorts __attribute__((vector_size(PIECE)));
typedef int32_t piece_ints __attribute__((vector_size(PIECE)));

#if defined(__AVXVNNI__)
INLINE piece_ints piece_dot(piece_ints total, piece_bytes u, piece_ints x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total) : "x"(u), "x"(x));
  return total;
}
#else
INLINE piece_ints fours(piece_bytes u, piece_ints x) {
  const piece_shorts ones = (piece_shorts){0} + 1;
  piece_shorts two;
  piece_ints four;
  __asm__("vpmaddubsw %2, %1, %0" : "=v"(two) : "v"(u), "v"(x));
  __asm__("vpmaddwd %2, %1, %0" : "=v"(four) : "v"(two), "v"(ones));
  return four;
}
INLINE piece_ints piece_dot(piece_ints total, piece_bytes u, piece_ints x) {
#if OFFSET == 128 /* two products of 255 * 127 do not fit into 16 bits, of 127 * 127 or 128 * 127 they do */
  return total + fours(u & 127, x) + fours(u & 128, x);
#else
  return total + fours(u, x);
#endif
}
#endif
INLINE ints dot(ints total, quads u, const int8_t *x) {
  union { quads whole; piece_bytes piece[64 / PIECE]; } weights = {u};
  union { ints whole; piece_ints piece[64 / PIECE]; } made = {total};
  const piece_ints four = (piece_ints){0} + *(const int32_t *)x;
#pragma clang loop unroll(full)
  for (int i = 0; i < 64 / PIECE; i++) made.piece[i] = piece_dot(made.piece[i], weights.piece[i], four);
  return made.whole;
}

#else
INLINE ints dot(ints total, quads u, const int8_t *x) {
#pragma clang loop unroll(full)
  for (int k = 0; k < 4; k++) total += (ints)((words)u >> (uint32_t)(8 * k) & 255) * (int32_t)x[k];
  return total;
}
#endif

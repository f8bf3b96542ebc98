/* Shared by all kernels of this folder: one source is this file, a type's block (for weights), and one kernel.
 *
 * Every kernel is `void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts)`: `a` holds its arguments
 * (addresses and counts), parts [part, end) of `parts` are the rows or heads to do, `thread` says whose scratch memory
 * to use. It must be the only function that is not inlined, because the loader calls the first byte of the code. No
 * libc: everything here is plain C with Clang's vectors of sixteen, which become what the processor has. */
#include <stdint.h>

typedef uint64_t u64;
typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t words __attribute__((vector_size(64), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1)));
typedef int8_t chars __attribute__((vector_size(16), aligned(1)));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(1)));

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

INLINE floats load(const float *p) { return *(const floats *)p; }
INLINE void store(float *p, floats v) { *(floats *)p = v; }
INLINE bytes load_bytes(const uint8_t *p) { return *(const bytes *)p; }
INLINE floats of_bytes(bytes v) { return __builtin_convertvector(v, floats); }
INLINE floats of_chars(chars v) { return __builtin_convertvector(v, floats); }

/* table[q[i]], q being below 16. */
INLINE chars of_sixteen(chars table, bytes q) {
#if defined(__SSSE3__)
  typedef char narrow __attribute__((vector_size(16)));
  return (chars)__builtin_ia32_pshufb128((narrow)table, (narrow)q);
#else
  chars result;
  for (int i = 0; i < 16; i++) result[i] = table[q[i]];
  return result;
#endif
}

/* The non-linear 4-bit values of IQ4_NL and IQ4_XS. */
INLINE chars nonlinear(bytes q) {
  return of_sixteen((chars){-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, q);
}

/* Twice the values of MXFP4 and NVFP4: a sign, two bits of an exponent, one of a fraction. */
INLINE chars e2m1(bytes q) {
  return of_sixteen((chars){0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, q);
}

/* f16 to f32 by bits: exact for all finite values, and needs no processor feature. */
INLINE float half_bits(uint32_t h) {
  union { uint32_t u; float f; } magnitude = {(h & 0x7fff) << 13}, power = {0x77800000}; /* 2^112 */
  union { float f; uint32_t u; } scaled = {magnitude.f * power.f};
  union { uint32_t u; float f; } result = {scaled.u | (h & 0x8000) << 16};
  return result.f;
}

INLINE float half(const uint8_t *p) {
#if defined(__F16C__) || defined(__aarch64__)
  __fp16 h;
  __builtin_memcpy(&h, p, 2);
  return (float)h;
#else
  return half_bits((uint32_t)p[0] | (uint32_t)p[1] << 8);
#endif
}

/* Rounded to the nearest f16, even where two are as near; for magnitudes below 65520. */
INLINE floats to_half(floats x) {
  const words bits = (words)x, magnitude = bits & 0x7fffffff;
  const words normal = (bits + 0xfff + ((bits >> 13) & 1)) & ~(words){0} << 13;
  const floats small = ((floats)magnitude + 0.75f) - 0.75f; /* multiples of 2^-24, below 2^-14 */
  const ints tiny = (ints)magnitude < 0x38800000;
  return (floats)(((words)small & (words)tiny) | (normal & ~(words)tiny) | (bits & 0x80000000));
}

/* Sums the lanes in a fixed order, so that every caller gets the same bits. */
INLINE float sum(floats v) {
  typedef float eight __attribute__((vector_size(32)));
  typedef float four __attribute__((vector_size(16)));
  eight a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  four b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

/* What `combine` makes of the lanes of each of sixteen vectors, in the order of `sum`: lane 4t + k is of v[4k + t]. */
#define ACROSS(name, vector, combine)                                                                       \
  INLINE vector name(const vector *v) {                                                                     \
    vector half[8], quarter[4], pair[2];                                                                    \
    for (int i = 0; i < 8; i++)                                                                             \
      half[i] = combine(BOTH(v, i, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),                 \
                        BOTH(v, i, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));          \
    for (int i = 0; i < 4; i++)                                                                             \
      quarter[i] = combine(BOTH(half, i, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),         \
                           BOTH(half, i, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));      \
    for (int i = 0; i < 2; i++)                                                                             \
      pair[i] = combine(BOTH(quarter, i, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),         \
                        BOTH(quarter, i, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));      \
    return combine(BOTH(pair, 0, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),                \
                   BOTH(pair, 0, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));               \
  }
#define BOTH(v, i, ...) __builtin_shufflevector((v)[2 * (i)], (v)[2 * (i) + 1], __VA_ARGS__)
#define ADDED(a, b) ((a) + (b))
ACROSS(sums, floats, ADDED)

/* exp for -87.3 <= x <= 88.3: range reduction by multiples of ln 2, then the polynomial of Cephes' expf. */
INLINE floats exponential_within(floats x) {
  floats n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ints exponent = (__builtin_convertvector(n, ints) + 127) << 23;
  return p * (floats)exponent;
}

/* exp to about 1 ulp, 0 below -87.3 and 2e38 above 88.3; a NaN goes through, both comparisons being false. */
INLINE floats exponential(floats x) {
  const floats least = (floats){0} - 87.3f, most = (floats){0} + 88.3f;
  const ints low = x < least, high = x > most;
  x = (floats)(((ints)x & ~(low | high)) | ((ints)least & low) | ((ints)most & high));
  return (floats)((ints)exponential_within(x) & ~low);
}

/* The same for what is not above 88.3. */
INLINE floats exponential_below(floats x) {
  const floats least = (floats){0} - 87.3f;
  const ints low = x < least;
  x = (floats)(((ints)x & ~low) | ((ints)least & low));
  return (floats)((ints)exponential_within(x) & ~low);
}

/* cap * tanh(x / cap), never beyond the cap. Near 0 the polynomial of Cephes' tanhf: of 1 - 2 / (exp(2y) + 1) only the
   cap's last bits would be left there, which are all of a logit that is small beside its cap. */
INLINE floats capped(floats x, float cap) {
  const floats y = x * (1.0f / cap), z = y * y;
  floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const floats near = p * z * y + y, far = 1.0f - 2.0f / (exponential(y * 2.0f) + 1.0f);
  const ints small = z < 0.390625f;
  return cap * (floats)(((ints)near & small) | ((ints)far & ~small));
}

/* Asks for share `index` of `count` of the memory that is read next, while others are computed with. */
INLINE void fetch_share(const uint8_t *p, u64 size, u64 index, u64 count) {
  const u64 lines = (size + 63) / 64;
  for (u64 i = lines * index / count; i < lines * (index + 1) / count; i++) __builtin_prefetch(p + i * 64, 0, 2);
}

/* Parts [part, end) of `count` units: [*first, *last). */
INLINE void share(u64 count, u64 part, u64 end, u64 parts, u64 *first, u64 *last) {
  *first = count * part / parts;
  *last = count * end / parts;
}

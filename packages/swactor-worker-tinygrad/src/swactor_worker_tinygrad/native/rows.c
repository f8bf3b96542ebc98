/* Embedding: out[i] = row ids[i] of the table, unpacked, times a scale. a: out, table, ids (uint32), count, columns,
 * scale (the bits of an f32; 0: none). */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  float *out = (float *)a[0];
  const uint8_t *table = (const uint8_t *)a[1];
  const uint32_t *ids = (const uint32_t *)a[2];
  const u64 columns = a[4];
  union { uint32_t u; float f; } scale = {(uint32_t)a[5]};
  u64 first, last;
  share(a[3], part, end, parts, &first, &last);
  for (u64 i = first; i < last; i++) {
    float *to = out + i * columns, *const row = to;
#ifdef VALUE_BYTES
    const uint8_t *from = table + ids[i] * columns * VALUE_BYTES;
    for (u64 c = 0; c < columns; c++) to[c] = one(from + c * VALUE_BYTES);
#else
    const u64 blocks = columns / (32 * GROUPS);
    const uint8_t *from = table + ids[i] * blocks * BLOCK_BYTES;
    for (u64 b = 0; b < blocks; b++, from += BLOCK_BYTES)
#pragma clang loop unroll(full)
      for (int g = 0; g < GROUPS; g++, to += 32) {
        floats left, right;
        unpack(from, g, &left, &right);
        store(to, left);
        store(to + LANES, right);
      }
#endif
    if (a[5])
      for (u64 c = 0; c < columns; c++) row[c] *= scale.f;
  }
}

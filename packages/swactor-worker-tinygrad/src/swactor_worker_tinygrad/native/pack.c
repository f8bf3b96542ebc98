/* Lays the blocks of sixteen rows side by side: byte i of a block of row r becomes lane r % 16 of the block's vector
 * i, so that one vector holds the same byte of sixteen rows. Bytes `from` to `to` of a block are laid by fours instead:
 * bytes i to i + 3 of sixteen rows, those of a row together, take the place of vectors i to i + 3. Rows that are missing
 * at the end are zero.
 * a: out (as many bytes as the rows rounded up to sixteen), rows as stored, rows, bytes of a row, bytes of a block,
 * from, to. */

/* Four bytes of each of sixteen rows. */
INLINE words gathered(const uint8_t *first, u64 row_bytes) {
  words made;
  for (u64 lane = 0; lane < LANES; lane++) {
    uint32_t four;
    __builtin_memcpy(&four, first + lane * row_bytes, 4);
    made[lane] = four;
  }
  return made;
}

/* One block of sixteen rows that are all there. */
INLINE void whole(uint8_t *made, const uint8_t *block, u64 row_bytes, u64 block_bytes, u64 from, u64 to) {
  for (u64 i = 0; i < block_bytes;) {
    const u64 end = i < from ? from : i < to ? to : block_bytes;
    for (; i + 4 <= end; i += 4, made += 4 * LANES) {
      const words four = gathered(block + i, row_bytes);
      if (i >= from && i < to)
        *(words *)made = four;
      else
        for (u64 k = 0; k < 4; k++) *(bytes *)(made + k * LANES) = __builtin_convertvector(four >> 8 * k & 255, bytes);
    }
    for (; i < end; i++, made += LANES)
      for (u64 lane = 0; lane < LANES; lane++) made[lane] = block[lane * row_bytes + i];
  }
}

/* The same, of the last `here` rows. */
INLINE void partial(uint8_t *made, const uint8_t *block, u64 row_bytes, u64 block_bytes, u64 from, u64 to, u64 here) {
  for (u64 i = 0; i < block_bytes;) {
    const u64 wide = i >= from && i < to ? 4 : 1;
    for (u64 lane = 0; lane < LANES; lane++, made += wide)
      for (u64 k = 0; k < wide; k++) made[k] = lane < here ? block[lane * row_bytes + i + k] : 0;
    i += wide;
  }
}

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const u64 rows = a[2], row_bytes = a[3], block_bytes = a[4], from = a[5], to = a[6];
  u64 first, last;
  share((rows + LANES - 1) / LANES, part, end, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const uint8_t *stored = (const uint8_t *)a[1] + unit * LANES * row_bytes;
    uint8_t *made = (uint8_t *)a[0] + unit * LANES * row_bytes;
    const u64 here = rows - unit * LANES < LANES ? rows - unit * LANES : LANES;
    for (u64 at = 0; at < row_bytes; at += block_bytes, made += LANES * block_bytes) {
      const uint8_t *ahead = stored + LANES * (row_bytes + at);
      for (u64 i = 0; i < LANES * block_bytes; i += 64) __builtin_prefetch(ahead + i);
      if (here == LANES)
        whole(made, stored + at, row_bytes, block_bytes, from, to);
      else
        partial(made, stored + at, row_bytes, block_bytes, from, to, here);
    }
  }
}

/* Lays the blocks of sixteen rows side by side: byte i of a block of row r becomes lane r % 16 of the block's vector
 * i, so that one vector holds the same byte of sixteen rows. Bytes `from` to `to` of a block are laid by fours instead:
 * bytes i to i + 3 of sixteen rows, those of a row together, take the place of vectors i to i + 3. Rows that are missing
 * at the end are zero.
 * a: out (as many bytes as the rows rounded up to sixteen), rows as stored, rows, bytes of a row, bytes of a block,
 * from, to. */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const u64 rows = a[2], row_bytes = a[3], block_bytes = a[4], from = a[5], to = a[6];
  u64 first, last;
  share((rows + LANES - 1) / LANES, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const uint8_t *stored = (const uint8_t *)a[1] + unit * LANES * row_bytes;
    uint8_t *made = (uint8_t *)a[0] + unit * LANES * row_bytes;
    const u64 here = rows - unit * LANES < LANES ? rows - unit * LANES : LANES;
    for (u64 at = 0; at < row_bytes; at += block_bytes)
      for (u64 i = 0; i < block_bytes;) {
        const u64 wide = i >= from && i < to ? 4 : 1;
        for (u64 lane = 0; lane < LANES; lane++, made += wide) {
          const uint8_t *byte = stored + lane * row_bytes + at + i;
          for (u64 k = 0; k < wide; k++) made[k] = lane < here ? byte[k] : 0;
        }
        i += wide;
      }
  }
}

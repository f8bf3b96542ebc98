/* Lays the blocks of sixteen rows side by side: byte i of a block of row r becomes lane r % 16 of the block's vector
 * i, so that one vector holds the same byte of sixteen rows. Rows that are missing at the end are zero.
 * a: out (as many bytes as the rows rounded up to sixteen), rows as stored, rows, bytes of a row, bytes of a block. */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const u64 rows = a[2], row_bytes = a[3], block_bytes = a[4];
  u64 first, last;
  share((rows + LANES - 1) / LANES, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const uint8_t *from = (const uint8_t *)a[1] + unit * LANES * row_bytes;
    uint8_t *to = (uint8_t *)a[0] + unit * LANES * row_bytes;
    const u64 here = rows - unit * LANES < LANES ? rows - unit * LANES : LANES;
    for (u64 at = 0; at < row_bytes; at += block_bytes)
      for (u64 i = at; i < at + block_bytes; i++, to += LANES)
        for (u64 lane = 0; lane < LANES; lane++) to[lane] = lane < here ? from[lane * row_bytes + i] : 0;
  }
}

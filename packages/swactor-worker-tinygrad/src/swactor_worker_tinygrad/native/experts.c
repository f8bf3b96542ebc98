/* Each row's own experts: out[t][s] = weight of expert chosen[t][s] times x[t], or with `shares`, x having a row for
 * each slot, out[t] = residual[t] + sum over s of shares[t][s] * (weight of expert chosen[t][s] times x[t][s]).
 *
 * a: out, x, weight, rows and columns of one expert, tokens, used (slots of a token), chosen (tokens, used; u64),
 * shares (tokens, used) or 0, residual or 0. */
void kernel(const u64 *a, u64 thread, u64 part, u64 parts) {
  const u64 rows = a[3], columns = a[4], tokens = a[5], used = a[6], panels = (rows + PANEL - 1) / PANEL;
  const float *shares = (const float *)a[8], *residual = (const float *)a[9];
  const u64 *chosen = (const u64 *)a[7];
  const u64 expert_bytes = rows * row_bytes(columns), slots = shares ? 1 : used;
  float made[PANEL];
  u64 first, last;
  share(tokens * slots * panels, part, parts, &first, &last);
  for (u64 unit = first; unit < last; unit++) {
    const u64 place = unit / panels, row = unit % panels * PANEL, count = rows - row < PANEL ? rows - row : PANEL;
    float *out = (float *)a[0] + place * rows + row, total[PANEL];
    for (u64 k = 0; k < count; k++) total[k] = residual ? residual[place * rows + row + k] : 0;
    for (u64 s = 0; s < (shares ? used : 1); s++) {
      const u64 slot = shares ? place * used + s : place;
      const float *x = (const float *)a[1] + (shares ? slot : place / used) * columns;
      const uint8_t *weight = (const uint8_t *)a[2] + chosen[slot] * expert_bytes + row * row_bytes(columns);
      const struct product p = {made, x, weight, count, columns, 1, count, 0, 0};
      if (count == PANEL) one_token(&p, 0, PANEL);
      else
        for (u64 k = 0; k < count; k++) one_token(&p, k, 1);
      for (u64 k = 0; k < count; k++) total[k] += shares ? made[k] * shares[slot] : made[k];
    }
    for (u64 k = 0; k < count; k++) out[k] = total[k];
  }
}

/* Each row's own experts: out[t][s] = weight of expert chosen[t][s] times x[t], or with `shares`, x having a row for
 * each slot, out[t] = residual[t] + sum over s of shares[t][s] * (weight of expert chosen[t][s] times x[t][s]).
 *
 * One row goes slot by slot. Many rows go expert by expert, in the order that `group.c` has made: PANEL rows of an
 * expert are read and unpacked once for all of its slots. Both add up in the same order and give the same bits.
 *
 * a: out, x, weight, rows and columns of one expert, tokens, used (slots of a token), chosen (tokens, used; u64),
 * shares (tokens, used) or 0, residual or 0, order or 0, starts, experts, scratch (PANEL * (columns + tokens * used)
 * floats a thread); without an order the last three are not read. */
#define TILE 4

struct mixture {
  float *out;
  const float *x;
  const uint8_t *weight;
  u64 rows, columns, tokens, used;
  const u64 *chosen;
  const float *shares, *residual;
  const u64 *order, *starts;
  u64 experts;
};

/* `made` of `tokens` slots, each with its own row of x, times PANEL rows that lie unpacked in `panel`. */
INLINE void tile(const struct product *p, const float *panel, const float *const *x, float *const *made, int tokens) {
  floats total[PANEL][TILE];
  for (int k = 0; k < PANEL; k++)
    for (int t = 0; t < tokens; t++) total[k][t] = (floats){0};
  for (u64 c = 0; c < p->columns / GROUP_VALUES * GROUP_VALUES; c += LANES) {
#pragma clang loop unroll(full)
    for (int k = 0; k < PANEL; k++) {
      floats w = load(panel + k * p->columns + c);
#pragma clang loop unroll(full)
      for (int t = 0; t < tokens; t++) total[k][t] += w * load(x[t] + c);
    }
  }
  for (int k = 0; k < PANEL; k++)
    for (int t = 0; t < tokens; t++) made[t][k] = sum(total[k][t]) + rest(p, k, x[t]);
}

INLINE void unpack_panel(const struct product *p, float *values) {
  const u64 stride = row_bytes(p->columns), blocks = p->columns / (GROUP_VALUES * GROUPS);
  for (int k = 0; k < PANEL; k++) {
    const uint8_t *w = p->weight + k * stride;
    float *value = values + k * p->columns;
    for (u64 b = 0; b < blocks; b++, w += BLOCK_BYTES) {
#pragma clang loop unroll(full)
      for (int g = 0; g < GROUPS; g++, value += GROUP_VALUES) {
        floats a, c;
        unpack(w, g, &a, &c);
        store(value, a);
        store(value + LANES, c);
      }
    }
  }
}

/* PANEL rows, or the last few, of every expert that has slots, times x: `made` is (slots, PANEL). */
INLINE void panel_of_all(const struct mixture *m, u64 row, u64 count, float *panel, float *made) {
  const u64 stride = row_bytes(m->columns), expert_bytes = m->rows * stride;
  for (u64 e = 0; e < m->experts; e++) {
    const u64 *slots = m->order + m->starts[e], many = m->starts[e + 1] - m->starts[e];
    if (!many) continue;
    struct product p = {0, 0, m->weight + e * expert_bytes + row * stride, count, m->columns, 1, count, 0, 0};
    u64 s = 0;
    if (count == PANEL && many > 1) {
      const uint8_t *next = p.weight;
      for (u64 after = e + 1; after < m->experts; after++)
        if (m->starts[after + 1] > m->starts[after]) {
          next = m->weight + after * expert_bytes + row * stride;
          break;
        }
      unpack_panel(&p, panel);
      while (s < many) {
        const float *x[TILE];
        float *to[TILE];
        const u64 left = many - s < TILE ? 1 : TILE;
        for (u64 t = 0; t < left; t++) {
          const u64 slot = slots[s + t];
          x[t] = m->x + (m->shares ? slot : slot / m->used) * m->columns;
          to[t] = made + slot * PANEL;
        }
        if (s == 0) fetch_share(next, PANEL * stride, 0, 1);
        if (left == TILE) tile(&p, panel, x, to, TILE);
        else tile(&p, panel, x, to, 1);
        s += left;
      }
    }
    for (; s < many; s++) {
      p.out = made + slots[s] * PANEL;
      p.x = m->x + (m->shares ? slots[s] : slots[s] / m->used) * m->columns;
      if (count == PANEL) one_token(&p, 0, PANEL);
      else
        for (u64 k = 0; k < count; k++) one_token(&p, k, 1);
    }
  }
}

/* Apart from the way of one row, which its code would slow down; behind `kernel`, with which the code begins. */
static __attribute__((noinline)) void by_expert(const struct mixture *m, float *panel, u64 part, u64 end, u64 parts);

void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  if (a[10]) {
    const struct mixture m = {(float *)a[0],       (const float *)a[1], (const uint8_t *)a[2], a[3],
                              a[4],                a[5],                a[6],                  (const u64 *)a[7],
                              (const float *)a[8], (const float *)a[9], (const u64 *)a[10],    (const u64 *)a[11],
                              a[12]};
    by_expert(&m, (float *)a[13] + thread * PANEL * (m.columns + m.tokens * m.used), part, end, parts);
    return;
  }
  const u64 rows = a[3], columns = a[4], tokens = a[5], used = a[6], panels = (rows + PANEL - 1) / PANEL;
  const float *shares = (const float *)a[8], *residual = (const float *)a[9];
  const u64 *chosen = (const u64 *)a[7];
  const u64 expert_bytes = rows * row_bytes(columns), slots = shares ? 1 : used;
  float made[PANEL];
  u64 first, last;
  share(tokens * slots * panels, part, end, parts, &first, &last);
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

static void by_expert(const struct mixture *m, float *panel, u64 part, u64 end, u64 parts) {
  float *made = panel + PANEL * m->columns;
  const u64 taken = m->shares ? m->used : 1, places = m->tokens * m->used / taken;
  u64 first, last;
  share((m->rows + PANEL - 1) / PANEL, part, end, parts, &first, &last);
  for (u64 row = first * PANEL; row < last * PANEL && row < m->rows; row += PANEL) {
    const u64 count = m->rows - row < PANEL ? m->rows - row : PANEL;
    panel_of_all(m, row, count, panel, made);
    for (u64 place = 0; place < places; place++)
      for (u64 k = 0; k < count; k++) {
        const u64 at = place * m->rows + row + k;
        float total = m->residual ? m->residual[at] : 0;
        for (u64 s = 0; s < taken; s++) {
          const u64 slot = place * taken + s;
          total += m->shares ? made[slot * PANEL + k] * m->shares[slot] : made[slot * PANEL + k];
        }
        m->out[at] = total;
      }
  }
}

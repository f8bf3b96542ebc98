/* Chooses each row's experts: those with the greatest softmax of the scores, the lower index first where two are
 * equal; their shares add up to 1. a: scores (tokens, experts; overwritten), chosen (tokens, used; u64), shares (tokens,
 * used), tokens, experts, used. */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const u64 experts = a[4], used = a[5];
  u64 first, last;
  share(a[3], part, end, parts, &first, &last);
  for (u64 t = first; t < last; t++) {
    float *scores = (float *)a[0] + t * experts, *shares = (float *)a[2] + t * used;
    u64 *chosen = (u64 *)a[1] + t * used;
    float top = scores[0], whole = 0, taken = 0;
    for (u64 e = 1; e < experts; e++) top = scores[e] > top ? scores[e] : top;
    for (u64 e = 0; e < experts; e++) {
      const floats wide = {scores[e] - top};
      scores[e] = exponential(wide)[0];
      whole += scores[e];
    }
    for (u64 s = 0; s < used; s++) {
      u64 best = 0;
      for (u64 e = 1; e < experts; e++)
        if (!(scores[best] >= scores[e])) best = e;
      chosen[s] = best;
      shares[s] = scores[best] / whole;
      taken += shares[s];
      scores[best] = -1;
    }
    taken = taken < 6.103515625e-5f ? 6.103515625e-5f : taken; /* as llama.cpp keeps it from zero */
    for (u64 s = 0; s < used; s++) shares[s] /= taken;
  }
}

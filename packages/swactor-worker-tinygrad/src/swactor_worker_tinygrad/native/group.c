/* Puts the slots of a chunk in order of their experts: starts[e] to starts[e + 1] of `order` are those of expert e, by
 * their places (token * used + slot), the lower first. In one part.
 *
 * a: chosen (slots; u64), order (slots; u64), starts (experts + 1; u64), slots, experts. */
void kernel(const u64 *a, u64 thread, u64 part, u64 end, u64 parts) {
  const u64 *chosen = (const u64 *)a[0], slots = a[3], experts = a[4];
  u64 *order = (u64 *)a[1], *starts = (u64 *)a[2];
  for (u64 e = 0; e <= experts; e++) starts[e] = 0;
  for (u64 s = 0; s < slots; s++) starts[chosen[s] + 1]++;
  for (u64 e = 0; e < experts; e++) starts[e + 1] += starts[e];
  for (u64 s = 0; s < slots; s++) order[starts[chosen[s]]++] = s;
  for (u64 e = experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

/* Runs a list of kernels, each cut into parts that the threads of a team take as they come.
 *
 * Thread 0 opens one kernel after the other; any thread takes the next part of the open one until none is left.
 * Nobody waits for a thread that has taken nothing, so a helper that the system keeps off its core costs nothing.
 *
 * `ticket` is (number of the kernel since the start) * 2^16 + next part. Thread 0 closes it (part 0xffff) before it
 * changes `parts` and `entry`; a helper that has seen the new `parts` therefore cannot take from the old ticket,
 * and one that has taken a part knows that `entry` is the one it saw, and that its list lives until it is done.
 *
 * a: entries (address of the kernel, parts, then 18 arguments each), how many, address of the team. */
#define ENTRY_WORDS 20
#define CLOSED 0xffff
#define SPINS 2000

struct team {
  u64 ticket, entry, parts, done, active;
  int (*give_way)(void);
};
typedef void (*work)(const u64 *, u64, u64, u64);

INLINE void wait_a_moment(uint32_t spin, const struct team *team) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  /* on a busy machine, let the thread that we wait for have the core */
  if (spin > SPINS) team->give_way();
}

/* Takes and does one part of the open kernel; 0 when there is none. */
INLINE int take(struct team *team, u64 thread) {
  u64 ticket = __atomic_load_n(&team->ticket, __ATOMIC_ACQUIRE);
  const u64 part = ticket & CLOSED, parts = __atomic_load_n(&team->parts, __ATOMIC_ACQUIRE);
  const u64 *entry = (const u64 *)__atomic_load_n(&team->entry, __ATOMIC_RELAXED);
  if (part >= parts) return 0;
  if (!__atomic_compare_exchange_n(&team->ticket, &ticket, ticket + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
    return 1;
  ((work)entry[0])(entry + 2, thread, part, parts);
  __atomic_add_fetch(&team->done, 1, __ATOMIC_RELEASE);
  return 1;
}

void kernel(const u64 *a, u64 thread) {
  struct team *team = (struct team *)a[2];
  if (thread) {
    for (uint32_t spin = 0; __atomic_load_n(&team->active, __ATOMIC_ACQUIRE); spin++) {
      if (take(team, thread)) spin = 0;
      else wait_a_moment(spin, team);
    }
    return;
  }
  const u64 *entry = (const u64 *)a[0];
  u64 number = team->ticket >> 16;
  for (u64 i = 0; i < a[1]; i++, entry += ENTRY_WORDS) {
    const u64 parts = entry[1];
    if (parts == 1) {
      ((work)entry[0])(entry + 2, 0, 0, 1);
      continue;
    }
    number++;
    __atomic_store_n(&team->entry, (u64)entry, __ATOMIC_RELAXED);
    __atomic_store_n(&team->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->parts, parts, __ATOMIC_RELEASE);
    __atomic_store_n(&team->ticket, number << 16, __ATOMIC_RELEASE);
    while (take(team, 0)) {}
    for (uint32_t spin = 0; __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) < parts; spin++)
      wait_a_moment(spin, team);
    __atomic_store_n(&team->ticket, number << 16 | CLOSED, __ATOMIC_RELEASE);
  }
}

/* Runs a list of kernels, each cut into parts that the threads of a team share.
 *
 * Between cores the way of a cache line takes up to half a microsecond, as long as the work of some parts: threads meet
 * as seldom as can be, and each writes to lines of its own. Thread 0 opens one group of kernels after the other. Every
 * thread has a share of an open group's parts; who has done its own, and has waited for a moment, takes parts from the
 * back of the others'. So nobody waits for a thread that has taken nothing: a helper that the system keeps off its core
 * costs nothing.
 *
 * A thread takes its share at once, as each start costs what a part does. After thread 0 had to wait for long, as on
 * cores of different speed, all take a half of what is left at a time for a while.
 *
 * A group's kernels are cut into as many parts, and who takes a part does it for each kernel in turn: a kernel may read
 * what the kernels before it in the group wrote in the same part, and nothing else that they write.
 *
 * `open` is (number of the group since the start) * 2^10 + parts, a member's `ticket` is (number of the group that it
 * was last used for) * 2^20 + first part of the share that is left * 2^10 + end of it. A ticket never comes again, and a
 * group is closed only when all its parts are done, those of every share: a thread that has taken a part of group n
 * knows that n is open, that `entry` is its, and that its list lives until that part is done. `done` counts the parts
 * that the member has done since the start.
 *
 * Between lists helpers look for the next for some microseconds, then sleep in the system until `state` changes.
 *
 * a: entries (address of the kernel, kernels of the group that it begins, parts, then 18 arguments each), how many,
 * address of the team, and ALONE, CALL (the helpers) or END (of the helpers, without a list). */
#define ENTRY_WORDS 21
/* so that 44 bits count groups, which lasts for years of steps without a pause */
#define PART_BITS 10
#define PART_MASK ((1 << PART_BITS) - 1)
#define ALONE 0
#define CALL 1
#define END 2
#define IDLE 0
#define RUNNING 1
#define ENDED 2
/* in groups */
#define CAREFUL 64
/* in pauses */
#define GRACE 40
#define LATE 400
#define SPINS 2000
#define IDLE_SPINS 1000
#if defined(__x86_64__)
#define SYSTEM_FUTEX 202
#else
#define SYSTEM_FUTEX 98
#endif
#define FUTEX_WAIT_PRIVATE 128
#define FUTEX_WAKE_PRIVATE 129

/* Processors fetch lines in pairs. */
#define APART __attribute__((aligned(128)))
struct member {
  APART u64 ticket;
  APART u64 done;
};
struct team {
  APART u64 open;
  const u64 *entry;
  u64 careful;
  APART uint32_t state;
  uint32_t sleeping;
  APART u64 threads;
  int (*give_way)(void);
  long (*system)(long, ...);
  struct member members[];
};
typedef void (*work)(const u64 *, u64, u64, u64, u64);

INLINE void pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

INLINE void wait_a_moment(uint32_t spin, const struct team *team) {
  pause();
  /* on a busy machine, let the thread that we wait for have the core */
  if (spin > SPINS) team->give_way();
}

INLINE void wake(struct team *team, int count) { team->system(SYSTEM_FUTEX, &team->state, FUTEX_WAKE_PRIVATE, count); }

/* Parts [part, end) of each kernel of a group. */
INLINE void do_parts(const u64 *entry, u64 thread, u64 part, u64 end) {
  for (u64 left = entry[1], parts = entry[2]; left; left--, entry += ENTRY_WORDS)
    ((work)entry[0])(entry + 3, thread, part, end, parts);
}

/* Takes and does what is left of one member's share of the group; returns how many parts. */
INLINE u64 do_share(struct team *team, u64 open, u64 owner, u64 thread) {
  u64 *place = &team->members[owner].ticket, first, last, taken = 0, ticket = __atomic_load_n(place, __ATOMIC_ACQUIRE);
  const u64 number = open >> PART_BITS, parts = open & PART_MASK;
  const int careful = number < __atomic_load_n(&team->careful, __ATOMIC_RELAXED);
  share(parts, team->threads - 1 - owner, team->threads - owner, team->threads, &first, &last);
  for (;;) {
    const u64 used = ticket >> 2 * PART_BITS;
    u64 from = first, to = last;
    if (used == number) from = ticket >> PART_BITS & PART_MASK, to = ticket & PART_MASK;
    if (used > number || from >= to) return taken;
    const u64 size = to - from, count = owner == thread && !careful ? size : size - size / 2;
    const u64 part = owner == thread ? from : to - count;
    const u64 rest = owner == thread ? (from + count) << PART_BITS | to : from << PART_BITS | part;
    const u64 next = number << 2 * PART_BITS | rest;
    if (!__atomic_compare_exchange_n(place, &ticket, next, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
    do_parts(team->entry, thread, part, part + count);
    taken += count;
    ticket = owner == thread ? __atomic_load_n(place, __ATOMIC_ACQUIRE) : next;
  }
}

INLINE u64 do_others(struct team *team, u64 open, u64 thread) {
  u64 taken = 0;
  for (u64 i = 1, owner = thread; i < team->threads; i++) {
    owner = owner + 1 < team->threads ? owner + 1 : 0;
    taken += do_share(team, open, owner, thread);
  }
  return taken;
}

INLINE void help(struct team *team, u64 thread) {
  struct member *own = team->members + thread;
  u64 done = own->done, seen = 0;
  for (uint32_t spin = 0;; spin++) {
    const uint32_t state = __atomic_load_n(&team->state, __ATOMIC_ACQUIRE);
    if (state == ENDED) return;
    if (state == RUNNING) {
      const u64 open = __atomic_load_n(&team->open, __ATOMIC_ACQUIRE);
      u64 taken = 0;
      if (open != seen) taken = do_share(team, open, thread, thread), seen = open, spin = 0;
      else if (spin == GRACE) taken = do_others(team, open, thread);
      else wait_a_moment(spin, team);
      if (taken) __atomic_store_n(&own->done, done += taken, __ATOMIC_RELEASE);
    } else if (spin < IDLE_SPINS) {
      pause();
    } else {
      __atomic_add_fetch(&team->sleeping, 1, __ATOMIC_SEQ_CST);
      team->system(SYSTEM_FUTEX, &team->state, FUTEX_WAIT_PRIVATE, IDLE, (void *)0);
      /* thread 0 has woken one: each wakes two others; after the list none, or they would go on for ever */
      if (__atomic_sub_fetch(&team->sleeping, 1, __ATOMIC_SEQ_CST) &&
          __atomic_load_n(&team->state, __ATOMIC_SEQ_CST) == RUNNING)
        wake(team, 2);
      spin = 0;
    }
  }
}

INLINE u64 done_by_helpers(const struct team *team) {
  u64 done = 0;
  for (u64 i = 1; i < team->threads; i++) done += __atomic_load_n(&team->members[i].done, __ATOMIC_ACQUIRE);
  return done;
}

INLINE void lead(struct team *team, const u64 *entry, const u64 *last) {
  u64 number = team->open >> PART_BITS, done = done_by_helpers(team);
  uint32_t grace = GRACE;
  for (; entry < last; entry += entry[1] * ENTRY_WORDS) {
    const u64 parts = entry[2];
    if (parts == 1) {
      do_parts(entry, 0, 0, 1);
      continue;
    }
    const u64 open = ++number << PART_BITS | parts;
    __atomic_store_n(&team->entry, entry, __ATOMIC_RELAXED);
    __atomic_store_n(&team->open, open, __ATOMIC_RELEASE);
    done += parts - do_share(team, open, 0, 0);
    for (uint32_t spin = 0; done_by_helpers(team) != done; spin++) {
      if (spin == LATE) __atomic_store_n(&team->careful, number + CAREFUL, __ATOMIC_RELAXED);
      if (spin == grace) {
        const u64 taken = do_others(team, open, 0);
        done -= taken;
        grace = taken ? 0 : GRACE; /* who has been away may be so for long */
      } else
        wait_a_moment(spin, team);
    }
  }
}

void kernel(const u64 *a, u64 thread) {
  struct team *team = (struct team *)a[2];
  if (thread) {
    help(team, thread);
    return;
  }
  if (a[3] == END) {
    __atomic_store_n(&team->state, ENDED, __ATOMIC_SEQ_CST);
    wake(team, INT32_MAX);
    return;
  }
  if (a[3] == CALL) {
    __atomic_store_n(&team->state, RUNNING, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team->sleeping, __ATOMIC_SEQ_CST)) wake(team, 1);
  }
  lead(team, (const u64 *)a[0], (const u64 *)a[0] + a[1] * ENTRY_WORDS);
  if (a[3] == CALL) __atomic_store_n(&team->state, IDLE, __ATOMIC_RELEASE);
}

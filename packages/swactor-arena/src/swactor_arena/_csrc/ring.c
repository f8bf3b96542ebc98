/* The shared ring. C11 atomics only, so that sanitizers and model checkers understand every access.
 *
 * Cursors. Each end owns one cursor, keeps it privately, publishes it with a release store and acquires the
 * other's. So bytes below an acquired commit are written, and bytes below an acquired consume are no longer
 * read. A cursor is a byte count since the ring began; it reaches 2^64 after centuries, and positions from
 * which it could overflow are refused.
 *
 * Hints. Both pending bits live in `wake` and change only by read-modify-write operations. These have one order
 * per location, and none breaks another's release sequence. The fence before the setting makes it a release; the
 * clearing acquires. Say an end publishes its cursor and then sets its bit:
 *   - the bit was clear: the hint is sent;
 *   - the bit was set: a hint is under way, and its receiver's clearing comes later in the order of `wake`,
 *     so it reads from this operation's release sequence, and the cursor that it loads next is the published
 *     one or a newer.
 * Hence the clearing must come before the cursor loads, and the setting after the publication.
 *
 * When the consumer may stay silent. A producer waits only after it saw a full ring: it published C, then
 * loaded a consume R with C - R == capacity. The consumer, moving consume from R to R', publishes R' and then
 * loads commit. Each side stores one location and loads the other, which acquire and release do not order,
 * so both have a sequentially consistent fence in between: the producer after its store in advance_commit,
 * the consumer after its store in advance_consume. Of two such fences one is first, so either the producer's
 * load gives R' or newer (it does not wait), or the consumer's load gives C (it sees C - R >= capacity, and
 * hints). An older R cannot block the producer silently either: the step that ended R made the same test.
 * The test is >= since the producer may already have used R'.
 *
 * No order is stronger than needed: a test weakens each of them and finds the execution that then goes wrong.
 *
 * Hostile or damaged headers. Every field is loaded once per operation and compared with the private copy;
 * arithmetic uses private copies only, so a span never leaves the data region.
 */
#include "ring.h"

#include <stdatomic.h>
#include <stddef.h>

#define MAGIC 0x47525753u /* "SWRG" in file order */
#define VERSION 1u
#define READABLE_PENDING 1u
#define WRITABLE_PENDING 2u

struct swactor_ring_header {
  _Alignas(64) _Atomic uint32_t magic;
  _Atomic uint16_t version;
  _Atomic uint16_t header_len;
  _Atomic uint64_t ring_id;
  _Atomic uint64_t capacity;
  _Atomic uint64_t commit;
  _Atomic uint64_t consume;
  _Atomic uint32_t state;
  _Atomic uint32_t wake;
};

typedef struct swactor_ring_header header_type;
_Static_assert(sizeof(header_type) == SWACTOR_RING_HEADER_BYTES, "the header fills one cache line");
_Static_assert(offsetof(header_type, version) == 4 && offsetof(header_type, header_len) == 6, "spec section 20");
_Static_assert(offsetof(header_type, ring_id) == 8 && offsetof(header_type, capacity) == 16, "spec section 20");
_Static_assert(offsetof(header_type, commit) == 24 && offsetof(header_type, consume) == 32, "spec section 20");
_Static_assert(offsetof(header_type, state) == 40 && offsetof(header_type, wake) == 44, "spec section 20");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "a lock would not cross processes");

#define RELAXED(field) atomic_load_explicit(&(field), memory_order_relaxed)
#define ACQUIRE(field) atomic_load_explicit(&(field), memory_order_acquire)
#define PUBLISH(field, value) atomic_store_explicit(&(field), (value), memory_order_release)

uint32_t swactor_ring_abi(void) { return SWACTOR_RING_ABI; }

static int inside(uint64_t offset, uint64_t length, uint64_t begin, uint64_t end) {
  return offset >= begin && offset <= end && length <= end - offset;
}

int swactor_ring_check_layout(uint64_t ceiling, const swactor_ring_layout *layout) {
  uint64_t begin = layout->arena_offset;
  if (!inside(begin, layout->total_len, 0, ceiling)) return SWACTOR_RING_E_LAYOUT;
  uint64_t end = begin + layout->total_len;
  uint64_t header = layout->header_offset, data = layout->data_offset;
  if (layout->data_capacity == 0 || !inside(data, layout->data_capacity, begin, end)) return SWACTOR_RING_E_LAYOUT;
  if (!inside(header, SWACTOR_RING_HEADER_BYTES, begin, end)) return SWACTOR_RING_E_LAYOUT;
  if (header % SWACTOR_RING_HEADER_BYTES != 0) return SWACTOR_RING_E_LAYOUT;
  int apart = header + SWACTOR_RING_HEADER_BYTES <= data || data + layout->data_capacity <= header;
  uint64_t alignment = layout->alignment;
  if (!apart || alignment == 0 || (alignment & (alignment - 1)) != 0) return SWACTOR_RING_E_LAYOUT;
  return data % alignment == 0 ? 0 : SWACTOR_RING_E_LAYOUT;
}

static int check_header(const swactor_ring *ring) {
  if (ring == NULL || ring->header == NULL) return SWACTOR_RING_E_HANDLE;
  header_type *header = ring->header;
  if (ACQUIRE(header->magic) != MAGIC) return SWACTOR_RING_E_MAGIC;
  if (RELAXED(header->version) != VERSION) return SWACTOR_RING_E_VERSION;
  if (RELAXED(header->header_len) != SWACTOR_RING_HEADER_BYTES) return SWACTOR_RING_E_VERSION;
  if (RELAXED(header->ring_id) != ring->ring_id) return SWACTOR_RING_E_IDENTITY;
  if (RELAXED(header->capacity) != ring->capacity) return SWACTOR_RING_E_CAPACITY;
  return 0;
}

/* The state, or an error when it is none of the three. Acquire: who sees CLOSED also sees the last commit. */
static int load_state(const swactor_ring *ring) {
  uint32_t state = ACQUIRE(ring->header->state);
  return state >= SWACTOR_RING_OPEN && state <= SWACTOR_RING_FAULTED ? (int)state : SWACTOR_RING_E_STATE;
}

/* Checks everything that is not the caller's own cursor. Returns the state or an error. */
static int enter(const swactor_ring *ring) {
  int status = check_header(ring);
  return status != 0 ? status : load_state(ring);
}

static int plausible(const swactor_ring *ring, uint64_t commit, uint64_t consume) {
  return commit <= UINT64_MAX - ring->capacity && consume <= commit && commit - consume <= ring->capacity;
}

int swactor_ring_init(uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout) {
  int status = swactor_ring_check_layout(ceiling, layout);
  if (status != 0) return status;
  header_type *header = (header_type *)(void *)(base + layout->header_offset);
  atomic_store_explicit(&header->magic, 0, memory_order_relaxed);
  atomic_store_explicit(&header->version, VERSION, memory_order_relaxed);
  atomic_store_explicit(&header->header_len, SWACTOR_RING_HEADER_BYTES, memory_order_relaxed);
  atomic_store_explicit(&header->ring_id, layout->ring_id, memory_order_relaxed);
  atomic_store_explicit(&header->capacity, layout->data_capacity, memory_order_relaxed);
  atomic_store_explicit(&header->commit, 0, memory_order_relaxed);
  atomic_store_explicit(&header->consume, 0, memory_order_relaxed);
  atomic_store_explicit(&header->state, SWACTOR_RING_OPEN, memory_order_relaxed);
  atomic_store_explicit(&header->wake, 0, memory_order_relaxed);
  PUBLISH(header->magic, MAGIC);
  return 0;
}

int swactor_ring_open(swactor_ring *ring, uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout) {
  int status = swactor_ring_check_layout(ceiling, layout);
  if (status != 0) return status;
  *ring = (swactor_ring){
      .header = (header_type *)(void *)(base + layout->header_offset),
      .ring_id = layout->ring_id,
      .capacity = layout->data_capacity,
      .eighth = layout->data_capacity < 8 ? 1 : layout->data_capacity / 8,
  };
  status = swactor_ring_cursors(ring);
  if (status < 0) swactor_ring_close(ring);
  return status;
}

void swactor_ring_close(swactor_ring *ring) { *ring = (swactor_ring){0}; }

/* Takes the producer's role at its first call; later, its own published cursor must be where it left it. */
static int enter_producer(swactor_ring *ring) {
  int state = enter(ring);
  if (state < 0) return state;
  if (state == SWACTOR_RING_CLOSED) return SWACTOR_RING_E_STATE;
  uint64_t commit = RELAXED(ring->header->commit);
  if (ring->produces) return commit == ring->commit ? state : SWACTOR_RING_E_FOREIGN;
  uint64_t consume = RELAXED(ring->header->consume);
  if (!plausible(ring, commit, consume)) return SWACTOR_RING_E_CURSOR;
  ring->commit = commit;
  ring->seen_consume = consume;
  ring->produces = 1;
  return state;
}

static int enter_consumer(swactor_ring *ring) {
  int state = enter(ring);
  if (state < 0) return state;
  uint64_t consume = RELAXED(ring->header->consume);
  if (ring->consumes) return consume == ring->consume ? state : SWACTOR_RING_E_FOREIGN;
  uint64_t commit = RELAXED(ring->header->commit);
  if (!plausible(ring, commit, consume)) return SWACTOR_RING_E_CURSOR;
  ring->consume = consume;
  ring->seen_commit = commit;
  ring->consumes = 1;
  return state;
}

/* Loads the producer's commit for the consumer: it never falls and never runs past a full ring. */
static int observe_commit(swactor_ring *ring) {
  uint64_t commit = ACQUIRE(ring->header->commit);
  if (commit < ring->seen_commit || !plausible(ring, commit, ring->consume)) return SWACTOR_RING_E_CURSOR;
  ring->seen_commit = commit;
  return 0;
}

static uint64_t least(uint64_t left, uint64_t right) { return left < right ? left : right; }

int64_t swactor_ring_writable(swactor_ring *ring) {
  int status = enter_producer(ring);
  if (status < 0) return status;
  uint64_t consume = ACQUIRE(ring->header->consume);
  if (consume < ring->seen_consume || consume > ring->commit) return SWACTOR_RING_E_CURSOR;
  ring->seen_consume = consume;
  uint64_t position = ring->commit % ring->capacity;
  ring->write_offset = position;
  ring->write_granted = least(ring->capacity - (ring->commit - consume), ring->capacity - position);
  return (int64_t)ring->write_granted;
}

int swactor_ring_advance_commit(swactor_ring *ring, int64_t count) {
  int status = enter_producer(ring);
  if (status < 0) return status;
  if (count < 0 || (uint64_t)count > ring->write_granted) return SWACTOR_RING_E_COUNT;
  if (count == 0) return 0;
  uint64_t commit = ring->commit + (uint64_t)count;
  if (commit > UINT64_MAX - ring->capacity) return SWACTOR_RING_E_CURSOR;
  ring->commit = commit;
  ring->write_granted -= (uint64_t)count;
  PUBLISH(ring->header->commit, commit);
  atomic_thread_fence(memory_order_seq_cst); /* before the next load of consume: see the top of this file */
  uint32_t before = atomic_fetch_or_explicit(&ring->header->wake, READABLE_PENDING, memory_order_relaxed);
  return (before & READABLE_PENDING) == 0;
}

int64_t swactor_ring_readable(swactor_ring *ring) {
  int status = enter_consumer(ring);
  if (status < 0) return status;
  status = observe_commit(ring);
  if (status < 0) return status;
  uint64_t position = ring->consume % ring->capacity;
  ring->read_offset = position;
  ring->read_granted = least(ring->seen_commit - ring->consume, ring->capacity - position);
  return (int64_t)ring->read_granted;
}

int swactor_ring_advance_consume(swactor_ring *ring, int64_t count) {
  int status = enter_consumer(ring);
  if (status < 0) return status;
  if (count < 0 || (uint64_t)count > ring->read_granted) return SWACTOR_RING_E_COUNT;
  if (count == 0) return 0;
  uint64_t before = ring->consume;
  uint64_t after = before + (uint64_t)count;
  ring->consume = after;
  ring->read_granted -= (uint64_t)count;
  PUBLISH(ring->header->consume, after);
  atomic_thread_fence(memory_order_seq_cst); /* before the load of commit: see the top of this file */
  uint64_t commit = RELAXED(ring->header->commit);
  int was_full = commit - before >= ring->capacity;
  if (!was_full && before / ring->eighth == after / ring->eighth) return 0;
  uint32_t wake = atomic_fetch_or_explicit(&ring->header->wake, WRITABLE_PENDING, memory_order_relaxed);
  return (wake & WRITABLE_PENDING) == 0;
}

static int acknowledge(swactor_ring *ring, uint32_t bit) {
  int status = enter(ring);
  if (status < 0) return status;
  atomic_fetch_and_explicit(&ring->header->wake, ~bit, memory_order_acquire);
  return 0;
}

int swactor_ring_acknowledge_readable(swactor_ring *ring) { return acknowledge(ring, READABLE_PENDING); }
int swactor_ring_acknowledge_writable(swactor_ring *ring) { return acknowledge(ring, WRITABLE_PENDING); }

int swactor_ring_cursors(swactor_ring *ring) {
  int status = enter(ring);
  if (status < 0) return status;
  /* An end's own cursor stands still, so its first try decides. An onlooker of a moving ring may load the two
   * too far apart; a bounded number of tries tells movement from damage. */
  for (int attempt = 0; attempt < 64; attempt++) {
    uint64_t consume = ACQUIRE(ring->header->consume);
    uint64_t commit = RELAXED(ring->header->commit);
    if (ring->produces && commit != ring->commit) return SWACTOR_RING_E_FOREIGN;
    if (ring->consumes && consume != ring->consume) return SWACTOR_RING_E_FOREIGN;
    if (!plausible(ring, commit, consume)) continue;
    ring->commit_now = commit;
    ring->consume_now = consume;
    return 0;
  }
  return SWACTOR_RING_E_CURSOR;
}

int swactor_ring_get_state(swactor_ring *ring) { return enter(ring); }

int swactor_ring_set_state(swactor_ring *ring, int state) {
  int current = enter(ring);
  if (current < 0) return current;
  if (state != SWACTOR_RING_CLOSED && state != SWACTOR_RING_FAULTED) return SWACTOR_RING_E_STATE;
  uint32_t expected = (uint32_t)current;
  while (expected < (uint32_t)state) { /* the three states are ordered, and only ever grow */
    if (atomic_compare_exchange_weak_explicit(&ring->header->state, &expected, (uint32_t)state, memory_order_release,
                                              memory_order_relaxed))
      return 0;
  }
  return expected <= SWACTOR_RING_FAULTED ? 0 : SWACTOR_RING_E_STATE;
}

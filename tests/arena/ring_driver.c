/* Drives ring.c without Python, for sanitizer builds.
 *
 *   boundaries                 every position, fill and count of small rings, at 0 and around each place where
 *                              narrow arithmetic breaks, and random damage of the header
 *   threads CAP TOTAL          two threads move TOTAL bytes in steps of 1 to 97, hints by semaphore only; exits 1
 *                              when one of them waits 20 s
 *   records CAP COUNT LENGTH   the same with COUNT records of LENGTH bytes
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ring.h"

#define REQUIRE(condition)                                              \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);           \
      exit(1);                                                          \
    }                                                                   \
  } while (0)

static swactor_ring_layout layout_of(uint64_t capacity) {
  return (swactor_ring_layout){.ring_id = 1,
                               .total_len = 64 + capacity,
                               .data_offset = 64,
                               .data_capacity = capacity,
                               .alignment = 64};
}

static uint8_t *memory_of(uint64_t capacity) {
  uint8_t *memory = aligned_alloc(64, (64 + capacity + 63) / 64 * 64);
  REQUIRE(memory != NULL);
  return memory;
}

static void put_cursors(uint8_t *base, uint64_t commit, uint64_t consume) {
  memcpy(base + 24, &commit, 8);
  memcpy(base + 32, &consume, 8);
}

static uint64_t least(uint64_t left, uint64_t right) { return left < right ? left : right; }

static void one_step(uint8_t *base, uint64_t capacity, uint64_t consume, uint64_t fill, int64_t count) {
  swactor_ring_layout layout = layout_of(capacity);
  swactor_ring ring;
  REQUIRE(swactor_ring_init(base, 64 + capacity, &layout) == 0);
  put_cursors(base, consume + fill, consume);
  REQUIRE(swactor_ring_open(&ring, base, 64 + capacity, &layout) == 0);
  int64_t writable = swactor_ring_writable(&ring);
  int64_t readable = swactor_ring_readable(&ring);
  uint64_t commit = consume + fill;
  REQUIRE(ring.write_offset == commit % capacity && ring.read_offset == consume % capacity);
  REQUIRE(writable == (int64_t)least(capacity - fill, capacity - commit % capacity));
  REQUIRE(readable == (int64_t)least(fill, capacity - consume % capacity));
  memset(base + 64 + ring.write_offset, 1, (size_t)writable);
  int produced = swactor_ring_advance_commit(&ring, count);
  REQUIRE((produced >= 0) == (count >= 0 && count <= writable));
  int consumed = swactor_ring_advance_consume(&ring, count);
  REQUIRE((consumed >= 0) == (count >= 0 && count <= readable));
  if (consumed >= 0 && count > 0 && fill == capacity) REQUIRE(consumed == 1);
  REQUIRE(swactor_ring_cursors(&ring) == 0);
  REQUIRE(ring.commit_now == commit + (produced >= 0 ? (uint64_t)count : 0));
  REQUIRE(ring.consume_now == consume + (consumed >= 0 ? (uint64_t)count : 0));
  swactor_ring_close(&ring);
  REQUIRE(swactor_ring_readable(&ring) == SWACTOR_RING_E_HANDLE);
}

static void every_step(uint64_t capacity, uint64_t first) {
  uint8_t *base = memory_of(capacity);
  for (uint64_t consume = first; consume < first + 2 * capacity; consume++)
    for (uint64_t fill = 0; fill <= capacity; fill++)
      for (int64_t count = -1; count <= (int64_t)capacity + 1; count++) one_step(base, capacity, consume, fill, count);
  free(base);
}

static void boundaries(void) {
  static const uint64_t places[] = {1ull << 31, 1ull << 32, 1ull << 53, 1ull << 63};
  for (uint64_t capacity = 1; capacity <= 17; capacity++) {
    every_step(capacity, 0);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) every_step(capacity, places[i] - capacity);
    every_step(capacity, UINT64_MAX - 5 * capacity); /* the last commit that is admitted is 2^64 - 1 - capacity */
  }
  uint64_t state = 88172645463325252u;
  uint8_t *base = memory_of(64);
  swactor_ring_layout layout = layout_of(64);
  for (int attempt = 0; attempt < 200000; attempt++) {
    swactor_ring ring;
    REQUIRE(swactor_ring_init(base, 128, &layout) == 0 && swactor_ring_open(&ring, base, 128, &layout) == 0);
    for (int damage = 0; damage < 3; damage++) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      base[24 + state % 24] = (uint8_t)(state >> 32);
      int64_t writable = swactor_ring_writable(&ring);
      if (writable > 0) base[64 + ring.write_offset + (uint64_t)writable - 1] = 1;
      int64_t readable = swactor_ring_readable(&ring);
      if (readable > 0) base[64 + ring.read_offset + (uint64_t)readable - 1] = 2;
      swactor_ring_advance_commit(&ring, 1);
      swactor_ring_advance_consume(&ring, 1);
      swactor_ring_acknowledge_readable(&ring);
      swactor_ring_set_state(&ring, (int)(state % 5));
    }
  }
  free(base);
}

static uint8_t *shared;
static uint64_t shared_capacity, shared_total, fixed_step;
static sem_t readable_hint, writable_hint;

static void wait_for(sem_t *hint, const char *name) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  if (sem_timedwait(hint, &until) != 0) {
    fprintf(stderr, "lost %s\n", name);
    exit(1);
  }
}

static uint8_t byte_at(uint64_t position) { return (uint8_t)(position * 131 + (position >> 8)); }

static void *produce(void *unused) {
  (void)unused;
  swactor_ring_layout layout = layout_of(shared_capacity);
  swactor_ring ring;
  REQUIRE(swactor_ring_open(&ring, shared, 64 + shared_capacity, &layout) == 0);
  uint64_t step = 1;
  for (uint64_t position = 0; position < shared_total;) {
    int64_t length = swactor_ring_writable(&ring);
    REQUIRE(length >= 0);
    if (length == 0) {
      wait_for(&writable_hint, "RingWritable");
      REQUIRE(swactor_ring_acknowledge_writable(&ring) == 0);
      continue;
    }
    step = fixed_step ? fixed_step - position % fixed_step : step % 97 + 1;
    uint64_t count = least(least((uint64_t)length, step), shared_total - position);
    for (uint64_t i = 0; i < count; i++) shared[64 + ring.write_offset + i] = byte_at(position + i);
    position += count;
    int hint = swactor_ring_advance_commit(&ring, (int64_t)count);
    REQUIRE(hint >= 0);
    if (hint) sem_post(&readable_hint);
  }
  return NULL;
}

static void *consume(void *unused) {
  (void)unused;
  swactor_ring_layout layout = layout_of(shared_capacity);
  swactor_ring ring;
  REQUIRE(swactor_ring_open(&ring, shared, 64 + shared_capacity, &layout) == 0);
  uint64_t step = 1;
  for (uint64_t position = 0; position < shared_total;) {
    int64_t length = swactor_ring_readable(&ring);
    REQUIRE(length >= 0);
    if (length == 0) {
      wait_for(&readable_hint, "RingReadable");
      REQUIRE(swactor_ring_acknowledge_readable(&ring) == 0);
      continue;
    }
    step = fixed_step ? fixed_step - position % fixed_step : step % 89 + 1;
    uint64_t count = least((uint64_t)length, step);
    for (uint64_t i = 0; i < count; i++) REQUIRE(shared[64 + ring.read_offset + i] == byte_at(position + i));
    position += count;
    int hint = swactor_ring_advance_consume(&ring, (int64_t)count);
    REQUIRE(hint >= 0);
    if (hint) sem_post(&writable_hint);
  }
  return NULL;
}

static void threads(uint64_t capacity, uint64_t total) {
  shared_capacity = capacity;
  shared_total = total;
  shared = memory_of(capacity);
  swactor_ring_layout layout = layout_of(capacity);
  REQUIRE(swactor_ring_init(shared, 64 + capacity, &layout) == 0);
  REQUIRE(sem_init(&readable_hint, 0, 0) == 0 && sem_init(&writable_hint, 0, 0) == 0);
  pthread_t producer, consumer;
  REQUIRE(pthread_create(&producer, NULL, produce, NULL) == 0);
  REQUIRE(pthread_create(&consumer, NULL, consume, NULL) == 0);
  REQUIRE(pthread_join(producer, NULL) == 0 && pthread_join(consumer, NULL) == 0);
  free(shared);
}

int main(int count, char **words) {
  if (count == 2 && strcmp(words[1], "boundaries") == 0)
    boundaries();
  else if (count == 4 && strcmp(words[1], "threads") == 0)
    threads(strtoull(words[2], NULL, 10), strtoull(words[3], NULL, 10));
  else if (count == 5 && strcmp(words[1], "records") == 0) {
    fixed_step = strtoull(words[4], NULL, 10);
    threads(strtoull(words[2], NULL, 10), strtoull(words[3], NULL, 10) * fixed_step);
  } else
    return 2;
  puts("done");
  return 0;
}

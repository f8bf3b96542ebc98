/* Stops a process after every instruction of claim-copy-commit or of consume-release, by ptrace.
 *
 *   ring_sweep produce|consume  kill|stop|fence|reuse  CONSUME FILL
 *
 * The child does one step of its role on a ring of CAPACITY bytes that holds FILL bytes from position CONSUME on;
 * this process is the survivor with the other role. For every i the child is halted after i instructions, and
 *   kill   gets SIGKILL: the survivor drains or fills; once the death is proven the range is reused;
 *   stop   stays stopped (SIGSTOP) while the survivor goes on, and is resumed late: nothing is lost or mixed up;
 *   fence  stays stopped while the owner takes the ring away, and is resumed late: its next call is refused, and
 *          after its end the range is reused;
 *   reuse  as fence, but the range is reused without waiting for the proof. Its next call is refused here too, but
 *          the one it was stopped in may still write: the reason why a range waits for its proof.
 * Prints "instructions N, untouched A, moved B"; exits 1 with a reason at the first thing that is not as it must
 * be. The BROKEN_* switches make the child a wrong program that the sweep has to catch.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ring.h"

enum { CAPACITY = 20, RECORD = 8, POISON = 0xdb };

#ifndef PATIENCE_MS
#define PATIENCE_MS 10000 /* how long the survivor waits for a hint or for an end */
#endif

enum { BEFORE, IN_STEP, PAST };

struct shared {
  uint8_t ring[SWACTOR_RING_HEADER_BYTES + CAPACITY];
  _Atomic int where; /* the child: before, in or past its step */
  int refused;       /* what its next call answered */
  uint8_t read[RECORD];
};

static struct shared *shared;
static int hear, tell; /* the pipe of the child's hints */
static long step;      /* instructions before the halt, for messages */

static void fail(const char *what) {
  printf("after %ld instructions: %s\n", step, what);
  exit(1);
}

static void must(int condition, const char *what) {
  if (!condition) fail(what);
}

static uint8_t *data(void) { return shared->ring + SWACTOR_RING_HEADER_BYTES; }
static uint8_t byte_at(uint64_t position) { return (uint8_t)(position * 131 + 7); }

static swactor_ring_layout layout_of(uint64_t ring_id) {
  return (swactor_ring_layout){.ring_id = ring_id,
                               .total_len = sizeof shared->ring,
                               .data_offset = SWACTOR_RING_HEADER_BYTES,
                               .data_capacity = CAPACITY,
                               .alignment = 64};
}

static void open_end(swactor_ring *ring, uint64_t ring_id) {
  swactor_ring_layout layout = layout_of(ring_id);
  must(swactor_ring_open(ring, shared->ring, sizeof shared->ring, &layout) == 0, "the ring cannot be opened");
}

static void create(uint64_t ring_id) {
  swactor_ring_layout layout = layout_of(ring_id);
  memset(data(), POISON, CAPACITY);
  must(swactor_ring_init(shared->ring, sizeof shared->ring, &layout) == 0, "the ring cannot be created");
}

/* --- the child's step: the code that is swept --- */

static void child_produce(swactor_ring *ring, uint64_t position) {
  for (int done = 0; done < RECORD;) {
    int64_t room = swactor_ring_writable(ring);
    if (room <= 0) return;
    if (room > RECORD - done) room = RECORD - done;
#ifdef BROKEN_COMMIT_FIRST
    uint64_t at = ring->write_offset;
    int hint = swactor_ring_advance_commit(ring, room);
    for (int64_t i = 0; i < room; i++) data()[at + (uint64_t)i] = byte_at(position + (uint64_t)i);
#else
    for (int64_t i = 0; i < room; i++) data()[ring->write_offset + (uint64_t)i] = byte_at(position + (uint64_t)i);
    int hint = swactor_ring_advance_commit(ring, room);
#endif
    if (hint < 0) return;
    position += (uint64_t)room;
    done += (int)room;
#ifndef BROKEN_NO_HINT
    if (hint == 1 && write(tell, "!", 1) != 1) _exit(4);
#endif
  }
}

static void child_consume(swactor_ring *ring, uint64_t position) {
  (void)position;
  for (int done = 0; done < RECORD;) {
    int64_t ready = swactor_ring_readable(ring);
    if (ready <= 0) return;
    if (ready > RECORD - done) ready = RECORD - done;
#ifdef BROKEN_RELEASE_FIRST
    uint64_t at = ring->read_offset;
    int hint = swactor_ring_advance_consume(ring, ready);
    for (int64_t i = 0; i < ready; i++) shared->read[done + i] = data()[at + (uint64_t)i];
#else
    for (int64_t i = 0; i < ready; i++) shared->read[done + i] = data()[ring->read_offset + (uint64_t)i];
    int hint = swactor_ring_advance_consume(ring, ready);
#endif
    if (hint < 0) return;
    done += (int)ready;
#ifndef BROKEN_NO_HINT
    if (hint == 1 && write(tell, "!", 1) != 1) _exit(4);
#endif
  }
}

struct scene {
  int produces; /* the child's role */
  uint64_t consume, fill;
};

static pid_t start_child(const struct scene *scene) {
  pid_t pid = fork();
  must(pid >= 0, "no second process");
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  swactor_ring ring;
  open_end(&ring, 1);
  pid_t self = getpid();
  if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(5);
  kill(self, SIGSTOP);
  shared->where = IN_STEP;
  if (scene->produces)
    child_produce(&ring, scene->consume + scene->fill);
  else
    child_consume(&ring, scene->consume);
  shared->where = PAST;
  shared->refused = (int)(scene->produces ? swactor_ring_writable(&ring) : swactor_ring_readable(&ring));
  _exit(0);
}

/* Runs the child for `step` instructions of its own step. 0 when it was through before. */
static int halt(pid_t pid) {
  int status;
  must(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "the child cannot be traced here (ptrace refused)");
  for (long done = 0; done < step || shared->where == BEFORE;) {
    must(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0, "no single step");
    must(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "the child ended in its step");
    must(WSTOPSIG(status) == SIGTRAP, "the child got a signal in its step");
    if (shared->where == PAST) return 0;
    done += shared->where == IN_STEP;
  }
  return 1;
}

static void stop_for_long(pid_t pid) {
  int status;
  must(ptrace(PTRACE_DETACH, pid, NULL, (void *)(intptr_t)SIGSTOP) == 0, "the child cannot be left");
  must(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status), "the child does not stay stopped");
}

/* The proof: the process is gone. Waits for it by pidfd, with a bound, as a node does. */
static int reap(pid_t pid) {
  int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
  must(pidfd >= 0, "no pidfd");
  struct pollfd ended = {.fd = pidfd, .events = POLLIN};
  must(poll(&ended, 1, PATIENCE_MS) == 1, "the end of the child is not seen");
  close(pidfd);
  int status;
  must(waitpid(pid, &status, 0) == pid, "the child cannot be reaped");
  return status;
}

static void resume_to_the_end(pid_t pid) {
  must(kill(pid, SIGCONT) == 0, "the child cannot be resumed");
  int status = reap(pid);
  must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the resumed child did not end well");
}

static void wait_for_hint(const char *lost) {
  struct pollfd hint = {.fd = hear, .events = POLLIN};
  must(poll(&hint, 1, PATIENCE_MS) == 1, lost);
  char byte;
  must(read(hear, &byte, 1) == 1, lost);
}

/* --- the survivor --- */

/* Takes everything that is committed and compares it with what was meant. */
static uint64_t drain(swactor_ring *ring, uint64_t position) {
  for (;;) {
    int64_t ready = swactor_ring_readable(ring);
    must(ready >= 0, "the consumer is refused");
    if (ready == 0) return position;
    for (int64_t i = 0; i < ready; i++)
      must(data()[ring->read_offset + (uint64_t)i] == byte_at(position + (uint64_t)i), "a byte was committed unwritten");
    position += (uint64_t)ready;
    must(swactor_ring_advance_consume(ring, ready) >= 0, "the consumer cannot release");
  }
}

/* Writes into all the space there is; the position after it. */
static uint64_t fill_up(swactor_ring *ring, uint64_t position) {
  for (;;) {
    int64_t room = swactor_ring_writable(ring);
    must(room >= 0, "the producer is refused");
    if (room == 0) return position;
    for (int64_t i = 0; i < room; i++) data()[ring->write_offset + (uint64_t)i] = byte_at(position + (uint64_t)i);
    position += (uint64_t)room;
    must(swactor_ring_advance_commit(ring, room) >= 0, "the producer cannot commit");
  }
}

/* A new generation in the range works from its first to its last byte. */
static void reuse(void) {
  swactor_ring producer, consumer;
  create(2);
  open_end(&producer, 2);
  open_end(&consumer, 2);
  uint64_t end = fill_up(&producer, 0);
  must(end == CAPACITY && drain(&consumer, 0) == end, "the reused range does not work");
}

static int part_of_the_step(const struct scene *scene, uint64_t moved) {
  uint64_t first = (scene->produces ? scene->consume + scene->fill : scene->consume) % CAPACITY;
  uint64_t to_the_wrap = CAPACITY - first;
  return moved == 0 || moved == RECORD || (to_the_wrap < RECORD && moved == to_the_wrap);
}

static void set_scene(const struct scene *scene, swactor_ring *survivor) {
  swactor_ring producer;
  create(1);
  uint64_t cursors[2] = {scene->consume, scene->consume};
  memcpy(shared->ring + 24, cursors, sizeof cursors);
  open_end(&producer, 1);
  for (uint64_t done = 0; done < scene->fill;) {
    int64_t room = swactor_ring_writable(&producer);
    must(room > 0, "the scene does not fit the ring");
    uint64_t part = (uint64_t)room < scene->fill - done ? (uint64_t)room : scene->fill - done;
    for (uint64_t i = 0; i < part; i++) data()[producer.write_offset + i] = byte_at(scene->consume + done + i);
    must(swactor_ring_advance_commit(&producer, (int64_t)part) >= 0, "the scene cannot be set");
    done += part;
  }
  open_end(survivor, 1);
  must(swactor_ring_acknowledge_readable(survivor) == 0, "the scene's hint cannot be taken");
  shared->where = BEFORE;
  shared->refused = 0;
  memset(shared->read, 0, RECORD);
}

static uint64_t cursor_now(swactor_ring *ring, int commit) {
  must(swactor_ring_cursors(ring) == 0, "the header of the survivor's ring is damaged");
  return commit ? ring->commit_now : ring->consume_now;
}

static uint64_t moved_by(const struct scene *scene, swactor_ring *survivor) {
  uint64_t before = scene->produces ? scene->consume + scene->fill : scene->consume;
  uint64_t moved = cursor_now(survivor, scene->produces) - before;
  must(part_of_the_step(scene, moved), "a part of a commit or of a release is seen");
  return moved;
}

static uint64_t after_kill(const struct scene *scene, swactor_ring *survivor, pid_t pid) {
  must(kill(pid, SIGKILL) == 0, "the child cannot be killed");
  must(WIFSIGNALED(reap(pid)), "the child was not killed");
  uint64_t moved = moved_by(scene, survivor);
  uint64_t end = scene->consume + scene->fill;
  if (scene->produces) {
    must(drain(survivor, scene->consume) == end + moved, "the survivor did not get the whole prefix");
  } else {
    end = fill_up(survivor, end);
    must(end == scene->consume + moved + CAPACITY, "the survivor did not get the released space");
    swactor_ring successor;
    open_end(&successor, 1);
    must(drain(&successor, scene->consume + moved) == end, "bytes that nobody had read are gone");
  }
  reuse();
  return moved;
}

static uint64_t after_stop(const struct scene *scene, swactor_ring *survivor, pid_t pid) {
  stop_for_long(pid);
  uint64_t moved = moved_by(scene, survivor);
  uint64_t end = scene->consume + scene->fill;
  if (scene->produces) {
    uint64_t position = drain(survivor, scene->consume);
    must(kill(pid, SIGCONT) == 0, "the child cannot be resumed");
    while (position < end + RECORD) {
      wait_for_hint("lost RingReadable");
      must(swactor_ring_acknowledge_readable(survivor) == 0, "the hint cannot be taken");
      position = drain(survivor, position);
    }
  } else {
    uint64_t position = fill_up(survivor, end);
    must(kill(pid, SIGCONT) == 0, "the child cannot be resumed");
    while (position < scene->consume + RECORD + CAPACITY) {
      wait_for_hint("lost RingWritable");
      must(swactor_ring_acknowledge_writable(survivor) == 0, "the hint cannot be taken");
      position = fill_up(survivor, position);
    }
  }
  int status = reap(pid);
  must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the resumed child did not end well");
  if (!scene->produces)
    for (uint64_t i = 0; i < RECORD; i++)
      must(shared->read[i] == byte_at(scene->consume + i), "bytes were overwritten while they were read");
  reuse();
  return moved;
}

static uint64_t after_fence(const struct scene *scene, swactor_ring *survivor, pid_t pid) {
  stop_for_long(pid);
  uint64_t moved = moved_by(scene, survivor);
  memset(shared->ring, 0, sizeof shared->ring); /* what discarding the pages does */
  resume_to_the_end(pid);
  must(shared->refused == SWACTOR_RING_E_MAGIC, "a late process goes on after its ring was taken away");
  reuse();
  return moved;
}

static uint64_t after_reuse_without_proof(const struct scene *scene, swactor_ring *survivor, pid_t pid) {
  stop_for_long(pid);
  uint64_t moved = moved_by(scene, survivor);
  create(2);
  resume_to_the_end(pid);
  must(shared->refused == SWACTOR_RING_E_IDENTITY, "a late process takes the new generation for its own");
  uint64_t cursors[2];
  memcpy(cursors, shared->ring + 24, sizeof cursors);
  must(cursors[0] == 0 && cursors[1] == 0, "a late process moved the new generation");
  for (int i = 0; i < CAPACITY; i++) must(data()[i] == POISON, "a late writer wrote into the new generation");
  return moved;
}

typedef uint64_t (*action)(const struct scene *, swactor_ring *, pid_t);

static action action_of(const char *name) {
  if (strcmp(name, "kill") == 0) return after_kill;
  if (strcmp(name, "stop") == 0) return after_stop;
  if (strcmp(name, "fence") == 0) return after_fence;
  if (strcmp(name, "reuse") == 0) return after_reuse_without_proof;
  return NULL;
}

static void empty_the_pipe(void) {
  char bytes[16];
  struct pollfd hint = {.fd = hear, .events = POLLIN};
  while (poll(&hint, 1, 0) == 1) must(read(hear, bytes, sizeof bytes) > 0, "the hints cannot be read");
}

int main(int count, char **words) {
  action act = count == 5 ? action_of(words[2]) : NULL;
  if (act == NULL) return 2;
  struct scene scene = {strcmp(words[1], "produce") == 0, strtoull(words[3], NULL, 10), strtoull(words[4], NULL, 10)};
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int ends[2];
  must(shared != MAP_FAILED && pipe(ends) == 0, "no memory or pipe");
  hear = ends[0], tell = ends[1];
  long untouched = 0, moved = 0;
  for (;; step++) {
    swactor_ring survivor;
    set_scene(&scene, &survivor);
    pid_t pid = start_child(&scene);
    if (!halt(pid)) {
      must(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid, "the last child cannot be ended");
      break;
    }
    if (act(&scene, &survivor, pid) == 0)
      untouched++;
    else
      moved++;
    empty_the_pipe();
  }
  printf("instructions %ld, untouched %ld, moved %ld\n", step, untouched, moved);
  return 0;
}

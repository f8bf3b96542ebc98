/* The shared ring (spec sections 20 to 22): header layout, handle and operations.
 *
 * Knows cursors, state and wake bits. It never touches a payload byte, owns no memory and makes no system
 * call; the caller turns the offsets it gets into pointers of its own mapping. Python's binding is made from
 * this same text (_build.py), so below the include there are only declarations and plain numbers.
 */
#ifndef SWACTOR_RING_H
#define SWACTOR_RING_H

#include <stdint.h>

/* Grows with any change of the header, of the protocol between the two ends, or of what Python calls. */
#define SWACTOR_RING_ABI 2
#define SWACTOR_RING_HEADER_BYTES 64

enum swactor_ring_state {
  SWACTOR_RING_OPEN = 1,
  SWACTOR_RING_CLOSED = 2,
  SWACTOR_RING_FAULTED = 3
};

/* Every operation returns 0 or a positive answer, or one of these and then has changed nothing. */
enum swactor_ring_error {
  SWACTOR_RING_E_HANDLE = -1,     /* the handle is null or closed */
  SWACTOR_RING_E_LAYOUT = -2,     /* the layout does not fit itself or the arena */
  SWACTOR_RING_E_MAGIC = -3,      /* no initialised ring at this offset */
  SWACTOR_RING_E_VERSION = -4,    /* header version or length differs */
  SWACTOR_RING_E_IDENTITY = -5,   /* another ring id */
  SWACTOR_RING_E_CAPACITY = -6,   /* another capacity */
  SWACTOR_RING_E_CURSOR = -7,     /* commit and consume cannot both be right */
  SWACTOR_RING_E_FOREIGN = -8,    /* this end's own cursor was moved by somebody else */
  SWACTOR_RING_E_STATE = -9,      /* the state word is none of the three, or forbids the call */
  SWACTOR_RING_E_COUNT = -10      /* the count is negative or beyond the span last given */
};

struct swactor_ring_header;

/* One end, private to a process. Everything that the other process could corrupt is kept here a second time
 * and compared. Positions are relative to the first data byte. */
typedef struct {
  struct swactor_ring_header *header;
  uint64_t ring_id;
  uint64_t capacity;
  uint64_t eighth;
  uint64_t commit;        /* producer: own cursor */
  uint64_t seen_consume;  /* producer: newest consume it has loaded */
  uint64_t write_granted; /* producer: bytes of the span last given that are not yet committed */
  uint64_t write_offset;
  uint64_t consume;       /* consumer: own cursor */
  uint64_t seen_commit;   /* consumer: newest commit it has loaded */
  uint64_t read_granted;
  uint64_t read_offset;
  uint64_t commit_now;    /* answers of swactor_ring_cursors */
  uint64_t consume_now;
  int produces;
  int consumes;
} swactor_ring;

/* Where a ring lies in a mapping of `ceiling` bytes at `base`: the spec's RingLayout. */
typedef struct {
  uint64_t ring_id;
  uint64_t arena_offset;
  uint64_t total_len;
  uint64_t header_offset;
  uint64_t data_offset;
  uint64_t data_capacity;
  uint64_t alignment;
} swactor_ring_layout;

uint32_t swactor_ring_abi(void);

/* Checks the layout alone; touches no memory. */
int swactor_ring_check_layout(uint64_t ceiling, const swactor_ring_layout *layout);
/* Writes a fresh header: cursors 0, state OPEN. The range must be nobody's and its pages must exist. */
int swactor_ring_init(uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout);
/* Binds `ring` to an initialised header. */
int swactor_ring_open(swactor_ring *ring, uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout);
void swactor_ring_close(swactor_ring *ring);

/* Length of the contiguous free span at ring->write_offset, 0 when full. Producer only. */
int64_t swactor_ring_writable(swactor_ring *ring);
/* 1 when a RingReadable hint must be sent. Producer only. */
int swactor_ring_advance_commit(swactor_ring *ring, int64_t count);
/* Length of the contiguous committed span at ring->read_offset, 0 when empty. Consumer only. */
int64_t swactor_ring_readable(swactor_ring *ring);
/* 1 when a RingWritable hint must be sent. Consumer only. */
int swactor_ring_advance_consume(swactor_ring *ring, int64_t count);

int swactor_ring_acknowledge_readable(swactor_ring *ring);
int swactor_ring_acknowledge_writable(swactor_ring *ring);

/* Fills commit_now and consume_now with a consistent pair. */
int swactor_ring_cursors(swactor_ring *ring);
int swactor_ring_get_state(swactor_ring *ring);
/* OPEN to CLOSED, OPEN or CLOSED to FAULTED; FAULTED is final and a later CLOSED changes nothing. */
int swactor_ring_set_state(swactor_ring *ring, int state);

#endif

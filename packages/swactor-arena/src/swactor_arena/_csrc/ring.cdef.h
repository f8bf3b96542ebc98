#define SWACTOR_RING_ABI ...
#define SWACTOR_RING_HEADER_BYTES ...
#define SWACTOR_RING_E_HANDLE ...
#define SWACTOR_RING_E_LAYOUT ...
#define SWACTOR_RING_E_MAGIC ...
#define SWACTOR_RING_E_VERSION ...
#define SWACTOR_RING_E_IDENTITY ...
#define SWACTOR_RING_E_CAPACITY ...
#define SWACTOR_RING_E_CURSOR ...
#define SWACTOR_RING_E_FOREIGN ...
#define SWACTOR_RING_E_STATE ...
#define SWACTOR_RING_E_COUNT ...

typedef struct {
  uint64_t write_offset;
  uint64_t read_offset;
  uint64_t commit_now;
  uint64_t consume_now;
  ...;
} swactor_ring;

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
int swactor_ring_check_layout(uint64_t ceiling, const swactor_ring_layout *layout);
int swactor_ring_init(uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout);
int swactor_ring_open(swactor_ring *ring, uint8_t *base, uint64_t ceiling, const swactor_ring_layout *layout);
void swactor_ring_close(swactor_ring *ring);
int64_t swactor_ring_writable(swactor_ring *ring);
int swactor_ring_advance_commit(swactor_ring *ring, int64_t count);
int64_t swactor_ring_readable(swactor_ring *ring);
int swactor_ring_advance_consume(swactor_ring *ring, int64_t count);
int swactor_ring_acknowledge_readable(swactor_ring *ring);
int swactor_ring_acknowledge_writable(swactor_ring *ring);
int swactor_ring_cursors(swactor_ring *ring);
int swactor_ring_get_state(swactor_ring *ring);
int swactor_ring_set_state(swactor_ring *ring, int state);

int swactor_pages_reserve(int fd, uint64_t offset, uint64_t length);
int swactor_pages_discard(int fd, uint64_t offset, uint64_t length);

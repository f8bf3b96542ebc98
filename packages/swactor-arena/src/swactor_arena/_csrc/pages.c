#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>

/* tmpfs undoes an interrupted allocation, so a process that gets signals all the time must not try for ever. */
enum { ATTEMPTS = 64 };

static int allocate(int fd, int mode, uint64_t offset, uint64_t length) {
  if (offset > INT64_MAX || length > INT64_MAX) return EFBIG;
  for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
    if (fallocate(fd, mode, (off_t)offset, (off_t)length) == 0) return 0;
    if (errno != EINTR) return errno;
  }
  return EINTR;
}

int swactor_pages_reserve(int fd, uint64_t offset, uint64_t length) { return allocate(fd, 0, offset, length); }

int swactor_pages_discard(int fd, uint64_t offset, uint64_t length) {
  return allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
}

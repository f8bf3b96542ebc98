/* Pages of an arena: make sure they exist, or give them back. Linux only. Returns 0 or an errno value. */
#ifndef SWACTOR_PAGES_H
#define SWACTOR_PAGES_H

#include <stdint.h>

int swactor_pages_reserve(int fd, uint64_t offset, uint64_t length);
int swactor_pages_discard(int fd, uint64_t offset, uint64_t length);

#endif

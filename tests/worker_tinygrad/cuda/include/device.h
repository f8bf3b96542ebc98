/* What CUDA C gives a kernel, on the host: the words that tinygrad's CUDA renderer writes, and the threads of a block.
 *
 * A block's threads are fibres where they meet at barriers, else one loop. `__shared__` is static: blocks run one
 * after the other. Included before every source that `nvrtc.cpp` builds; of libraries it needs
 * none but C's, which is there. */
#pragma once
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n)

struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

#define VECTORS(type, name)                                                                                            \
  struct __align__(2 * sizeof(type)) name##2 { type x, y; };                                                           \
  struct name##3 { type x, y, z; };                                                                                    \
  struct __align__(4 * sizeof(type)) name##4 { type x, y, z, w; };                                                     \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                     \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                          \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(signed char, char)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
VECTORS(unsigned short, ushort)
VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong)

#define OF_ONE(name)                                                                                                   \
  inline float name(float x) { return __builtin_##name##f(x); }                                                        \
  inline double name(double x) { return __builtin_##name(x); }
OF_ONE(exp2)
OF_ONE(log2)
OF_ONE(sin)
OF_ONE(sqrt)
OF_ONE(trunc)
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
inline float __int_as_float(int bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

/* Fibres: begun once a launch by makecontext, which asks the system, and switched by _setjmp, which does not. */
namespace block {
constexpr unsigned STACK = 1 << 16;
struct Thread {
  ucontext_t at;
  jmp_buf place;
  dim3 index;
  bool begun, done;
  char *stack;
};
static jmp_buf scheduler;
static Thread *running;
static void (*body)();

inline void barrier() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

inline void live() {
  for (;;) {
    body();
    running->done = true;
    barrier(); /* until the next block */
  }
}

__attribute__((noinline)) static void go_on(Thread *thread) {
  running = thread;
  threadIdx = thread->index;
  if (_setjmp(scheduler)) return;
  if (thread->begun) _longjmp(thread->place, 1);
  thread->begun = true;
  setcontext(&thread->at);
}

inline Thread *make_threads(unsigned count) {
  Thread *threads = (Thread *)malloc(count * sizeof(Thread));
  for (unsigned i = 0; i < count; i++) {
    Thread &t = threads[i];
    t.begun = false;
    t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    t.stack = (char *)malloc(STACK);
    getcontext(&t.at);
    t.at.uc_stack.ss_sp = t.stack;
    t.at.uc_stack.ss_size = STACK;
    t.at.uc_link = nullptr;
    makecontext(&t.at, live, 0);
  }
  return threads;
}

/* Each thread as far as its next barrier, in turns, until all are done. */
inline void run_with_barriers(Thread *threads, unsigned count) {
  for (unsigned i = 0; i < count; i++) threads[i].done = false;
  for (unsigned left = count; left;)
    for (unsigned i = 0; i < count; i++) {
      if (threads[i].done) continue;
      go_on(&threads[i]);
      if (threads[i].done) left--;
    }
}
}  // namespace block
#define __syncthreads() block::barrier()

/* The arguments lie one behind the other, each aligned to its size (the driver's CU_LAUNCH_PARAM_BUFFER_POINTER). */
template <class T> inline T argument(const char *arguments, unsigned long *at) {
  *at = (*at + alignof(T) - 1) / alignof(T) * alignof(T);
  T value;
  __builtin_memcpy(&value, arguments + *at, sizeof(T));
  *at += sizeof(T);
  return value;
}

template <class... A> struct Call {
  static inline void (*kernel)(A...);
  static inline const char *arguments;
  static void once() {
    unsigned long at = 0;
    struct Caller {
      Caller(void (*f)(A...), A... values) { f(values...); }
    } made{kernel, argument<A>(arguments, &at)...}; /* braces: from left to right */
    (void)made;
  }
};

template <class... A>
void launch(void (*kernel)(A...), const char *arguments, const unsigned *dims, bool barriers) {
  gridDim = {dims[0], dims[1], dims[2]};
  blockDim = {dims[3], dims[4], dims[5]};
  Call<A...>::kernel = kernel;
  Call<A...>::arguments = arguments;
  block::body = Call<A...>::once;
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block::Thread *threads = barriers ? block::make_threads(count) : nullptr;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        if (barriers) {
          block::run_with_barriers(threads, count);
          continue;
        }
        for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
          for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) Call<A...>::once();
      }
  if (barriers) {
    for (unsigned i = 0; i < count; i++) free(threads[i].stack);
    free(threads);
  }
}

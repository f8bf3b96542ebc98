/* A stand-in for NVIDIA's driver: device memory that the host cannot reach, work that runs when it must and no sooner.
 *
 * Whatever is asked for asynchronously waits in a queue until somebody synchronises, so a missing synchronisation shows
 * as a wrong result each time and not now and then. Device addresses are reserved and cannot be read: the same bytes are
 * at another address, which only copies and kernels know. New memory is full of NaNs, memory behind an allocation cannot
 * be read, and host memory that is freed under a queued copy ends the process. Of a graph's nodes the last one that may
 * comes first. An error of a kernel or copy stays, as on a device. Environment: STAND_IN_CUDA_MEMORY (bytes of the
 * device), STAND_IN_CUDA_LAUNCHES (kernels until the device is lost), STAND_IN_CUDA_DEVICES, STAND_IN_CUDA_FILES (a folder
 * for what it has to write). */
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <elf.h>
#include <vector>

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALISED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_PTX = 218, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
};
typedef void (*Entry)(const char *, const unsigned *);
struct Context { int device; };
struct Module { void *library; };
struct Event { double at = 0; };
struct Kernel { Entry entry; };
struct Work { Entry entry; unsigned dims[6]; std::vector<char> arguments; };
struct Copy { uint64_t to, from; size_t size; };
struct Node { bool copies; Work work; Copy copy; std::vector<Node *> after; };
struct Graph { std::vector<Node *> nodes, order; };

static const uint64_t REGION = 1ull << 36, PAGE = 4096;
static std::recursive_mutex lock;
static thread_local Context *current;
static uint64_t base, shadow, used, next_address;
static std::map<uint64_t, uint64_t> live; /* device address: bytes */
static std::map<uint64_t, uint64_t> pinned;
struct Pending { std::function<int()> run; uint64_t host; };
static std::deque<Pending> queue;
static int sticky;
static bool initialised;
static long launches;

static uint64_t number(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
static char *bytes(uint64_t address) { return (char *)(address - base + shadow); }
static bool on_device(uint64_t address) { return address >= base && address < base + REGION; }
static bool allocated(uint64_t address, size_t size) {
  auto after = live.upper_bound(address);
  if (after == live.begin()) return false;
  --after;
  return address + size <= after->first + after->second;
}

static int run_queue() {
  while (!queue.empty()) {
    const Pending first = queue.front();
    queue.pop_front();
    if (!sticky) sticky = first.run();
  }
  return sticky;
}
#define ENTER                                                                                                          \
  std::lock_guard<std::recursive_mutex> held(lock);                                                                    \
  if (!initialised) return NOT_INITIALISED;                                                                            \
  if (!current) return INVALID_CONTEXT;                                                                                \
  if (sticky) return sticky

static int run_kernel(Work work) {
  static const long most = number("STAND_IN_CUDA_LAUNCHES", 0);
  if (most && ++launches > most) return ILLEGAL_ADDRESS;
  for (size_t at = 0; at + 8 <= work.arguments.size(); at += 8) {
    uint64_t word;
    memcpy(&word, &work.arguments[at], 8);
    if (!on_device(word)) continue;
    if (!allocated(word, 1)) {
      fprintf(stderr, "stand-in driver: a kernel was given device memory that is not allocated\n");
      return ILLEGAL_ADDRESS;
    }
    word = (uint64_t)bytes(word);
    memcpy(&work.arguments[at], &word, 8);
  }
  work.entry(work.arguments.data(), work.dims);
  return SUCCESS;
}
static int run_copy(const Copy &copy) {
  if (!allocated(copy.to, copy.size) || !allocated(copy.from, copy.size)) return ILLEGAL_ADDRESS;
  memmove(bytes(copy.to), bytes(copy.from), copy.size);
  return SUCCESS;
}
static Work work_of(Kernel *kernel, const unsigned *dims, void **extra) {
  Work work{kernel->entry, {}, {}};
  memcpy(work.dims, dims, sizeof work.dims);
  const char *at = (const char *)extra[1]; /* CU_LAUNCH_PARAM_BUFFER_POINTER, SIZE, END */
  work.arguments.assign(at, at + *(size_t *)extra[3]);
  return work;
}
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

extern "C" {
int cuGetErrorString(int code, const char **text) {
  static const std::map<int, const char *> texts = {
      {SUCCESS, "no error"}, {INVALID_VALUE, "invalid argument"}, {OUT_OF_MEMORY, "out of memory"},
      {NOT_INITIALISED, "initialization error"}, {NO_DEVICE, "no CUDA-capable device is detected"},
      {INVALID_DEVICE, "invalid device ordinal"}, {INVALID_IMAGE, "device kernel image is invalid"},
      {INVALID_CONTEXT, "invalid device context"}, {INVALID_PTX, "a PTX JIT compilation failed"},
      {NOT_FOUND, "named symbol not found"}, {ILLEGAL_ADDRESS, "an illegal memory access was encountered"}};
  auto found = texts.find(code);
  *text = found == texts.end() ? "unknown error" : found->second;
  return SUCCESS;
}
int cuInit(unsigned) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (number("STAND_IN_CUDA_DEVICES", 1) == 0) return NO_DEVICE;
  if (!base) {
    base = (uint64_t)mmap(nullptr, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    shadow = (uint64_t)mmap(nullptr, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    next_address = base;
  }
  initialised = true;
  return SUCCESS;
}
int cuDeviceGetCount(int *count) { return *count = number("STAND_IN_CUDA_DEVICES", 1), SUCCESS; }
int cuDeviceGet(int *device, int index) {
  if (!initialised) return NOT_INITIALISED;
  if (index < 0 || (uint64_t)index >= number("STAND_IN_CUDA_DEVICES", 1)) return INVALID_DEVICE;
  return *device = index, SUCCESS;
}
int cuDeviceComputeCapability(int *major, int *minor, int) { return *major = 8, *minor = 6, SUCCESS; }
int cuDeviceTotalMem_v2(size_t *total, int) { return *total = number("STAND_IN_CUDA_MEMORY", 1ull << 33), SUCCESS; }
int cuDeviceCanAccessPeer(int *can, int, int) { return *can = 0, SUCCESS; }
int cuCtxCreate_v2(Context **context, unsigned, int device) { return *context = current = new Context{device}, SUCCESS; }
int cuCtxSetCurrent(Context *context) { return current = context, SUCCESS; }
int cuCtxSynchronize() {
  ENTER;
  return run_queue();
}

/* No function of the driver: what nobody has waited for yet. */
int stand_in_queued() {
  std::lock_guard<std::recursive_mutex> held(lock);
  return queue.size();
}

int cuMemGetInfo_v2(size_t *available, size_t *total) {
  ENTER;
  *total = number("STAND_IN_CUDA_MEMORY", 1ull << 33);
  return *available = *total - used, SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t size) {
  ENTER;
  if (!size) return INVALID_VALUE;
  if (used + size > number("STAND_IN_CUDA_MEMORY", 1ull << 33)) return OUT_OF_MEMORY;
  const uint64_t whole = (size + PAGE - 1) / PAGE * PAGE;
  if (next_address + whole + PAGE > base + REGION) return OUT_OF_MEMORY;
  *address = next_address;
  next_address += whole + PAGE; /* addresses are never used again, and a page behind each is nobody's */
  mprotect(bytes(*address), whole, PROT_READ | PROT_WRITE);
  memset(bytes(*address), 0xff, size);
  live[*address] = size;
  used += size;
  return SUCCESS;
}
int cuMemFree_v2(uint64_t address) {
  ENTER;
  run_queue(); /* as the driver does */
  auto found = live.find(address);
  if (found == live.end()) return INVALID_VALUE;
  const uint64_t whole = (found->second + PAGE - 1) / PAGE * PAGE;
  madvise(bytes(address), whole, MADV_DONTNEED);
  mprotect(bytes(address), whole, PROT_NONE);
  used -= found->second;
  live.erase(found);
  return sticky;
}
int cuMemHostAlloc(void **address, size_t size, unsigned) {
  ENTER;
  *address = malloc(size);
  pinned[(uint64_t)*address] = size;
  return SUCCESS;
}
int cuMemFreeHost(void *address) {
  ENTER;
  for (const Pending &each : queue)
    if (each.host == (uint64_t)address) {
      fprintf(stderr, "stand-in driver: host memory was freed under a queued copy\n");
      abort();
    }
  if (!pinned.erase((uint64_t)address)) return INVALID_VALUE;
  free(address);
  return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *) {
  ENTER;
  std::shared_ptr<std::vector<char>> taken;
  if (!pinned.count((uint64_t)from)) taken = std::make_shared<std::vector<char>>((char *)from, (char *)from + size);
  queue.push_back({[=] {
                     if (!allocated(to, size)) return (int)ILLEGAL_ADDRESS;
                     memcpy(bytes(to), taken ? taken->data() : from, size);
                     return (int)SUCCESS;
                   },
                   taken ? 0 : (uint64_t)from});
  return SUCCESS;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
  ENTER;
  if (run_queue()) return sticky;
  if (!allocated(from, size)) return sticky = ILLEGAL_ADDRESS;
  memcpy(to, bytes(from), size);
  return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *) {
  ENTER;
  queue.push_back({[=] { return run_copy({to, from, size}); }, 0});
  return SUCCESS;
}

int cuEventCreate(Event **event, unsigned) { return *event = new Event, SUCCESS; }
int cuEventRecord(Event *event, void *) {
  ENTER;
  queue.push_back({[=] { return event->at = now(), (int)SUCCESS; }, 0});
  return SUCCESS;
}
int cuEventSynchronize(Event *) {
  ENTER;
  return run_queue();
}
int cuEventElapsedTime(float *milliseconds, Event *from, Event *to) {
  return *milliseconds = (to->at - from->at) * 1e3, SUCCESS;
}
int cuEventDestroy_v2(Event *event) {
  ENTER;
  run_queue();
  delete event;
  return SUCCESS;
}
int cuStreamWaitEvent(void *, Event *, unsigned) { return SUCCESS; }

int cuModuleLoadData(Module **module, const void *image) {
  ENTER;
  if (memcmp(image, "\x7f" "ELF", 4)) return INVALID_PTX;
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  /* a name of its own: a second library of one name would be the first */
  std::string path = std::string(getenv("STAND_IN_CUDA_FILES")) + "/module-XXXXXX";
  const int file = mkstemp(&path[0]);
  if (file < 0 || write(file, image, size) != (ssize_t)size) return OUT_OF_MEMORY;
  close(file);
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(path.c_str());
  if (!library) return INVALID_IMAGE;
  return *module = new Module{library}, SUCCESS;
}
int cuModuleGetFunction(Kernel **kernel, Module *module, const char *name) {
  ENTER;
  void *entry = dlsym(module->library, ("entry__" + std::string(name)).c_str());
  if (!entry) return NOT_FOUND;
  return *kernel = new Kernel{(Entry)entry}, SUCCESS;
}
int cuModuleUnload(Module *module) {
  ENTER;
  run_queue();
  dlclose(module->library);
  delete module;
  return SUCCESS;
}
int cuFuncSetAttribute(Kernel *, int, int) { return SUCCESS; }
int cuLaunchKernel(Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                   void *, void **, void **extra) {
  ENTER;
  const unsigned dims[6] = {gx, gy, gz, bx, by, bz};
  if (!(gx && gy && gz && bx && by && bz) || bx * by * bz > 1024) return INVALID_VALUE;
  const Work work = work_of(kernel, dims, extra);
  queue.push_back({[=] { return run_kernel(work); }, 0});
  return SUCCESS;
}

struct KernelNode { Kernel *function; unsigned dims[6], shared; void **parameters, **extra; };
struct CopyNode {
  size_t from_at[4]; unsigned from_kind; void *from_host; uint64_t from; void *from_array, *reserved0; size_t from_pitch[2];
  size_t to_at[4]; unsigned to_kind; void *to_host; uint64_t to; void *to_array, *reserved1; size_t to_pitch[2];
  size_t width, height, depth;
};
static_assert(sizeof(KernelNode) == 56 && sizeof(CopyNode) == 200, "as in cuda.h");

int cuGraphCreate(Graph **graph, unsigned) { return *graph = new Graph, SUCCESS; }
int cuGraphAddKernelNode(Node **node, Graph *graph, Node **after, size_t count, const KernelNode *of) {
  *node = new Node{false, work_of(of->function, of->dims, of->extra), {}, {after, after + count}};
  return graph->nodes.push_back(*node), SUCCESS;
}
int cuGraphAddMemcpyNode(Node **node, Graph *graph, Node **after, size_t count, const CopyNode *of, Context *) {
  *node = new Node{true, {}, {of->to, of->from, of->width * of->height * of->depth}, {after, after + count}};
  return graph->nodes.push_back(*node), SUCCESS;
}
/* An instance is its graph: nobody here makes two of one. Of the nodes whose turn it may be the last one comes first,
   so what somebody forgot to order is in the wrong order. */
int cuGraphInstantiate_v2(Graph **instance, Graph *graph, Node **, char *, size_t) {
  std::set<Node *> done;
  auto ready = [&](const Node *node) {
    return std::all_of(node->after.begin(), node->after.end(), [&](Node *each) { return done.count(each) != 0; });
  };
  while (graph->order.size() < graph->nodes.size()) {
    auto next = std::find_if(graph->nodes.rbegin(), graph->nodes.rend(),
                             [&](Node *node) { return !done.count(node) && ready(node); });
    if (next == graph->nodes.rend()) return INVALID_VALUE;
    done.insert(*next);
    graph->order.push_back(*next);
  }
  return *instance = graph, SUCCESS;
}
int cuGraphExecKernelNodeSetParams(Graph *, Node *node, const KernelNode *of) {
  return node->work = work_of(of->function, of->dims, of->extra), SUCCESS;
}
int cuGraphExecMemcpyNodeSetParams(Graph *, Node *node, const CopyNode *of, Context *) {
  return node->copy = {of->to, of->from, of->width * of->height * of->depth}, SUCCESS;
}
int cuGraphLaunch(Graph *instance, void *) {
  ENTER;
  for (const Node *node : instance->order) {
    const Node taken = *node;
    queue.push_back({[=] { return taken.copies ? run_copy(taken.copy) : run_kernel(taken.work); }, 0});
  }
  return SUCCESS;
}
int cuGraphExecDestroy(Graph *) { return SUCCESS; }
int cuGraphDestroy(Graph *graph) {
  ENTER;
  run_queue();
  for (Node *node : graph->nodes) delete node;
  delete graph;
  return SUCCESS;
}
}

// Counts the bytes of large blocks that a process holds, and the most it ever held, whichever thread takes or frees
// them. To be preloaded; PyTorch's own record of allocations knows the threads alone that a profiler was started in.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <malloc.h>

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);
}

namespace {
constexpr size_t kLarge = 1024;  // below are Python's objects
std::atomic<long long> held{0}, most{0};

void *taken(void *block) {
  const size_t size = block ? malloc_usable_size(block) : 0;
  if (size >= kLarge) {
    const long long now = held.fetch_add(static_cast<long long>(size)) + static_cast<long long>(size);
    long long before = most.load();
    while (before < now && !most.compare_exchange_weak(before, now)) {
    }
  }
  return block;
}

void given_back(size_t size) {
  if (size >= kLarge) held.fetch_sub(static_cast<long long>(size));
}
}  // namespace

extern "C" {
void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  void *found = memalign(alignment, size);
  if (!found) return ENOMEM;
  *block = found;
  return 0;
}

void *realloc(void *block, size_t size) {
  const size_t before = block ? malloc_usable_size(block) : 0;
  void *found = __libc_realloc(block, size);
  if (found || size == 0) {
    given_back(before);
    taken(found);
  }
  return found;
}

void free(void *block) {
  if (block) given_back(malloc_usable_size(block));
  __libc_free(block);
}

long long allocations_held() { return held.load(); }
long long allocations_most() { return most.load(); }
void allocations_restart() { most.store(held.load()); }
}

// A CUDA runtime with one pretended device: host memory and no kernels. It is loaded before the real one, so PyTorch's
// CUDA build finds a device, and autograd starts its device thread; fake tensors never ask for a number.
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>

#define OK(name, ...) int name(__VA_ARGS__) { return 0; }

static int found(int *place, int value) { *place = value; return 0; }
static int allocated(void **place, size_t align, size_t size) { return posix_memalign(place, align, size ? size : align) ? 2 : 0; }

int cudaGetDeviceCount(int *count) { return found(count, 1); }
int cudaGetDevice(int *device) { return found(device, 0); }
OK(cudaSetDevice, int device)
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; return found(greatest, -5); }
OK(cudaDeviceSynchronize, void)
int cudaDriverGetVersion(int *version) { return found(version, 13000); }
int cudaRuntimeGetVersion(int *version) { return found(version, 13000); }
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)
int cudaMalloc(void **place, size_t size) { return allocated(place, 512, size); }
int cudaFree(void *place) { free(place); return 0; }
int cudaMemGetInfo(size_t *left, size_t *all) { *left = 70ul << 30; *all = 80ul << 30; return 0; }
int cudaHostAlloc(void **place, size_t size, unsigned flags) { return allocated(place, 4096, size); }
int cudaFreeHost(void *place) { free(place); return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { memcpy(to, from, size); return 0; }
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) { memset(to, value, size); return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return allocated(stream, 64, 64); }
OK(cudaStreamQuery, void *stream)
OK(cudaStreamSynchronize, void *stream)
int cudaStreamIsCapturing(void *stream, int *status) { return found(status, 0); }
OK(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
int cudaEventCreateWithFlags(void **event, unsigned flags) { return allocated(event, 64, 64); }
int cudaEventDestroy(void *event) { free(event); return 0; }
OK(cudaEventQuery, void *event)
OK(cudaEventRecord, void *event, void *stream)
OK(cudaEventRecordWithFlags, void *event, void *stream, unsigned flags)
OK(cudaEventSynchronize, void *event)
int cudaEventElapsedTime(float *milliseconds, void *first, void *last) { *milliseconds = 1; return 0; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return found(can, 0); }
OK(cudaThreadExchangeStreamCaptureMode, int *mode)
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    // Compute capability 9.0, and as many processors as an H100 has.
    return found(value, attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1024);
}
int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "pretended");
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = 80ul << 30;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->regsPerBlock = 65536;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->textureAlignment = 512;
    properties->l2CacheSize = 50 << 20;
    return 0;
}
struct cudaGrid { int x, y, z; };
OK(cudaLaunchKernel, const void *function, struct cudaGrid grid, struct cudaGrid block, void **arguments, size_t shared, void *stream)

// What PyTorch asks of the driver itself, libcuda.so.1, which machines without a GPU do not have.
static int found(int *place, int value) { *place = value; return 0; }

int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; return found(active, 1); }
int cuDriverGetVersion(int *version) { return found(version, 13000); }
int cuGetErrorString(int error, const char **text) { *text = "pretended"; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuDeviceGetCount(int *count) { return found(count, 1); }

/* The wheels of the CUDA runtime lack this header; its macros mean nothing to a host compiler. */
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDA_CB
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)

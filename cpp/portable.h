// Macros for functions: to compile one source for CPU and GPU, with bitwise equal results, and to keep prefetches.
#pragma once

// For functions that only prefetch. Unless such a function is inlined early, GCC takes it for one without effect and
// removes its calls.
#define HETMPI_PREFETCHES [[gnu::always_inline]] inline

#ifdef __CUDACC__
#define HETMPI_SHARED __host__ __device__ inline
#else
#define HETMPI_SHARED inline
#endif

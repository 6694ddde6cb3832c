// Macros to compile one source for CPU and GPU, with bitwise equal results.
#pragma once

#ifdef __CUDACC__
#define HETMPI_SHARED __host__ __device__ inline
#else
#define HETMPI_SHARED inline
#endif

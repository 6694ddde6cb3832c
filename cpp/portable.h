// What it takes to compile one source for the CPU and the GPU: both then come to the same bits.
#pragma once

#ifdef __CUDACC__
#define HETMPI_SHARED __host__ __device__ inline
#else
#define HETMPI_SHARED inline
#endif

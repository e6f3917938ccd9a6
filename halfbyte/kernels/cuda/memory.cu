// How fast memory is read.

// parts [programs] = the exclusive or of what each program reads: of 16 bytes each, `count` in all.
extern "C" __global__ void __launch_bounds__(512) read_all(
    const uint4* data, int count, unsigned* parts) {
    constexpr int AT_ONCE = 8;  // loads of a thread that are under way together
    __shared__ unsigned found[512];
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned bits = 0;
    for (; i + (AT_ONCE - 1) * step < count; i += AT_ONCE * step) {
        uint4 some[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) some[j] = data[i + j * step];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) bits ^= some[j].x ^ some[j].y ^ some[j].z ^ some[j].w;
    }
    for (; i < count; i += step) bits ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    found[threadIdx.x] = bits;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int j = 1; j < int(blockDim.x); j++) bits ^= found[j];
    parts[blockIdx.x] = bits;
}

// What a CUDA source of this package needs to be compiled and run as plain C++20.
//
// A CUDA thread becomes a thread of the host, __syncthreads a barrier of theirs, __syncwarp one of 32
// of them, and the programs of a grid run one after the other, so that static variables can stand
// for shared memory. A cluster is one program.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // `extern __shared__` is replaced by `extern` before compiling
#define asm(...) rounded = host_nearest_tf32(x)  // the one instruction that is written out

#define __align__(bytes) alignas(bytes)
#define __restrict__

using std::min, std::size_t;

struct Index {
    unsigned x, y, z;
};
inline thread_local Index threadIdx, blockIdx;
inline Index gridDim, blockDim;

inline std::barrier<>* everyone;
inline void __syncthreads() { everyone->arrive_and_wait(); }

// The warps that multiply: all but the last two.
inline std::barrier<>* first;

// What the lanes of a warp show each other.
struct Warp {
    std::barrier<> barrier{32};
    unsigned words[32][8];
    const void* places[32];
};
inline std::vector<std::unique_ptr<Warp>> warps;
inline Warp& warp() { return *warps[threadIdx.x / 32]; }
inline void __syncwarp() { warp().barrier.arrive_and_wait(); }

template <typename Value>
Value __shfl_up_sync(unsigned, Value value, int distance) {
    const int lane = threadIdx.x % 32;
    std::memcpy(warp().words[lane], &value, sizeof value);
    __syncwarp();
    Value result;
    std::memcpy(&result, warp().words[std::max(0, lane - distance)], sizeof result);
    __syncwarp();
    return result;
}
inline int __shfl_sync(unsigned, int value, int lane) {
    warp().words[threadIdx.x % 32][0] = value;
    __syncwarp();
    const int result = warp().words[lane][0];
    __syncwarp();
    return result;
}

struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const std::uint64_t both = std::uint64_t(high) << 32 | low;
    unsigned bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return bytes;
}
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __expf(float x) { return std::exp(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
// cvt.rna.tf32.f32: to nearest, halves away from zero.
inline unsigned host_nearest_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1FFFu; }

constexpr std::size_t SHARED_FLOATS = 65536;
alignas(128) inline float shared[SHARED_FLOATS];
constexpr float UNTOUCHED = -12345.625f;
inline unsigned char* const memory = reinterpret_cast<unsigned char*>(shared);

// Runs a kernel over a grid, its arguments behind pointers as cuLaunchKernel takes them. False when
// it wrote to shared memory beyond the `shared_bytes` it asked for.
template <typename... Arguments>
bool launch(void (*kernel)(Arguments...), const unsigned* grid, unsigned threads,
            std::size_t shared_bytes, void** values) {
    const auto place = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return std::tuple<Arguments...>(*static_cast<Arguments*>(values[I])...);
    };
    const auto arguments = place(std::index_sequence_for<Arguments...>{});
    std::fill(shared, shared + SHARED_FLOATS, UNTOUCHED);
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
    for (unsigned i = 0; i < grid[0] * grid[1] * grid[2]; i++) {
        std::barrier<> barrier(threads);
        everyone = &barrier;
        std::barrier<> all_but_a_warp(threads > 64 ? threads - 64 : threads);
        first = &all_but_a_warp;
        warps.clear();
        for (unsigned w = 0; w < (threads + 31) / 32; w++) warps.push_back(std::make_unique<Warp>());
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; thread++) {
            running.emplace_back([&, thread] {
                threadIdx = {thread, 0, 0};
                blockIdx = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
                std::apply(kernel, arguments);
                barrier.arrive_and_drop();
            });
        }
        for (auto& thread : running) thread.join();
    }
    return std::all_of(shared + shared_bytes / sizeof(float), shared + SHARED_FLOATS,
                       [](float value) { return value == UNTOUCHED; });
}

#define HOST_LAUNCHER(kernel)                                                                \
    extern "C" bool launch_##kernel(const unsigned* grid, unsigned threads,                  \
                                    std::size_t shared_bytes, void** values) {               \
        return launch(kernel, grid, threads, shared_bytes, values);                          \
    }

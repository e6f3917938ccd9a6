// What a CUDA source of this package needs to be compiled and run as plain C++20.
//
// A CUDA thread becomes a thread of the host, __syncthreads a barrier of theirs, and the programs
// of a grid run one after the other, so that static variables can stand for shared memory.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // `extern __shared__` is replaced by `extern` before compiling
#define asm(...) rounded = host_nearest_tf32(x)  // the one instruction that is written out

using std::min;

struct Index {
    unsigned x, y;
};
inline thread_local Index threadIdx, blockIdx;

inline std::barrier<>* everyone;
inline void __syncthreads() { everyone->arrive_and_wait(); }

struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

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
alignas(16) inline float shared[SHARED_FLOATS];
constexpr float UNTOUCHED = -12345.625f;

// Runs a kernel over a grid, its arguments behind pointers as cuLaunchKernel takes them. False when
// it wrote to shared memory beyond the `shared_bytes` it asked for.
template <typename... Arguments>
bool launch(void (*kernel)(Arguments...), unsigned width, unsigned height, unsigned threads,
            std::size_t shared_bytes, void** values) {
    const auto place = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return std::tuple<Arguments...>(*static_cast<Arguments*>(values[I])...);
    };
    const auto arguments = place(std::index_sequence_for<Arguments...>{});
    std::fill(shared, shared + SHARED_FLOATS, UNTOUCHED);
    for (unsigned y = 0; y < height; y++) {
        for (unsigned x = 0; x < width; x++) {
            std::barrier<> barrier(threads);
            everyone = &barrier;
            std::vector<std::thread> running;
            for (unsigned i = 0; i < threads; i++) {
                running.emplace_back([&, i] {
                    threadIdx = {i, 0}, blockIdx = {x, y};
                    std::apply(kernel, arguments);
                    barrier.arrive_and_drop();
                });
            }
            for (auto& thread : running) thread.join();
        }
    }
    return std::all_of(shared + shared_bytes / sizeof(float), shared + SHARED_FLOATS,
                       [](float value) { return value == UNTOUCHED; });
}

#define HOST_LAUNCHER(kernel)                                                              \
    extern "C" bool launch_##kernel(unsigned width, unsigned height, unsigned threads,     \
                                    std::size_t shared_bytes, void** values) {             \
        return launch(kernel, width, height, threads, shared_bytes, values);               \
    }

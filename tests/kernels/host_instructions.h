// halfbyte/kernels/cuda/instructions.cuh for the host: the same functions, by their definition.
#pragma once

#ifndef HOPPER
#define HOPPER 1  // 0 for what runs on earlier GPUs
#endif

enum class Element { bfloat16, float16 };

template <Element E>
float value_of(unsigned short bits) {
    if constexpr (E == Element::bfloat16) return __uint_as_float(unsigned(bits) << 16);
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <Element E>
unsigned short rounded(float x) {
    if constexpr (E == Element::bfloat16) {
        const unsigned bits = __float_as_uint(x);
        return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    }
    const _Float16 value = x;
    unsigned short bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline unsigned shared_address(const void* place) {
    return static_cast<const unsigned char*>(place) - memory;
}

// Copies happen when they are asked for, so that one that comes too early is seen.
constexpr int COPY_ARRIVALS = HOPPER ? 1 : 32;
struct Barrier {
    std::mutex mutex;
    std::condition_variable ended;
    int count = 0, waiting_for = 0, bytes = 0, phase = 0;
    void settle() {
        if (waiting_for < 0 || bytes < 0) std::abort();
        if (waiting_for == 0 && bytes == 0) waiting_for = count, phase++, ended.notify_all();
    }
};
inline Barrier barriers[64];  // 8 bytes of shared memory each
inline void make_barrier(unsigned barrier, int count) {
    Barrier& own = barriers[barrier / 8];
    own.count = own.waiting_for = count, own.bytes = own.phase = 0;
}
inline void show_barriers() {}
inline void arrive(unsigned barrier) {
    Barrier& own = barriers[barrier / 8];
    const std::lock_guard lock(own.mutex);
    own.waiting_for--, own.settle();
}
inline void wait(unsigned barrier, int phase) {
    Barrier& own = barriers[barrier / 8];
    std::unique_lock lock(own.mutex);
    // A phase that never ends is a mistake in the bytes that were announced, or in the arrivals.
    if (!own.ended.wait_for(lock, std::chrono::seconds(60), [&] { return own.phase > phase; })) {
        std::abort();
    }
}
inline void announce(unsigned barrier, int bytes) {
    Barrier& own = barriers[barrier / 8];
    const std::lock_guard lock(own.mutex);
    own.waiting_for--, own.bytes += bytes, own.settle();
}
struct Source {  // as `host_source` makes it
    long element, sizes[3], strides[2], box[3], swizzled, unused[6];
    const unsigned char* data;
};
inline void copy_box(unsigned to, const Source& source, int x, int y, int z, unsigned barrier) {
    if (to % 128) std::abort();
    const long first[3] = {x, y, z};
    long bytes = 0;
    for (long k = 0; k < source.box[2]; k++) {
        for (long j = 0; j < source.box[1]; j++) {
            for (long i = 0; i < source.box[0]; i++, bytes += source.element) {
                const bool there = first[0] + i < source.sizes[0] && first[1] + j < source.sizes[1]
                                   && first[2] + k < source.sizes[2];
                unsigned place = to + bytes;
                if (source.swizzled) place ^= (place >> 7 & 7) << 4;
                std::memset(memory + place, 0, source.element);
                if (there) {
                    std::memcpy(memory + place,
                                source.data + (first[0] + i) * source.element
                                    + (first[1] + j) * source.strides[0]
                                    + (first[2] + k) * source.strides[1],
                                source.element);
                }
            }
        }
    }
    Barrier& own = barriers[barrier / 8];
    const std::lock_guard lock(own.mutex);
    own.bytes -= bytes, own.settle();
}
inline void copy_16_bytes(unsigned to, const void* from, bool there) {
    if (to % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) std::abort();
    if (there) std::memcpy(memory + to, from, 16);
    else std::memset(memory + to, 0, 16);
}
inline void end_of_copies(unsigned barrier) { arrive(barrier); }
template <int THREADS>
void synchronize_first() {
    first->arrive_and_wait();
}

inline void load_matrices(unsigned (&words)[4], unsigned address) {
    const int lane = threadIdx.x % 32;
    warp().places[lane] = memory + address;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        words[i] = static_cast<const unsigned*>(warp().places[8 * i + lane / 4])[lane % 4];
    }
    __syncwarp();
}

template <Element E>
unsigned fma2(unsigned a, unsigned b, unsigned c) {
    const auto half = [&](int shift) {
        // Exact in float64, but for sums of very different sizes, which are not taken here.
        const double sum = double(value_of<E>(a >> shift)) * value_of<E>(b >> shift)
                           + value_of<E>(c >> shift);
        return rounded<E>(float(sum));
    };
    return half(0) | unsigned(half(16)) << 16;
}
template <Element E>
unsigned times(unsigned a, unsigned b) {
    return fma2<E>(a, b, 0x80008000u);
}
inline unsigned mask_or(unsigned word, unsigned mask, unsigned bits) { return (word & mask) | bits; }

template <Element E>
void multiply_add(float (&sums)[4], const unsigned (&weights)[4], unsigned tokens,
                  unsigned more_tokens, const float (&start)[4]) {
    const int lane = threadIdx.x % 32;
    unsigned* own = warp().words[lane];
    std::copy(weights, weights + 4, own);
    own[4] = tokens, own[5] = more_tokens;
    __syncwarp();
    float result[4];
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), token = 2 * (lane % 4) + i % 2;
        double sum = start[i];
        for (int k = 0; k < 16; k++) {
            const unsigned weight = warp().words[4 * (row % 8) + k % 8 / 2][row / 8 + k / 8 * 2];
            const unsigned activation = warp().words[4 * token + k % 8 / 2][4 + k / 8];
            sum += double(value_of<E>(weight >> 16 * (k % 2)))
                   * value_of<E>(activation >> 16 * (k % 2));
        }
        result[i] = sum;
    }
    __syncwarp();
    std::copy(result, result + 4, sums);
}

inline void wait_for_earlier_kernels() {}
inline void let_later_kernels_start() {}

struct Cluster {
    int rank, size;
};
inline Cluster this_cluster() { return {int(blockIdx.y), int(gridDim.y)}; }
inline void synchronize(Cluster) { std::abort(); }
inline float4 load_shared_of(const float4* place, int, Cluster) { return *place; }

inline void show_to_tensor_cores() {}
inline void begin_products() {}
inline void end_of_products() {}
template <int LATER>
void wait_for_products() {}

template <Element E, int BLOCKS>
void start_product(float (&sums)[BLOCKS][4], const unsigned (&weights)[4], unsigned address) {
    const int lane = threadIdx.x % 32;
    std::copy(weights, weights + 4, warp().words[lane]);
    __syncwarp();
    for (int b = 0; b < BLOCKS; b++) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), token = 8 * b + 2 * (lane % 4) + i % 2;
            double sum = sums[b][i];
            for (int k = 0; k < 16; k++) {
                const unsigned weight = warp().words[4 * (row % 8) + k % 8 / 2][row / 8 + k / 8 * 2];
                unsigned place = address + token / 8 * 1024 + token % 8 * 128 + 2 * k;
                place ^= (place >> 7 & 7) << 4;
                unsigned short activation;
                std::memcpy(&activation, memory + place, 2);
                sum += double(value_of<E>(weight >> 16 * (k % 2))) * value_of<E>(activation);
            }
            sums[b][i] = sum;
        }
    }
    __syncwarp();
}

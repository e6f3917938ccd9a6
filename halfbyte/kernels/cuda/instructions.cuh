// Instructions of the tensor cores, of copies into shared memory and of clusters, as functions.

#if __CUDA_ARCH__ >= 900
#define HOPPER 1
#else
#define HOPPER 0
#endif

enum class Element { bfloat16, float16 };

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// ------------------------------------------------------------- barriers and copies between memories

// A barrier in shared memory. A phase of it ends when as many as `count` have arrived and all bytes
// that were announced are there; phases are even, odd and so on.
__device__ __forceinline__ void make_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// The thread that made barriers does this before others, and copies, use them.
__device__ __forceinline__ void show_barriers() {
#if HOPPER
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

// Until phase `phase` (its lowest bit) has ended.
__device__ __forceinline__ void wait(unsigned barrier, int phase) {
    unsigned done = 0;
    while (!done) {
        asm volatile("{\n.reg .pred p;\n"
#if HOPPER
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
#else
                     "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase & 1)
                     : "memory");
    }
}

// A matrix of up to three dimensions in global memory; halfbyte/kernels/jit.py makes one. Where there is
// an engine that copies boxes of it, `boxes` says what that needs to know.
struct alignas(64) Source {
    unsigned long long boxes[16];
    const unsigned char* data;
};

// A warp that copies tells a barrier, so often that `COPY_ARRIVALS` are counted: a thread announces how
// many bytes boxes have, or all lanes say that they have asked for all copies of 16 bytes.
constexpr int COPY_ARRIVALS = HOPPER ? 1 : 32;

#if HOPPER
__device__ __forceinline__ void announce(unsigned barrier, int bytes) {
    asm volatile("{\n.reg .b64 state;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// The box whose first element has these numbers, the first dimension in a row. What is not in the
// matrix is zero. In lines of 128 bytes, if the source says so, pieces of 16 bytes change places by
// the lowest three bits of the line's number in shared memory.
__device__ __forceinline__ void copy_box(
    unsigned to, const Source& source, int x, int y, int z, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&source), "r"(x), "r"(y), "r"(z),
                 "r"(barrier)
                 : "memory");
}
#endif

// Zeros when it is not `there`.
__device__ __forceinline__ void copy_16_bytes(unsigned to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void end_of_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Of the first `THREADS` threads of a program.
template <int THREADS>
__device__ __forceinline__ void synchronize_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// -------------------------------------------------------------------------------------- arithmetic

// Four matrices of 8 rows of 16 bytes, their rows at the addresses of lanes 0-7, 8-15 and so on:
// word `lane % 4` of row `lane / 4` of each.
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

// a b + c, of both halves, rounded once.
template <Element E>
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    if constexpr (E == Element::bfloat16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    }
    return d;
}

template <Element E>
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
    return fma2<E>(a, b, 0x80008000u);
}

// (word & mask) | bits, which the compiler would make two instructions of.
__device__ __forceinline__ unsigned mask_or(unsigned word, unsigned mask, unsigned bits) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}

// sums [16, 8] = weights [16, 16] tokens [16, 8] + start
template <Element E>
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&weights)[4], unsigned tokens, unsigned more_tokens,
    const float (&start)[4]) {
    if constexpr (E == Element::bfloat16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
            : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(tokens),
              "r"(more_tokens), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
            : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(tokens),
              "r"(more_tokens), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
    }
}

template <Element E>
__device__ __forceinline__ unsigned short rounded(float x) {
    unsigned short bits;
    if constexpr (E == Element::bfloat16) {
#if HOPPER
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
        unsigned pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
        bits = static_cast<unsigned short>(pair);
#endif
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    }
    return bits;
}

// Nothing that an earlier kernel of the stream writes may be read before this. Weights and scales
// are not written by kernels of a stream that they are used in.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_later_kernels_start() {
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The programs with the same blockIdx.x and blockIdx.z.
struct Cluster {
    int rank, size;
};

__device__ __forceinline__ Cluster this_cluster() {
    return {static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y)};
}

// All threads of a cluster of several programs.
__device__ __forceinline__ void synchronize(Cluster) {
#if HOPPER
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Numbers in the shared memory of program `rank` of the cluster, at the place they have here.
__device__ __forceinline__ float4 load_shared_of(const float4* place, int rank, Cluster cluster) {
#if HOPPER
    if (cluster.size > 1) {
        unsigned here = shared_address(place), there;
        float4 value;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                     : "r"(there)
                     : "memory");
        return value;
    }
#endif
    return *place;
}

// ------------------------------------------------ tensor cores of four warps (Hopper only: sm_90a)

#if HOPPER
// What one thread wrote to shared memory by itself, these instructions see only after it did this.
__device__ __forceinline__ void show_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before products whose registers other instructions wrote.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_of_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until no more than `LATER` of the groups of products are under way.
template <int LATER>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

// For both types of elements: `places` of the sums in the instruction, `others` of its other operands.
#define START_PRODUCT(columns, places, others, ...)                                            \
    if constexpr (E == Element::bfloat16) {                                                    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" places  \
                     "}, " others ", 1, 1, 1, 0;"                                              \
                     : __VA_ARGS__                                                             \
                     : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]),     \
                       "l"(matrix));                                                           \
    } else {                                                                                   \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" places    \
                     "}, " others ", 1, 1, 1, 0;"                                              \
                     : __VA_ARGS__                                                             \
                     : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]),     \
                       "l"(matrix));                                                           \
    }

// Starts sums [64, 8 BLOCKS] += weights [64, 16] tokens [16, 8 BLOCKS], 16 rows of each of four
// warps, in registers as for `multiply_add`. Of the tokens, at `address`, those of eight lie in 1024
// bytes, 128 bytes for 64 columns of each; pieces of 16 bytes change places by the token's number.
template <Element E, int BLOCKS>
__device__ __forceinline__ void start_product(
    float (&sums)[BLOCKS][4], const unsigned (&weights)[4], unsigned address) {
    const unsigned long long matrix =
        (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
    if constexpr (BLOCKS == 2) {
        START_PRODUCT("16",
                      "%0, %1, %2, %3, %4, %5, %6, %7 ",
                      "{%8, %9, %10, %11}, %12",
                      "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
                      "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]));
    }
    if constexpr (BLOCKS == 4) {
        START_PRODUCT("32",
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 ",
                      "{%16, %17, %18, %19}, %20",
                      "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
                      "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
                      "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
                      "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]));
    }
    if constexpr (BLOCKS == 8) {
        START_PRODUCT("64",
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                      "%30, %31 ",
                      "{%32, %33, %34, %35}, %36",
                      "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
                      "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
                      "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
                      "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]),
                      "+f"(sums[4][0]), "+f"(sums[4][1]), "+f"(sums[4][2]), "+f"(sums[4][3]),
                      "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
                      "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]),
                      "+f"(sums[7][0]), "+f"(sums[7][1]), "+f"(sums[7][2]), "+f"(sums[7][3]));
    }
    if constexpr (BLOCKS == 16) {
        START_PRODUCT("128",
                      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                      "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
                      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
                      "%58, %59, %60, %61, %62, %63 ",
                      "{%64, %65, %66, %67}, %68",
                      "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
                      "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
                      "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
                      "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]),
                      "+f"(sums[4][0]), "+f"(sums[4][1]), "+f"(sums[4][2]), "+f"(sums[4][3]),
                      "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
                      "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]),
                      "+f"(sums[7][0]), "+f"(sums[7][1]), "+f"(sums[7][2]), "+f"(sums[7][3]),
                      "+f"(sums[8][0]), "+f"(sums[8][1]), "+f"(sums[8][2]), "+f"(sums[8][3]),
                      "+f"(sums[9][0]), "+f"(sums[9][1]), "+f"(sums[9][2]), "+f"(sums[9][3]),
                      "+f"(sums[10][0]), "+f"(sums[10][1]), "+f"(sums[10][2]), "+f"(sums[10][3]),
                      "+f"(sums[11][0]), "+f"(sums[11][1]), "+f"(sums[11][2]), "+f"(sums[11][3]),
                      "+f"(sums[12][0]), "+f"(sums[12][1]), "+f"(sums[12][2]), "+f"(sums[12][3]),
                      "+f"(sums[13][0]), "+f"(sums[13][1]), "+f"(sums[13][2]), "+f"(sums[13][3]),
                      "+f"(sums[14][0]), "+f"(sums[14][1]), "+f"(sums[14][2]), "+f"(sums[14][3]),
                      "+f"(sums[15][0]), "+f"(sums[15][1]), "+f"(sums[15][2]), "+f"(sums[15][3]));
    }
}
#undef START_PRODUCT
#endif

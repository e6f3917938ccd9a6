// Products of 16-bit activations with INT4 weights, read as a checkpoint stores them.
//
// A weight [N, K] is int32 [N, K/8], eight codes to a word, the first column in the lowest nibble,
// code + 8 stored; its scales are bfloat16 [N, groups]. Nothing is repacked. A warp has some rows of
// 128 or 256 columns at a time copied into a ring of its own in shared memory, some of them ahead; warps
// that share rows take neighbouring blocks, so that a program reads rows in long pieces. `ldmatrix`
// then gives each lane one word of a group of 32 columns: a 16 x 16 operand of the tensor cores, for
// a sum over columns may be taken in any order. Weights are the left operand, eight tokens at a time
// the right one. Activations of few tokens pass through the same ring, those of many are made ready
// once for all warps of a program.
//
// The sums of a group start from -8 times the sum of its activations, which a product with a
// constant matrix gives, so that no weight is ever corrected; then they are multiplied by the scale
// in float32. The weight itself is never rounded.
//
// Warps that share rows, and the programs of a cluster, which share them too, add up their parts in
// a fixed order through shared memory: no atomics, no workspace, the same bits every time.
//
// Compiled at run time by halfbyte/kernels/jit.py; the plain torch twin is in reference.py.

#include "instructions.cuh"

constexpr int BLOCK = 128;  // columns, of four groups of 32
constexpr int PADDING = 4;  // floats between rows of partial sums, so that lanes spread over banks

// ------------------------------------------------------------------------------------- the weight

// A code in the lowest bits of a 16-bit float, or sixteen times it, is that many times the smallest
// number there is: subnormal, or with the smallest exponent, where the scale is the same. So a mask
// turns nibbles into numbers. Activations are made larger in turn, where they would come out
// subnormal in float32, and what was multiplied by sixteen smaller.
constexpr unsigned NIBBLES = 0x000F000Fu, NEXT_NIBBLES = 0x00F000F0u;
constexpr unsigned MINUS_8 = 0x80088008u, MINUS_128 = 0x80808080u;

template <Element E>
constexpr unsigned LARGER = E == Element::bfloat16 ? 0x5F805F80u : 0x3C003C00u;  // 2^64, 1

template <Element E>
constexpr unsigned SMALLER = E == Element::bfloat16 ? 0x5D805D80u : 0x2C002C00u;  // 2^60, 1 / 16

// What sums are multiplied with in the end: 2^(133 - 64), or 2^24.
template <Element E>
constexpr float UNIT = E == Element::bfloat16 ? 590295810358705651712.0f : 16777216.0f;

// A scale, in the type of the activations, in both halves of a register.
template <Element E>
__device__ __forceinline__ unsigned both_halves(float scale) {
    return __byte_perm(rounded<E>(scale), 0, 0x1010);
}

// Weights J and J + 4 of a word. A nibble in the mantissa of 128, or 1024, is that number and the
// code and 8; taking 136 or 1032 away is exact, and the product is rounded once.
template <Element E, int J>
__device__ __forceinline__ unsigned two_weights(unsigned word, unsigned scale) {
    constexpr bool BF = E == Element::bfloat16;
    constexpr unsigned EXPONENT = BF ? 0x43004300u : 0x64006400u, ONE = BF ? 0x3F803F80u : 0x3C003C00u;
    constexpr unsigned OFFSET = BF ? 0xC308C308u : 0xE408E408u, ZERO = 0x80008000u;
    return fma2<E>(fma2<E>(mask_or(word >> (4 * J), NIBBLES, EXPONENT), ONE, OFFSET), scale, ZERO);
}

// Where activations are while they are multiplied.
enum class Activations {
    of_a_warp,  // in the ring of each warp
    shared,     // made ready for all warps
    wide,       // for tensor cores of four warps, which read them from shared memory; Hopper only
};

// How the warps of a program share its rows and columns.
template <int ROW_GROUPS_, int TOKENS_, int WARPS_BY_ROWS_, int WARPS_BY_COLUMNS_, int BLOCKS_,
          int DEPTH_, Activations ACTIVATIONS_, int SCALES_>
struct Tile {
    static constexpr int ROW_GROUPS = ROW_GROUPS_;  // of 16 rows, of a warp
    static constexpr int TOKENS = TOKENS_;
    static constexpr int TOKEN_BLOCKS = (TOKENS + 7) / 8;
    static constexpr int WARPS_BY_ROWS = WARPS_BY_ROWS_;
    static constexpr int WARPS_BY_COLUMNS = WARPS_BY_COLUMNS_;
    static constexpr int BLOCKS = BLOCKS_;  // that are copied together, one or two
    static constexpr int DEPTH = DEPTH_;    // stages in the ring of a warp
    static constexpr int SCALES = SCALES_;  // of a row in a block: 4, 2 or 1
    static constexpr int WARP_ROWS = 16 * ROW_GROUPS;
    static constexpr int ROWS = WARP_ROWS * WARPS_BY_ROWS;
    static constexpr int WARPS = WARPS_BY_ROWS * WARPS_BY_COLUMNS;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr Activations ACTIVATIONS = ACTIVATIONS_;
    static constexpr bool SHARED = ACTIVATIONS != Activations::of_a_warp;
    static constexpr bool WIDE = ACTIVATIONS == Activations::wide;
    // With many tokens it costs less to correct and scale the weights, as they are rounded then.
    static constexpr bool ROUNDED = TOKENS > 16 || WIDE;
    // In a stage of a ring: codes, scales (one alone is loaded when it is needed), activations.
    static constexpr int ROW_BYTES = 64 * BLOCKS;
    static constexpr int SCALE_BYTES = SCALES > 1 ? 2 * SCALES * BLOCKS : 0;
    static constexpr int SCALES_AT = WARP_ROWS * ROW_BYTES;
    static constexpr int TOKENS_AT = SCALES_AT + WARP_ROWS * SCALE_BYTES;
    static constexpr int STAGE = TOKENS_AT + (SHARED ? 0 : TOKENS * 2 * BLOCK * BLOCKS);
    // Behind the rings: shared activations, in pieces of 8 tokens and 32 columns; of a stage of each
    // warp:
    static constexpr int PIECES = 4 * BLOCKS * TOKEN_BLOCKS * WARPS_BY_COLUMNS;
    static constexpr int PIECE_BYTES = 512 + (ROUNDED ? 0 : 64);
    static constexpr int PIECES_AT = (WARPS * DEPTH * STAGE + 1023) / 1024 * 1024;
    static constexpr int WIDE_BYTES = 2 * BLOCK * BLOCKS * TOKENS;  // of activations of a stage
    static_assert(!WIDE || (WARPS_BY_COLUMNS == 1 && WARPS % 4 == 0 && TOKENS % 16 == 0));
};

// Columns and scales of a weight; columns are a multiple of BLOCK, and of what is copied together.
struct Shape {
    int columns, groups, group_shift;  // a group is 1 << group_shift columns
    int chunk;  // stages of a warp that activations are made ready for at a time
};

// The rows of a warp, and the ring that their codes and scales pass through. `row_of` gives the row
// of the weight for a row of the program.
template <typename T, typename RowOf>
struct Ring {
    static constexpr int HALVES = 2 * T::ROW_GROUPS;  // of 8 rows
    static constexpr int LANES = 4 * T::BLOCKS;       // that copy a row
    const uint4* packed;
    const unsigned short* scales;
    Shape shape;
    RowOf row_of;
    unsigned char* stages;
    unsigned address, own, matrices;
    int first;

    __device__ __forceinline__ Ring(
        unsigned char* memory, const uint4* packed, const unsigned short* scales, Shape shape,
        RowOf row_of)
        : packed(packed), scales(scales), shape(shape), row_of(row_of) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        first = warp / T::WARPS_BY_COLUMNS * T::WARP_ROWS;
        stages = memory + warp * T::DEPTH * T::STAGE;
        address = shared_address(stages);
        own = address + lane / LANES * T::ROW_BYTES + 16 * (lane % LANES ^ place_of(lane / LANES));
        matrices = address + T::ROW_BYTES * lane;
    }

    // Pieces of 16 bytes change places within a row, so that those that `load_matrices` reads
    // together, one of each of eight rows, lie in all banks.
    static __device__ __forceinline__ int place_of(int row) {
        return T::BLOCKS == 2 ? row % 8 : row / 2 % 4;
    }

    // Starts to copy the blocks of a stage.
    __device__ __forceinline__ void fetch(int unit, int stage) {
        const int lane = threadIdx.x % 32, start = stage * T::STAGE;
#pragma unroll
        for (int i = 0; i < T::WARP_ROWS * LANES / 32; i++) {
            const size_t row = row_of(first + 32 / LANES * i + lane / LANES);
            // Rows of two blocks take turns in four of eight places.
            const unsigned to = T::BLOCKS == 2 ? own ^ 64 * (i % 2) : own;
            copy_16_bytes(to + start + 512 * i,
                          packed + row * (shape.columns / 32) + LANES * unit + lane % LANES);
        }
        if constexpr (T::SCALES > 1) {
#pragma unroll
            for (int i = 0; i < T::WARP_ROWS / 32; i++) {
                const size_t row = row_of(first + 32 * i + lane);
                copy_bytes<T::SCALE_BYTES>(
                    address + start + T::SCALES_AT + (32 * i + lane) * T::SCALE_BYTES,
                    scales + row * shape.groups + T::SCALES * T::BLOCKS * unit);
            }
        }
    }

    // The scales of columns 32 w and on.
    __device__ __forceinline__ void load_scales(
        float (&factors)[HALVES], int unit, int stage, int w) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const unsigned short* place;
            if constexpr (T::SCALES == 1) {
                const int group = (T::BLOCKS * unit + w / 4) * BLOCK >> shape.group_shift;
                place = scales + size_t(row_of(first + 8 * i + row)) * shape.groups + group;
            } else {
                place = reinterpret_cast<const unsigned short*>(
                            stages + stage * T::STAGE + T::SCALES_AT
                            + (8 * i + row) * T::SCALE_BYTES)
                    + w * T::SCALES / 4;
            }
            factors[i] = __uint_as_float(static_cast<unsigned>(*place) << 16);
        }
    }

    // All scales of a block, in halves of a register; one alone in the lower one.
    __device__ __forceinline__ void load_block_scales(
        unsigned (&factors)[HALVES][2], int unit, int stage, int block) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const unsigned char* place = stages + stage * T::STAGE + T::SCALES_AT
                + (8 * i + row) * T::SCALE_BYTES + 2 * T::SCALES * block;
            if constexpr (T::SCALES == 4) {
                const uint2 four = *reinterpret_cast<const uint2*>(place);
                factors[i][0] = four.x, factors[i][1] = four.y;
            } else if constexpr (T::SCALES == 2) {
                factors[i][0] = *reinterpret_cast<const unsigned*>(place);
            } else {
                const int group = (T::BLOCKS * unit + block) * BLOCK >> shape.group_shift;
                factors[i][0] = scales[size_t(row_of(first + 8 * i + row)) * shape.groups + group];
            }
        }
    }

    // Words of columns 32 w and on of two groups of 16 rows: of the upper and lower rows of each.
    __device__ __forceinline__ void load_words(
        unsigned (&words)[4], int stage, int w, int group) {
        const unsigned piece = stage * T::STAGE + 16 * (w ^ place_of(threadIdx.x % 32));
        load_matrices(words, matrices + piece + 16 * T::ROW_BYTES * group);
    }

    // The codes in them, for each group the operands of two products.
    __device__ __forceinline__ void load_codes(
        unsigned (&codes)[2][2][4], int stage, int w, int group) {
        unsigned words[4];
        load_words(words, stage, w, group);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const unsigned upper = words[2 * j], lower = words[2 * j + 1];
            codes[j][0][0] = upper & NIBBLES, codes[j][0][1] = lower & NIBBLES;
            codes[j][0][2] = upper & NEXT_NIBBLES, codes[j][0][3] = lower & NEXT_NIBBLES;
            codes[j][1][0] = upper >> 8 & NIBBLES, codes[j][1][1] = lower >> 8 & NIBBLES;
            codes[j][1][2] = upper >> 8 & NEXT_NIBBLES, codes[j][1][3] = lower >> 8 & NEXT_NIBBLES;
        }
    }

    // The same of the weights themselves, rounded to the type of the activations.
    template <Element E>
    __device__ __forceinline__ void load_weights(
        unsigned (&weights)[2][2][4], const float* factors, int stage, int w, int group) {
        unsigned words[4];
        load_words(words, stage, w, group);
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned word = words[2 * j + half];
                const unsigned scale = both_halves<E>(factors[2 * j + half]);
                weights[j][0][half] = two_weights<E, 0>(word, scale);
                weights[j][0][2 + half] = two_weights<E, 1>(word, scale);
                weights[j][1][half] = two_weights<E, 2>(word, scale);
                weights[j][1][2 + half] = two_weights<E, 3>(word, scale);
            }
        }
    }
};

// The scale of columns 32 w and on of a block.
template <typename T>
__device__ __forceinline__ float scale_of(const unsigned (&factors)[2], int w) {
    const int s = w * T::SCALES / 4;
    return __uint_as_float(s % 2 ? factors[s / 2] & 0xFFFF0000u : factors[s / 2] << 16);
}

// Eight activations of a lane in the order of codes in a word: j and j + 4, j = 0 .. 3.
__device__ __forceinline__ void order(uint4 eight, unsigned (&pairs)[4]) {
    pairs[0] = __byte_perm(eight.x, eight.z, 0x5410), pairs[1] = __byte_perm(eight.x, eight.z, 0x7632);
    pairs[2] = __byte_perm(eight.y, eight.w, 0x5410), pairs[3] = __byte_perm(eight.y, eight.w, 0x7632);
}

// What products with codes take of them, and -8 times the sum over the lanes of a token.
template <Element E>
__device__ __forceinline__ void prepare(uint4 eight, unsigned (&pairs)[4], float (&starts)[4]) {
    order(eight, pairs);
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = times<E>(pairs[j], j % 2 ? SMALLER<E> : LARGER<E>);
    const unsigned offsets[4] = {MINUS_8, MINUS_8, MINUS_128, MINUS_128};
    multiply_add<E>(starts, offsets, pairs[0], pairs[1], {0, 0, 0, 0});
    multiply_add<E>(starts, offsets, pairs[2], pairs[3], starts);
}

// sums += scales (codes times activations), of 16 rows, 32 columns and 8 tokens.
template <Element E>
__device__ __forceinline__ void add_group(
    float (&sums)[4], const unsigned (&codes)[2][4], const unsigned (&pairs)[4],
    const float (&starts)[4], float upper, float lower) {
    float group[4];
    multiply_add<E>(group, codes[0], pairs[0], pairs[1], starts);
    multiply_add<E>(group, codes[1], pairs[2], pairs[3], group);
    sums[0] = fmaf(group[0], upper, sums[0]);
    sums[1] = fmaf(group[1], upper, sums[1]);
    sums[2] = fmaf(group[2], lower, sums[2]);
    sums[3] = fmaf(group[3], lower, sums[3]);
}

// Sums over this warp's columns of weights times tokens, for its rows. `token_of` gives the
// activations of a token, or nullptr. For few tokens.
template <typename T, Element E, typename RowOf, typename TokenOf>
__device__ __forceinline__ void sum_columns_alone(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], Ring<T, RowOf> ring, Cluster part,
    TokenOf token_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int units = ring.shape.columns / (BLOCK * T::BLOCKS);
    const int step = part.size * T::WARPS_BY_COLUMNS;
    const int first = part.rank * T::WARPS_BY_COLUMNS + warp % T::WARPS_BY_COLUMNS;
#pragma unroll
    for (int i = 0; i < T::DEPTH - 1; i++) {
        if (first + i * step < units) ring.fetch(first + i * step, i);
    }
    wait_for_earlier_kernels();
    // A lane copies, and reads, the activations of the columns that it gets codes of.
    const uint4* token[T::TOKEN_BLOCKS];
#pragma unroll
    for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
        token[b] = 8 * b + lane / 4 < T::TOKENS ? token_of(8 * b + lane / 4) : nullptr;
    }
    const int own = T::TOKENS_AT + 16 * lane;
    auto fetch_tokens = [&](int unit, int stage) {
#pragma unroll
        for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
            if (!token[b]) continue;
#pragma unroll
            for (int w = 0; w < 4 * T::BLOCKS; w++) {
                copy_bytes<16>(
                    ring.address + stage * T::STAGE + own + 64 * (w * T::TOKENS + 8 * b),
                    token[b] + 16 * T::BLOCKS * unit + 4 * w + lane % 4);
            }
        }
    };
#pragma unroll
    for (int i = 0; i < T::DEPTH - 1; i++) {
        if (first + i * step < units) fetch_tokens(first + i * step, i);
        end_of_copies();
    }

    int stage = 0, free = T::DEPTH - 1;
    for (int unit = first; unit < units; unit += step) {
        const int ahead = unit + (T::DEPTH - 1) * step;
        if (ahead < units) {
            ring.fetch(ahead, free);
            fetch_tokens(ahead, free);
        }
        end_of_copies();
        wait_for_copies<T::DEPTH - 1>();
#pragma unroll 1
        for (int block = 0; block < T::BLOCKS; block++) {
            unsigned factors[2 * T::ROW_GROUPS][2];
            ring.load_block_scales(factors, unit, stage, block);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int group = 4 * block + w;
                unsigned pairs[T::TOKEN_BLOCKS][4];
                float starts[T::TOKEN_BLOCKS][4];
#pragma unroll
                for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
                    uint4 eight = make_uint4(0, 0, 0, 0);
                    if (token[b]) {
                        eight = *reinterpret_cast<const uint4*>(
                            ring.stages + stage * T::STAGE + own
                            + 64 * (group * T::TOKENS + 8 * b));
                    }
                    prepare<E>(eight, pairs[b], starts[b]);
                }
#pragma unroll
                for (int i = 0; i < T::ROW_GROUPS; i += 2) {
                    unsigned codes[2][2][4];
                    ring.load_codes(codes, stage, group, i);
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int upper = 2 * (i + j);
#pragma unroll
                        for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
                            add_group<E>(sums[i + j][b], codes[j], pairs[b], starts[b],
                                         scale_of<T>(factors[upper], w),
                                         scale_of<T>(factors[upper + 1], w));
                        }
                    }
                }
            }
        }
        __syncwarp();
        free = stage;
        stage = stage + 1 == T::DEPTH ? 0 : stage + 1;
    }
}

// sums += the weights of a stage of the ring times activations that are ready.
template <typename T, Element E, typename RowOf>
__device__ __forceinline__ void multiply_stage(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], Ring<T, RowOf>& ring,
    const unsigned char* pieces, int unit, int stage) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1  // unrolled it would need more registers than there are
    for (int w = 0; w < 4 * T::BLOCKS; w++) {
        float factors[2 * T::ROW_GROUPS];
        ring.load_scales(factors, unit, stage, w);
        unsigned codes[T::ROW_GROUPS / 2][2][2][4];  // or weights
#pragma unroll
        for (int i = 0; i < T::ROW_GROUPS / 2; i++) {
            if constexpr (T::ROUNDED) {
                ring.template load_weights<E>(codes[i], factors + 4 * i, stage, w, 2 * i);
            } else {
                ring.load_codes(codes[i], stage, w, 2 * i);
            }
        }
#pragma unroll
        for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
            const unsigned char* piece = pieces + (w * T::TOKEN_BLOCKS + b) * T::PIECE_BYTES;
            const uint4 four = *reinterpret_cast<const uint4*>(piece + 16 * lane);
            const unsigned pairs[4] = {four.x, four.y, four.z, four.w};
            if constexpr (T::ROUNDED) {
#pragma unroll
                for (int i = 0; i < T::ROW_GROUPS; i++) {
                    float (&sum)[4] = sums[i][b];
                    multiply_add<E>(sum, codes[i / 2][i % 2][0], pairs[0], pairs[1], sum);
                    multiply_add<E>(sum, codes[i / 2][i % 2][1], pairs[2], pairs[3], sum);
                }
            } else {
                const float4 start =
                    *reinterpret_cast<const float4*>(piece + 512 + 16 * (lane % 4));
                const float starts[4] = {start.x, start.y, start.z, start.w};
#pragma unroll
                for (int i = 0; i < T::ROW_GROUPS; i++) {
                    add_group<E>(sums[i][b], codes[i / 2][i % 2], pairs, starts, factors[2 * i],
                                 factors[2 * i + 1]);
                }
            }
        }
    }
}

// The same for any tokens. What products take of the activations is made ready for all warps of the
// program together, for `chunk` stages of each warp at a time.
template <typename T, Element E, typename RowOf, typename TokenOf>
__device__ __forceinline__ void sum_columns_shared(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], Ring<T, RowOf> ring, unsigned char* memory,
    Cluster part, TokenOf token_of) {
    constexpr int AT_ONCE = 4;  // pieces that a warp waits for together
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp % T::WARPS_BY_COLUMNS;
    const int units = ring.shape.columns / (BLOCK * T::BLOCKS), chunk = ring.shape.chunk;
    const int step = part.size * T::WARPS_BY_COLUMNS;
    const int first = part.rank * T::WARPS_BY_COLUMNS;
    unsigned char* const pieces = memory + T::PIECES_AT;
#pragma unroll
    for (int i = 0; i < T::DEPTH - 1; i++) {
        if (first + column + i * step < units) ring.fetch(first + column + i * step, i);
        end_of_copies();
    }
    wait_for_earlier_kernels();
    // Piece p has tokens 8 (p % TOKEN_BLOCKS) and on, and the columns of p / TOKEN_BLOCKS: 32 of a
    // stage of one of the warps that share rows, after p / PIECES stages.
    auto make_ready = [&](int start) {
        const int count = chunk * T::PIECES;
        for (int some = warp; some < count; some += AT_ONCE * T::WARPS) {
            uint4 eights[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int p = some + i * T::WARPS, group = p / T::TOKEN_BLOCKS;
                const int w = group % (4 * T::BLOCKS);
                const int unit = start + p / T::PIECES * step
                    + group / (4 * T::BLOCKS) % T::WARPS_BY_COLUMNS;
                const uint4* token = token_of(p % T::TOKEN_BLOCKS * 8 + lane / 4);
                eights[i] = token && unit < units ? token[16 * T::BLOCKS * unit + 4 * w + lane % 4]
                                                  : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int p = some + i * T::WARPS;
                if (p >= count) break;
                unsigned pairs[4];
                unsigned char* place = pieces + p * T::PIECE_BYTES + 16 * lane;
                if constexpr (T::ROUNDED) {
                    order(eights[i], pairs);
                } else {
                    float starts[4];
                    prepare<E>(eights[i], pairs, starts);
                    if (lane < 4) {
                        *reinterpret_cast<float4*>(place + 512) =
                            make_float4(starts[0], starts[1], starts[2], starts[3]);
                    }
                }
                *reinterpret_cast<uint4*>(place) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
        __syncthreads();
    };

    int stage = 0, free = T::DEPTH - 1, place = chunk;
    for (int base = first; base < units; base += step) {
        if (place == chunk) {
            if (base > first) __syncthreads();  // all are done with the chunk before
            make_ready(base);
            place = 0;
        }
        const int unit = base + column, ahead = unit + (T::DEPTH - 1) * step;
        if (ahead < units) ring.fetch(ahead, free);
        end_of_copies();
        wait_for_copies<T::DEPTH - 1>();
        if (unit < units) {
            const int piece = place * T::PIECES + 4 * T::BLOCKS * T::TOKEN_BLOCKS * column;
            multiply_stage<T, E>(sums, ring, pieces + piece * T::PIECE_BYTES, unit, stage);
        }
        __syncwarp();
        place++;
        free = stage;
        stage = stage + 1 == T::DEPTH ? 0 : stage + 1;
    }
}

#if HOPPER
// The same with the tensor cores of four warps at once, which take activations from shared memory.
// They are loaded a stage ahead and stored when this one is done with.
template <typename T, Element E, typename RowOf, typename TokenOf>
__device__ __forceinline__ void sum_columns_wide(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], Ring<T, RowOf> ring, unsigned char* memory,
    Cluster part, TokenOf token_of) {
    constexpr int GROUPS = 4 * T::BLOCKS;                          // of 32 columns in a stage
    constexpr int PIECES = GROUPS * T::TOKEN_BLOCKS;               // of those and 8 tokens
    constexpr int OWN = (PIECES + T::WARPS - 1) / T::WARPS;        // of a warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int units = ring.shape.columns / (BLOCK * T::BLOCKS);
    unsigned char* const activations = memory + T::PIECES_AT;
#pragma unroll
    for (int i = 0; i < T::DEPTH - 1; i++) {
        if (part.rank + i * part.size < units) ring.fetch(part.rank + i * part.size, i);
        end_of_copies();
    }
    wait_for_earlier_kernels();
    // Piece p has tokens 8 (p / GROUPS) and on, and columns 32 (p % GROUPS) and on.
    uint4 eights[OWN];
    auto load = [&](int unit) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int p = warp + i * T::WARPS;
            const uint4* token = p < PIECES ? token_of(8 * (p / GROUPS) + lane / 4) : nullptr;
            eights[i] = token ? token[16 * T::BLOCKS * unit + 4 * (p % GROUPS) + lane % 4]
                              : make_uint4(0, 0, 0, 0);
        }
    };
    // Two groups of columns make 128 bytes of a token; a lane has one of four words of 16 bytes.
    auto store = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int p = warp + i * T::WARPS, group = p % GROUPS, token = lane / 4;
            if (p >= PIECES) break;
            unsigned pairs[4];
            order(eights[i], pairs);
            unsigned char* place = activations + buffer * T::WIDE_BYTES
                + group / 2 * (128 * T::TOKENS) + p / GROUPS * 1024 + 128 * token + 4 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                *reinterpret_cast<unsigned*>(place + 16 * (4 * (group % 2) + j ^ token)) = pairs[j];
            }
        }
        show_to_tensor_cores();
        __syncthreads();
    };
    if (part.rank < units) load(part.rank);
    store(0);

    int stage = 0, free = T::DEPTH - 1, buffer = 0;
    for (int unit = part.rank; unit < units; unit += part.size) {
        const int next = unit + part.size, ahead = unit + (T::DEPTH - 1) * part.size;
        if (next < units) load(next);
        if (ahead < units) ring.fetch(ahead, free);
        end_of_copies();
        wait_for_copies<T::DEPTH - 1>();
        const unsigned here = shared_address(activations) + buffer * T::WIDE_BYTES;
        // While products of one group of columns are under way, weights of the next are made.
        unsigned weights[2][T::ROW_GROUPS / 2][2][2][4];
#pragma unroll
        for (int w = 0; w < GROUPS; w++) {
            float factors[2 * T::ROW_GROUPS];
            ring.load_scales(factors, unit, stage, w);
#pragma unroll
            for (int i = 0; i < T::ROW_GROUPS / 2; i++) {
                ring.template load_weights<E>(weights[w % 2][i], factors + 4 * i, stage, w, 2 * i);
            }
            begin_products();
#pragma unroll
            for (int i = 0; i < T::ROW_GROUPS; i++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    start_product<E, T::TOKEN_BLOCKS>(
                        sums[i], weights[w % 2][i / 2][i % 2][half],
                        here + w / 2 * (128 * T::TOKENS) + w % 2 * 64 + 32 * half);
                }
            }
            end_of_products();
            wait_for_products<1>();
        }
        wait_for_products<0>();
        __syncwarp();
        buffer ^= 1;
        if (next < units) store(buffer);
        free = stage;
        stage = stage + 1 == T::DEPTH ? 0 : stage + 1;
    }
}
#endif

template <typename T, Element E, typename RowOf, typename TokenOf>
__device__ __forceinline__ void sum_columns(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], unsigned char* memory,
    const uint4* __restrict__ packed, const unsigned short* __restrict__ scales, Shape shape,
    Cluster part, RowOf row_of, TokenOf token_of) {
    static_assert(HOPPER || !T::WIDE, "these tensor cores are of compute capability 9.0");
    const Ring<T, RowOf> ring(memory, packed, scales, shape, row_of);
    if constexpr (T::WIDE) {
#if HOPPER
        sum_columns_wide<T, E>(sums, ring, memory, part, token_of);
#endif
    } else if constexpr (T::SHARED) {
        sum_columns_shared<T, E>(sums, ring, memory, part, token_of);
    } else {
        sum_columns_alone<T, E>(sums, ring, part, token_of);
    }
}

// Leaves the sums of each warp in shared memory, [warps by columns][tokens][rows], and waits for
// all programs of the cluster.
template <typename T>
__device__ __forceinline__ void share(
    float* shared, const float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], Cluster part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = warp / T::WARPS_BY_COLUMNS * T::WARP_ROWS + lane / 4;
    float* mine = shared + (warp % T::WARPS_BY_COLUMNS) * T::TOKENS * (T::ROWS + PADDING);
    __syncthreads();  // the rings are done with
#pragma unroll
    for (int i = 0; i < T::ROW_GROUPS; i++) {
#pragma unroll
        for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int token = 8 * b + 2 * (lane % 4) + j % 2;
                if (token < T::TOKENS) {
                    mine[token * (T::ROWS + PADDING) + first + 16 * i + 8 * (j / 2)] = sums[i][b][j];
                }
            }
        }
    }
    synchronize(part);
}

// One sum, over all columns.
template <typename T, Element E>
__device__ __forceinline__ float total(const float* shared, int token, int row, Cluster part) {
    float sum = 0.0f;
    for (int rank = 0; rank < part.size; rank++) {
#pragma unroll
        for (int warp = 0; warp < T::WARPS_BY_COLUMNS; warp++) {
            const int place = (warp * T::TOKENS + token) * (T::ROWS + PADDING) + row;
            sum += load_shared_of(shared + place, rank, part);
        }
    }
    return T::ROUNDED ? sum : sum * UNIT<E>;
}

// Calls `write` with the tokens and rows that are this program's to finish; both numbers of rows
// are powers of two.
template <typename T, typename Write>
__device__ __forceinline__ void finish(int tokens, int rows, Cluster part, Write write) {
    const int count = rows / part.size, shift = 31 - __clz(count);
    for (int i = threadIdx.x; i < tokens * count; i += T::THREADS) {
        write(i >> shift, part.rank * count + (i & (count - 1)));
    }
    if (part.size > 1) synchronize(part);  // others may still read what this program shares
}

// ------------------------------------------------------------------------------------------ dense

// y [M, N] = x [M, K] times a weight [N, K] transposed; M is at most T::TOKENS.
template <typename T, Element E>
__device__ __forceinline__ void dense(
    const uint4* packed, const unsigned short* scales, const uint4* x, unsigned short* y,
    int tokens, int rows, Shape shape) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Cluster part = this_cluster();
    const int first = blockIdx.x * T::ROWS;
    float sums[T::ROW_GROUPS][T::TOKEN_BLOCKS][4] = {};
    let_later_kernels_start();
    sum_columns<T, E>(
        sums, memory, packed, scales, shape, part,
        [&](int row) { return min(first + row, rows - 1); },
        [&](int token) {
            return token < tokens ? x + size_t(token) * (shape.columns / 8) : nullptr;
        });
    float* parts = reinterpret_cast<float*>(memory);
    share<T>(parts, sums, part);
    finish<T>(tokens, T::ROWS, part, [&](int token, int row) {
        const float sum = total<T, E>(parts, token, row, part);
        if (first + row < rows) y[size_t(token) * rows + first + row] = rounded<E>(sum);
    });
}

// ------------------------------------------------------------------------------ mixture of experts

// A program's part of the work: up to T::TOKENS of the pairs (token, expert) of one expert.
struct Work {
    int expert, first, count, unused;
};

// The work of a layer, by a program of one thread to an expert: `order` holds the pairs sorted by
// expert, `list` the pieces of it. Pairs of an expert that is not here are left out.
extern "C" __global__ void __launch_bounds__(1024) list_work(
    const int* experts, int pairs, int expert_count, int pairs_of_a_work, int* order, Work* list,
    int* works) {
    __shared__ int chunk[1024], totals[2][1024];
    const int thread = threadIdx.x;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    int count = 0;
    for (int start = 0; start < pairs; start += 1024) {
        __syncthreads();
        chunk[thread] = start + thread < pairs ? experts[start + thread] : -1;
        __syncthreads();
        for (int i = 0; i < min(1024, pairs - start); i++) count += chunk[i] == thread;
    }
    if (thread >= expert_count) count = 0;
    const int own_works = (count + pairs_of_a_work - 1) / pairs_of_a_work;
    totals[0][thread] = count, totals[1][thread] = own_works;
    for (int distance = 1; distance < 1024; distance *= 2) {
        __syncthreads();
        const int before = thread >= distance ? totals[0][thread - distance] : 0;
        const int works_before = thread >= distance ? totals[1][thread - distance] : 0;
        __syncthreads();
        totals[0][thread] += before, totals[1][thread] += works_before;
    }
    int place = totals[0][thread] - count;
    for (int i = 0; i < own_works; i++) {
        const int first = place + i * pairs_of_a_work;
        list[totals[1][thread] - own_works + i] = {
            thread, first, min(pairs_of_a_work, place + count - first), 0};
    }
    if (thread == 1023) *works = totals[1][1023];
    for (int start = 0; start < pairs; start += 1024) {
        __syncthreads();
        chunk[thread] = start + thread < pairs ? experts[start + thread] : -1;
        __syncthreads();
        if (count == 0) continue;
        for (int i = 0; i < min(1024, pairs - start); i++) {
            if (chunk[i] == thread) order[place++] = start + i;
        }
    }
}

// gated [pairs, I] = silu(gate) up, of a weight [experts, 2 I, K], gate first. Both come from
// one program: sixteen rows of the one, sixteen of the other, and so on.
template <typename T, Element E>
__device__ __forceinline__ void gate_up(
    const uint4* packed, const unsigned short* scales, const uint4* x, unsigned short* gated,
    const Work* list, const int* works, const int* order, int pairs_per_token, int intermediate,
    Shape shape) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Cluster part = this_cluster();
    constexpr int HALF = T::ROWS / 2;
    const int start = blockIdx.x * HALF;
    wait_for_earlier_kernels();
    let_later_kernels_start();  // `down` may read the list as soon as it runs
    if (blockIdx.z >= *works) return;
    const Work work = list[blockIdx.z];
    const size_t offset = size_t(work.expert) * 2 * intermediate;
    float sums[T::ROW_GROUPS][T::TOKEN_BLOCKS][4] = {};
    sum_columns<T, E>(
        sums, memory, packed + offset * (shape.columns / 32), scales + offset * shape.groups, shape,
        part,
        [&](int row) {
            const int place = start + row / 32 * 16 + row % 16;
            return min(place, intermediate - 1) + (row / 16 % 2) * intermediate;
        },
        [&](int token) {
            if (token >= work.count) return static_cast<const uint4*>(nullptr);
            const int source = order[work.first + token] / pairs_per_token;
            return x + size_t(source) * (shape.columns / 8);
        });
    float* parts = reinterpret_cast<float*>(memory);
    share<T>(parts, sums, part);
    finish<T>(work.count, HALF, part, [&](int token, int place) {
        const int row = place / 16 * 32 + place % 16;
        const float gate = total<T, E>(parts, token, row, part);
        const float up = total<T, E>(parts, token, row + 16, part);
        if (start + place < intermediate) {
            const size_t target = size_t(order[work.first + token]) * intermediate;
            gated[target + start + place] = rounded<E>(gate / (1.0f + __expf(-gate)) * up);
        }
    });
}

// parts [pairs, N] float32 = gated [pairs, K] times a weight [experts, N, K] transposed, times the
// router's weight of the pair.
template <typename T, Element E>
__device__ __forceinline__ void down(
    const uint4* packed, const unsigned short* scales, const uint4* gated, float* out,
    const Work* list, const int* works, const int* order, const float* router, int rows,
    Shape shape) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Cluster part = this_cluster();
    const int first = blockIdx.x * T::ROWS;
    let_later_kernels_start();
    // `gate_up` has seen the list before this could start, so weights are fetched while it ends.
    if (blockIdx.z >= *works) {
        wait_for_earlier_kernels();
        return;
    }
    const Work work = list[blockIdx.z];
    const size_t offset = size_t(work.expert) * rows;
    float sums[T::ROW_GROUPS][T::TOKEN_BLOCKS][4] = {};
    sum_columns<T, E>(
        sums, memory, packed + offset * (shape.columns / 32), scales + offset * shape.groups, shape,
        part, [&](int row) { return min(first + row, rows - 1); },
        [&](int token) {
            if (token >= work.count) return static_cast<const uint4*>(nullptr);
            return gated + size_t(order[work.first + token]) * (shape.columns / 8);
        });
    float* parts = reinterpret_cast<float*>(memory);
    share<T>(parts, sums, part);
    finish<T>(work.count, T::ROWS, part, [&](int token, int row) {
        const float sum = total<T, E>(parts, token, row, part);
        const int pair = order[work.first + token];
        if (first + row < rows) out[size_t(pair) * rows + first + row] = sum * router[pair];
    });
}

// y [M, N] = the sum over a token's experts, in their order, of parts [M, experts of a token, N].
template <Element E>
__device__ __forceinline__ void add_experts(
    const float* parts, const int* experts, unsigned short* y, int pairs_per_token,
    int expert_count, int rows) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < pairs_per_token; i++) {
        const int pair = token * pairs_per_token + i;
        if (experts[pair] >= 0 && experts[pair] < expert_count) sum += parts[size_t(pair) * rows + row];
    }
    y[size_t(token) * rows + row] = rounded<E>(sum);
}

// ------------------------------------------------------------------------------------ entry points

// One of these is appended to the source for each tile that is used, with the number of programs
// that are to fit a multiprocessor.
#define DENSE(E, RESIDENT, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, RESIDENT) run(        \
        const uint4* packed, const unsigned short* scales, const uint4* x, unsigned short* y,      \
        int tokens, int rows, int columns, int groups, int shift, int chunk) {                                \
        dense<Tile<__VA_ARGS__>, E>(packed, scales, x, y, tokens, rows, {columns, groups, shift, chunk}); \
    }

#define GATE_UP(E, RESIDENT, ...)                                                                  \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, RESIDENT) run(        \
        const uint4* packed, const unsigned short* scales, const uint4* x, unsigned short* gated,  \
        const Work* list, const int* works, const int* order, int pairs_per_token,                 \
        int intermediate, int columns, int groups, int shift, int chunk) {                                    \
        gate_up<Tile<__VA_ARGS__>, E>(packed, scales, x, gated, list, works, order,                \
                                      pairs_per_token, intermediate, {columns, groups, shift, chunk});    \
    }

#define DOWN(E, RESIDENT, ...)                                                                     \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, RESIDENT) run(        \
        const uint4* packed, const unsigned short* scales, const uint4* gated, float* parts,       \
        const Work* list, const int* works, const int* order, const float* router, int rows,       \
        int columns, int groups, int shift, int chunk) {                                                      \
        down<Tile<__VA_ARGS__>, E>(packed, scales, gated, parts, list, works, order, router, rows, \
                                   {columns, groups, shift, chunk});                                      \
    }

#define ADD_EXPERTS(E)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) run(                                         \
        const float* parts, const int* experts, unsigned short* y, int pairs_per_token,            \
        int expert_count, int rows) {                                                              \
        add_experts<E>(parts, experts, y, pairs_per_token, expert_count, rows);                    \
    }

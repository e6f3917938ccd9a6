// Products of 16-bit activations with INT4 weights, in blocks of 16 rows and 128 columns.
//
// A weight lies as halfbyte/kernels/fragments.py puts it: blocks of the same rows one after the other,
// in each the operands of tensor cores, lane by lane, and then the scales of its rows. Weights are
// the left operand, eight tokens at a time the right one.
//
// Two warps of a program copy, one the weight, one the activations; the others multiply. What they
// copy, blocks of all rows of the program and some of their columns and the activations of these,
// passes through a ring of stages in shared memory; two barriers of a stage say that it is full and
// that it is empty again. On Hopper one instruction copies all codes and scales of a stage, and one
// the activations of all tokens, or of one where they are gathered.
//
// Warps share the columns of a stage, its rows, or both. In the end warps that share rows, and the
// programs of a cluster, which share them too, add up their parts in a fixed order through shared
// memory: no atomics, no workspace, the same bits every time.
//
// For few tokens the weight is never rounded. The sums of a group start from -8 times the sum of its
// activations, which a product with a constant matrix gives, so that no code is ever corrected; then
// they are multiplied by the scale in float32. For many tokens it costs less to correct and to scale
// the weights, which are then rounded to the type of the activations.
//
// Compiled at run time by halfbyte/kernels/jit.py; the plain torch twin is in reference.py.

#include "instructions.cuh"

constexpr int BLOCK_ROWS = 16, BLOCK_COLUMNS = 128;

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

// The nibbles J and J + 4 of a word. A nibble in the mantissa of 128, or 1024, is that number and the
// code and 8; taking 136 or 1032 away is exact, and the product is rounded once.
template <Element E, int J>
__device__ __forceinline__ unsigned two_weights(unsigned word, unsigned scale) {
    constexpr bool BF = E == Element::bfloat16;
    constexpr unsigned EXPONENT = BF ? 0x43004300u : 0x64006400u, ONE = BF ? 0x3F803F80u : 0x3C003C00u;
    constexpr unsigned OFFSET = BF ? 0xC308C308u : 0xE408E408u, ZERO = 0x80008000u;
    return fma2<E>(fma2<E>(mask_or(word >> (4 * J), NIBBLES, EXPONENT), ONE, OFFSET), scale, ZERO);
}

// How the warps of a program share its rows and columns.
template <int ROW_GROUPS_, int TOKENS_, int WARPS_BY_ROWS_, int WARPS_BY_COLUMNS_, bool WIDE_,
          int SCALES_, bool GATHERED_>
struct Tile {
    static constexpr int ROW_GROUPS = ROW_GROUPS_;  // of 16 rows, of a warp
    static constexpr int TOKENS = TOKENS_;          // eight, or a multiple
    static constexpr int TOKEN_BLOCKS = TOKENS / 8;
    static constexpr int WARPS_BY_ROWS = WARPS_BY_ROWS_;
    static constexpr int WARPS_BY_COLUMNS = WARPS_BY_COLUMNS_;
    static constexpr bool WIDE = WIDE_;  // with the tensor cores of four warps at once; Hopper only
    static constexpr int SCALES = SCALES_;  // of a row in a block: 4, 2 or 1
    static constexpr bool GATHERED = GATHERED_;  // tokens are not consecutive rows of activations
    static constexpr int WARPS = WARPS_BY_ROWS * WARPS_BY_COLUMNS;  // that multiply
    static constexpr int THREADS = 32 * (WARPS + 2);
    static constexpr int STRIPS = ROW_GROUPS * WARPS_BY_ROWS;  // of 16 rows, of a program
    static constexpr bool ROUNDED = TOKENS > 16 || WIDE;
    static constexpr int BLOCK_BYTES = 64 * BLOCK_ROWS + 2 * BLOCK_ROWS * SCALES;
    static constexpr int STRIP_BYTES = BLOCK_BYTES * WARPS_BY_COLUMNS;  // in a stage
    static_assert(HOPPER || !WIDE, "these tensor cores are of compute capability 9.0");
    static_assert(!WIDE || (!GATHERED && WARPS_BY_ROWS % 4 == 0 && TOKENS % 16 == 0));
    static_assert(!GATHERED || TOKENS <= 32, "a lane has one token");
    static constexpr int SUMS = STRIPS * TOKEN_BLOCKS;  // of 16 rows and 8 tokens, a float4 a lane
};

// Where things are in shared memory; the barriers of all stages come first.
struct Memory {
    int depth;     // stages of the ring
    int capacity;  // tokens that a stage has room for
    int sums_at;   // where the warps leave their sums
};
constexpr int RING_AT = 1024;

// The activations of a stage are lines of 128 bytes, of 64 columns of a token. Pieces of 16 bytes
// change places within a line by its number, so that those of eight tokens fill all banks: their lines
// follow each other, or are an odd number of lines apart.
template <typename T>
struct Lines {
    static constexpr int OF_STAGE = 2 * T::WARPS_BY_COLUMNS;  // of a token
    static constexpr int OF_TOKEN = T::GATHERED ? OF_STAGE + 1 : 1;
    int of_columns;

    __device__ __forceinline__ explicit Lines(int capacity)
        : of_columns(T::GATHERED ? 1 : capacity) {}
    __device__ __forceinline__ int all(int capacity) const {
        return capacity * (T::GATHERED ? OF_TOKEN : OF_STAGE);
    }
    // Where eight columns of a token are, by their number in the stage.
    __device__ __forceinline__ int place(int token, int eight) const {
        const int line = token * OF_TOKEN + eight / 8 * of_columns;
        return 128 * line + 16 * (eight % 8 ^ line % 8);
    }
};

// What one program multiplies at a time: some strips of 16 rows with some tokens. Strips follow each
// other, or half of them do, and the other half.
struct Piece {
    int tokens;
    int strips[2];
    const int* order;  // where tokens are gathered: rows of activations, times `per_row`
    int per_row;
};

// The columns of a program, in blocks: the programs of a cluster have so many one after the other.
struct Columns {
    int first, end, all;  // blocks; all columns

    __device__ __forceinline__ Columns(int columns, Cluster part) : all(columns) {
        const int blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        const int own = (blocks + part.size - 1) / part.size;
        first = min(part.rank * own, blocks), end = min(first + own, blocks);
    }
};

__device__ __forceinline__ unsigned full_barrier(unsigned memory, int stage) {
    return memory + 16 * stage;
}
__device__ __forceinline__ unsigned empty_barrier(unsigned memory, int stage) {
    return memory + 16 * stage + 8;
}

// A place in the ring, and how often it went round.
struct Place {
    int stage = 0, round = 0;
    __device__ __forceinline__ void next(int depth) {
        if (++stage == depth) stage = 0, round++;
    }
};

// --------------------------------------------------------------------------------- the warps that copy

// Activations are first in a stage, then come codes and scales.
template <typename T>
__device__ __forceinline__ int codes_at(Memory layout) {
    return 128 * Lines<T>(layout.capacity).all(layout.capacity);
}

template <typename T>
__device__ __forceinline__ int stage_bytes(Memory layout) {
    return (codes_at<T>(layout) + T::STRIPS * T::STRIP_BYTES + 1023) / 1024 * 1024;
}

// Copies the codes and scales of all strips of a piece, of which there are `all`.
template <typename T, int HALVES>
__device__ __forceinline__ void copy_codes(
    const Source& weight, const Piece& piece, int all, unsigned memory, Memory layout,
    Columns columns, Place& place) {
    constexpr int TOGETHER = T::STRIPS / HALVES;
    static_assert(HALVES == 1 || TOGETHER * T::STRIP_BYTES % 128 == 0, "boxes begin at 128 bytes");
    const int lane = threadIdx.x % 32;
    for (int block = columns.first; block < columns.end; block += T::WARPS_BY_COLUMNS) {
        const unsigned barrier = full_barrier(memory, place.stage);
        const unsigned to =
            memory + RING_AT + place.stage * stage_bytes<T>(layout) + codes_at<T>(layout);
        if (place.round) wait(empty_barrier(memory, place.stage), place.round - 1);
#if HOPPER
        if (lane == 0) {
            announce(barrier, T::STRIPS * T::STRIP_BYTES);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                copy_box(to + half * TOGETHER * T::STRIP_BYTES, weight, 0, block,
                         piece.strips[half], barrier);
            }
        }
#else
        constexpr int WIDTH = T::STRIP_BYTES / 16;
        const int blocks = (columns.all + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        for (int i = lane; i < T::STRIPS * WIDTH; i += 32) {
            const int s = i / WIDTH, at = block * T::BLOCK_BYTES + 16 * (i % WIDTH);
            const int strip = min(piece.strips[s / TOGETHER] + s % TOGETHER, all - 1);
            copy_16_bytes(to + 16 * i, weight.data + size_t(strip) * blocks * T::BLOCK_BYTES + at,
                          at < blocks * T::BLOCK_BYTES);
        }
        end_of_copies(barrier);
#endif
        __syncwarp();
        place.next(layout.depth);
    }
}

// Copies the activations of all tokens of a piece.
template <typename T>
__device__ __forceinline__ void copy_tokens(
    const Source& x, const Piece& piece, unsigned memory, Memory layout, Columns columns,
    Place& place) {
    const Lines<T> lines(layout.capacity);
    const int lane = threadIdx.x % 32;
    int row = lane;
    if (T::GATHERED && lane < piece.tokens) row = piece.order[lane] / piece.per_row;
    for (int block = columns.first; block < columns.end; block += T::WARPS_BY_COLUMNS) {
        const unsigned barrier = full_barrier(memory, place.stage);
        const unsigned to = memory + RING_AT + place.stage * stage_bytes<T>(layout);
        if (place.round) wait(empty_barrier(memory, place.stage), place.round - 1);
#if HOPPER
        const int copied = T::GATHERED ? piece.tokens : layout.capacity;
        if (lane == 0) announce(barrier, copied * 128 * lines.OF_STAGE);
        __syncwarp();
        if (lane < (T::GATHERED ? piece.tokens : 1)) {
            copy_box(to + 128 * lane * lines.OF_TOKEN, x, 0, T::GATHERED ? row : 0, 2 * block,
                     barrier);
        }
#else
        constexpr int WIDTH = BLOCK_COLUMNS / 8 * T::WARPS_BY_COLUMNS;  // in 16 bytes
        for (int token = 0; token < piece.tokens; token++) {
            const int from = T::GATHERED ? __shfl_sync(0xFFFFFFFFu, row, token) : token;
            const unsigned char* data = x.data + 2 * (size_t(from) * columns.all);
            for (int i = lane; i < WIDTH; i += 32) {
                const int column = BLOCK_COLUMNS * block + 8 * i;
                copy_16_bytes(to + lines.place(token, i), data + 2 * column, column < columns.all);
            }
        }
        end_of_copies(barrier);
#endif
        __syncwarp();
        place.next(layout.depth);
    }
}

// ------------------------------------------------------------------------------ the warps that multiply

// The scales of a lane's two rows in a block: pairs of bfloat16, of the upper and of the lower row.
template <int SCALES>
struct Scales {
    unsigned words[SCALES == 4 ? 4 : SCALES];

    __device__ __forceinline__ void load(const unsigned char* place) {
        if constexpr (SCALES == 4) {
            const uint4 all = *reinterpret_cast<const uint4*>(place);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else if constexpr (SCALES == 2) {
            const uint2 all = *reinterpret_cast<const uint2*>(place);
            words[0] = all.x, words[1] = all.y;
        } else {
            words[0] = *reinterpret_cast<const unsigned*>(place);
        }
    }
    // That of columns 32 w and on, of the upper or lower row, in float32.
    __device__ __forceinline__ float of(int w, int lower) const {
        const int number = lower * SCALES + w * SCALES / 4;
        const unsigned word = words[number / 2];
        return __uint_as_float(number % 2 ? word & 0xFFFF0000u : word << 16);
    }
};

// What products with codes take of activations, and -8 times the sum of those of a token.
template <Element E>
__device__ __forceinline__ void prepare(unsigned (&pairs)[4], float (&starts)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = times<E>(pairs[j], j % 2 ? SMALLER<E> : LARGER<E>);
    const unsigned offsets[4] = {MINUS_8, MINUS_8, MINUS_128, MINUS_128};
    multiply_add<E>(starts, offsets, pairs[0], pairs[1], {0, 0, 0, 0});
    multiply_add<E>(starts, offsets, pairs[2], pairs[3], starts);
}

// The codes of a word, as an operand.
__device__ __forceinline__ void take_codes(unsigned (&codes)[4], unsigned word) {
    const unsigned next = word >> 8;
    codes[0] = word & NIBBLES, codes[2] = word & NEXT_NIBBLES;
    codes[1] = next & NIBBLES, codes[3] = next & NEXT_NIBBLES;
}

// Its weights, rounded; `upper` and `lower` are the scales of its rows in both halves.
template <Element E>
__device__ __forceinline__ void take_weights(
    unsigned (&weights)[4], unsigned word, unsigned upper, unsigned lower) {
    weights[0] = two_weights<E, 0>(word, upper), weights[2] = two_weights<E, 1>(word, upper);
    weights[1] = two_weights<E, 2>(word, lower), weights[3] = two_weights<E, 3>(word, lower);
}

// sums += the product of 32 columns of a strip, in two words of each lane, with 8 tokens.
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

// The operands of columns 32 w and on of a strip: codes, or weights.
template <typename T, Element E>
__device__ __forceinline__ void take_operands(
    unsigned (&operands)[2][4], uint4 words, const Scales<T::SCALES>& scales, int w) {
    const unsigned first = w % 2 ? words.z : words.x, second = w % 2 ? words.w : words.y;
    if constexpr (T::ROUNDED) {
        const unsigned upper = both_halves<E>(scales.of(w, 0));
        const unsigned lower = both_halves<E>(scales.of(w, 1));
        take_weights<E>(operands[0], first, upper, lower);
        take_weights<E>(operands[1], second, upper, lower);
    } else {
        take_codes(operands[0], first);
        take_codes(operands[1], second);
    }
}

// The words of a lane in half of a block.
__device__ __forceinline__ uint4 words_of(const unsigned char* block, int half) {
    return *reinterpret_cast<const uint4*>(
        block + 32 * BLOCK_ROWS * half + 16 * (threadIdx.x % 32));
}

template <typename T>
__device__ __forceinline__ void load_scales(
    Scales<T::SCALES> (&scales)[T::ROW_GROUPS], const unsigned char* block) {
#pragma unroll
    for (int i = 0; i < T::ROW_GROUPS; i++) {
        scales[i].load(block + i * T::STRIP_BYTES + 64 * BLOCK_ROWS
                       + 4 * T::SCALES * (threadIdx.x % 32 / 4));
    }
}

// sums += the product of a block of every strip of this warp with all tokens. Its columns are those of
// the stage from 128 `column` on. `token` is, for each eight tokens, the one that this lane finds for
// all: where there are fewer, lanes take the last one, and nothing becomes of it.
template <typename T, Element E>
__device__ __forceinline__ void multiply_block(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], const unsigned char* block,
    unsigned activations, int column, const int (&token)[T::TOKEN_BLOCKS], Lines<T> lines) {
    const int lane = threadIdx.x % 32;
    Scales<T::SCALES> scales[T::ROW_GROUPS];
    load_scales<T>(scales, block);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 words[T::ROW_GROUPS];
#pragma unroll
        for (int i = 0; i < T::ROW_GROUPS; i++) words[i] = words_of(block + i * T::STRIP_BYTES, half);
#pragma unroll
        for (int w = 2 * half; w < 2 * half + 2; w++) {
            unsigned operands[T::ROW_GROUPS][2][4];
#pragma unroll
            for (int i = 0; i < T::ROW_GROUPS; i++) {
                take_operands<T, E>(operands[i], words[i], scales[i], w);
            }
#pragma unroll
            for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
                unsigned x[4];  // of four times eight columns
                const int eight = BLOCK_COLUMNS / 8 * column + 4 * w + lane / 8;
                load_matrices(x, activations + lines.place(token[b], eight));
                if constexpr (T::ROUNDED) {
#pragma unroll
                    for (int i = 0; i < T::ROW_GROUPS; i++) {
                        float(&sum)[4] = sums[i][b];
                        multiply_add<E>(sum, operands[i][0], x[0], x[1], sum);
                        multiply_add<E>(sum, operands[i][1], x[2], x[3], sum);
                    }
                } else {
                    float starts[4];
                    prepare<E>(x, starts);
#pragma unroll
                    for (int i = 0; i < T::ROW_GROUPS; i++) {
                        add_group<E>(sums[i][b], operands[i], x, starts, scales[i].of(w, 0),
                                     scales[i].of(w, 1));
                    }
                }
            }
        }
    }
}

#if HOPPER
// The same with the tensor cores of four warps, which take activations from shared memory: while
// products of 32 columns are under way, weights of the next are made.
template <typename T, Element E>
__device__ __forceinline__ void multiply_block_wide(
    float (&sums)[T::ROW_GROUPS][T::TOKEN_BLOCKS][4], const unsigned char* block,
    unsigned columns) {
    Scales<T::SCALES> scales[T::ROW_GROUPS];
    load_scales<T>(scales, block);
    unsigned operands[2][T::ROW_GROUPS][2][4];
    show_to_tensor_cores();
#pragma unroll
    for (int w = 0; w < 4; w++) {
#pragma unroll
        for (int i = 0; i < T::ROW_GROUPS; i++) {
            take_operands<T, E>(operands[w % 2][i], words_of(block + i * T::STRIP_BYTES, w / 2),
                                scales[i], w);
        }
        begin_products();
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < T::ROW_GROUPS; i++) {
                start_product<E, T::TOKEN_BLOCKS>(
                    sums[i], operands[w % 2][i][half],
                    columns + w / 2 * (128 * T::TOKENS) + w % 2 * 64 + 32 * half);
            }
        }
        end_of_products();
        wait_for_products<1>();
    }
    wait_for_products<0>();
}
#endif

template <typename T>
struct Multiplier {
    unsigned char* memory;
    Memory layout;
    Columns columns;
    Place place;

    // Leaves the sums of this warp over its columns in shared memory, for all to add up.
    template <Element E>
    __device__ __forceinline__ void run(const Piece& piece) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int column = warp / T::WARPS_BY_ROWS, row = warp % T::WARPS_BY_ROWS;
        const unsigned barriers = shared_address(memory);
        const int codes = codes_at<T>(layout) + row * T::ROW_GROUPS * T::STRIP_BYTES
            + column * T::BLOCK_BYTES;
        int token[T::TOKEN_BLOCKS];
#pragma unroll
        for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
            token[b] = min(8 * b + lane % 8, piece.tokens - 1);
        }
        float sums[T::ROW_GROUPS][T::TOKEN_BLOCKS][4] = {};
        for (int block = columns.first + column;; block += T::WARPS_BY_COLUMNS) {
            if (block - column >= columns.end) break;
            wait(full_barrier(barriers, place.stage), place.round);
            if (block < columns.end) {
                const int stage = RING_AT + place.stage * stage_bytes<T>(layout);
                const unsigned activations = barriers + stage;
                if constexpr (T::WIDE) {
#if HOPPER
                    multiply_block_wide<T, E>(sums, memory + stage + codes,
                                              activations + 256 * T::TOKENS * column);
#endif
                } else {
                    multiply_block<T, E>(sums, memory + stage + codes, activations, column, token,
                                         Lines<T>(layout.capacity));
                }
            }
            __syncwarp();
            if (lane == 0) arrive(empty_barrier(barriers, place.stage));
            place.next(layout.depth);
        }
        synchronize_first<32 * T::WARPS>();  // the ring, or earlier sums, are done with
        float4* const own = reinterpret_cast<float4*>(memory + layout.sums_at)
            + (column * T::SUMS + row * T::ROW_GROUPS * T::TOKEN_BLOCKS) * 32 + lane;
#pragma unroll
        for (int i = 0; i < T::ROW_GROUPS; i++) {
#pragma unroll
            for (int b = 0; b < T::TOKEN_BLOCKS; b++) {
                const float(&sum)[4] = sums[i][b];
                own[(i * T::TOKEN_BLOCKS + b) * 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        }
    }

    // The sums over all columns of 16 rows and 8 tokens: rows `lane / 4` and 8 more, of tokens
    // `lane % 4 * 2` and the next.
    template <Element E>
    __device__ __forceinline__ void total(float (&sum)[4], int strip, int b, Cluster part) const {
        const float4* place = reinterpret_cast<const float4*>(memory + layout.sums_at)
            + (strip * T::TOKEN_BLOCKS + b) * 32 + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = 0.0f;
        for (int rank = 0; rank < part.size; rank++) {
#pragma unroll
            for (int column = 0; column < T::WARPS_BY_COLUMNS; column++) {
                const float4 own = load_shared_of(place + column * T::SUMS * 32, rank, part);
                sum[0] += own.x, sum[1] += own.y, sum[2] += own.z, sum[3] += own.w;
            }
        }
        if constexpr (!T::ROUNDED) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] *= UNIT<E>;
        }
    }
};

// Runs all pieces of a program. `piece_of` gives one by its number; `write` is called with the number
// of a piece and a strip and eight tokens that this warp is to finish: of strips in two halves with
// those of the first one. In a cluster there is one piece. `strips` are those of the weight.
template <typename T, Element E, int HALVES, typename PieceOf, typename Write>
__device__ __forceinline__ void run_pieces(
    const Source& weight, const Source& x, Memory layout, int strips, int columns, int pieces,
    PieceOf piece_of, Write write) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int warp = threadIdx.x / 32;
    const Cluster part = this_cluster();
    const Columns own(columns, part);
    const unsigned barriers = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < layout.depth; stage++) {
            make_barrier(full_barrier(barriers, stage), 2 * COPY_ARRIVALS);
            make_barrier(empty_barrier(barriers, stage), T::WARPS);
        }
        show_barriers();
    }
    __syncthreads();
    if (warp >= T::WARPS) {
        // The weight is copied while an earlier kernel may still write activations.
        if (warp > T::WARPS) wait_for_earlier_kernels();
        Place place;
        for (int p = blockIdx.x; p < pieces; p += gridDim.x) {
            if (warp == T::WARPS) {
                copy_codes<T, HALVES>(weight, piece_of(p), strips, barriers, layout, own, place);
            } else {
                copy_tokens<T>(x, piece_of(p), barriers, layout, own, place);
            }
            if (part.size > 1) synchronize(part), synchronize(part);
        }
    } else {
        Multiplier<T> multiplier{memory, layout, own, {}};
        for (int p = blockIdx.x; p < pieces; p += gridDim.x) {
            multiplier.template run<E>(piece_of(p));
            if (part.size > 1) {
                synchronize(part);
            } else {
                synchronize_first<32 * T::WARPS>();
            }
            const int count = T::SUMS / HALVES;
            for (int i = part.rank + part.size * warp; i < count; i += part.size * T::WARPS) {
                write(multiplier, p, i / T::TOKEN_BLOCKS, i % T::TOKEN_BLOCKS);
            }
            if (part.size > 1) synchronize(part);  // others may still read what this one shares
        }
    }
}

// Of a lane: calls `write` with the place in the sums, the row of the strip and the token.
template <typename Write>
__device__ __forceinline__ void each_sum(int tokens, int b, Write write) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int token = 8 * b + lane % 4 * 2 + j % 2;
        if (token < tokens) write(j, lane / 4 + j / 2 * 8, token);
    }
}

// ------------------------------------------------------------------------------------------ dense

// y [M, N] = x [M, K] times a weight [N, K] transposed; M is at most T::TOKENS.
template <typename T, Element E>
__device__ __forceinline__ void dense(
    const Source& weight, const Source& x, unsigned short* y, int tokens, int rows, int columns,
    Memory layout) {
    const Cluster part = this_cluster();
    const int strips = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    let_later_kernels_start();
    run_pieces<T, E, 1>(
        weight, x, layout, strips, columns, (strips + T::STRIPS - 1) / T::STRIPS,
        [&](int p) { return Piece{tokens, {p * T::STRIPS, 0}, nullptr, 1}; },
        [&](const Multiplier<T>& multiplier, int p, int strip, int b) {
            float sum[4];
            multiplier.template total<E>(sum, strip, b, part);
            const int first = (p * T::STRIPS + strip) * BLOCK_ROWS;
            each_sum(tokens, b, [&](int j, int row, int token) {
                if (first + row < rows) y[size_t(token) * rows + first + row] = rounded<E>(sum[j]);
            });
        });
}

// ------------------------------------------------------------------------------ mixture of experts

// Some of the pairs (token, expert) of one expert, up to T::TOKENS.
struct Work {
    int expert, first, count, unused;
};

// The sum of `value` of this thread and all before it, in a program of 1024.
__device__ __forceinline__ unsigned long long sum_so_far(unsigned long long value) {
    __shared__ unsigned long long of_warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto in_warp = [&](unsigned long long sum) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const unsigned long long before = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
            if (lane >= distance) sum += before;
        }
        return sum;
    };
    const unsigned long long sum = in_warp(value);
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    if (warp == 0) of_warps[lane] = in_warp(of_warps[lane]);
    __syncthreads();
    return warp ? sum + of_warps[warp - 1] : sum;
}

// Calls `each` with the pairs of an expert, in their order; all 1024 threads of a program take part,
// each with its own expert.
template <typename Each>
__device__ __forceinline__ void each_pair_of(
    int expert, const int* experts, int pairs, Each each) {
    __shared__ uint4 chunk[256];  // of experts
    for (int start = 0; start < pairs; start += 1024) {
        const int own = start + threadIdx.x;
        __syncthreads();
        reinterpret_cast<int*>(chunk)[threadIdx.x] = own < pairs ? experts[own] : -1;
        __syncthreads();
        for (int i = 0; i < (min(1024, pairs - start) + 3) / 4; i++) {
            const uint4 four = chunk[i];
            if (four.x == expert) each(start + 4 * i);
            if (four.y == expert) each(start + 4 * i + 1);
            if (four.z == expert) each(start + 4 * i + 2);
            if (four.w == expert) each(start + 4 * i + 3);
        }
    }
}

// The work of a layer, by a program of one thread to an expert: `order` holds the pairs sorted by
// expert, `list` the pieces of it. Pairs of an expert that is not here are left out.
extern "C" __global__ void __launch_bounds__(1024) list_work(
    const int* experts, int pairs, int expert_count, int pairs_of_a_work, int* order, Work* list,
    int* works) {
    const int thread = threadIdx.x;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    int count = 0;
    each_pair_of(thread, experts, pairs, [&](int) { count++; });
    if (thread >= expert_count) count = 0;
    const int own_works = (count + pairs_of_a_work - 1) / pairs_of_a_work;
    const unsigned long long sum =
        sum_so_far(static_cast<unsigned long long>(own_works) << 32 | unsigned(count));
    const int all_works = sum >> 32;
    int place = int(unsigned(sum)) - count;
    for (int i = 0; i < own_works; i++) {
        const int first = place + i * pairs_of_a_work;
        list[all_works - own_works + i] = {
            thread, first, min(pairs_of_a_work, place + count - first), 0};
    }
    if (thread == 1023) *works = all_works;
    each_pair_of(thread, experts, pairs, [&](int pair) {
        if (thread < expert_count) order[place++] = pair;
    });
}

// gated [pairs, I] = silu(gate) up, of a weight [experts, 2 I, K], gate first. Both come from one
// program: half of its strips are the gate's, and half the same of the other.
template <typename T, Element E>
__device__ __forceinline__ void gate_up(
    const Source& weight, const Source& x, unsigned short* gated, const Work* list,
    const int* works, const int* order, int pairs_per_token, int experts, int intermediate,
    int columns, Memory layout) {
    const int strips = intermediate / BLOCK_ROWS, together = T::STRIPS / 2;
    const int pieces_of_work = (strips + together - 1) / together;
    wait_for_earlier_kernels();
    let_later_kernels_start();  // `down` may read the list as soon as it runs
    run_pieces<T, E, 2>(
        weight, x, layout, 2 * experts * strips, columns, *works * pieces_of_work,
        [&](int p) {
            const Work work = list[p / pieces_of_work];
            const int first = 2 * work.expert * strips + p % pieces_of_work * together;
            return Piece{
                work.count, {first, first + strips}, order + work.first, pairs_per_token};
        },
        [&](const Multiplier<T>& multiplier, int p, int strip, int b) {
            const Work work = list[p / pieces_of_work];
            const int place = (p % pieces_of_work * together + strip) * BLOCK_ROWS;
            float gate[4], up[4];
            multiplier.template total<E>(gate, strip, b, {0, 1});
            multiplier.template total<E>(up, together + strip, b, {0, 1});
            if (place >= intermediate) return;
            each_sum(work.count, b, [&](int j, int row, int token) {
                gated[size_t(order[work.first + token]) * intermediate + place + row] =
                    rounded<E>(gate[j] / (1.0f + __expf(-gate[j])) * up[j]);
            });
        });
}

// parts [pairs, N] float32 = gated [pairs, K] times a weight [experts, N, K] transposed, times the
// router's weight of the pair.
template <typename T, Element E>
__device__ __forceinline__ void down(
    const Source& weight, const Source& gated, float* parts, const Work* list, const int* works,
    const int* order, const float* router, int experts, int rows, int columns, Memory layout) {
    const int strips = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int pieces_of_work = (strips + T::STRIPS - 1) / T::STRIPS;
    let_later_kernels_start();
    // `gate_up` has seen the list before this could start, so weights are fetched while it ends.
    run_pieces<T, E, 1>(
        weight, gated, layout, experts * strips, columns, *works * pieces_of_work,
        [&](int p) {
            const Work work = list[p / pieces_of_work];
            const int first = work.expert * strips + p % pieces_of_work * T::STRIPS;
            return Piece{work.count, {first, 0}, order + work.first, 1};
        },
        [&](const Multiplier<T>& multiplier, int p, int strip, int b) {
            const Work work = list[p / pieces_of_work];
            const int first = (p % pieces_of_work * T::STRIPS + strip) * BLOCK_ROWS;
            float sum[4];
            multiplier.template total<E>(sum, strip, b, {0, 1});
            each_sum(work.count, b, [&](int j, int row, int token) {
                const int pair = order[work.first + token];
                if (first + row < rows) parts[size_t(pair) * rows + first + row] = sum[j] * router[pair];
            });
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

// One of these is appended to the source for each tile that is used.
#define DENSE(E, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__, false>::THREADS, 1) run(        \
        const __grid_constant__ Source weight, const __grid_constant__ Source x,                   \
        unsigned short* y, int tokens, int rows, int columns, int depth, int capacity,             \
        int sums_at) {                                                                             \
        dense<Tile<__VA_ARGS__, false>, E>(weight, x, y, tokens, rows, columns,                    \
                                           {depth, capacity, sums_at});                            \
    }

#define GATE_UP(E, ...)                                                                            \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__, true>::THREADS, 1) run(         \
        const __grid_constant__ Source weight, const __grid_constant__ Source x,                   \
        unsigned short* gated, const Work* list, const int* works, const int* order,               \
        int pairs_per_token, int experts, int intermediate, int columns, int depth, int capacity,  \
        int sums_at) {                                                                             \
        gate_up<Tile<__VA_ARGS__, true>, E>(weight, x, gated, list, works, order, pairs_per_token, \
                                            experts, intermediate, columns,                        \
                                            {depth, capacity, sums_at});                           \
    }

#define DOWN(E, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__, true>::THREADS, 1) run(         \
        const __grid_constant__ Source weight, const __grid_constant__ Source gated, float* parts, \
        const Work* list, const int* works, const int* order, const float* router, int experts,    \
        int rows, int columns, int depth, int capacity, int sums_at) {                             \
        down<Tile<__VA_ARGS__, true>, E>(weight, gated, parts, list, works, order, router,         \
                                         experts, rows, columns, {depth, capacity, sums_at});      \
    }

#define ADD_EXPERTS(E)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) run(                                         \
        const float* parts, const int* experts, unsigned short* y, int pairs_per_token,            \
        int expert_count, int rows) {                                                              \
        add_experts<E>(parts, experts, y, pairs_per_token, expert_count, rows);                    \
    }

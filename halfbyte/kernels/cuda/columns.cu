// The two loops over columns of a block that GPTQ and its refinement need, a thread to a row.
//
// A block is 128 columns, worked on in pieces of 32 whose values sit in registers. What later
// pieces need of earlier ones passes through shared memory. The matrix is the same for all rows of
// a program: threads read it at one address, which costs one access for all of them.
//
// Compiled at run time by halfbyte/kernels/jit.py; plain torch twins are in halfbyte/quantize.

constexpr int ROWS = 128;    // threads, and rows, of a program
constexpr int BLOCK = 128;   // columns of a block
constexpr int PIECE = 32;    // columns held in registers
constexpr int PIECES = BLOCK / PIECE;
constexpr int PITCH = PIECE + 1;  // of a row in shared memory, so that columns spread over banks

// Adding and subtracting 1.5 x 2^23 rounds to the nearest integer, half to even.
__device__ __forceinline__ float nearest_integer(float x) {
    return __fsub_rn(__fadd_rn(x, 12582912.0f), 12582912.0f);
}

// Correctly rounded but for rare last bits; `inverse` is 1 / divisor.
__device__ __forceinline__ float divide(float x, float divisor, float inverse) {
    float quotient = x * inverse;
    return fmaf(fmaf(-quotient, divisor, x), inverse, quotient);
}

__device__ __forceinline__ float nearest_tf32(float x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return __uint_as_float(rounded);
}

__device__ __forceinline__ float bfloat16_at(const unsigned short* place) {
    return __uint_as_float(static_cast<unsigned>(*place) << 16);
}

// Half to even; finite numbers only.
__device__ __forceinline__ unsigned short nearest_bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    return static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// A square of PIECE x PIECE numbers of a matrix of `pitch` columns, into shared memory.
__device__ __forceinline__ void fetch_square(
    float (*square)[PIECE], const float* __restrict__ matrix, long long pitch) {
    constexpr int COUNT = PIECE * PIECE / ROWS;
    const int row = threadIdx.x / PIECE, column = threadIdx.x % PIECE;
    float values[COUNT];  // all on their way at once
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        values[i] = matrix[(row + i * (ROWS / PIECE)) * pitch + column];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) square[row + i * (ROWS / PIECE)][column] = values[i];
    __syncthreads();
}

// A tile of ROWS x PIECE, rows of `pitch` numbers, coalesced; rows behind the last are zero.
__device__ __forceinline__ void fetch_tile(
    float (*tile)[PITCH], const float* __restrict__ matrix, long long pitch, int rows) {
    constexpr int ACROSS = PIECE / 4, COUNT = PIECE / 4;  // float4s of a row, and to a thread
    const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * 4;
    float4 values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int r = row + i * (ROWS / ACROSS);
        values[i] = r < rows ? *reinterpret_cast<const float4*>(matrix + r * pitch + column)
                             : make_float4(0, 0, 0, 0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float* place = &tile[row + i * (ROWS / ACROSS)][column];
        place[0] = values[i].x, place[1] = values[i].y;
        place[2] = values[i].z, place[3] = values[i].w;
    }
    __syncthreads();
}

// values[k] += sum over r of row[r] square[r][k].
__device__ __forceinline__ void add_product(
    float (&values)[PIECE], const float* row, const float (*square)[PIECE]) {
    for (int r = 0; r < PIECE; r++) {
        float factor = row[r];
#pragma unroll
        for (int k = 0; k < PIECE; k++) values[k] = fmaf(factor, square[r][k], values[k]);
    }
}

// Eight codes at a time between memory and registers.
__device__ __forceinline__ void load_codes(float (&codes)[PIECE], const signed char* place) {
#pragma unroll
    for (int k = 0; k < PIECE; k += 8) {
        long long word = *reinterpret_cast<const long long*>(place + k);
#pragma unroll
        for (int i = 0; i < 8; i++) codes[k + i] = static_cast<signed char>(word >> (8 * i));
    }
}

__device__ __forceinline__ void store_codes(signed char* place, const float (&codes)[PIECE]) {
#pragma unroll
    for (int k = 0; k < PIECE; k += 8) {
        unsigned long long word = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            word |= (unsigned long long)(unsigned char)(signed char)(int)codes[k + i] << (8 * i);
        }
        *reinterpret_cast<unsigned long long*>(place + k) = word;
    }
}

// The nearest scale that a checkpoint can hold: bfloat16, and normal.
__device__ __forceinline__ float stored_scale(float scale) {
    constexpr float SMALLEST = 1.1754943508222875e-38f;
    scale = __uint_as_float(static_cast<unsigned>(nearest_bfloat16(scale)) << 16);
    return fabsf(scale) < SMALLEST ? SMALLEST : scale;
}

// The scale for a group of one piece: the largest magnitude over that divisor with the least error,
// each column's multiplied with `importance` before it is squared; the first of equals.
__device__ __forceinline__ float least_squares_scale(
    const float (&wanted)[PIECE], const float* importance, const float* __restrict__ divisors,
    int candidates, float code_min, float code_max) {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < PIECE; k++) largest = fmaxf(largest, fabsf(wanted[k]));
    float best = 0.0f, least = __uint_as_float(0x7F800000u);
    for (int i = 0; i < candidates; i++) {
        const float scale = stored_scale(__fdiv_rn(largest, divisors[i]));
        const float inverse = __fdiv_rn(1.0f, scale);
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < PIECE; k++) {
            const float code = fminf(fmaxf(wanted[k] * inverse, code_min), code_max);
            const float error = fmaf(nearest_integer(code), scale, -wanted[k]) * importance[k];
            total = fmaf(error, error, total);
        }
        if (total < least) least = total, best = scale;
    }
    return best;
}

// Of `nearby` multiples of a scale the one that serves a group best when its columns are rounded one
// after the other; the first of equals.
__device__ __forceinline__ float best_nearby(
    float start, const float (&wanted)[PIECE], const float* own, const float (*square)[PIECE],
    const float* importance, const float* __restrict__ multiples, int nearby, float code_min,
    float code_max) {
    float best = start, least = __uint_as_float(0x7F800000u);
    for (int i = 0; i < nearby; i++) {
        __syncthreads();  // or the compiler keeps all of `square` between the rounds
        const float scale = stored_scale(start * multiples[i]), inverse = __frcp_rn(scale);
        float trial[PIECE], total = 0.0f;
#pragma unroll
        for (int k = 0; k < PIECE; k++) trial[k] = wanted[k];
#pragma unroll
        for (int j = PIECE - 1; j >= 0; j--) {
            const float code = divide(trial[j], scale, inverse);
            const float made = scale * nearest_integer(fminf(fmaxf(code, code_min), code_max));
            const float off = (trial[j] - made) * importance[j];
            total = fmaf(off, off, total);
            const float gone = own[j] - made;
#pragma unroll
            for (int k = 0; k < j; k++) trial[k] = fmaf(gone, square[j][k], trial[k]);
        }
        if (total < least) least = total, best = scale;
    }
    __syncthreads();
    return best;
}

// GPTQ: round the columns of a block from the last to the first.
//
// target  [item, rows, pitch]  what each column would be without the errors of this block
// errors  [item, rows, size]   weights of the block in, their rounding errors out (to TF32)
// codes   [item, rows, size]
// factor  [item, size, size]   L, lower triangle
// scales  [item, rows, groups] bfloat16, of groups of columns as stored
// order   [item, columns]      the stored column of each column here
// With SEARCH each piece is one group, whose scale is searched first and written: among the
// `candidates` divisors of its largest weight, and then among the multiples of what that finds, which
// follow the divisors.
template <bool SEARCH>
__device__ __forceinline__ void round_pieces(
    const float* __restrict__ target, float* errors, signed char* codes,
    const float* __restrict__ factor, unsigned short* __restrict__ scales,
    const int* __restrict__ order, const float* __restrict__ divisors, int candidates, int nearby,
    int rows, int columns, int size, int groups, int columns_per_group, int start,
    int pitch, int offset, float code_min, float code_max) {
    extern __shared__ float shared[];
    auto error = reinterpret_cast<float (*)[ROWS][PITCH]>(shared);
    auto square = reinterpret_cast<float (*)[PIECE]>(shared + PIECES * ROWS * PITCH);
    __shared__ float diagonal[BLOCK];
    __shared__ int group[BLOCK];

    const long long item = blockIdx.y;
    const int first = blockIdx.x * ROWS, row = first + threadIdx.x, left = rows - first;
    const bool inside = row < rows;
    target += (item * rows + first) * pitch + offset;
    errors += (item * rows + first) * size + start;
    codes += (item * rows + row) * size + start;
    factor += item * size * size + start * (long long)size + start;
    scales += (item * rows + first) * groups;
    diagonal[threadIdx.x] = factor[threadIdx.x * (size + 1ll)];
    const int column = start + threadIdx.x;
    group[threadIdx.x] = column < columns ? order[item * columns + column] / columns_per_group : 0;

    for (int p = PIECES - 1; p >= 0; p--) {
        const int base = p * PIECE;
        fetch_tile(error[p], target + base, pitch, left);
        float* own = error[p][threadIdx.x];
        float wanted[PIECE];
#pragma unroll
        for (int k = 0; k < PIECE; k++) wanted[k] = own[k];
        float scale[SEARCH ? 1 : PIECE];
        if constexpr (!SEARCH) {
            // A warp to a row: its scales lie together. Padding has weight 0, whatever its scale.
            __syncthreads();
#pragma unroll 8
            for (int i = threadIdx.x; i < ROWS * PIECE; i += ROWS) {
                const int r = min(i / PIECE, left - 1);
                error[p][i / PIECE][i % PIECE] =
                    bfloat16_at(scales + r * (long long)groups + group[base + i % PIECE]);
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < PIECE; k++) scale[k] = own[k];
        }
        float behind[PIECE] = {};
        for (int q = p + 1; q < PIECES; q++) {
            fetch_square(square, factor + q * PIECE * (long long)size + base, size);
            add_product(behind, error[q][threadIdx.x], square);
        }
        fetch_square(square, factor + base * (long long)size + base, size);
#pragma unroll
        for (int k = 0; k < PIECE; k++) wanted[k] += behind[k] / diagonal[base + k];
        for (int i = threadIdx.x; i < PIECE * PIECE; i += ROWS) {
            square[i / PIECE][i % PIECE] /= diagonal[base + i % PIECE];
        }
        fetch_tile(error[p], errors + base, size, left);
        if constexpr (SEARCH) {
            // What the columns would be without any rounding.
            float best[PIECE];
#pragma unroll
            for (int k = 0; k < PIECE; k++) best[k] = wanted[k];
#pragma unroll
            for (int j = PIECE - 1; j >= 0; j--) {
                const float moved = own[j] - best[j];
#pragma unroll
                for (int k = 0; k < j; k++) best[k] = fmaf(moved, square[j][k], best[k]);
            }
            scale[0] = least_squares_scale(
                best, diagonal + base, divisors, candidates, code_min, code_max);
            scale[0] = best_nearby(
                scale[0], wanted, own, square, diagonal + base, divisors + candidates, nearby,
                code_min, code_max);
            if (inside && start + base < columns) {  // what is behind them is padding
                scales[threadIdx.x * (long long)groups + group[base]] =
                    nearest_bfloat16(scale[0]);
            }
        }
        float chosen[PIECE];
#pragma unroll
        for (int j = PIECE - 1; j >= 0; j--) {
            const float step = scale[SEARCH ? 0 : j];
            float code = divide(wanted[j], step, __frcp_rn(step));
            code = nearest_integer(fminf(fmaxf(code, code_min), code_max));
            const float gone = own[j] - code * step;
            own[j] = gone;
            chosen[j] = code;
#pragma unroll
            for (int k = 0; k < j; k++) {
                wanted[k] = fmaf(gone, square[j][k], wanted[k]);
            }
        }
        if (inside) store_codes(codes + base, chosen);
        __syncthreads();
#pragma unroll 8
        for (int i = threadIdx.x; i < ROWS * PIECE; i += ROWS) {
            const int r = i / PIECE;
            if (r < left) errors[r * (long long)size + base + i % PIECE] =
                nearest_tf32(error[p][r][i % PIECE]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(ROWS, 3) round_block(
    const float* __restrict__ target, float* errors, signed char* codes,
    const float* __restrict__ factor, unsigned short* __restrict__ scales,
    const int* __restrict__ order, const float* __restrict__ divisors, int candidates, int nearby,
    int rows, int columns, int size, int groups, int columns_per_group, int start,
    int pitch, int offset, float code_min, float code_max) {
    round_pieces<false>(
        target, errors, codes, factor, scales, order, divisors, candidates, nearby, rows, columns,
        size, groups, columns_per_group, start, pitch, offset, code_min, code_max);
}

extern "C" __global__ void __launch_bounds__(ROWS, 3) search_and_round_block(
    const float* __restrict__ target, float* errors, signed char* codes,
    const float* __restrict__ factor, unsigned short* __restrict__ scales,
    const int* __restrict__ order, const float* __restrict__ divisors, int candidates, int nearby,
    int rows, int columns, int size, int groups, int columns_per_group, int start,
    int pitch, int offset, float code_min, float code_max) {
    round_pieces<true>(
        target, errors, codes, factor, scales, order, divisors, candidates, nearby, rows, columns,
        size, groups, columns_per_group, start, pitch, offset, code_min, code_max);
}

// Where the scale at `place` is best for the codes of its group, if that is better; the change.
__device__ __forceinline__ float refined_scale(
    unsigned short* place, float slope, float curve, bool inside) {
    const float old = bfloat16_at(place);
    const unsigned short best = nearest_bfloat16(old + slope / (curve > 0.0f ? curve : 1.0f));
    const float step = __uint_as_float((unsigned)best << 16) - old;
    const bool better = curve > 0.0f && (old + step) * old > 0.0f &&
                        step * (step * curve - 2.0f * slope) < 0.0f;
    if (better && inside) *place = best;
    return better ? step : 0.0f;
}

// Each code of a piece in turn to where it is best while the others stay.
__device__ __forceinline__ void descend_piece(
    float (&slopes)[PIECE], float (&code)[PIECE], float* change, const float (*square)[PIECE],
    float added, float scale, float code_min, float code_max) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int j = 0; j < PIECE; j++) {
        const float curve = square[j][j] + added;
        const float pull = curve > 0.0f ? slopes[j] * inverse * __frcp_rn(curve) : 0.0f;
        const float best = nearest_integer(fminf(fmaxf(code[j] + pull, code_min), code_max));
        const float step = (code[j] - best) * scale;
        code[j] = best;
        change[j] += step;
#pragma unroll
        for (int k = j + 1; k < PIECE; k++) slopes[k] = fmaf(step, square[j][k], slopes[k]);
    }
}

// The gradient of one piece, by way of a tile in shared memory.
__device__ __forceinline__ void load_slopes(
    float (&slopes)[PIECE], float (*tile)[PITCH], const float* gradient, long long pitch, int rows) {
    fetch_tile(tile, gradient, pitch, rows);
#pragma unroll
    for (int k = 0; k < PIECE; k++) slopes[k] = tile[threadIdx.x][k];
}

// values += change[first..last) H, for the columns of H from `hessian` on.
__device__ __forceinline__ void add_changes(
    float (&values)[PIECE], float (*change)[ROWS][PITCH], int first, int last,
    float (*square)[PIECE], const float* hessian, long long columns) {
    for (int q = first; q < last; q++) {
        fetch_square(square, hessian + q * PIECE * columns, columns);
        add_product(values, change[q][threadIdx.x], square);
    }
}

// Coordinate descent on E (H + damping) E^T: each group's scale for its codes, then its codes.
//
// gradient [item, rows, pitch]  E (H + damping) of the block's columns, from `offset` on
// errors   [item, rows, columns], codes, scales [item, rows, groups] bfloat16: in and out
// hessian  [item, columns, columns], damping [item]
// halves   [item, rows, columns] bfloat16: the errors, as the next sweep's products read them
// moved    [item, rows, pitch]   bfloat16: their change, as the next blocks' products read it
// Groups of 32, 64 or 128 columns have their scale refined when `refine`; codes change in any case.
extern "C" __global__ void __launch_bounds__(ROWS, 3) descend_block(
    const float* __restrict__ gradient, float* errors, signed char* codes, unsigned short* scales,
    const float* __restrict__ hessian, const float* __restrict__ damping, unsigned short* halves,
    unsigned short* moved,
    int rows, int columns, int groups, int columns_per_group, int start, int pieces, int refine,
    int pitch, int offset, float code_min, float code_max) {
    extern __shared__ float shared[];
    auto change = reinterpret_cast<float (*)[ROWS][PITCH]>(shared);
    auto square = reinterpret_cast<float (*)[PIECE]>(shared + PIECES * ROWS * PITCH);
    auto tile = reinterpret_cast<float (*)[PITCH]>(shared + PIECES * ROWS * PITCH + PIECE * PIECE);

    const long long item = blockIdx.y;
    const int first = blockIdx.x * ROWS, row = first + threadIdx.x, left = rows - first;
    const bool inside = row < rows;
    gradient += (item * rows + first) * pitch + offset;
    moved += (item * rows + first) * pitch + offset;
    errors += (item * rows + first) * columns + start;
    halves += (item * rows + first) * columns + start;
    codes += (item * rows + (inside ? row : 0)) * columns + start;
    scales += (item * rows + (inside ? row : 0)) * groups;
    const float* block = hessian + item * columns * columns + start * (long long)columns + start;
    const float added = damping[item];
    const int per_group = refine ? columns_per_group / PIECE : pieces;

    for (int group = 0; group < pieces; group += per_group) {
        const int end = group + per_group;
        unsigned short* place = scales + (start + group * PIECE) / columns_per_group;
        // A group of one piece keeps its gradient and its pull (H + damping) c in registers.
        const bool single = refine && per_group == 1;
        float slopes[PIECE], code[PIECE];
        if (single) {
            load_slopes(slopes, change[group], gradient + group * PIECE, pitch, left);
            add_changes(slopes, change, 0, group, square, block + group * PIECE, columns);
            fetch_square(square, block + group * PIECE * (columns + 1ll), columns);
            load_codes(code, codes + group * PIECE);
            float* own = change[group][threadIdx.x];
            float pull[PIECE];
#pragma unroll
            for (int k = 0; k < PIECE; k++) own[k] = code[k], pull[k] = added * code[k];
            add_product(pull, own, square);
            float slope = 0.0f, curve = 0.0f;
#pragma unroll
            for (int k = 0; k < PIECE; k++) {
                slope = fmaf(code[k], slopes[k], slope);
                curve = fmaf(code[k], pull[k], curve);
            }
            const float step = refined_scale(place, slope, curve, inside);
#pragma unroll
            for (int k = 0; k < PIECE; k++) {
                own[k] *= -step;
                slopes[k] = fmaf(-step, pull[k], slopes[k]);
            }
            const float scale = bfloat16_at(place);
            descend_piece(slopes, code, own, square, added, scale, code_min, code_max);
            if (inside) store_codes(codes + group * PIECE, code);
            continue;
        }
        if (refine) {
            float slope = 0.0f, curve = 0.0f;
            for (int p = group; p < end; p++) {
                load_codes(code, codes + p * PIECE);
                load_slopes(slopes, tile, gradient + p * PIECE, pitch, left);
                add_changes(slopes, change, 0, group, square, block + p * PIECE, columns);
                float pull[PIECE];
#pragma unroll
                for (int k = 0; k < PIECE; k++) {
                    slope = fmaf(code[k], slopes[k], slope);
                    pull[k] = added * code[k];
                }
                for (int q = group; q < end; q++) {
                    float other[PIECE];
                    load_codes(other, codes + q * PIECE);
#pragma unroll
                    for (int k = 0; k < PIECE; k++) change[q][threadIdx.x][k] = other[k];
                }
                add_changes(pull, change, group, end, square, block + p * PIECE, columns);
#pragma unroll
                for (int k = 0; k < PIECE; k++) curve = fmaf(code[k], pull[k], curve);
            }
            const float step = refined_scale(place, slope, curve, inside);
            for (int q = group; q < end; q++) {
#pragma unroll
                for (int k = 0; k < PIECE; k++) change[q][threadIdx.x][k] *= -step;
            }
        } else {
            for (int q = group; q < end; q++) {
#pragma unroll
                for (int k = 0; k < PIECE; k++) change[q][threadIdx.x][k] = 0.0f;
            }
        }
        for (int p = group; p < end; p++) {
            load_slopes(slopes, tile, gradient + p * PIECE, pitch, left);
            add_changes(slopes, change, 0, end, square, block + p * PIECE, columns);
            fetch_square(square, block + p * PIECE * (columns + 1ll), columns);
            load_codes(code, codes + p * PIECE);
            float* own = change[p][threadIdx.x];
#pragma unroll
            for (int k = 0; k < PIECE; k++) slopes[k] = fmaf(added, own[k], slopes[k]);
            const float scale = bfloat16_at(scales + (start + p * PIECE) / columns_per_group);
            descend_piece(slopes, code, own, square, added, scale, code_min, code_max);
            if (inside) store_codes(codes + p * PIECE, code);
        }
    }
    __syncthreads();
    for (int p = 0; p < pieces; p++) {
#pragma unroll 8
        for (int i = threadIdx.x; i < ROWS * PIECE; i += ROWS) {
            const int r = i / PIECE, k = i % PIECE;
            if (r < left) {
                const long long place = r * (long long)columns + p * PIECE + k;
                const float error = errors[place] + change[p][r][k];
                errors[place] = error;
                halves[place] = nearest_bfloat16(error);
                moved[r * (long long)pitch + p * PIECE + k] = nearest_bfloat16(change[p][r][k]);
            }
        }
    }
}

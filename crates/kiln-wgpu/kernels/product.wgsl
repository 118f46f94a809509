// x · Wᵀ, with an epilogue: tiles of both operands go through workgroup memory, an invocation keeps the sums of TM rows and QUADS
// groups of four columns in registers, and LANES invocations are side by side. Sums run over `inner` in order, in f32.
//
// TILE: few rows (16 × 64), small (64 × 64), large (128 × 128), or narrow (256 × 32).
//
// INPUT: matrix, or image: the rows are the pixels of a convolution's result, and `inner` the taps' channels, which are read from
// the image without writing the matrix down.
#if TILE == few
#let TM 1
#let QUADS 1
#let LANES 16
#let BK 16
#elif TILE == small
#let TM 4
#let QUADS 1
#let LANES 16
#let BK 16
#elif TILE == large
#let TM 8
#let QUADS 2
#let LANES 16
#let BK 8
#else
#let TM 8
#let QUADS 1
#let LANES 8
#let BK 8
#end
#params rows, inner, outputs, stride, tile, first_column, all_columns, y_stride, y_column, flags, scale: f32
#if INPUT == image
#params width, channels, kernel_width, step, top: i32, left: i32, doubled, first_row: i32, image_first: i32
#params image_height, image_width
#end
#read x: X
#read w: words
#read columns: f32
#read row_scales: f32
#read gate: f32
#read residual: Y
#write y: Y
#include weights
#include epilogue

const BM = 256u / LANES * TM;
// Columns from one group of four of an invocation to the next.
const SPREAD = 4u * LANES;
const BN = SPREAD * QUADS;
// Vectors of four that cover a tile's inner size.
const STEPS = BK / 4u;
// Rows of a tile that all invocations load at once.
const LOADED = 256u / STEPS;

var<workgroup> x_tile: array<f32, BM * BK>;
var<workgroup> w_tile: array<f32, BN * BK>;

#if INPUT == matrix
fn input4(m: u32, k: u32) -> vec4<f32> {
    let at = m * params.inner + k;
    if (k + 4u <= params.inner) {
        return read4_x(at);
    }
    var values = vec4<f32>(read_x(at), 0.0, 0.0, 0.0);
    if (k + 1u < params.inner) {
        values.y = read_x(at + 1u);
    }
    if (k + 2u < params.inner) {
        values.z = read_x(at + 2u);
    }
    return values;
}
#else
// The position of a tap's pixel in the image, or -1 in the padding.
fn pixel(m: u32, tap: u32) -> i32 {
    let row = (params.first_row + i32(m / params.width)) * i32(params.step) + i32(tap / params.kernel_width) - params.top;
    let column = i32((m % params.width) * params.step + tap % params.kernel_width) - params.left;
    let y = row >> params.doubled;
    let x = column >> params.doubled;
    if (y < 0 || x < 0 || y >= i32(params.image_height) || x >= i32(params.image_width)) {
        return -1;
    }
    return (y - params.image_first) * i32(params.image_width) + x;
}

fn input(m: u32, k: u32) -> f32 {
    if (k >= params.inner) {
        return 0.0;
    }
    let at = pixel(m, k / params.channels);
    if (at < 0) {
        return 0.0;
    }
    return read_x(u32(at) * params.channels + k % params.channels);
}

fn input4(m: u32, k: u32) -> vec4<f32> {
    if ((params.channels & 3u) == 0u) {
        let at = pixel(m, k / params.channels);
        if (at < 0 || k >= params.inner) {
            return vec4<f32>();
        }
        return read4_x(u32(at) * params.channels + k % params.channels);
    }
    return vec4<f32>(input(m, k), input(m, k + 1u), input(m, k + 2u), input(m, k + 3u));
}
#end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tiles = (params.rows + BM - 1u) / BM;
    let number = group.x + group.y * 32768u;
    let first_m = number % tiles * BM;
    let first_n = number / tiles * BN;
    if (first_n >= params.outputs) {
        return;
    }
    let lane_m = lane / LANES * TM;
    let lane_n = lane % LANES * 4u;
    let load_row = lane / STEPS;
    let load_k = lane % STEPS * 4u;
    #for i in 0..TM
    #for q in 0..QUADS
    var sums_{i}_{q} = vec4<f32>();
    #end
    #end
    for (var start = 0u; start < params.inner; start += BK) {
        let k = start + load_k;
        workgroupBarrier();
        for (var row = load_row; row < BM; row += LOADED) {
            var values = vec4<f32>();
            if (first_m + row < params.rows && k < params.inner) {
                values = input4(first_m + row, k);
            }
            #for c in 0..4
            x_tile[(load_k + {c}u) * BM + row] = values[{c}];
            #end
        }
        for (var row = load_row; row < BN; row += LOADED) {
            var weights = vec4<f32>();
            if (first_n + row < params.outputs && k < params.inner) {
                weights = weight4(first_n + row, k);
            }
            #for c in 0..4
            w_tile[(load_k + {c}u) * BN + row] = weights[{c}];
            #end
        }
        workgroupBarrier();
        for (var inner = 0u; inner < BK; inner++) {
            #for q in 0..QUADS
            let at_{q} = inner * BN + {q}u * SPREAD + lane_n;
            let w_{q} = vec4<f32>(w_tile[at_{q}], w_tile[at_{q} + 1u], w_tile[at_{q} + 2u], w_tile[at_{q} + 3u]);
            #end
            #for i in 0..TM
            let x_{i} = x_tile[inner * BM + lane_m + {i}u];
            #for q in 0..QUADS
            sums_{i}_{q} += x_{i} * w_{q};
            #end
            #end
        }
    }
    #for i in 0..TM
    #for q in 0..QUADS
    finish2(first_m + lane_m + {i}u, first_n + {q}u * SPREAD + lane_n, sums_{i}_{q}.xy);
    finish2(first_m + lane_m + {i}u, first_n + {q}u * SPREAD + lane_n + 2u, sums_{i}_{q}.zw);
    #end
    #end
}

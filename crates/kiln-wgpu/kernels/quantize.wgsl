// Quantizes rows by their largest magnitude, a workgroup for each, and writes the rows' scales.
//
// int8: integers, four to a word. e4m3: the bytes of a weight, four to a word. fp8, nvfp4: the rounded values, nvfp4's times their
// blocks' scales, as bf16, which holds them exactly. Rows of words are padded with zeros.
#params rows, columns, nan
#read x: X
#if FORMAT == int8, e4m3
#write y: words
#else
#write y: bf16
#end
#write scales: f32
#include math
#include division

var<workgroup> largest_of: array<u32, 256>;

// The largest magnitude of a row, as bits: those of NaN are larger than all others.
fn largest(first: u32, lane: u32) -> u32 {
    var mine = 0u;
    for (var i = lane; i < params.columns; i += 256u) {
        mine = max(mine, bitcast<u32>(read_x(first + i)) & 0x7fffffffu);
    }
    largest_of[lane] = mine;
    for (var step = 128u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (lane < step) {
            largest_of[lane] = max(largest_of[lane], largest_of[lane + step]);
        }
    }
    workgroupBarrier();
    return largest_of[0];
}

// The nearest float with `fraction` bits behind the point and exponents from `lowest` on; exact powers of two scale it.
fn round_float(x: f32, fraction: i32, lowest: i32) -> f32 {
    let exponent = max(i32((bitcast<u32>(x) >> 23u) & 0xffu) - 127, lowest);
    return round(x * power_of_two(fraction - exponent)) * power_of_two(exponent - fraction);
}

fn round_e4m3(x: f32) -> f32 {
    return clamp(round_float(clamp(x, -448.0, 448.0), 3, -6), -448.0, 448.0);
}

#if FORMAT == int8
const LARGEST = 127.0;
#elif FORMAT == nvfp4
const LARGEST = 2688.0;
#else
const LARGEST = 448.0;
#end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x + group.y * 32768u;
    if (row >= params.rows) {
        return;
    }
    let first = row * params.columns;
    let bits = largest(first, lane);
    var inverse = 0.0;
    var scale = 0.0;
    if (bits >= 0x7f800000u) {
        scale = bitcast<f32>(params.nan);
    } else if (bitcast<f32>(bits) >= 1e-30) {
        inverse = exact_divide(LARGEST, bitcast<f32>(bits));
        scale = exact_divide(bitcast<f32>(bits), LARGEST);
    }
    if (lane == 0u) {
        write_scales(row, scale);
    }
    #if FORMAT == int8, e4m3
    let words = (params.columns + 3u) / 4u;
    for (var i = lane; i < words; i += 256u) {
        var word = 0u;
        for (var c = 0u; c < 4u; c++) {
            let column = 4u * i + c;
            if (column < params.columns) {
                word |= code(read_x(first + column) * inverse) << (8u * c);
            }
        }
        write_word_y(row * words + i, word);
    }
    #elif FORMAT == fp8
    for (var i = 2u * lane; i < params.columns; i += 512u) {
        let count = min(2u, params.columns - i);
        let pair = read2_x(first + i) * inverse;
        write2_y(first + i, vec2<f32>(finite(pair.x), finite(pair.y)), count);
    }
    #else
    for (var column = 16u * lane; column < params.columns; column += 4096u) {
        block(first + column, inverse);
    }
    #end
}

#if FORMAT == int8
fn code(x: f32) -> u32 {
    return u32(i32(round(clamp(x, -127.0, 127.0)))) & 0xffu;
}
#elif FORMAT == e4m3
fn code(x: f32) -> u32 {
    let rounded = finite(x);
    let exponent = max(i32((bitcast<u32>(rounded) >> 23u) & 0xffu) - 127, -6);
    let steps = u32(abs(rounded) * power_of_two(3 - exponent));
    return (u32(exponent + 6) << 3u) + steps + select(0u, 0x80u, x < 0.0);
}
#end
#if FORMAT == fp8, e4m3

// Of a row with NaN or infinity, the scale is NaN.
fn finite(x: f32) -> f32 {
    if (!is_finite(x)) {
        return 0.0;
    }
    return round_e4m3(x);
}
#elif FORMAT == nvfp4

fn block(first: u32, inverse: f32) {
    var most = 0.0;
    for (var i = 0u; i < 16u; i++) {
        most = max(most, abs(read_x(first + i)));
    }
    let scaled = most * inverse;
    var scale = 0.0;
    if (scaled > 1e-4) {
        scale = round_e4m3(exact_divide(scaled, 6.0));
    }
    var factor = 0.0;
    if (scale > 0.0) {
        factor = exact_divide(inverse, scale);
    }
    for (var i = 0u; i < 16u; i += 2u) {
        let pair = read2_x(first + i) * factor;
        write2_y(first + i, vec2<f32>(e2m1(pair.x), e2m1(pair.y)) * scale, 2u);
    }
}

fn e2m1(x: f32) -> f32 {
    return round_float(clamp(x, -6.0, 6.0), 1, 0);
}
#end

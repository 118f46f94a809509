// Four neighbouring values of a weight's row, from the bytes of its format.
//
// Rows are `params.stride` words apart and start at a word. `k` is a multiple of 4; past the last column, values are zeros for
// formats whose blocks are single values, and other formats have whole blocks. Scales of matrices and rows are multiplied into the
// sums instead.

// Four bytes from a byte's position on, which is even.
fn bytes4(at: u32) -> u32 {
    let word = word_w(at >> 2u);
    if ((at & 2u) == 0u) {
        return word;
    }
    return (word >> 16u) | (word_w((at >> 2u) + 1u) << 16u);
}

// A byte at any position.
fn byte(at: u32) -> u32 {
    return (word_w(at >> 2u) >> ((at & 3u) << 3u)) & 0xffu;
}

fn each_byte(bytes: u32) -> vec4<u32> {
    return (vec4<u32>(bytes) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// An f16, without the subnormal f32 that some devices take for 0.
fn half(bits: u32) -> f32 {
    let exponent = bits & 0x7c00u;
    var magnitude = f32(bits & 0x3ffu) * 5.9604644775390625e-8;
    if (exponent != 0u) {
        magnitude = bitcast<f32>(((bits & 0x7fffu) << 13u) + select(0x38000000u, 0x70000000u, exponent == 0x7c00u));
    }
    return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
}

// The f16 at an even byte.
fn half_at(at: u32) -> f32 {
    return half(bytes4(at) & 0xffffu);
}

fn e4m3(bits: u32) -> f32 {
    var magnitude = f32(bits & 7u) * 0.001953125;
    if ((bits & 0x7fu) == 0x7fu) {
        magnitude = bitcast<f32>(0x7f800001u | bits);
    } else if ((bits & 0x78u) != 0u) {
        magnitude = bitcast<f32>(((bits & 0x7fu) << 20u) + 0x3c000000u);
    }
    return select(magnitude, -magnitude, (bits & 0x80u) != 0u);
}

#if W == f32
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let at = row * params.stride + k;
    let values = bitcast<vec4<f32>>(vec4<u32>(word_w(at), word_w(at + 1u), word_w(at + 2u), word_w(at + 3u)));
    return within_row(k, values);
}
#elif W == bf16
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let at = row * params.stride + (k >> 1u);
    let words = vec4<u32>(vec2<u32>(word_w(at)), vec2<u32>(word_w(at + 1u)));
    let bits = (words << vec4<u32>(16u, 0u, 16u, 0u)) & vec4<u32>(0xffff0000u);
    return within_row(k, bitcast<vec4<f32>>(bits));
}
#elif W == f16
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let at = row * params.stride + (k >> 1u);
    let a = word_w(at);
    let b = word_w(at + 1u);
    return within_row(k, vec4<f32>(half(a & 0xffffu), half(a >> 16u), half(b & 0xffffu), half(b >> 16u)));
}
#elif W == f8_e4m3, f8_e4m3_tiles
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let bits = each_byte(word_w(row * params.stride + (k >> 2u)));
    let values = vec4<f32>(e4m3(bits.x), e4m3(bits.y), e4m3(bits.z), e4m3(bits.w));
    return within_row(k, values * tile_scale(row, k));
}
#elif W == f8_e5m2, f8_e5m2_tiles
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let bits = each_byte(word_w(row * params.stride + (k >> 2u))) << vec4<u32>(8u);
    let values = vec4<f32>(half(bits.x), half(bits.y), half(bits.z), half(bits.w));
    return within_row(k, values * tile_scale(row, k));
}
#elif W == int8
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let word = vec4<i32>(i32(word_w(row * params.stride + (k >> 2u))));
    return within_row(k, vec4<f32>((word << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u)));
}
#elif W == nvfp4
// A row: its values, then an e4m3 scale for each block of 16.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let first = row * params.stride * 4u;
    let bits = bytes4(first + (k >> 1u));
    let scale = e4m3(byte(first + (params.inner >> 1u) + (k >> 4u)));
    return scale * vec4<f32>(e2m1(bits), e2m1(bits >> 4u), e2m1(bits >> 8u), e2m1(bits >> 12u));
}

fn e2m1(bits: u32) -> f32 {
    let doubles = vec2<u32>(0x03020100u, 0x0c080604u)[bits >> 2u & 1u];
    let magnitude = 0.5 * f32((doubles >> ((bits & 3u) << 3u)) & 0xffu);
    return select(magnitude, -magnitude, (bits & 8u) != 0u);
}
#elif W == q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl
// Blocks of 32: d · q or d · q + m. Low nibbles are values 0 to 15, high ones 16 to 31; fifth bits have a word of their own.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let i = k & 31u;
    let shift = (i >> 4u) << 2u;
    #if W == q8_0
    let block = row * params.stride * 4u + (k >> 5u) * 34u;
    let word = vec4<i32>(i32(bytes4(block + 2u + i)));
    return half_at(block) * vec4<f32>((word << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
    #elif W == q4_0, iq4_nl
    let block = row * params.stride * 4u + (k >> 5u) * 18u;
    let q = each_byte(bytes4(block + 2u + (i & 15u)) >> shift) & vec4<u32>(15u);
    #if W == iq4_nl
    return half_at(block) * iq4(q);
    #else
    return half_at(block) * (vec4<f32>(q) - 8.0);
    #end
    #elif W == q4_1
    let block = row * params.stride * 4u + (k >> 5u) * 20u;
    let q = each_byte(bytes4(block + 4u + (i & 15u)) >> shift) & vec4<u32>(15u);
    return half_at(block) * vec4<f32>(q) + half_at(block + 2u);
    #elif W == q5_0
    let block = row * params.stride * 4u + (k >> 5u) * 22u;
    let q = each_byte(bytes4(block + 6u + (i & 15u)) >> shift) & vec4<u32>(15u);
    return half_at(block) * (vec4<f32>(q | fifth_bits(bytes4(block + 2u) >> i)) - 16.0);
    #else
    let block = row * params.stride * 4u + (k >> 5u) * 24u;
    let q = each_byte(bytes4(block + 8u + (i & 15u)) >> shift) & vec4<u32>(15u);
    return half_at(block) * vec4<f32>(q | fifth_bits(bytes4(block + 4u) >> i)) + half_at(block + 2u);
    #end
}

fn fifth_bits(bits: u32) -> vec4<u32> {
    return ((vec4<u32>(bits) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u)) << vec4<u32>(4u);
}
#elif W == q2_k
// Groups of 16: d · scale · q - dmin · minimum.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let block = row * params.stride * 4u + (k >> 8u) * 84u;
    let group = (k >> 4u) & 15u;
    let scale = byte(block + group);
    let q = (each_byte(bytes4(block + 16u + two_bit_byte(k))) >> vec4<u32>(two_bit_shift(k))) & vec4<u32>(3u);
    let minimum = half_at(block + 82u) * f32(scale >> 4u);
    return half_at(block + 80u) * f32(scale & 15u) * vec4<f32>(q) - minimum;
}
#elif W == q3_k
// Groups of 16: d · (scale - 32) · (q - 4), the third bits apart.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let block = row * params.stride * 4u + (k >> 8u) * 110u;
    let group = (k >> 4u) & 15u;
    let low = (byte(block + 96u + (group & 7u)) >> ((group >> 3u) << 2u)) & 15u;
    let upper = (byte(block + 104u + (group & 3u)) >> ((group >> 2u) << 1u)) & 3u;
    let high = (each_byte(bytes4(block + (k & 31u))) >> vec4<u32>(group >> 1u)) & vec4<u32>(1u);
    let q = (each_byte(bytes4(block + 32u + two_bit_byte(k))) >> vec4<u32>(two_bit_shift(k))) & vec4<u32>(3u);
    let d = half_at(block + 108u) * (f32(low | (upper << 4u)) - 32.0);
    return d * (vec4<f32>(q | (high << vec4<u32>(2u))) - 4.0);
}
#elif W == q4_k, q5_k
// Groups of 32: d · scale · q - dmin · minimum, with scales and minimums of six bits.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let group = (k >> 5u) & 7u;
    let nibble = ((group >> 1u) << 5u) + (k & 31u);
    #if W == q4_k
    let block = row * params.stride * 4u + (k >> 8u) * 144u;
    let q = each_byte(bytes4(block + 16u + nibble) >> ((group & 1u) << 2u)) & vec4<u32>(15u);
    #else
    let block = row * params.stride * 4u + (k >> 8u) * 176u;
    let high = (each_byte(bytes4(block + 16u + (k & 31u))) >> vec4<u32>(group)) & vec4<u32>(1u);
    let low = each_byte(bytes4(block + 48u + nibble) >> ((group & 1u) << 2u)) & vec4<u32>(15u);
    let q = low | (high << vec4<u32>(4u));
    #end
    let scales = block + 4u;
    let later = byte(scales + group + 4u);
    var scale = byte(scales + group) & 63u;
    var minimum = later & 63u;
    if (group >= 4u) {
        scale = (later & 15u) | ((byte(scales + group - 4u) >> 6u) << 4u);
        minimum = (later >> 4u) | ((byte(scales + group) >> 6u) << 4u);
    }
    return half_at(block) * f32(scale) * vec4<f32>(q) - half_at(block + 2u) * f32(minimum);
}
#elif W == q6_k
// Groups of 16: d · scale · (q - 32), the upper two bits apart.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let block = row * params.stride * 4u + (k >> 8u) * 210u;
    let group = (k >> 4u) & 15u;
    let half_block = group >> 3u;
    let quarter = (group & 7u) >> 1u;
    let low_byte = half_block * 64u + ((quarter & 1u) << 5u) + (k & 31u);
    let low = each_byte(bytes4(block + low_byte) >> ((quarter >> 1u) << 2u)) & vec4<u32>(15u);
    let high_bytes = each_byte(bytes4(block + 128u + half_block * 32u + (k & 31u)));
    let high = (high_bytes >> vec4<u32>(quarter << 1u)) & vec4<u32>(3u);
    let scale = f32(i32(byte(block + 192u + group) << 24u) >> 24u);
    return half_at(block + 208u) * scale * (vec4<f32>(low | (high << vec4<u32>(4u))) - 32.0);
}
#elif W == iq4_xs
// Groups of 32: d · (scale - 32) · value of a table.
fn weight4(row: u32, k: u32) -> vec4<f32> {
    let block = row * params.stride * 4u + (k >> 8u) * 136u;
    let group = (k >> 5u) & 7u;
    let i = k & 31u;
    let low = (byte(block + 4u + (group >> 1u)) >> ((group & 1u) << 2u)) & 15u;
    let high = ((bytes4(block + 2u) & 0xffffu) >> (group << 1u)) & 3u;
    let q = each_byte(bytes4(block + 8u + group * 16u + (i & 15u)) >> ((i >> 4u) << 2u)) & vec4<u32>(15u);
    return half_at(block) * (f32(low | (high << 4u)) - 32.0) * iq4(q);
}
#end

#if W == f32, bf16, f16, int8, f8_e4m3, f8_e5m2, f8_e4m3_tiles, f8_e5m2_tiles
fn within_row(k: u32, values: vec4<f32>) -> vec4<f32> {
    let left = vec4<u32>(params.inner - k);
    return select(vec4<f32>(), values, vec4<u32>(0u, 1u, 2u, 3u) < left);
}
#end
#if W == f8_e4m3, f8_e5m2
fn tile_scale(row: u32, k: u32) -> f32 {
    return 1.0;
}
#elif W == f8_e4m3_tiles, f8_e5m2_tiles
// A row: its values, then an f32 scale for each `params.tile` columns.
fn tile_scale(row: u32, k: u32) -> f32 {
    return bitcast<f32>(word_w(row * params.stride + ((params.inner + 3u) >> 2u) + k / params.tile));
}
#elif W == q2_k, q3_k
// 128 values share 32 bytes.
fn two_bit_byte(k: u32) -> u32 {
    return ((k >> 7u) & 1u) * 32u + (k & 31u);
}

fn two_bit_shift(k: u32) -> u32 {
    return ((k >> 5u) & 3u) << 1u;
}
#elif W == iq4_nl, iq4_xs
// The table's values plus 128, four to a word.
fn iq4(q: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(iq4_value(q.x), iq4_value(q.y), iq4_value(q.z), iq4_value(q.w));
}

fn iq4_value(q: u32) -> f32 {
    let word = vec4<u32>(0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u)[q >> 2u];
    return f32((word >> ((q & 3u) << 3u)) & 0xffu) - 128.0;
}
#end

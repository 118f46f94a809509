// Sums over all elements, for relative_l1: first for each workgroup's share, then of those sums.
//
// A share has three numbers: Σ|x - y|, Σ|y|, and 1 if the quotient is NaN, which a compiler may take for impossible.
#if STEP == share
#params count, share
#read x: T
#read other: T
#write y: f32
#else
#params shares, nan
#read x: f32
#write y: f32
#end
#include math

var<workgroup> sums: array<vec3<f32>, 256>;

fn reduce(lane: u32, mine: vec3<f32>) -> vec3<f32> {
    sums[lane] = mine;
    for (var step = 128u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (lane < step) {
            sums[lane] += sums[lane + step];
        }
    }
    workgroupBarrier();
    return sums[0];
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var mine = vec3<f32>();
    #if STEP == share
    let number = group.x + group.y * 32768u;
    let first = number * params.share;
    let end = min(first + params.share, params.count);
    for (var i = first + lane; i < end; i += 256u) {
        let a = read_x(i);
        let b = read_other(i);
        let same_infinity = !is_finite(a) && bitcast<u32>(a) == bitcast<u32>(b);
        if (is_nan(a) || is_nan(b) || same_infinity) {
            mine.z = 1.0;
        } else {
            mine += vec3<f32>(abs(a - b), abs(b), 0.0);
        }
    }
    let total = reduce(lane, mine);
    if (lane == 0u) {
        write_y(3u * number, total.x);
        write_y(3u * number + 1u, total.y);
        write_y(3u * number + 2u, total.z);
    }
    #else
    for (var i = lane; i < params.shares; i += 256u) {
        mine += vec3<f32>(read_x(3u * i), read_x(3u * i + 1u), read_x(3u * i + 2u));
    }
    let total = reduce(lane, mine);
    if (lane == 0u) {
        if (total.z > 0.0) {
            write_bits_y(0u, params.nan);
        } else if (total.x == 0.0) {
            write_y(0u, 0.0);
        } else {
            write_y(0u, total.x / total.y);
        }
    }
    #end
}

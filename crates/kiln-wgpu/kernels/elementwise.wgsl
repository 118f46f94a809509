// One element of the result from one of each input; an invocation computes two neighbours.
#params count, columns, s: f32, f
#read x: T
#if OP == add_scaled, lerp, guide
#read other: T
#elif OP == blend_rows
#read other: T
#read mask: f32
#elif OP == affine
#read scale: f32
#read shift: f32
#end
#write y: T
#include activation

fn element(i: u32, x: f32) -> f32 {
    #if OP == activation
    return activate(x, params.f);
    #elif OP == add_scaled
    return x + params.s * read_other(i);
    #elif OP == lerp
    return params.s * read_other(i) + (1.0 - params.s) * x;
    #elif OP == guide
    // Exact where s is 1, however large the other is.
    return params.s * x + (1.0 - params.s) * read_other(i);
    #elif OP == blend_rows
    let m = read_mask(i / params.columns);
    return (1.0 - m) * x + m * read_other(i);
    #else
    let column = i % params.columns;
    return x * read_scale(column) + read_shift(column);
    #end
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = 2u * ((group.x + group.y * 32768u) * 256u + lane);
    if (i >= params.count) {
        return;
    }
    let pair = read2_x(i);
    let count = min(2u, params.count - i);
    var second = 0.0;
    if (count > 1u) {
        second = element(i + 1u, pair.y);
    }
    write2_y(i, vec2<f32>(element(i, pair.x), second), count);
}

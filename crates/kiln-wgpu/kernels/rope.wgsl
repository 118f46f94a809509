// RMS norm of every head and the rotary embedding. 32 invocations take one head, a workgroup eight.
#params count, heads, head_dim, eps: f32
#read x: T
#if NORMED == yes
#read weight: f32
#end
#read cos: f32
#read sin: f32
#write y: T

var<workgroup> squares: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let head = (group.x + group.y * 32768u) * 8u + lane / 32u;
    let exists = head < params.count;
    let first = head * params.head_dim;
    let half = params.head_dim / 2u;
    let part = lane % 32u;
    var factor = 1.0;
    #if NORMED == yes
    var sum = 0.0;
    if (exists) {
        for (var i = part; i < params.head_dim; i += 32u) {
            let value = read_x(first + i);
            sum += value * value;
        }
    }
    squares[lane] = sum;
    for (var step = 16u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (part < step) {
            squares[lane] += squares[lane + step];
        }
    }
    workgroupBarrier();
    factor = 1.0 / sqrt(squares[lane - part] / f32(params.head_dim) + params.eps);
    #end
    if (!exists) {
        return;
    }
    let angles = head / params.heads * half;
    #if PAIRS == interleaved
    for (var i = part; i < half; i += 32u) {
        let pair = scaled(first, 2u * i, 2u * i + 1u, factor);
        write2_y(first + 2u * i, rotated(pair, angles + i), 2u);
    }
    #else
    // Two neighbouring pairs at a time, so that whole words are written.
    for (var i = 2u * part; i < half; i += 64u) {
        let count = min(2u, half - i);
        let next = min(i + 1u, half - 1u);
        let a = rotated(scaled(first, i, i + half, factor), angles + i);
        let b = rotated(scaled(first, next, next + half, factor), angles + next);
        write2_y(first + i, vec2<f32>(a.x, b.x), count);
        write2_y(first + half + i, vec2<f32>(a.y, b.y), count);
    }
    #end
}

fn scaled(first: u32, i: u32, j: u32, factor: f32) -> vec2<f32> {
    let pair = vec2<f32>(read_x(first + i), read_x(first + j)) * factor;
    #if NORMED == yes
    return pair * vec2<f32>(read_weight(i), read_weight(j));
    #else
    return pair;
    #end
}

fn rotated(pair: vec2<f32>, angle: u32) -> vec2<f32> {
    let c = read_cos(angle);
    let s = read_sin(angle);
    return vec2<f32>(pair.x * c - pair.y * s, pair.x * s + pair.y * c);
}

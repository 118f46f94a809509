// round(clamp(scale · x + shift, 0, 1) · 255), four bytes to a word; NaN becomes 0.
#params count, scale: f32, shift: f32
#read x: T
#write y: words
#include math

fn byte(i: u32) -> u32 {
    if (i >= params.count) {
        return 0u;
    }
    let value = read_x(i) * params.scale + params.shift;
    if (is_nan(value)) {
        return 0u;
    }
    return u32(round(clamp(value, 0.0, 1.0) * 255.0));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let word = (group.x + group.y * 32768u) * 256u + lane;
    if (4u * word >= params.count) {
        return;
    }
    let i = 4u * word;
    write_word_y(word, byte(i) | (byte(i + 1u) << 8u) | (byte(i + 2u) << 16u) | (byte(i + 3u) << 24u));
}

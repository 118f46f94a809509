// silu(first half of a row) · second half; an invocation computes two neighbours.
#params count, columns
#read x: T
#write y: T
#include activation

fn element(i: u32) -> f32 {
    let row = i / params.columns;
    let at = i + row * params.columns;
    return silu(read_x(at)) * read_x(at + params.columns);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = 2u * ((group.x + group.y * 32768u) * 256u + lane);
    if (i >= params.count) {
        return;
    }
    let count = min(2u, params.count - i);
    var second = 0.0;
    if (count > 1u) {
        second = element(i + 1u);
    }
    write2_y(i, vec2<f32>(element(i), second), count);
}

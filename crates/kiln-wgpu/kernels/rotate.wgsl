// Rotates groups of 16, 64 or 256 values by a regular Hadamard matrix: for each base-4 digit of the position, a product with the
// matrix of four. The order of additions is part of the definition.
#params count, strides, factor: f32
#read x: T
#write y: f32

var<workgroup> values: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = (group.x + group.y * 32768u) * 256u + lane;
    var value = 0.0;
    if (i < params.count) {
        value = read_x(i);
    }
    for (var stride = 1u; stride < params.strides; stride <<= 2u) {
        workgroupBarrier();
        values[lane] = value;
        workgroupBarrier();
        let digit = (lane / stride) & 3u;
        let first = lane - digit * stride;
        let a = values[first];
        let b = values[first + stride];
        let c = values[first + 2u * stride];
        let d = values[first + 3u * stride];
        switch digit {
            case 0u: { value = (a + b) + (c - d); }
            case 1u: { value = (a + b) - (c - d); }
            case 2u: { value = (c + d) + (a - b); }
            default: { value = (c + d) - (a - b); }
        }
    }
    if (i < params.count) {
        write_y(i, value * params.factor);
    }
}

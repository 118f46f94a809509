// Norms of rows, a workgroup for each. Moments take two passes: one would cancel where the mean is large.
#params rows, columns, eps: f32
#read x: T
#read scale: f32
#if OP == ada_layer_norm
#read shift: f32
#end
#write y: T
#include row_sums

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x + group.y * 32768u;
    if (row >= params.rows) {
        return;
    }
    let first = row * params.columns;
    let size = f32(params.columns);
    var sum = 0.0;
    #if OP == ada_layer_norm
    for (var i = lane; i < params.columns; i += 256u) {
        sum += read_x(first + i);
    }
    let mean = sum_of_all(lane, sum) / size;
    sum = 0.0;
    #elif OP == rms_norm
    let mean = 0.0;
    #end
    for (var i = lane; i < params.columns; i += 256u) {
        let deviation = read_x(first + i) - mean;
        sum += deviation * deviation;
    }
    let factor = 1.0 / sqrt(sum_of_all(lane, sum) / size + params.eps);
    for (var i = 2u * lane; i < params.columns; i += 512u) {
        let count = min(2u, params.columns - i);
        var pair = (read2_x(first + i) - mean) * factor;
        // Past the last column, any value will do.
        let j = min(i + 1u, params.columns - 1u);
        let weight = vec2<f32>(read_scale(i), read_scale(j));
        #if OP == ada_layer_norm
        pair = pair * (1.0 + weight) + vec2<f32>(read_shift(i), read_shift(j));
        #else
        pair = pair * weight;
        #end
        write2_y(first + i, pair, count);
    }
}

// Values in another place, or of another type; an invocation writes two neighbours of the result.
//
// copy_columns: rows of `columns` values, `from_stride` and `to_stride` apart. space_to_depth, depth_to_space: the result's
// `height`, `width` and `channels`; the input's rows are those from `first` on. cast: to another type, rounded to nearest even.
#if OP == copy_columns
#params count, columns, from_stride, to_stride
#elif OP == cast
#params count
#else
#params count, width, channels
#end
#read x: X
#write y: Y

fn source(i: u32) -> u32 {
    #if OP == copy_columns
    return i / params.columns * params.from_stride + i % params.columns;
    #elif OP == cast
    return i;
    #elif OP == space_to_depth
    let pixel = i / params.channels;
    let channel = i % params.channels;
    let row = 2u * (pixel / params.width) + (channel >> 1u & 1u);
    let column = 2u * (pixel % params.width) + (channel & 1u);
    return (row * 2u * params.width + column) * (params.channels >> 2u) + (channel >> 2u);
    #else
    let pixel = i / params.channels;
    let row = pixel / params.width;
    let column = pixel % params.width;
    let deep = row / 2u * (params.width / 2u) + column / 2u;
    return deep * 4u * params.channels + 4u * (i % params.channels) + 2u * (row & 1u) + (column & 1u);
    #end
}

fn target_of(i: u32) -> u32 {
    #if OP == copy_columns
    return i / params.columns * params.to_stride + i % params.columns;
    #else
    return i;
    #end
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = 2u * ((group.x + group.y * 32768u) * 256u + lane);
    if (i >= params.count) {
        return;
    }
    let last = min(i + 1u, params.count - 1u);
    let first_to = target_of(i);
    #if OP == cast
    write2_y(i, vec2<f32>(read_x(i), read_x(last)), last - i + 1u);
    #else
    let pair = vec2<u32>(bits_x(source(i)), bits_x(source(last)));
    if (last == i || target_of(last) != first_to + 1u) {
        write_bits_y(first_to, pair.x);
        if (last > i) {
            write_bits_y(target_of(last), pair.y);
        }
    } else {
        write2_bits_y(first_to, pair);
    }
    #end
}

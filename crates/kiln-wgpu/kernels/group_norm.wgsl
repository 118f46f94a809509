// Group norm in three steps: moments of each group in shares of the pixels, of each group, and the result.
//
// Sums of a share are of differences from its first value, so that they don't cancel where the mean is large; shares are combined
// by their means. `moments`: mean and sum of squared deviations; `share_moments`: the same after a count, for each share and group.
#if STEP == share
#params pixels, share, channels, width, number
#read x: T
#write moments: f32
#elif STEP == combine
#params shares, groups, size: f32, eps: f32
#read share_moments: f32
#write moments: f32
#else
#params count, channels, width, f
#read x: T
#read moments: f32
#read weight: f32
#read bias: f32
#write y: T
#include activation
#end
#include row_sums

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = workgroup.x + workgroup.y * 32768u;
    #if STEP == share
    // Workgroups: the groups of one share after those of another.
    let groups = params.channels / params.width;
    let group = number % groups;
    let first_pixel = number / groups * params.share;
    let pixels = min(params.share, params.pixels - first_pixel);
    let first = first_pixel * params.channels + group * params.width;
    let size = pixels * params.width;
    let origin = read_x(first);
    var sum = 0.0;
    var squares = 0.0;
    for (var i = lane; i < size; i += 256u) {
        let value = read_x(first + i / params.width * params.channels + i % params.width) - origin;
        sum += value;
        squares += value * value;
    }
    sum = sum_of_all(lane, sum);
    squares = sum_of_all(lane, squares);
    if (lane == 0u) {
        let mean = sum / f32(size);
        let at = 3u * (params.number * groups + number);
        write_moments(at, f32(size));
        write_moments(at + 1u, origin + mean);
        write_moments(at + 2u, max(squares - sum * mean, 0.0));
    }
    #elif STEP == combine
    // A workgroup for each group.
    var sum = 0.0;
    let origin = read_share_moments(3u * number + 1u);
    for (var i = lane; i < params.shares; i += 256u) {
        let at = 3u * (i * params.groups + number);
        sum += read_share_moments(at) * (read_share_moments(at + 1u) - origin);
    }
    let offset = sum_of_all(lane, sum) / params.size;
    var squares = 0.0;
    for (var i = lane; i < params.shares; i += 256u) {
        let at = 3u * (i * params.groups + number);
        let distance = read_share_moments(at + 1u) - origin - offset;
        squares += read_share_moments(at + 2u) + read_share_moments(at) * distance * distance;
    }
    let variance = sum_of_all(lane, squares) / params.size;
    if (lane == 0u) {
        write_moments(2u * number, origin + offset);
        write_moments(2u * number + 1u, 1.0 / sqrt(variance + params.eps));
    }
    #else
    let i = 2u * (number * 256u + lane);
    if (i >= params.count) {
        return;
    }
    let pair = read2_x(i);
    let count = min(2u, params.count - i);
    write2_y(i, vec2<f32>(normed(i, pair.x), normed(i + 1u, pair.y)), count);
    #end
}
#if STEP == apply

fn normed(i: u32, x: f32) -> f32 {
    let channel = i % params.channels;
    let group = channel / params.width;
    let y = (x - read_moments(2u * group)) * read_moments(2u * group + 1u);
    return activate(y * read_weight(channel) + read_bias(channel), params.f);
}
#end

// A sum over the 256 invocations of a workgroup, known to all of them.
var<workgroup> partial_sums: array<f32, 256>;

fn sum_of_all(lane: u32, mine: f32) -> f32 {
    // The last sum may still be read.
    workgroupBarrier();
    partial_sums[lane] = mine;
    for (var step = 128u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if (lane < step) {
            partial_sums[lane] += partial_sums[lane + step];
        }
    }
    workgroupBarrier();
    return partial_sums[0];
}

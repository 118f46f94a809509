//! Which elements dropout keeps: a function of seed and index, so that a recomputed block drops the same ones.

/// Whether dropout of this rate keeps an element: the upper 24 bits of SplitMix64's output function of
/// `seed + (element + 1) · 0x9e3779b97f4a7c15`, over 2²⁴, are at least `rate`.
pub fn keeps(seed: u64, element: u64, rate: f32) -> bool {
    let z = seed.wrapping_add((element + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    let z = z ^ z >> 31;
    (z >> 40) as f32 / (1u64 << 24) as f32 >= rate
}

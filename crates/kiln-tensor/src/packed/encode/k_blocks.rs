//! Encodes GGUF's blocks of 256 values (the K formats): packs what [`k_search`](super::k_search) finds.
//!
//! Codes are packed 32 at a time, a run of the block that shares its bytes with others at other bits.

use super::k_search::{AsymmetricBlock, SymmetricBlock, VALUES};

const RUN: usize = 32;

/// Groups of 16: 2 bits per value, 4 per scale and per minimum.
pub(super) fn q2_k(x: &[f32; VALUES], out: &mut Vec<u8>) {
    let block = AsymmetricBlock::new::<16, 2>(x, 3, 15);
    out.extend((0..16).map(|g| block.scales[g] | block.minima[g] << 4));
    out.extend(pack_2_bits(&block.codes));
    out.extend(scale_bytes(&block));
}

/// Groups of 16: 3 bits per value, 6 per scale.
pub(super) fn q3_k(x: &[f32; VALUES], out: &mut Vec<u8>) {
    let block = SymmetricBlock::new(x, 4, 32);
    let mut scales = [0u8; 12];
    for (g, &scale) in block.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        scales[g % 8] |= (scale & 15) << (g / 8 * 4);
        scales[8 + g % 4] |= (scale >> 4) << (2 * (g / 4));
    }
    out.extend(high_bits(&block.codes, 2));
    out.extend(pack_2_bits(&block.codes));
    out.extend(scales);
    out.extend(block.d.to_le_bytes());
}

/// Groups of 32: 4 bits per value, 6 per scale and per minimum.
pub(super) fn q4_k(x: &[f32; VALUES], out: &mut Vec<u8>) {
    let block = AsymmetricBlock::new::<32, 1>(x, 15, 63);
    out.extend(scale_bytes(&block));
    out.extend(pack_6_bits(&block));
    out.extend(pack_nibbles(&block.codes));
}

/// Groups of 32: 5 bits per value, 6 per scale and per minimum.
pub(super) fn q5_k(x: &[f32; VALUES], out: &mut Vec<u8>) {
    let block = AsymmetricBlock::new::<32, 1>(x, 31, 63);
    out.extend(scale_bytes(&block));
    out.extend(pack_6_bits(&block));
    out.extend(high_bits(&block.codes, 4));
    out.extend(pack_nibbles(&block.codes));
}

/// Groups of 16: 6 bits per value, 8 per scale.
pub(super) fn q6_k(x: &[f32; VALUES], out: &mut Vec<u8>) {
    let block = SymmetricBlock::new(x, 32, 128);
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (run, codes) in runs(&block.codes) {
        let (half, quarter) = (run / 4, run % 4);
        let (low, high) = (&mut low[half * 64 + quarter % 2 * RUN..], &mut high[half * RUN..]);
        merge(low, codes, |q| (q & 15) << (quarter / 2 * 4));
        merge(high, codes, |q| (q >> 4) << (2 * quarter));
    }
    out.extend(low);
    out.extend(high);
    out.extend(block.scales.map(|s| s as u8));
    out.extend(block.d.to_le_bytes());
}

fn runs(codes: &[u8; VALUES]) -> impl Iterator<Item = (usize, &[u8; RUN])> {
    codes.as_chunks::<RUN>().0.iter().enumerate()
}

/// Adds bits of a run to bytes.
fn merge(bytes: &mut [u8], codes: &[u8; RUN], bits: impl Fn(u8) -> u8) {
    bytes.iter_mut().zip(codes).for_each(|(byte, &q)| *byte |= bits(q));
}

/// The lower two bits; four runs share 32 bytes.
fn pack_2_bits(codes: &[u8; VALUES]) -> [u8; 64] {
    let mut bytes = [0; 64];
    runs(codes)
        .for_each(|(run, codes)| merge(&mut bytes[run / 4 * RUN..], codes, |q| (q & 3) << (run % 4 * 2)));
    bytes
}

/// The lower four bits; two runs share 32 bytes.
fn pack_nibbles(codes: &[u8; VALUES]) -> [u8; 128] {
    let mut bytes = [0; 128];
    runs(codes)
        .for_each(|(run, codes)| merge(&mut bytes[run / 2 * RUN..], codes, |q| (q & 15) << (run % 2 * 4)));
    bytes
}

/// The highest bit, above `low` others; all runs share 32 bytes.
fn high_bits(codes: &[u8; VALUES], low: usize) -> [u8; RUN] {
    let mut bytes = [0; RUN];
    runs(codes).for_each(|(run, codes)| merge(&mut bytes, codes, |q| (q >> low) << run));
    bytes
}

fn scale_bytes(block: &AsymmetricBlock) -> impl Iterator<Item = u8> {
    block.d.to_le_bytes().into_iter().chain(block.dmin.to_le_bytes())
}

/// Packs eight scales and eight minima of 6 bits into 12 bytes.
fn pack_6_bits(block: &AsymmetricBlock) -> [u8; 12] {
    let (s, m) = (&block.scales, &block.minima);
    std::array::from_fn(|i| match i {
        0..4 => s[i] | s[i + 4] >> 4 << 6,
        4..8 => m[i - 4] | m[i] >> 4 << 6,
        _ => s[i - 4] & 15 | (m[i - 4] & 15) << 4,
    })
}

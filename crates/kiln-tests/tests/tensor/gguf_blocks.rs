//! GGUF blocks, bit for bit as the `gguf` Python package decodes them (hashes by `tools/formats/gguf_hashes.py`).

use kiln_tensor::packed::{Format, PackedTensor};

/// Format, offsets of a block's f16 scales, and the hash of the decoded values.
const EXPECTED: [(Format, &[usize], u64); 12] = [
    (Format::Q4_0, &[0], 0x26bc615a310131c7),
    (Format::Q4_1, &[0, 2], 0x1c09e486e4fbe46b),
    (Format::Q5_0, &[0], 0xad122a84af08487f),
    (Format::Q5_1, &[0, 2], 0x3aa7e364f97ac7df),
    (Format::Q8_0, &[0], 0xb2e1feb84c99d496),
    (Format::Q2K, &[80, 82], 0x03b64142b9361b79),
    (Format::Q3K, &[108], 0x41e555c14971fc26),
    (Format::Q4K, &[0, 2], 0x7bd3401fc414d6d0),
    (Format::Q5K, &[0, 2], 0x8f86ffebb7e6aff4),
    (Format::Q6K, &[208], 0xca7498de2521fbcf),
    (Format::Iq4Nl, &[0], 0x4095e45a6d602b70),
    (Format::Iq4Xs, &[0], 0x895fb2db4ada1829),
];

const BLOCKS: usize = 64;

fn noise(count: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..count).map(|_| next()).collect()
}

fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn random_blocks_decode_as_in_the_gguf_package() {
    for (format, f16_offsets, expected) in EXPECTED {
        let mut data = noise(BLOCKS * format.block_bytes());
        for block in data.chunks_exact_mut(format.block_bytes()) {
            // Keeps the scales finite.
            f16_offsets.iter().for_each(|offset| block[offset + 1] &= 0xbb);
        }
        let matrix = PackedTensor::new(format, [BLOCKS, format.block_values()], data.into()).unwrap();
        let values = matrix.to_f32().unwrap();
        // Adding 0.0 turns -0.0 into 0.0.
        let bytes = values.to_f32().unwrap().iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(fnv(bytes.into_iter()), expected, "{format}");
    }
}

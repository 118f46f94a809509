use kiln_base::hex;
use kiln_tensor::{DType, Shape};
use sha2::{Digest, Sha256};

const BLOCK: usize = 4096;
const BLOCKS: usize = 4;

/// Name, dtype, shape and bytes of a tensor.
pub(crate) type TensorContent<'s> = (&'s str, DType, &'s Shape, &'s [u8]);

/// The hash behind [`crate::WeightSource::fingerprint`]; tensors must come sorted by name.
pub(crate) fn fingerprint<'s>(tensors: impl Iterator<Item = TensorContent<'s>>) -> String {
    let mut hash = Sha256::new();
    // If the scheme ever changes, this line must, too, so that old fingerprints don't match new ones.
    hash.update(b"kiln weights 1\n");
    for (name, dtype, shape, data) in tensors {
        // Lengths before contents, so that different lists of tensors never give the same bytes.
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update(format!(" {dtype} {shape} "));
        hash.update((data.len() as u64).to_le_bytes());
        for block in blocks(data) {
            hash.update(block);
        }
    }
    hex(hash.finalize())
}

/// The fingerprint of a LoRA from that of its tensors.
pub(crate) fn with_scales(tensors: &str, scales: impl Iterator<Item = f64>) -> String {
    let mut hash = Sha256::new();
    hash.update(b"kiln lora 1\n");
    hash.update(tensors);
    scales.for_each(|scale| hash.update(scale.to_le_bytes()));
    hex(hash.finalize())
}

/// All of short data, else four blocks: the first, the last, and two evenly between.
fn blocks(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (count, size) = match data.len() {
        n if n <= BLOCKS * BLOCK => (1, n),
        _ => (BLOCKS, BLOCK),
    };
    let step = (data.len() - size) / (BLOCKS - 1);
    (0..count).map(move |i| {
        let start = if i + 1 == BLOCKS { data.len() - size } else { i * step };
        &data[start..start + size]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_short_data_and_the_ends_of_long_data() {
        let bytes: Vec<u8> = (0..100_001u32).map(|i| (i % 251) as u8).collect();
        let all = |n: usize| blocks(&bytes[..n]).map(<[u8]>::to_vec).collect::<Vec<_>>();
        for n in [0, 1, BLOCK, BLOCKS * BLOCK] {
            assert_eq!(all(n), [bytes[..n].to_vec()]);
        }
        for n in [BLOCKS * BLOCK + 1, 99_999, 100_001] {
            let blocks = all(n);
            assert_eq!(blocks.len(), BLOCKS);
            assert!(blocks.iter().all(|b| b.len() == BLOCK));
            assert_eq!(blocks[0], bytes[..BLOCK]);
            assert_eq!(blocks[BLOCKS - 1], bytes[n - BLOCK..n]);
        }
    }
}

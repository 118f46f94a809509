//! Synthetic weights, for measuring without a checkpoint.
//!
//! Tensors share memory where it is short, which changes times little while the distinct bytes exceed the caches by far.

use std::sync::Mutex;

use bytes::Bytes;
use kiln_base::lock;
use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostTensor, Result, Shape, bf16, f16};
use memmap2::MmapMut;
use rayon::prelude::*;

/// Values of the pattern that all matrices repeat: 1 MiB, more than the cache of a core, and quick to compute.
const PATTERN: usize = 1 << 19;
/// The standard deviation of the values, as in checkpoints: activations of layers with a few thousand inputs neither vanish
/// nor explode.
const DEVIATION: f32 = 0.02;
/// Blocks of the pattern of Q4_K matrices.
const PATTERN_BLOCKS: usize = 1 << 12;
/// Matrices of at least this size are filled by several threads.
const LARGE: usize = 4 << 20;

/// Tensors of any name and shape: random matrices, norm weights of 1, biases of 0; bf16, or linear layers in Q4_K.
#[derive(Debug)]
pub(crate) struct Synthetic {
    pattern: Vec<u8>,
    /// The pattern of Q4_K matrices, if linear layers are stored so.
    q4_k: Option<Vec<u8>>,
    /// Bytes that may be allocated; further tensors reuse earlier blocks.
    budget: u64,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    blocks: Vec<Bytes>,
    /// The block to reuse next.
    next: usize,
    requested: u64,
    allocated: u64,
}

impl Synthetic {
    pub fn new(budget: u64) -> Synthetic {
        let mut random = xorshift64();
        let mut uniform = || (random() >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
        // The sum of three uniform values, of variance 1/12 each, is close enough to normal.
        let mut normal = || (uniform() + uniform() + uniform()) * 2.0 * DEVIATION;
        let pattern = (0..PATTERN).flat_map(|_| bf16::from_f32(normal()).to_le_bytes()).collect();
        Synthetic { pattern, q4_k: None, budget, pool: Mutex::default() }
    }

    /// Stores linear layers whose rows are whole blocks in Q4_K.
    pub fn with_q4_k(self) -> Synthetic {
        let mut random = xorshift64();
        let mut pattern = Vec::with_capacity(144 * PATTERN_BLOCKS);
        // Scales and minimums of 1: a value is `d · q - dmin`, and q from 0 to 15 has a deviation of 4.61.
        let d = DEVIATION / 4.61;
        let header: Vec<u8> = [d, 7.5 * d].into_iter().flat_map(|v| f16::from_f32(v).to_le_bytes()).collect();
        for _ in 0..PATTERN_BLOCKS {
            pattern.extend_from_slice(&header);
            pattern.extend_from_slice(&[1, 1, 1, 1, 1, 1, 1, 1, 0x11, 0x11, 0x11, 0x11]);
            (0..16).for_each(|_| pattern.extend_from_slice(&random().to_le_bytes()));
        }
        Synthetic { q4_k: Some(pattern), ..self }
    }

    /// Average bytes per weight of linear layers.
    pub fn bytes_per_weight(&self) -> f64 {
        if self.q4_k.is_some() { 144.0 / 256.0 } else { 2.0 }
    }

    /// The linear layer of this shape in Q4_K; `None` if layers are bf16 or its rows are not whole blocks.
    pub fn packed(&self, shape: &Shape) -> Option<Result<PackedTensor>> {
        let pattern = self.q4_k.as_ref()?;
        let &[rows, cols] = shape.dims() else { return None };
        let bytes = Format::Q4K.row_bytes(cols)?.checked_mul(rows)?;
        Some(PackedTensor::new(Format::Q4K, shape, self.bytes(bytes, pattern)))
    }

    /// Bytes of all requested tensors, and of the memory behind them.
    pub fn sizes(&self) -> (u64, u64) {
        let pool = lock(&self.pool);
        (pool.requested, pool.allocated)
    }

    pub fn tensor(&self, name: &str, shape: &Shape) -> Result<HostTensor> {
        if shape.rank() < 2 {
            let one = name.ends_with("weight") || name.ends_with("running_var");
            let value = bf16::from_f32(if one { 1.0 } else { 0.0 });
            return HostTensor::from_bf16(shape, vec![value; shape.numel()]);
        }
        let bytes = shape.checked_numel().and_then(|n| n.checked_mul(2));
        let bytes = bytes.ok_or_else(|| kiln_tensor::Error::TooLarge(shape.clone()))?;
        HostTensor::new(DType::BF16, shape, self.bytes(bytes, &self.pattern))
    }

    fn bytes(&self, len: usize, pattern: &[u8]) -> Bytes {
        let mut pool = lock(&self.pool);
        pool.requested += len as u64;
        if pool.allocated + len as u64 > self.budget {
            let count = pool.blocks.len();
            let from = pool.next;
            if let Some(found) = (from..from + count).find(|i| pool.blocks[i % count].len() >= len) {
                pool.next = found + 1;
                return pool.blocks[found % count].slice(..len);
            }
        }
        let block = fill(len, pattern);
        pool.allocated += len as u64;
        pool.blocks.push(block.clone());
        block
    }
}

/// A generator of random bits.
fn xorshift64() -> impl FnMut() -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// A block filled with repetitions of a pattern.
fn fill(len: usize, pattern: &[u8]) -> Bytes {
    let copy = |chunk: &mut [u8]| chunk.copy_from_slice(&pattern[..chunk.len()]);
    if len >= LARGE
        && let Ok(mut map) = MmapMut::map_anon(len)
    {
        // Huge pages, if available: a page fault for every 4 KiB takes longer than the copy.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.par_chunks_mut(pattern.len()).for_each(copy);
        return Bytes::from_owner(map);
    }
    let mut block = vec![0; len];
    block.chunks_mut(pattern.len()).for_each(copy);
    block.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_random_and_norms_are_one() {
        let synthetic = Synthetic::new(u64::MAX);
        let matrix = synthetic.tensor("a.weight", &[1000, 700].into()).unwrap();
        let values = matrix.to_f32().unwrap();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3 && (deviation - DEVIATION).abs() < 1e-3, "{mean} ± {deviation}");
        assert_eq!(synthetic.tensor("norm.weight", &[3].into()).unwrap().to_f32().unwrap()[..], [1.0; 3]);
        assert_eq!(synthetic.tensor("conv.bias", &[3].into()).unwrap().to_f32().unwrap()[..], [0.0; 3]);
    }

    #[test]
    fn linear_layers_in_q4_k_have_the_same_spread() {
        let synthetic = Synthetic::new(u64::MAX).with_q4_k();
        assert!(synthetic.packed(&[3, 200].into()).is_none());
        let matrix = synthetic.packed(&[700, 512].into()).unwrap().unwrap();
        let values = matrix.to_f32().unwrap();
        let values = values.to_f32().unwrap();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3 && (deviation - DEVIATION).abs() < 1e-3, "{mean} ± {deviation}");
    }

    #[test]
    fn blocks_are_reused_beyond_the_budget() {
        let synthetic = Synthetic::new(5000);
        let at = |rows| synthetic.tensor("w", &[rows, 10].into()).unwrap().bytes().as_ptr();
        let (first, second) = (at(100), at(120));
        assert_eq!([at(90), at(110), at(90)], [first, second, first]);
        assert_eq!(synthetic.sizes(), (2 * 10 * (100 + 120 + 90 + 110 + 90), 4400));
        // No block is large enough to be reused.
        at(1000);
        assert_eq!(synthetic.sizes().1, 4400 + 20_000);
    }

    #[test]
    fn large_matrices_are_filled_to_the_end() {
        let synthetic = Synthetic::new(u64::MAX);
        let block = fill(2 * LARGE + 12_346, &synthetic.pattern);
        assert!(block.chunks(2 * PATTERN).all(|c| c == &synthetic.pattern[..c.len()]));
    }
}

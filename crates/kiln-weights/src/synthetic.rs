//! Synthetic weights, for measuring without a checkpoint.
//!
//! Tensors share memory where it is short, which changes times little while the distinct bytes exceed the caches by far.

use std::sync::Mutex;

use bytes::Bytes;
use kiln_base::lock;
use kiln_tensor::{DType, HostTensor, Result, Shape, bf16};
use memmap2::MmapMut;
use rayon::prelude::*;

/// Values of the pattern that all matrices repeat: 1 MiB, more than the cache of a core, and quick to compute.
const PATTERN: usize = 1 << 19;
/// The standard deviation of the values, as in checkpoints: activations of layers with a few thousand inputs neither vanish
/// nor explode.
const DEVIATION: f32 = 0.02;
/// Matrices of at least this size are filled by several threads.
const LARGE: usize = 4 << 20;

/// Tensors of any name and shape, bf16: random matrices, norm weights of 1, biases of 0.
#[derive(Debug)]
pub(crate) struct Synthetic {
    pattern: Vec<u8>,
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
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut uniform = || {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
        };
        // The sum of three uniform values, of variance 1/12 each, is close enough to normal.
        let mut normal = || (uniform() + uniform() + uniform()) * 2.0 * DEVIATION;
        let pattern = (0..PATTERN).flat_map(|_| bf16::from_f32(normal()).to_le_bytes()).collect();
        Synthetic { pattern, budget, pool: Mutex::default() }
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
        HostTensor::new(DType::BF16, shape, self.bytes(bytes))
    }

    fn bytes(&self, len: usize) -> Bytes {
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
        let block = self.fill(len);
        pool.allocated += len as u64;
        pool.blocks.push(block.clone());
        block
    }

    /// A block filled with repetitions of the pattern.
    fn fill(&self, len: usize) -> Bytes {
        let copy = |chunk: &mut [u8]| chunk.copy_from_slice(&self.pattern[..chunk.len()]);
        if len >= LARGE
            && let Ok(mut map) = MmapMut::map_anon(len)
        {
            // Huge pages, if available: a page fault for every 4 KiB takes longer than the copy.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            map.par_chunks_mut(self.pattern.len()).for_each(copy);
            return Bytes::from_owner(map);
        }
        let mut block = vec![0; len];
        block.chunks_mut(self.pattern.len()).for_each(copy);
        block.into()
    }
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
        let block = synthetic.fill(2 * LARGE + 12_346);
        assert!(block.chunks(2 * PATTERN).all(|c| c == &synthetic.pattern[..c.len()]));
    }
}

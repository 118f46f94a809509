//! Weights made up on the spot, for measuring without a checkpoint.

use std::sync::Mutex;

use bytes::Bytes;
use kiln_base::lock;
use kiln_tensor::{DType, HostTensor, Result, Shape, bf16};
use memmap2::MmapMut;

/// Values of the pattern that all matrices repeat: 1 MiB, more than a core keeps near, less than is felt when it is made.
const PATTERN: usize = 1 << 19;
/// How far the values spread, as in checkpoints: layers of a few thousand inputs neither fade nor explode.
const SPREAD: f32 = 0.02;
/// Matrices from this size on are filled by several threads.
const LARGE: usize = 4 << 20;

/// Tensors of any name and shape, bf16: random matrices, norm weights of 1, biases of 0.
#[derive(Debug)]
pub(crate) struct Synthetic {
    pattern: Vec<u8>,
    /// Bytes that may be made; what is asked for beyond repeats what was.
    budget: u64,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    blocks: Vec<Bytes>,
    /// The block to repeat next.
    next: usize,
    asked: u64,
    made: u64,
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
        // The sum of three is normal enough; the variance of each is 1/12.
        let mut normal = || (uniform() + uniform() + uniform()) * 2.0 * SPREAD;
        let pattern = (0..PATTERN).flat_map(|_| bf16::from_f32(normal()).to_le_bytes()).collect();
        Synthetic { pattern, budget, pool: Mutex::default() }
    }

    /// Bytes asked for, and bytes of memory behind them.
    pub fn sizes(&self) -> (u64, u64) {
        let pool = lock(&self.pool);
        (pool.asked, pool.made)
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
        pool.asked += len as u64;
        if pool.made + len as u64 > self.budget {
            let count = pool.blocks.len();
            let from = pool.next;
            if let Some(found) = (from..from + count).find(|i| pool.blocks[i % count].len() >= len) {
                pool.next = found + 1;
                return pool.blocks[found % count].slice(..len);
            }
        }
        let block = self.fill(len);
        pool.made += len as u64;
        pool.blocks.push(block.clone());
        block
    }

    fn fill(&self, len: usize) -> Bytes {
        if len >= LARGE
            && let Ok(mut map) = MmapMut::map_anon(len)
        {
            // In huge pages, where there are any: a fault for every 4 KiB takes longer than the copying.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            self.repeat(&mut map, std::thread::available_parallelism().map_or(1, usize::from));
            return Bytes::from_owner(map);
        }
        let mut block = vec![0; len];
        self.repeat(&mut block, 1);
        block.into()
    }

    /// Fills `block` with the pattern, over and over.
    fn repeat(&self, block: &mut [u8], threads: usize) {
        let share = block.len().div_ceil(threads).next_multiple_of(self.pattern.len()).max(1);
        std::thread::scope(|scope| {
            for part in block.chunks_mut(share) {
                scope.spawn(move || {
                    for chunk in part.chunks_mut(self.pattern.len()) {
                        chunk.copy_from_slice(&self.pattern[..chunk.len()]);
                    }
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_spread_as_in_checkpoints_and_norms_are_one() {
        let made = Synthetic::new(u64::MAX);
        let matrix = made.tensor("a.weight", &[1000, 700].into()).unwrap();
        let values = matrix.to_f32().unwrap();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3 && (deviation - SPREAD).abs() < 1e-3, "{mean} ± {deviation}");
        assert_eq!(made.tensor("norm.weight", &[3].into()).unwrap().to_f32().unwrap()[..], [1.0; 3]);
        assert_eq!(made.tensor("conv.bias", &[3].into()).unwrap().to_f32().unwrap()[..], [0.0; 3]);
    }

    #[test]
    fn memory_beyond_the_budget_repeats_what_was_made() {
        let made = Synthetic::new(5000);
        let at = |rows| made.tensor("w", &[rows, 10].into()).unwrap().bytes().as_ptr();
        let (first, second) = (at(100), at(120));
        assert_eq!([at(90), at(110), at(90)], [first, second, first]);
        assert_eq!(made.sizes(), (2 * 10 * (100 + 120 + 90 + 110 + 90), 4400));
        // Nothing is large enough to be repeated.
        at(1000);
        assert_eq!(made.sizes().1, 4400 + 20_000);
    }

    #[test]
    fn large_matrices_are_filled_to_the_end() {
        let made = Synthetic::new(u64::MAX);
        let block = made.fill(2 * LARGE + 12_346);
        assert!(block.chunks(2 * PATTERN).all(|c| c == &made.pattern[..c.len()]));
    }
}

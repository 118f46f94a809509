//! Which tiling of a kernel is fastest for a shape: measured once and cached on disk.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Mutex;

use kiln_base::lock;

use super::shape::{GemmShape, Operands};
use crate::cache::CacheKey;
use crate::error::Result;
use crate::queue::Queue;
use crate::sources::KernelSource;

/// The chosen tilings, by shape.
pub(super) struct Tilings<T> {
    /// A source of the kernels, whose change makes another tiling the fastest.
    source: KernelSource,
    chosen: Mutex<HashMap<GemmShape, T>>,
}

impl<T: Copy + Debug> Tilings<T> {
    pub fn new(source: KernelSource) -> Tilings<T> {
        Tilings { source, chosen: Mutex::default() }
    }

    /// The fastest of some tilings for a product that `launch` launches; the first one if it is not worth measuring.
    pub fn choose(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        operands: &Operands,
        candidates: impl FnOnce() -> Vec<T>,
        launch: impl Fn(&Operands, T) -> Result<()>,
    ) -> Result<T> {
        // Locked while tilings are measured: two at once would disturb each other.
        let mut chosen = lock(&self.chosen);
        if let Some(tiling) = chosen.get(shape) {
            return Ok(*tiling);
        }
        let candidates = candidates();
        let fastest = if shape.is_worth_timing() {
            self.measure(queue, shape, operands, &candidates, launch)?
        } else {
            0
        };
        chosen.insert(*shape, candidates[fastest]);
        Ok(candidates[fastest])
    }

    /// The index of the fastest tiling, from the disk cache if it is there.
    fn measure(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        operands: &Operands,
        candidates: &[T],
        launch: impl Fn(&Operands, T) -> Result<()>,
    ) -> Result<usize> {
        let device = queue.device("cuEventSynchronize")?;
        let (text, all) = (format!("{shape:?}"), format!("{candidates:?}"));
        let (kernels, gpu) = (self.source.full_text(), queue.gpu().name.as_bytes());
        let key = CacheKey::new("tiling", &[text.as_bytes(), all.as_bytes(), kernels.as_bytes(), gpu]);
        let cached = device.cache.get(&key).and_then(|bytes| bytes.first().map(|&i| usize::from(i)));
        if let Some(fastest) = cached.filter(|&i| i < candidates.len()) {
            return Ok(fastest);
        }
        // Use scratch memory: a product that accumulates into its result cannot be repeated in place.
        let Some(scratch) = queue.allocate(shape.out_bytes())? else { return Ok(0) };
        let trial = Operands { out: scratch.ptr(queue), ..*operands };
        let mut best = (f32::INFINITY, 0);
        for (i, &tiling) in candidates.iter().enumerate() {
            let milliseconds = queue.time_repeated(|| launch(&trial, tiling))?;
            if milliseconds < best.0 {
                best = (milliseconds, i);
            }
        }
        device.cache.put(&key, &[best.1 as u8]);
        Ok(best.1)
    }
}

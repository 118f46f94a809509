//! Which freed buffers are kept for which requests.
//!
//! All work runs in the order of its submission, so a freed buffer can be reused at once, even if the GPU has not reached its
//! last use.

use std::collections::BTreeMap;

/// Freed blocks by size, and the bytes that are held in total.
pub(crate) struct BlockCache<T> {
    cached: BTreeMap<usize, Vec<T>>,
    limit: Option<usize>,
    held: usize,
    peak: usize,
}

impl<T> BlockCache<T> {
    /// A cache for at most `limit` bytes in all blocks together.
    pub fn new(limit: Option<usize>) -> BlockCache<T> {
        BlockCache { cached: BTreeMap::new(), limit, held: 0, peak: 0 }
    }

    /// Rounds a size up, so that requests of similar size can share blocks.
    pub fn round(bytes: usize) -> usize {
        let step = match bytes {
            0..0x10_0000 => 512,
            0x10_0000..0x400_0000 => 0x1_0000,
            _ => 0x20_0000,
        };
        bytes.max(1).next_multiple_of(step)
    }

    /// Returns a freed block of `size` bytes or slightly more: a much larger one is better left for a larger request.
    pub fn take(&mut self, size: usize) -> Option<(T, usize)> {
        let size = self.cached.range(size..=size + size / 4).next().map(|(&size, _)| size)?;
        let blocks = self.cached.get_mut(&size)?;
        let block = blocks.pop()?;
        if blocks.is_empty() {
            self.cached.remove(&size);
        }
        Some((block, size))
    }

    /// Keeps a freed block.
    pub fn put(&mut self, block: T, size: usize) {
        self.cached.entry(size).or_default().push(block);
    }

    /// Whether the limit allows a new block.
    pub fn allows(&self, size: usize) -> bool {
        self.limit.is_none_or(|limit| self.held + size <= limit)
    }

    /// Counts a new block.
    pub fn add(&mut self, size: usize) {
        self.held += size;
        self.peak = self.peak.max(self.held);
    }

    /// Takes all freed blocks out, and restarts the peak.
    pub fn clear(&mut self) -> Vec<T> {
        let cached = std::mem::take(&mut self.cached);
        self.held -= cached.iter().map(|(size, blocks)| size * blocks.len()).sum::<usize>();
        self.peak = self.held;
        cached.into_values().flatten().collect()
    }

    /// Bytes of all blocks, freed ones included.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Maximum of [`BlockCache::held`] since the last [`BlockCache::clear`].
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Bytes that the limit still allows, if there is one; freed blocks count as free.
    pub fn available(&self) -> Option<usize> {
        let cached: usize = self.cached.iter().map(|(size, blocks)| size * blocks.len()).sum();
        self.limit.map(|limit| limit.saturating_sub(self.held - cached))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_blocks_are_reused_for_similar_sizes() {
        let mut cache = BlockCache::new(None);
        cache.add(1024);
        cache.put("a", 1024);
        assert_eq!(cache.take(512), None);
        assert_eq!(cache.take(1000), Some(("a", 1024)));
        assert_eq!(cache.take(1000), None);
    }

    #[test]
    fn a_limit_counts_all_blocks() {
        let mut cache = BlockCache::new(Some(4096));
        assert!(cache.allows(4096) && !cache.allows(4097));
        cache.add(3072);
        cache.put((), 3072);
        assert!(!cache.allows(2048));
        assert_eq!(cache.available(), Some(4096));
        assert_eq!(cache.clear().len(), 1);
        assert!(cache.allows(2048));
        assert_eq!((cache.held(), cache.peak()), (0, 0));
    }
}

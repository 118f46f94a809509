//! How much memory an image takes beside the weights.

use std::fmt;

use kiln_model::{LARGEST_PIXELS, transformer};
use kiln_tensor::DType;

/// Memory that serving a request takes beside the weights, in bytes: an upper estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Activations of one transformer step.
    pub transformer: u64,
    /// Activations of the autoencoder.
    pub autoencoder: u64,
}

impl MemoryNeed {
    /// What is needed at once: the phases come one after the other.
    pub fn peak(&self) -> u64 {
        self.transformer.max(self.autoencoder)
    }

    /// The need of an image of `width` × `height` with `others` text and reference tokens, of a transformer and of an
    /// autoencoder with these channels in its last level and the one before it.
    pub fn of(
        config: &transformer::Config,
        channels: Option<[usize; 2]>,
        [width, height]: [usize; 2],
        others: usize,
        dtype: DType,
    ) -> MemoryNeed {
        let element = dtype.size() as u64;
        let tokens = (width / 16).saturating_mul(height / 16);
        let transformer = MemoryNeed::steps(config, tokens.saturating_add(others), dtype);
        let channels = channels.unwrap_or([64; 2]);
        MemoryNeed { transformer, autoencoder: autoencoder([width, height], channels, element) }
    }

    /// Activations of one transformer step over so many rows.
    pub(crate) fn steps(config: &transformer::Config, rows: usize, dtype: DType) -> u64 {
        // A single block holds its input, its norm, q, k, v and twice the MLP, the attention, the MLP, the sum.
        let widths = config.dim() as f64 * (8.0 + 3.0 * config.mlp_ratio);
        (rows as f64 * widths * dtype.size() as f64) as u64
    }
}

/// What decoding takes. The level below the last has more channels and runs at full size before it loses them: its input,
/// the norm of that and the narrower output live together. Values are in `element` bytes, the picture's in f32.
fn autoencoder([width, height]: [usize; 2], [last, before]: [usize; 2], element: u64) -> u64 {
    let pixels = (width as u64).saturating_mul(height as u64);
    let at_once = pixels.min(LARGEST_PIXELS as u64);
    let channels = 2 * before as u64 + last.max(before / 2) as u64;
    let canvas = pixels.saturating_mul(4 * 4);
    at_once.saturating_mul(channels * element).saturating_add(canvas)
}

impl fmt::Display for MemoryNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Gib(self.peak()))
    }
}

/// Bytes as GiB with one decimal, as MiB where that says nothing.
pub(crate) struct Gib(pub(crate) u64);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 as f64 / f64::from(1 << 30) {
            gib if gib < 0.1 => write!(f, "{:.0} MiB", gib * 1024.0),
            gib => write!(f, "{gib:.1} GiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_sizes_are_told_apart() {
        assert_eq!(
            [4 << 20, 700 << 20, 3 << 30].map(|n| Gib(n).to_string()),
            ["4 MiB", "0.7 GiB", "3.0 GiB"]
        );
    }

    #[test]
    fn a_picture_of_1024_decodes_within_three_gib_even_in_f32() {
        let need = |size, element| autoencoder([size; 2], [128, 256], element);
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        // Two tensors of 1 GiB, one of half as much, and the picture.
        assert_eq!(need(1024, 4), (5 << 29) + (16 << 20));
        assert!(gib(need(1024, 4)) < 2.6 && gib(need(1024, 2)) < 1.3);
        // Larger ones come in tiles: only the picture itself grows.
        assert_eq!(need(4096, 4) - need(2048, 4), 16 * (4096 * 4096 - 2048 * 2048));
    }
}

use std::fmt;

use kiln_tensor::DType;

use crate::{ModelFolder, tiles};

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

    /// The need of a picture of `width` × `height` with `others` text and reference tokens.
    pub fn new(folder: &ModelFolder, [width, height]: [usize; 2], others: usize, dtype: DType) -> MemoryNeed {
        let config = &folder.transformer.config;
        let element = dtype.size() as u64;
        let tokens = (width as u64 / 16).saturating_mul(height as u64 / 16);
        let rows = tokens.saturating_add(others as u64);
        // A single block holds its input, its norm, q, k, v and twice the MLP, the attention, the MLP, the sum.
        let widths = config.dim() as f64 * (8.0 + 3.0 * config.mlp_ratio);
        let transformer = (rows as f64 * widths * element as f64) as u64;
        // The widest level runs at full size before its channels are halved: input, norm and output live together.
        let pixels = (width as u64).saturating_mul(height as u64);
        let channels = folder.vae.as_ref().map_or(64, |v| v.config.decoder_channels()[1]) as u64;
        let at_once = pixels.min(tiles::LARGEST_PIXELS as u64);
        let canvas = pixels.saturating_mul(4 * 4);
        let autoencoder = at_once.saturating_mul(3 * channels * element).saturating_add(canvas);
        MemoryNeed { transformer, autoencoder }
    }
}

impl fmt::Display for MemoryNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Gib(self.peak()))
    }
}

/// Bytes as GiB with one decimal.
pub(crate) struct Gib(pub(crate) u64);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GiB", self.0 as f64 / f64::from(1 << 30))
    }
}

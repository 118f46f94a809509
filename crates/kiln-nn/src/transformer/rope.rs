//! Rotary position embedding over four axes: image index t, row h, column w and text index l.
//!
//! Each axis rotates its own `axes_dims_rope` elements of a head, in interleaved pairs. A table has the shape
//! `[tokens, head_dim / 2]`.

use kiln_ops::{Backend, RopeLayout, RopeTable};
use kiln_tensor::{DType, HostTensor};

use super::config::Config;
use crate::Result;

/// The position of a token on the four axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Image index: 0 for the generated image, 10, 20, … for references.
    pub t: u32,
    /// Row on the token grid.
    pub h: u32,
    /// Column on the token grid.
    pub w: u32,
    /// Index in the text.
    pub l: u32,
}

impl Position {
    /// Positions of `count` text tokens.
    pub fn text(count: usize) -> Vec<Position> {
        (0..count as u32).map(|l| Position { t: 0, h: 0, w: 0, l }).collect()
    }

    /// Positions of a token grid, row by row.
    pub fn grid(t: u32, height: usize, width: usize) -> Vec<Position> {
        let row = |h| (0..width as u32).map(move |w| Position { t, h, w, l: 0 });
        (0..height as u32).flat_map(row).collect()
    }

    fn axes(self) -> [u32; 4] {
        [self.t, self.h, self.w, self.l]
    }
}

/// The rotary tables of one list of tokens, computed once and used in every step.
pub struct RopeTables<B: Backend> {
    pub(super) text: RopeTable<B::Tensor>,
    /// Of the image stream.
    pub(super) image: RopeTable<B::Tensor>,
    /// Of the text, then the image stream.
    pub(super) joined: RopeTable<B::Tensor>,
}

/// Computes the rotary table of these tokens. The angles are f64: at position 511, f32 would lose half its digits.
pub(super) fn table<B: Backend>(
    b: &B,
    config: &Config,
    positions: &[Position],
) -> Result<RopeTable<B::Tensor>> {
    let axes: Vec<Axis> = (0..4).map(|axis| Axis::new(config, axis, positions)).collect();
    let width = axes.iter().map(|axis| axis.width).sum();
    let upload = |which: fn(&Axis) -> &[f32]| {
        let mut values = Vec::with_capacity(positions.len() * width);
        for p in positions {
            for (axis, index) in axes.iter().zip(p.axes()) {
                values.extend_from_slice(&which(axis)[index as usize * axis.width..][..axis.width]);
            }
        }
        Ok::<_, crate::Error>(b.upload(&HostTensor::from_f32([positions.len(), width], values)?, DType::F32)?)
    };
    let (cos, sin) = (upload(|axis| &axis.cos)?, upload(|axis| &axis.sin)?);
    Ok(RopeTable { cos, sin, pairs: RopeLayout::Interleaved })
}

/// The columns of one axis, for every index up to the largest: thousands of tokens share a few dozen indices.
struct Axis {
    width: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Axis {
    fn new(config: &Config, axis: usize, positions: &[Position]) -> Axis {
        let dim = config.axes_dims_rope.get(axis).copied().unwrap_or(0);
        let count = positions.iter().map(|p| p.axes()[axis] + 1).max().unwrap_or(0);
        let frequency = |i: usize| config.rope_theta.powf(-((2 * i) as f64) / dim as f64);
        let frequencies: Vec<f64> = (0..dim / 2).map(frequency).collect();
        let angles = (0..count).flat_map(|p| frequencies.iter().map(move |f| f64::from(p) * f));
        let (cos, sin) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        Axis { width: dim / 2, cos, sin }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_ops::Reference;

    /// `reference/oracles.safetensors` of the golden set has each angle twice, once per element of its pair.
    #[test]
    fn tables_equal_those_of_diffusers() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/reference/oracles.safetensors");
        let oracles = kiln_weights::WeightSource::open(file).unwrap();
        let ids = oracles.tensor("rope_ids").unwrap().to_i64().unwrap();
        let positions: Vec<Position> = ids
            .chunks_exact(4)
            .map(|p| Position { t: p[0] as u32, h: p[1] as u32, w: p[2] as u32, l: p[3] as u32 })
            .collect();
        let config: Config = serde_json::from_str(
            r#"{"in_channels":128,"num_layers":0,"num_single_layers":0,"attention_head_dim":128,
                "num_attention_heads":1,"joint_attention_dim":1}"#,
        )
        .unwrap();
        let b = Reference::new();
        let table = table(&b, &config, &positions).unwrap();
        for (name, ours) in [("rope_cos", &table.cos), ("rope_sin", &table.sin)] {
            let expected = oracles.tensor(name).unwrap();
            let ours = b.download(ours).unwrap();
            let pairs = expected.to_f32().unwrap().into_owned();
            for (a, pair) in ours.to_f32().unwrap().iter().zip(pairs.chunks_exact(2)) {
                assert!((a - pair[0]).abs() < 1e-7 && pair[0] == pair[1], "{name}: {a}, expected {pair:?}");
            }
        }
    }
}

//! What was written, and the error of what was quantized.

use std::collections::BTreeMap;
use std::fmt;

/// The quantization error of the layers of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerGroup {
    /// The layers' name, without the number of the block.
    pub name: String,
    /// The name of the type they were written in.
    pub storage: &'static str,
    /// How many there are.
    pub layers: usize,
    /// Their weights.
    pub weights: u64,
    /// `‖quantized - weight‖ / ‖weight‖` over all of them.
    pub error: f64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The quantized layers, by kind.
    pub groups: Vec<LayerGroup>,
    /// The layers that were to be quantized, by the type they were written in: another one than was asked for if their
    /// rows are no whole blocks of it.
    pub layers: BTreeMap<&'static str, usize>,
    /// Other tensors that were written in another type than the source's: how many, by both types.
    pub changed: BTreeMap<(&'static str, &'static str), usize>,
    /// Tensors that were not quantized.
    pub copied: usize,
    /// Bytes of all tensors before and after.
    pub bytes: [u64; 2],
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.groups.iter().map(|g| g.name.len()).max().unwrap_or(0);
        for LayerGroup { name, layers, weights, error, .. } in &self.groups {
            let millions = *weights as f64 / 1e6;
            writeln!(
                f,
                "{name:width$}  {layers:3} layers  {millions:8.1} M weights  {:.2} % off",
                100.0 * error
            )?;
        }
        for ((before, after), count) in &self.changed {
            writeln!(f, "{count} tensors written as {after}, were {before}")?;
        }
        write!(f, "{} tensors kept as they are", self.copied - self.changed.values().sum::<usize>())
    }
}

/// The quantization error of the layers of one kind, so far.
#[derive(Default)]
pub(crate) struct ErrorSums {
    pub layers: usize,
    weights: u64,
    squares: [f64; 2],
}

impl ErrorSums {
    /// Adds a layer.
    pub fn add(&mut self, weights: u64, squares: [f64; 2]) {
        self.layers += 1;
        self.weights += weights;
        self.squares = [self.squares[0] + squares[0], self.squares[1] + squares[1]];
    }

    pub fn group(self, name: String, storage: &'static str) -> LayerGroup {
        let [error, value] = self.squares;
        let error = (error / value.max(f64::MIN_POSITIVE)).sqrt();
        LayerGroup { name, storage, layers: self.layers, weights: self.weights, error }
    }
}

/// `transformer_blocks.attn.to_q` for `transformer_blocks.3.attn.to_q.weight`.
pub(crate) fn layer_kind(name: &str) -> String {
    let segments: Vec<&str> = name.split('.').collect();
    let number = segments.iter().position(|segment| segment.parse::<usize>().is_ok());
    let kept = segments.iter().enumerate();
    let kept = kept.filter(|(i, segment)| Some(*i) != number && **segment != "weight");
    kept.map(|(_, segment)| *segment).collect::<Vec<_>>().join(".")
}

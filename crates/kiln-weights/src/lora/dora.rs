//! DoRA: rows (or columns) of the sum of weight and update get learned magnitudes.
//!
//! Their norms are computed once, when a LoRA is applied to a layer. Then the magnitudes become factors of the weight and of
//! the update, and neither is copied.

use kiln_tensor::packed::PackedTensor;
use rayon::prelude::*;

use super::patch::{NormScale, UpdateValues, module_row};
use super::targets::RowRuns;

/// The magnitudes in a file.
pub(super) enum Magnitude {
    /// One per row of the module.
    Rows(Vec<f32>),
    /// One per column of the layer.
    Columns(Vec<f32>),
}

/// The weight of a layer without LoRAs, as matrices whose rows are stacked.
pub(super) struct BaseWeight(pub Vec<PackedTensor>);

impl BaseWeight {
    fn rows(&self) -> usize {
        self.0.iter().map(PackedTensor::row_count).sum()
    }

    fn read(&self, mut row: usize, out: &mut [f32]) {
        for matrix in &self.0 {
            if row < matrix.row_count() {
                return matrix.read(row, 0, out);
            }
            row -= matrix.row_count();
        }
    }
}

/// Computes the factors that give a layer of `cols` columns, updated by `scale` times `values`, these magnitudes.
pub(super) fn norm_scale(
    base: &BaseWeight,
    cols: usize,
    (values, scale): (&UpdateValues, f32),
    runs: &RowRuns,
    magnitude: &Magnitude,
) -> NormScale {
    let read_updated = |row: usize, out: &mut [f32]| {
        let module_row = module_row(runs, row)?;
        base.read(row, out);
        values.add(module_row, 0, scale, out);
        Some(module_row)
    };
    match magnitude {
        Magnitude::Rows(magnitudes) => {
            let row_scale = |out: &mut Vec<f32>, row| {
                read_updated(row, out)
                    .map_or(1.0, |module_row| ratio(magnitudes[module_row], squared_norm(out)))
            };
            NormScale::Rows(
                (0..base.rows()).into_par_iter().map_init(|| vec![0f32; cols], row_scale).collect(),
            )
        }
        Magnitude::Columns(magnitudes) => {
            let (mut squares, mut out) = (vec![0f64; cols], vec![0f32; cols]);
            for row in 0..base.rows() {
                if read_updated(row, &mut out).is_some() {
                    squares.iter_mut().zip(&out).for_each(|(sum, v)| *sum += f64::from(*v).powi(2));
                }
            }
            let scales = magnitudes.iter().zip(&squares).map(|(magnitude, sum)| ratio(*magnitude, *sum));
            NormScale::Columns(scales.collect())
        }
    }
}

/// The sum of squares, in f64 except within groups of 64, so that long rows lose no precision.
fn squared_norm(values: &[f32]) -> f64 {
    values.chunks(64).map(|v| f64::from(v.iter().map(|v| v * v).sum::<f32>())).sum()
}

/// The factor that gives a vector this magnitude; 0 for a vector of zeros.
fn ratio(magnitude: f32, squared_norm: f64) -> f32 {
    if squared_norm == 0.0 { 0.0 } else { (f64::from(magnitude) / squared_norm.sqrt()) as f32 }
}

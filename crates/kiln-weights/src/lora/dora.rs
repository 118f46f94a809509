//! DoRA: rows (or columns) of the sum of weight and update get learned magnitudes.
//!
//! Their norms are computed once, when a LoRA is applied to a layer. Then the magnitudes become factors of the weight and of
//! the update, and neither is copied.

use kiln_tensor::packed::StackedRows;
use kiln_tensor::vector;
use rayon::prelude::*;

use super::patch::{NormScale, UpdateValues, module_row};
use super::targets::RowRuns;

/// A layer of `cols` columns, and an update of some of its rows.
pub(super) struct UpdatedWeight<'a> {
    /// The weight without LoRAs.
    pub base: StackedRows,
    pub cols: usize,
    pub values: &'a UpdateValues,
    pub scale: f32,
    pub runs: &'a RowRuns,
}

impl UpdatedWeight<'_> {
    /// Reads the sum of a row and its update, and returns the row of the module; `None` for a row without update.
    fn read(&self, row: usize, out: &mut [f32]) -> Option<usize> {
        let module_row = module_row(self.runs, row)?;
        self.base.decode(row, out);
        self.values.add(module_row, 0, self.scale, out);
        Some(module_row)
    }

    /// The factors that give the layer's rows these magnitudes, one per row of the module.
    pub fn row_scale(&self, magnitudes: &[f32]) -> NormScale {
        let row_scale = |out: &mut Vec<f32>, row| {
            let module_row = self.read(row, out);
            module_row.map_or(1.0, |module_row| ratio(magnitudes[module_row], vector::squared_norm(out)))
        };
        let rows = (0..self.base.count()).into_par_iter();
        NormScale::Rows(rows.map_init(|| vec![0f32; self.cols], row_scale).collect())
    }

    /// Adds the squares of each column's elements to `sums`.
    pub fn add_column_squares(&self, sums: &mut [f64]) {
        let mut out = vec![0f32; self.cols];
        for row in 0..self.base.count() {
            if self.read(row, &mut out).is_some() {
                vector::add_squares(sums, &out);
            }
        }
    }
}

/// The factors that give columns of these sums of squares these magnitudes.
pub(super) fn column_scale(magnitudes: &[f32], squares: &[f64]) -> NormScale {
    let scales = magnitudes.iter().zip(squares).map(|(magnitude, sum)| ratio(*magnitude, *sum));
    NormScale::Columns(scales.collect())
}

/// The factor that gives a vector this magnitude; 0 for a vector of zeros.
fn ratio(magnitude: f32, squared_norm: f64) -> f32 {
    if squared_norm == 0.0 { 0.0 } else { (f64::from(magnitude) / squared_norm.sqrt()) as f32 }
}

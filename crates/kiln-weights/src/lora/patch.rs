//! Updates that can't be added to a layer's output: full-rank ones, and DoRA, which rescales the rows or columns of the
//! sum of weight and update.
//!
//! No patched copy is made: a [`WeightPatch`] changes values where a kernel reads the weight, some columns of a row at a
//! time. Only int8 weights are quantized again, and a GPU loads the patched weight again.

use kiln_tensor::packed::{PackedTensor, Patch};
use kiln_tensor::{Result, vector};

use super::targets::RowRuns;
use super::update::{Factor, KeyedTensor, Update};

/// The patch of one layer: `w · (row_scale[row] + column_scale[column])`, plus the full-rank updates.
#[derive(Debug, Default)]
pub(crate) struct WeightPatch {
    /// The factor of each row; `None` means 1.
    row_scale: Option<Vec<f32>>,
    /// Added to the row factor, one per column; `None` means 0.
    column_scale: Option<Vec<f32>>,
    updates: Vec<FullRankUpdate>,
}

/// A full-rank update of some rows of a layer.
#[derive(Debug)]
struct FullRankUpdate {
    values: UpdateValues,
    runs: RowRuns,
    norm_scale: NormScale,
    factor: f32,
}

/// The factors by which a DoRA multiplies the sum of weight and update: its magnitude divided by the sum's norm.
#[derive(Clone, Debug)]
pub(super) enum NormScale {
    None,
    /// One per row of the layer; 1 for rows that the DoRA does not change.
    Rows(Vec<f32>),
    /// One per column of the layer.
    Columns(Vec<f32>),
}

impl NormScale {
    /// The same factors, multiplied by further ones of the layer's rows.
    pub fn multiplied(&self, rows: Option<&[f32]>) -> NormScale {
        match (self, rows) {
            (_, None) => self.clone(),
            (NormScale::Rows(own), Some(rows)) => {
                NormScale::Rows(own.iter().zip(rows).map(|(own, row)| own * row).collect())
            }
            // The diffusers rule, which this is for, has no factors of columns.
            (NormScale::None | NormScale::Columns(_), Some(rows)) => NormScale::Rows(rows.to_vec()),
        }
    }
}

impl WeightPatch {
    /// Adds what a DoRA does to the weight itself, with the user's factor.
    pub(super) fn add_norm_scale(&mut self, norm_scale: &NormScale, weight: f32) {
        let change = |scale: &f32| weight * (scale - 1.0);
        match norm_scale {
            NormScale::None => {}
            NormScale::Rows(scales) => {
                let rows = self.row_scale.get_or_insert_with(|| vec![1.0; scales.len()]);
                rows.iter_mut().zip(scales).for_each(|(row, scale)| *row += change(scale));
            }
            NormScale::Columns(scales) => {
                let columns = self.column_scale.get_or_insert_with(|| vec![0.0; scales.len()]);
                columns.iter_mut().zip(scales).for_each(|(column, scale)| *column += change(scale));
            }
        }
    }

    /// Multiplies the weight, and the updates so far, by the factors of a DoRA that was trained on rows.
    pub(super) fn multiply_rows(&mut self, scales: &[f32]) {
        let multiply =
            |rows: &mut Vec<f32>| rows.iter_mut().zip(scales).for_each(|(row, scale)| *row *= scale);
        multiply(self.row_scale.get_or_insert_with(|| vec![1.0; scales.len()]));
        for FullRankUpdate { norm_scale, .. } in &mut self.updates {
            match norm_scale {
                NormScale::Rows(rows) => multiply(rows),
                // The diffusers rule, which this is for, has no factors of columns.
                NormScale::None | NormScale::Columns(_) => *norm_scale = NormScale::Rows(scales.to_vec()),
            }
        }
    }

    /// Adds a full-rank update, times `factor`.
    pub(super) fn add_update(
        &mut self,
        values: UpdateValues,
        runs: RowRuns,
        norm_scale: NormScale,
        factor: f32,
    ) {
        self.updates.push(FullRankUpdate { values, runs, norm_scale, factor });
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.row_scale.is_none() && self.column_scale.is_none() && self.updates.is_empty()
    }
}

impl Patch for WeightPatch {
    fn apply(&self, row: usize, from: usize, values: &mut [f32]) {
        let scale = self.row_scale.as_ref().map_or(1.0, |rows| rows[row]);
        match &self.column_scale {
            Some(columns) => vector::scale_each(values, scale, &columns[from..]),
            None if scale != 1.0 => vector::scale(values, scale),
            None => {}
        }
        for FullRankUpdate { values: update, runs, norm_scale, factor } in &self.updates {
            let Some(module_row) = module_row(runs, row) else { continue };
            match norm_scale {
                NormScale::None => update.add(module_row, from, *factor, values),
                NormScale::Rows(scales) => update.add(module_row, from, factor * scales[row], values),
                NormScale::Columns(scales) => {
                    let mut scratch = vec![0.0; values.len()];
                    update.add(module_row, from, *factor, &mut scratch);
                    vector::add_product(values, &scratch, &scales[from..]);
                }
            }
        }
    }
}

/// The row of the module that maps to this row of the layer.
pub(super) fn module_row(runs: &RowRuns, row: usize) -> Option<usize> {
    runs.iter().find_map(|(from, at)| {
        let offset = row.checked_sub(*at)?;
        (offset < from.len()).then(|| from.start + offset)
    })
}

/// An update with its factors as f32.
#[derive(Debug)]
pub(super) enum UpdateValues {
    LowRank(MatrixProduct),
    Kron { left: Vec<f32>, left_cols: usize, right: Vec<f32>, right_size: [usize; 2] },
    Hadamard(MatrixProduct, MatrixProduct),
    Full(PackedTensor),
}

/// The product of two matrices, computed row by row.
#[derive(Debug)]
pub(super) struct MatrixProduct {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
}

impl MatrixProduct {
    fn new(left: &KeyedTensor, right: &KeyedTensor) -> Result<MatrixProduct> {
        let floats = |matrix: &KeyedTensor| Ok::<_, kiln_tensor::Error>(matrix.tensor.to_f32()?.into_owned());
        Ok(MatrixProduct { left: floats(left)?, right: floats(right)?, rank: right.size()[0] })
    }

    /// Adds `factor` times a row of the product, from column `from` on, to `out`.
    fn add(&self, row: usize, from: usize, factor: f32, out: &mut [f32]) {
        let cols = self.right.len() / self.rank;
        for (left, right) in
            self.left[row * self.rank..][..self.rank].iter().zip(self.right.chunks_exact(cols))
        {
            vector::add_scaled(out, factor * left, &right[from..]);
        }
    }
}

impl UpdateValues {
    /// The update must have been checked against the layer's size, so that what is allocated here is no larger than the
    /// layer.
    pub fn new(update: &Update) -> Result<UpdateValues> {
        Ok(match update {
            Update::LowRank { down, up } => UpdateValues::LowRank(MatrixProduct::new(up, down)?),
            Update::Kron { left, right } => UpdateValues::Kron {
                left: factor_values(left)?,
                left_cols: left.size()[1],
                right: factor_values(right)?,
                right_size: right.size(),
            },
            Update::Hadamard { first: [a, b], second: [c, d] } => {
                UpdateValues::Hadamard(MatrixProduct::new(a, b)?, MatrixProduct::new(c, d)?)
            }
            Update::Full(matrix) => UpdateValues::Full(PackedTensor::from_dense(&matrix.tensor)?),
        })
    }

    /// Adds `factor` times a row, from column `from` on, to `out`.
    pub fn add(&self, row: usize, from: usize, factor: f32, out: &mut [f32]) {
        match self {
            UpdateValues::LowRank(product) => product.add(row, from, factor, out),
            UpdateValues::Kron { left, left_cols, right, right_size: [height, width] } => {
                let left = &left[row / height * left_cols..][..*left_cols];
                let right = &right[row % height * width..][..*width];
                let (mut block, mut skip, mut rest) = (from / width, from % width, out);
                while !rest.is_empty() {
                    let (now, later) = rest.split_at_mut(rest.len().min(width - skip));
                    vector::add_scaled(now, factor * left[block], &right[skip..]);
                    (block, skip, rest) = (block + 1, 0, later);
                }
            }
            UpdateValues::Hadamard(first, second) => {
                let (mut a, mut b) = (vec![0.0; out.len()], vec![0.0; out.len()]);
                first.add(row, from, factor, &mut a);
                second.add(row, from, 1.0, &mut b);
                vector::add_product(out, &a, &b);
            }
            UpdateValues::Full(matrix) => {
                let mut scratch = vec![0.0; out.len()];
                matrix.decode(row, from, &mut scratch);
                vector::add_scaled(out, factor, &scratch);
            }
        }
    }
}

/// All values of a LoKr factor.
fn factor_values(factor: &Factor) -> Result<Vec<f32>> {
    match factor {
        Factor::Whole(matrix) => Ok(matrix.tensor.to_f32()?.into_owned()),
        Factor::Product(a, b) => product(a, b),
    }
}

/// All values of a product.
pub(super) fn product(a: &KeyedTensor, b: &KeyedTensor) -> Result<Vec<f32>> {
    let (product, cols) = (MatrixProduct::new(a, b)?, b.size()[1]);
    let mut out = vec![0.0; a.size()[0] * cols];
    out.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| product.add(row, 0, 1.0, out));
    Ok(out)
}

//! Updates of a weight that can't all be added to a layer's output: of full rank, or a DoRA, which gives the rows of the
//! sum other lengths.
//!
//! Nothing is copied: the changed values are made where a kernel reads the weight, a piece of a row at a time.

use std::ops::Range;

use kiln_tensor::Result;
use kiln_tensor::packed::{Change, Packed};

use super::update::{Factor, Keyed, Update};

/// The changes of one layer: `w · (rows[row] + columns[column])`, plus the updates that are no thin matrices.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// What the rows are multiplied with; none means 1.
    rows: Option<Vec<f32>>,
    /// What is added to that for every column.
    columns: Option<Vec<f32>>,
    updates: Vec<Placed>,
}

/// An update, and which of its rows go to which row of the layer.
#[derive(Debug)]
struct Placed {
    values: Values,
    runs: Runs,
    gains: Gains,
    factor: f32,
}

/// What a DoRA multiplies the sum of weight and update with.
#[derive(Clone, Debug)]
pub(super) enum Gains {
    None,
    /// Every row of the layer, those that it doesn't change with 1.
    Rows(Vec<f32>),
    /// Every column of the layer.
    Columns(Vec<f32>),
}

/// Rows of a module, and the row of the layer where they go.
pub(super) type Runs = Vec<(Range<usize>, usize)>;

impl Merged {
    /// Takes up what `gains` do to the weight itself, with the user's factor.
    pub(super) fn gain(&mut self, gains: &Gains, weight: f32) {
        let part = |gain: &f32| weight * (gain - 1.0);
        match gains {
            Gains::None => {}
            Gains::Rows(gains) => {
                let rows = self.rows.get_or_insert_with(|| vec![1.0; gains.len()]);
                rows.iter_mut().zip(gains).for_each(|(row, gain)| *row += part(gain));
            }
            Gains::Columns(gains) => {
                let columns = self.columns.get_or_insert_with(|| vec![0.0; gains.len()]);
                columns.iter_mut().zip(gains).for_each(|(column, gain)| *column += part(gain));
            }
        }
    }

    /// Takes up an update of full rank, times `factor`.
    pub(super) fn add(&mut self, values: Values, runs: Runs, gains: Gains, factor: f32) {
        self.updates.push(Placed { values, runs, gains, factor });
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.rows.is_none() && self.columns.is_none() && self.updates.is_empty()
    }
}

impl Change for Merged {
    fn change(&self, row: usize, from: usize, values: &mut [f32]) {
        let gain = self.rows.as_ref().map_or(1.0, |rows| rows[row]);
        match &self.columns {
            Some(columns) => {
                values.iter_mut().zip(&columns[from..]).for_each(|(v, column)| *v *= gain + column);
            }
            None if gain != 1.0 => values.iter_mut().for_each(|v| *v *= gain),
            None => {}
        }
        for Placed { values: update, runs, gains, factor } in &self.updates {
            let Some(source) = source_row(runs, row) else { continue };
            match gains {
                Gains::None => update.add(source, from, *factor, values),
                Gains::Rows(gains) => update.add(source, from, factor * gains[row], values),
                Gains::Columns(gains) => {
                    let mut piece = vec![0.0; values.len()];
                    update.add(source, from, *factor, &mut piece);
                    let each = values.iter_mut().zip(&piece).zip(&gains[from..]);
                    each.for_each(|((v, update), gain)| *v += update * gain);
                }
            }
        }
    }
}

/// The row of the module that goes to this row of the layer.
pub(super) fn source_row(runs: &[(Range<usize>, usize)], row: usize) -> Option<usize> {
    runs.iter().find_map(|(from, at)| {
        let place = row.checked_sub(*at)?;
        (place < from.len()).then(|| from.start + place)
    })
}

/// An update with its factors as floats.
#[derive(Debug)]
pub(super) enum Values {
    LowRank(Pair),
    Kron { left: Vec<f32>, width: usize, right: Vec<f32>, right_size: [usize; 2] },
    Hadamard(Pair, Pair),
    Full(Packed),
}

/// Two matrices to be multiplied.
#[derive(Debug)]
pub(super) struct Pair {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
}

impl Pair {
    fn new(left: &Keyed, right: &Keyed) -> Result<Pair> {
        let floats = |matrix: &Keyed| Ok::<_, kiln_tensor::Error>(matrix.tensor.to_f32()?.into_owned());
        Ok(Pair { left: floats(left)?, right: floats(right)?, rank: right.size()[0] })
    }

    /// Adds `factor` times a row of the product from column `from` on.
    fn add(&self, row: usize, from: usize, factor: f32, out: &mut [f32]) {
        let cols = self.right.len() / self.rank;
        for (left, right) in
            self.left[row * self.rank..][..self.rank].iter().zip(self.right.chunks_exact(cols))
        {
            let left = factor * left;
            out.iter_mut().zip(&right[from..]).for_each(|(out, right)| *out += left * right);
        }
    }
}

impl Values {
    /// The update must have been found to be of the layer's size: what is allocated here is no larger than the layer.
    pub fn new(update: &Update) -> Result<Values> {
        Ok(match update {
            Update::LowRank { down, up } => Values::LowRank(Pair::new(up, down)?),
            Update::Kron { left, right } => Values::Kron {
                left: whole(left)?,
                width: left.size()[1],
                right: whole(right)?,
                right_size: right.size(),
            },
            Update::Hadamard { first: [a, b], second: [c, d] } => {
                Values::Hadamard(Pair::new(a, b)?, Pair::new(c, d)?)
            }
            Update::Full(matrix) => Values::Full(Packed::from_dense(&matrix.tensor)?),
        })
    }

    /// Adds `factor` times a row from column `from` on.
    pub fn add(&self, row: usize, from: usize, factor: f32, out: &mut [f32]) {
        match self {
            Values::LowRank(pair) => pair.add(row, from, factor, out),
            Values::Kron { left, width, right, right_size: [height, inner] } => {
                let left = &left[row / height * width..][..*width];
                let right = &right[row % height * inner..][..*inner];
                let (mut block, mut skip, mut rest) = (from / inner, from % inner, out);
                while !rest.is_empty() {
                    let (now, later) = rest.split_at_mut(rest.len().min(inner - skip));
                    let left = factor * left[block];
                    now.iter_mut().zip(&right[skip..]).for_each(|(out, right)| *out += left * right);
                    (block, skip, rest) = (block + 1, 0, later);
                }
            }
            Values::Hadamard(first, second) => {
                let (mut one, mut other) = (vec![0.0; out.len()], vec![0.0; out.len()]);
                first.add(row, from, factor, &mut one);
                second.add(row, from, 1.0, &mut other);
                out.iter_mut().zip(one.iter().zip(&other)).for_each(|(out, (a, b))| *out += a * b);
            }
            Values::Full(matrix) => {
                let mut piece = vec![0.0; out.len()];
                matrix.read(row, from, &mut piece);
                out.iter_mut().zip(&piece).for_each(|(out, v)| *out += factor * v);
            }
        }
    }
}

fn whole(factor: &Factor) -> Result<Vec<f32>> {
    match factor {
        Factor::Whole(matrix) => Ok(matrix.tensor.to_f32()?.into_owned()),
        Factor::Product(a, b) => product(a, b),
    }
}

/// All values of a product.
pub(super) fn product(a: &Keyed, b: &Keyed) -> Result<Vec<f32>> {
    let (pair, cols) = (Pair::new(a, b)?, b.size()[1]);
    let mut out = vec![0.0; a.size()[0] * cols];
    out.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| pair.add(row, 0, 1.0, out));
    Ok(out)
}

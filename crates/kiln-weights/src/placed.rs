use std::iter;
use std::ops::Range;

use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, HostTensor, Shape};

use crate::coding::{self, Coding};
use crate::file::WeightFile;
use crate::header::Entry;
use crate::layout::View;
use crate::{Error, Result};

/// A tensor of the model: all of a tensor in a file, or a part of it.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub file: usize,
    /// As it is stored.
    pub entry: Entry,
    view: View,
    /// As the model gets it.
    pub shape: Shape,
}

/// Rows of a linear layer, below each other.
#[derive(Clone, Debug)]
pub(crate) enum Slab {
    Dense(HostTensor),
    Packed(Packed),
}

impl Slab {
    pub fn into_packed(self) -> kiln_tensor::Result<Packed> {
        match self {
            Slab::Dense(dense) => Packed::from_dense(&dense),
            Slab::Packed(packed) => Ok(packed),
        }
    }
}

impl Placed {
    pub fn whole(file: usize, entry: Entry) -> Placed {
        Placed { file, shape: entry.shape.clone(), entry, view: View::Whole }
    }

    /// The same tensor seen otherwise; `None` when its shape doesn't allow it.
    pub fn seen(&self, view: View) -> Option<Placed> {
        let shape = view.shape(&self.entry.shape)?;
        Some(Placed { file: self.file, entry: self.entry.clone(), view, shape })
    }

    /// Whether its values have to be unpacked.
    pub fn is_packed(&self) -> bool {
        !matches!(self.entry.coding, Coding::Plain)
    }

    /// The stored rows that it consists of, in its order.
    fn rows(&self) -> Vec<Range<usize>> {
        let rows = self.entry.shape.dims().first().copied().unwrap_or(1);
        match self.view {
            View::Whole | View::Squeezed => iter::once(0..rows).collect(),
            View::Part(i, count) => iter::once(rows / count * i..rows / count * (i + 1)).collect(),
            View::Swapped => vec![rows / 2..rows, 0..rows / 2],
        }
    }

    /// Its bytes in the file; of one whose halves change places, of both.
    pub fn range(&self) -> Range<usize> {
        let all = self.entry.range.clone();
        match self.view {
            View::Part(i, count) => {
                let part = all.len() / count;
                all.start + part * i..all.start + part * (i + 1)
            }
            _ => all,
        }
    }

    /// Its values: as they are stored, sharing the file's bytes, where they are plain and lie in one piece; unpacked to f32
    /// else.
    pub fn tensor(&self, files: &[WeightFile], name: &str) -> Result<HostTensor> {
        let unusable =
            |source| Error::Tensor { file: files[self.file].path.clone(), tensor: name.to_owned(), source };
        if self.is_packed() {
            let pieces = self.packed(files, name)?;
            let values =
                pieces.iter().map(Packed::to_f32).collect::<Result<Vec<_>, _>>().map_err(unusable)?;
            return join(&values, &self.shape).map_err(unusable);
        }
        let whole = files[self.file].tensor(name, &self.entry)?;
        let cut = || match (&self.view, &self.rows()[..]) {
            (View::Whole, _) => Ok(whole.clone()),
            (_, [rows]) => whole.rows(rows.clone())?.reshape(&self.shape),
            (_, several) => {
                let pieces = several.iter().map(|rows| whole.rows(rows.clone()));
                join(&pieces.collect::<Result<Vec<_>, _>>()?, &self.shape)
            }
        };
        cut().map_err(unusable)
    }

    /// Its rows as packed matrices.
    fn packed(&self, files: &[WeightFile], name: &str) -> Result<Vec<Packed>> {
        let unusable =
            |source| Error::Tensor { file: files[self.file].path.clone(), tensor: name.to_owned(), source };
        let whole = coding::packed(files, self.file, name, &self.entry)?;
        if self.view == View::Whole {
            return Ok(vec![whole]);
        }
        self.rows().into_iter().map(|rows| whole.rows(rows)).collect::<Result<_, _>>().map_err(unusable)
    }

    /// Its rows as a linear layer takes them, never copied. Small floats count as packed, with scales or without.
    pub fn slabs(&self, files: &[WeightFile], name: &str) -> Result<Vec<Slab>> {
        if self.is_packed() || self.entry.dtype.is_small_float() {
            return Ok(self.packed(files, name)?.into_iter().map(Slab::Packed).collect());
        }
        if self.view != View::Swapped {
            return Ok(vec![Slab::Dense(self.tensor(files, name)?)]);
        }
        let whole = files[self.file].tensor(name, &self.entry)?;
        let piece = |rows| whole.rows(rows).map(Slab::Dense);
        let pieces = self.rows().into_iter().map(piece).collect::<Result<_, _>>();
        pieces.map_err(|source| Error::Tensor {
            file: files[self.file].path.clone(),
            tensor: name.to_owned(),
            source,
        })
    }
}

/// Tensors of one type below each other.
fn join(pieces: &[HostTensor], shape: &Shape) -> kiln_tensor::Result<HostTensor> {
    match pieces {
        [one] => one.reshape(shape),
        _ => {
            let bytes: Vec<u8> = pieces.iter().flat_map(|p| p.bytes().iter().copied()).collect();
            HostTensor::new(pieces.first().map_or(DType::F32, HostTensor::dtype), shape, bytes.into())
        }
    }
}

//! A tensor of the model in the files it is read from.

use std::iter;
use std::ops::Range;

use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostTensor, Shape};

use crate::encoding::TensorEntry;
use crate::encoding::{self, Encoding};
use crate::file::WeightFile;
use crate::layout::View;
use crate::{Error, Result};

/// A tensor of the model: all or a slice of a tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct SourceTensor {
    pub file: usize,
    /// The tensor in the file.
    pub entry: TensorEntry,
    view: View,
    /// The shape in the model.
    pub shape: Shape,
}

/// Consecutive rows of a linear layer's weight.
#[derive(Clone, Debug)]
pub(crate) enum RowBlock {
    Dense(HostTensor),
    Packed(PackedTensor),
}

impl RowBlock {
    pub fn into_packed(self) -> kiln_tensor::Result<PackedTensor> {
        match self {
            RowBlock::Dense(dense) => PackedTensor::from_dense(&dense),
            RowBlock::Packed(packed) => Ok(packed),
        }
    }
}

impl SourceTensor {
    pub fn whole(file: usize, entry: TensorEntry) -> SourceTensor {
        SourceTensor { file, shape: entry.shape.clone(), entry, view: View::Whole }
    }

    /// Another view of the same tensor in the file; `None` if its shape doesn't allow it.
    pub fn with_view(&self, view: View) -> Option<SourceTensor> {
        let shape = view.shape(&self.entry.shape)?;
        Some(SourceTensor { file: self.file, entry: self.entry.clone(), view, shape })
    }

    /// Which part of the tensor in the file it is, in words.
    pub fn view_name(&self) -> String {
        format!("{:?}", self.view)
    }

    /// Whether its values have to be dequantized.
    pub fn is_packed(&self) -> bool {
        !matches!(self.entry.encoding, Encoding::Dense)
    }

    /// The rows of the tensor in the file that it consists of, in the model's order.
    fn stored_rows(&self) -> Vec<Range<usize>> {
        let rows = self.entry.shape.dims().first().copied().unwrap_or(1);
        match self.view {
            View::Whole | View::Squeezed => iter::once(0..rows).collect(),
            View::Chunk(i, count) => iter::once(rows / count * i..rows / count * (i + 1)).collect(),
            View::SwappedHalves => vec![rows / 2..rows, 0..rows / 2],
        }
    }

    /// Its bytes in the file.
    pub fn range(&self) -> Range<usize> {
        let all = self.entry.range.clone();
        match self.view {
            View::Chunk(i, count) => {
                let chunk = all.len() / count;
                all.start + chunk * i..all.start + chunk * (i + 1)
            }
            _ => all,
        }
    }

    /// Its values: dense ones share the file's bytes, unless halves are swapped; packed ones are dequantized to f32.
    pub fn tensor(&self, files: &[WeightFile], name: &str) -> Result<HostTensor> {
        if self.is_packed() {
            let blocks = self.packed(files, name)?;
            let values = blocks.iter().map(PackedTensor::to_f32).collect::<Result<Vec<_>, _>>();
            let joined = values.and_then(|values| concatenate(&values, &self.shape));
            return joined.map_err(self.tensor_error(files, name));
        }
        let whole = files[self.file].tensor(name, &self.entry)?;
        let slice = || match (&self.view, &self.stored_rows()[..]) {
            (View::Whole, _) => Ok(whole.clone()),
            (_, [rows]) => whole.rows(rows.clone())?.reshape(&self.shape),
            (_, several) => {
                let blocks = several.iter().map(|rows| whole.rows(rows.clone()));
                concatenate(&blocks.collect::<Result<Vec<_>, _>>()?, &self.shape)
            }
        };
        slice().map_err(self.tensor_error(files, name))
    }

    /// Its rows as packed matrices.
    fn packed(&self, files: &[WeightFile], name: &str) -> Result<Vec<PackedTensor>> {
        let whole = encoding::read_packed(files, self.file, name, &self.entry)?;
        if self.view == View::Whole {
            return Ok(vec![whole]);
        }
        let blocks = self.stored_rows().into_iter().map(|rows| whole.rows(rows)).collect::<Result<_, _>>();
        blocks.map_err(self.tensor_error(files, name))
    }

    /// Its rows for a linear layer, never copied. fp8 values count as packed, with scales or without.
    pub fn row_blocks(&self, files: &[WeightFile], name: &str) -> Result<Vec<RowBlock>> {
        if self.is_packed() || self.entry.dtype.is_fp8() {
            return Ok(self.packed(files, name)?.into_iter().map(RowBlock::Packed).collect());
        }
        if self.view != View::SwappedHalves {
            return Ok(vec![RowBlock::Dense(self.tensor(files, name)?)]);
        }
        let whole = files[self.file].tensor(name, &self.entry)?;
        let block = |rows| whole.rows(rows).map(RowBlock::Dense);
        let blocks = self.stored_rows().into_iter().map(block).collect::<Result<_, _>>();
        blocks.map_err(self.tensor_error(files, name))
    }

    fn tensor_error(&self, files: &[WeightFile], name: &str) -> impl FnOnce(kiln_tensor::Error) -> Error {
        let (file, tensor) = (files[self.file].path.clone(), name.to_owned());
        move |source| Error::Tensor { file, tensor, source }
    }
}

/// Stacks tensors of one dtype by rows.
fn concatenate(tensors: &[HostTensor], shape: &Shape) -> kiln_tensor::Result<HostTensor> {
    if let [one] = tensors {
        return one.reshape(shape);
    }
    let bytes: Vec<u8> = tensors.iter().flat_map(|t| t.bytes().iter().copied()).collect();
    HostTensor::new(tensors.first().map_or(DType::F32, HostTensor::dtype), shape, bytes.into())
}

//! Converts the values of one tensor to what is written.

use bytes::Bytes;
use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostTensor};

use super::encode::{EncodedMatrix, StackedRows, encode};
use super::plan::{Conversion, PlannedTensor};
use crate::layout::View;
use crate::{Error, Result, WeightSource};

/// What is written for a tensor.
pub(super) struct ConvertedTensor {
    pub bytes: Bytes,
    /// One scale, or one per row.
    pub scale: Option<HostTensor>,
    /// Scales of 16 columns each, in tiles.
    pub block_scales: Option<Vec<u8>>,
    /// Sums of the squared errors and values, if it was quantized.
    pub squares: Option<[f64; 2]>,
}

impl ConvertedTensor {
    fn unscaled(bytes: Bytes) -> ConvertedTensor {
        ConvertedTensor { bytes, scale: None, block_scales: None, squares: None }
    }
}

/// The format of a dense float dtype.
fn dense_format(dtype: DType) -> Format {
    match dtype {
        DType::BF16 => Format::BF16,
        DType::F16 => Format::F16,
        _ => Format::F32,
    }
}

pub(super) fn convert(
    source: &WeightSource,
    planned: &PlannedTensor,
    threads: usize,
) -> Result<ConvertedTensor> {
    let (format, is_quantized) = match planned.conversion {
        Conversion::Copy(_) => {
            let bytes = match planned.sources.first() {
                Some((name, _)) => source.stored(name)?.bytes().clone(),
                None => Bytes::new(),
            };
            return Ok(ConvertedTensor::unscaled(bytes));
        }
        Conversion::Cast(dtype) if dtype.is_fp8() => {
            return Ok(ConvertedTensor::unscaled(concatenate(&rows(source, planned)?)));
        }
        Conversion::CopyPacked(format) => {
            let rows = rows(source, planned)?;
            let scale = match format {
                Format::F8E4M3 | Format::F8E5M2 => Some(scale(&rows).map_err(tensor_error(source, planned))?),
                _ => None,
            };
            return Ok(ConvertedTensor { scale, ..ConvertedTensor::unscaled(concatenate(&rows)) });
        }
        Conversion::Cast(dtype) => (dense_format(dtype), false),
        Conversion::Quantize(format) => (format, true),
    };
    let rows = rows(source, planned)?;
    if let ([one], false) = (&rows[..], is_quantized)
        && one.format() == format
    {
        return Ok(ConvertedTensor::unscaled(one.bytes().clone()));
    }
    let encoded = encode(&StackedRows(&rows), format, threads, is_quantized);
    let EncodedMatrix { matrix, block_scales, scale, squares } =
        encoded.map_err(tensor_error(source, planned))?;
    let scale = scale.map(|s| HostTensor::from_f32([0; 0], vec![s])).transpose();
    Ok(ConvertedTensor {
        bytes: matrix.bytes().clone(),
        scale: scale.map_err(tensor_error(source, planned))?,
        block_scales,
        squares: is_quantized.then_some(squares),
    })
}

fn concatenate(rows: &[PackedTensor]) -> Bytes {
    rows.iter().map(|r| &r.bytes()[..]).collect::<Vec<_>>().concat().into()
}

/// One scale if all matrices have the same, else one per row.
fn scale(matrices: &[PackedTensor]) -> kiln_tensor::Result<HostTensor> {
    match matrices.first().and_then(PackedTensor::scale) {
        Some(one) if matrices.iter().all(|m| m.scale() == Some(one)) => {
            HostTensor::from_f32([0; 0], vec![one])
        }
        _ => {
            let rows: Vec<f32> = matrices.iter().flat_map(PackedTensor::row_scales).collect();
            HostTensor::from_f32([rows.len()], rows)
        }
    }
}

/// The shape of [`ConvertedTensor::scale`] for packed values that are copied.
pub(super) fn scale_shape(source: &WeightSource, planned: &PlannedTensor) -> Result<Vec<usize>> {
    let scale = scale(&rows(source, planned)?).map_err(tensor_error(source, planned))?;
    Ok(scale.shape().dims().to_vec())
}

/// The rows of a tensor in the order of the file; a tensor that is not a matrix counts as one row.
fn rows(source: &WeightSource, planned: &PlannedTensor) -> Result<Vec<PackedTensor>> {
    let unusable =
        |error| Error::Tensor { file: source.path().to_owned(), tensor: planned.name.clone(), source: error };
    let mut all = Vec::new();
    for (name, view) in &planned.sources {
        let Some((_, shape)) = source.entry(name) else { continue };
        let mut blocks = Vec::new();
        if shape.rank() == 2 {
            for block in source.row_blocks(name, shape.clone())? {
                blocks.push(block.into_packed().map_err(unusable)?);
            }
        } else {
            let tensor = source.tensor(name)?;
            let row = tensor.reshape([1, tensor.numel()]).map_err(unusable)?;
            blocks.push(PackedTensor::from_dense(&row).map_err(unusable)?);
        }
        match (view, &blocks[..]) {
            (View::SwappedHalves, [whole]) => {
                let (half, rows) = (whole.row_count() / 2, whole.row_count());
                all.push(whole.rows(half..rows).map_err(unusable)?);
                all.push(whole.rows(0..half).map_err(unusable)?);
            }
            // Read from a file with swapped halves, which are separate blocks already.
            (View::SwappedHalves, [first, second]) => all.extend([second.clone(), first.clone()]),
            _ => all.extend(blocks),
        }
    }
    Ok(all)
}

fn tensor_error(source: &WeightSource, planned: &PlannedTensor) -> impl FnOnce(kiln_tensor::Error) -> Error {
    let (file, tensor) = (source.path().to_owned(), planned.name.clone());
    move |source| Error::Tensor { file, tensor, source }
}

//! Converts the values of one tensor to what is written.

use bytes::Bytes;
use kiln_tensor::packed::{Format, PackedTensor, Scales, StackedRows};
use kiln_tensor::{DType, HostTensor, Rotation};

use super::encode::{EncodedMatrix, encode, into_tiles};
use super::plan::{Conversion, PlannedTensor};
use super::row_order::RowOrder;
use super::rows::{common_scale, rescaled, rows};
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
            return Ok(ConvertedTensor::unscaled(concatenate(&planned_rows(source, planned)?)));
        }
        Conversion::CopyInt8 => return copy_int8(source, planned, threads),
        Conversion::CopyPacked(Format::NvFp4) => return copy_nvfp4(source, planned),
        Conversion::CopyPacked(format) => {
            let rows = planned_rows(source, planned)?;
            let scale = match format {
                Format::F8E4M3 | Format::F8E5M2 => Some(scale(&rows).map_err(tensor_error(source, planned))?),
                _ => None,
            };
            return Ok(ConvertedTensor { scale, ..ConvertedTensor::unscaled(concatenate(&rows)) });
        }
        Conversion::Cast(dtype) => (dense_format(dtype), false),
        Conversion::Quantize(format) => (format, true),
    };
    let rows = planned_rows(source, planned)?;
    if let ([one], false) = (&rows[..], is_quantized)
        && one.format() == format
    {
        return Ok(ConvertedTensor::unscaled(one.bytes().clone()));
    }
    let encoded = encode(&StackedRows(rows), format, threads, is_quantized);
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

/// int8 rows and their scales, stacked.
fn copy_int8(source: &WeightSource, planned: &PlannedTensor, threads: usize) -> Result<ConvertedTensor> {
    let (mut bytes, mut scales) = (Vec::new(), Vec::new());
    for (name, view) in &planned.sources {
        let Some((_, shape)) = source.entry(name) else { continue };
        let matrix = source.int8(name, shape.clone(), Rotation::None, threads)?;
        let rows = matrix.scale.to_f32().map_err(tensor_error(source, planned))?;
        // From the middle, if the file has the halves swapped.
        let middle = if *view == View::SwappedHalves { rows.len() / 2 } else { 0 };
        let weight = matrix.weight.bytes();
        if planned.order != RowOrder::Same {
            let width = weight.len() / rows.len().max(1);
            let order = (0..rows.len()).map(|row| planned.order.source_row(row));
            for row in order {
                bytes.extend_from_slice(&weight[row * width..][..width]);
                scales.push(rows[row]);
            }
            continue;
        }
        let (first, second) = weight.split_at(weight.len() / rows.len().max(1) * middle);
        bytes.extend_from_slice(second);
        bytes.extend_from_slice(first);
        scales.extend_from_slice(&rows[middle..]);
        scales.extend_from_slice(&rows[..middle]);
    }
    let scale = HostTensor::from_f32([scales.len()], scales).map_err(tensor_error(source, planned))?;
    Ok(ConvertedTensor { scale: Some(scale), ..ConvertedTensor::unscaled(bytes.into()) })
}

/// nvfp4 values and scales in ComfyUI's order, with the same values as in the source.
fn copy_nvfp4(source: &WeightSource, planned: &PlannedTensor) -> Result<ConvertedTensor> {
    let matrices = planned_rows(source, planned)?;
    let error = |reason| Error::InvalidTensor {
        file: source.path().to_owned(),
        tensor: planned.name.clone(),
        reason,
    };
    let common = common_scale(&matrices).ok_or_else(|| error("its parts have unlike scales"))?;
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for matrix in &matrices {
        let Scales::PerBlock { global, scales: own, high_first } = matrix.scales() else {
            return Err(error("it has no scales per block"));
        };
        codes.extend(matrix.bytes().iter().map(|pair| if high_first { *pair } else { pair.rotate_left(4) }));
        scales.extend(own.iter().map(|scale| rescaled(*scale, global, common).unwrap_or_default()));
    }
    let (rows, cols) = (planned.shape.rows(), planned.shape.last());
    let scale = HostTensor::from_f32([0; 0], vec![common]).map_err(tensor_error(source, planned))?;
    Ok(ConvertedTensor {
        scale: Some(scale),
        block_scales: Some(into_tiles(&scales, cols / 16, rows)),
        ..ConvertedTensor::unscaled(codes.into())
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
    let scale = scale(&planned_rows(source, planned)?).map_err(tensor_error(source, planned))?;
    Ok(scale.shape().dims().to_vec())
}

fn planned_rows(source: &WeightSource, planned: &PlannedTensor) -> Result<Vec<PackedTensor>> {
    let rows = rows(source, &planned.name, &planned.sources)?;
    planned.order.apply(rows).map_err(tensor_error(source, planned))
}

fn tensor_error(source: &WeightSource, planned: &PlannedTensor) -> impl FnOnce(kiln_tensor::Error) -> Error {
    let (file, tensor) = (source.path().to_owned(), planned.name.clone());
    move |source| Error::Tensor { file, tensor, source }
}

//! Converts the values of one tensor to what is written.

use bytes::Bytes;
use kiln_tensor::packed::small_floats::{from_e4m3, to_e4m3};
use kiln_tensor::packed::{Format, PackedTensor, Scales, StackedRows};
use kiln_tensor::{DType, HostTensor};

use super::encode::{EncodedMatrix, encode, into_tiles};
use super::plan::{Conversion, PlannedTensor};
use super::row_order::RowOrder;
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
        let matrix = source.int8(name, shape.clone(), threads)?;
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

/// The scale that a tensor stacked from these nvfp4 tensors can have; `None` if their values would change.
pub(super) fn nvfp4_scale(source: &WeightSource, sources: &[(String, View)]) -> Result<Option<f32>> {
    let name = sources.first().map_or("", |(name, _)| name);
    Ok(common_scale(&rows(source, name, sources)?))
}

/// One of the matrices' own scales of the whole with which all block scales keep their meaning.
fn common_scale(matrices: &[PackedTensor]) -> Option<f32> {
    let all: Vec<(f32, Vec<u8>)> = matrices
        .iter()
        .map(|matrix| match matrix.scales() {
            Scales::PerBlock { global, mut scales, .. } => {
                scales.sort_unstable();
                scales.dedup();
                Some((global, scales))
            }
            _ => None,
        })
        .collect::<Option<_>>()?;
    let fits = |common: f32| {
        all.iter()
            .all(|(global, scales)| scales.iter().all(|scale| rescaled(*scale, *global, common).is_some()))
    };
    all.iter().map(|(global, _)| *global).find(|common| fits(*common))
}

/// The e4m3 scale that means with `to` exactly what `scale` means with `from`.
fn rescaled(scale: u8, from: f32, to: f32) -> Option<u8> {
    if from.to_bits() == to.to_bits() {
        return Some(scale);
    }
    let value = from_e4m3(scale) * from;
    let found = to_e4m3(value / to);
    (from_e4m3(found) * to == value).then_some(found)
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

/// The rows of tensors in the order of the file; a tensor that is not a matrix counts as one row, or as
/// two if its halves are swapped. Errors name `tensor`.
fn rows(source: &WeightSource, tensor: &str, sources: &[(String, View)]) -> Result<Vec<PackedTensor>> {
    let unusable =
        |error| Error::Tensor { file: source.path().to_owned(), tensor: tensor.to_owned(), source: error };
    let mut all = Vec::new();
    for (name, view) in sources {
        let Some((_, shape)) = source.entry(name) else { continue };
        check_f64(source, name)?;
        let mut blocks = Vec::new();
        if shape.rank() == 2 {
            for block in source.row_blocks(name, shape.clone())? {
                blocks.push(block.into_packed().map_err(unusable)?);
            }
        } else {
            let tensor = source.tensor(name)?;
            let rows = if *view == View::SwappedHalves { 2 } else { 1 };
            let row = tensor.reshape([rows, tensor.numel() / rows]).map_err(unusable)?;
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

/// Refuses an f64 tensor with values that would become infinite: everything is converted through f32.
fn check_f64(source: &WeightSource, name: &str) -> Result<()> {
    if source.entry(name).is_none_or(|(dtype, _)| dtype != DType::F64) {
        return Ok(());
    }
    let stored = source.stored(name)?;
    let (values, _) = stored.bytes().as_chunks::<8>();
    let is_too_large = |value: f64| value.is_finite() && (value as f32).is_infinite();
    if values.iter().any(|bytes| is_too_large(f64::from_le_bytes(*bytes))) {
        let (file, tensor) = (source.path().to_owned(), name.to_owned());
        return Err(Error::InvalidTensor {
            file,
            tensor,
            reason: "it has an f64 value beyond the range of f32",
        });
    }
    Ok(())
}

fn tensor_error(source: &WeightSource, planned: &PlannedTensor) -> impl FnOnce(kiln_tensor::Error) -> Error {
    let (file, tensor) = (source.path().to_owned(), planned.name.clone());
    move |source| Error::Tensor { file, tensor, source }
}

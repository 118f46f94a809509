use bytes::Bytes;
use kiln_tensor::packed::{Format, Packed};
use kiln_tensor::{DType, HostTensor};

use super::encode::{Encoded, Rows, encode};
use super::plan::{How, Planned};
use crate::layout::View;
use crate::{Error, Result, WeightSource};

/// What is written for a tensor.
pub(super) struct Produced {
    pub bytes: Bytes,
    /// A factor for all of it, or one for every row.
    pub scale: Option<HostTensor>,
    /// Scales for 16 columns each, in tiles.
    pub blocks: Option<Vec<u8>>,
    /// Sums of the squared errors and values, where it was packed anew.
    pub squares: Option<[f64; 2]>,
}

impl Produced {
    fn plain(bytes: Bytes) -> Produced {
        Produced { bytes, scale: None, blocks: None, squares: None }
    }
}

/// The format of plain floats.
fn format_of(dtype: DType) -> Format {
    match dtype {
        DType::BF16 => Format::BF16,
        DType::F16 => Format::F16,
        _ => Format::F32,
    }
}

pub(super) fn produce(source: &WeightSource, planned: &Planned, threads: usize) -> Result<Produced> {
    let unusable =
        |error| Error::Tensor { file: source.path().to_owned(), tensor: planned.name.clone(), source: error };
    let (format, anew) = match planned.how {
        How::Same(_) => {
            let Some((name, _)) = planned.pieces.first() else { return Ok(Produced::plain(Bytes::new())) };
            return Ok(Produced::plain(source.stored(name)?.bytes().clone()));
        }
        How::Plain(dtype) if dtype.is_small_float() => {
            let pieces = rows(source, planned)?;
            return Ok(Produced::plain(
                pieces.iter().map(|p| &p.bytes()[..]).collect::<Vec<_>>().concat().into(),
            ));
        }
        How::Plain(dtype) => (format_of(dtype), false),
        How::Packed(format) => (format, true),
        How::Kept(format) => {
            let pieces = rows(source, planned)?;
            let bytes = pieces.iter().map(|p| &p.bytes()[..]).collect::<Vec<_>>().concat();
            let scale = match format {
                Format::F8E4M3 | Format::F8E5M2 => Some(scale(&pieces).map_err(unusable)?),
                _ => None,
            };
            return Ok(Produced { scale, ..Produced::plain(bytes.into()) });
        }
    };
    let pieces = rows(source, planned)?;
    if let ([one], false) = (&pieces[..], anew)
        && one.format() == format
    {
        return Ok(Produced::plain(one.bytes().clone()));
    }
    let Encoded { matrix, blocks, scale, squares } =
        encode(&Rows(&pieces), format, threads, anew).map_err(unusable)?;
    let scale = scale.map(|s| HostTensor::from_f32([0; 0], vec![s])).transpose().map_err(unusable)?;
    Ok(Produced { bytes: matrix.bytes().clone(), scale, blocks, squares: anew.then_some(squares) })
}

/// One factor where all pieces have the same, else one for every row.
fn scale(pieces: &[Packed]) -> kiln_tensor::Result<HostTensor> {
    match pieces.first().and_then(Packed::scale) {
        Some(one) if pieces.iter().all(|p| p.scale() == Some(one)) => HostTensor::from_f32([0; 0], vec![one]),
        _ => {
            let rows: Vec<f32> = pieces.iter().flat_map(Packed::row_scales).collect();
            HostTensor::from_f32([rows.len()], rows)
        }
    }
}

/// The shape of [`Produced::scale`] for pieces that are kept.
pub(super) fn scale_shape(source: &WeightSource, planned: &Planned) -> Result<Vec<usize>> {
    let pieces = rows(source, planned)?;
    let scale = scale(&pieces).map_err(|error| Error::Tensor {
        file: source.path().to_owned(),
        tensor: planned.name.clone(),
        source: error,
    })?;
    Ok(scale.shape().dims().to_vec())
}

/// The rows of a tensor in the order of the file; all that is no matrix is one row.
fn rows(source: &WeightSource, planned: &Planned) -> Result<Vec<Packed>> {
    let unusable =
        |error| Error::Tensor { file: source.path().to_owned(), tensor: planned.name.clone(), source: error };
    let mut all = Vec::new();
    for (name, view) in &planned.pieces {
        let Some((_, shape)) = source.entry(name) else { continue };
        let mut pieces = Vec::new();
        if shape.rank() == 2 {
            for slab in source.slabs(name, shape.clone())? {
                pieces.push(slab.into_packed().map_err(unusable)?);
            }
        } else {
            let tensor = source.tensor(name)?;
            let line = tensor.reshape([1, tensor.numel()]).map_err(unusable)?;
            pieces.push(Packed::from_dense(&line).map_err(unusable)?);
        }
        match (view, &pieces[..]) {
            (View::Swapped, [whole]) => {
                let (half, rows) = (whole.row_count() / 2, whole.row_count());
                all.push(whole.rows(half..rows).map_err(unusable)?);
                all.push(whole.rows(0..half).map_err(unusable)?);
            }
            // It was read from such a file: its halves are apart already.
            (View::Swapped, [first, second]) => all.extend([second.clone(), first.clone()]),
            _ => all.extend(pieces),
        }
    }
    Ok(all)
}

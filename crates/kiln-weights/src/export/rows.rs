//! The rows of tensors to write, and the scale that several can share.

use kiln_tensor::DType;
use kiln_tensor::packed::small_floats::{from_e4m3, to_e4m3};
use kiln_tensor::packed::{PackedTensor, Scales};

use crate::layout::View;
use crate::{Error, Result, WeightSource};

/// The scale that a tensor stacked from these nvfp4 tensors can have; `None` if their values would change.
pub(super) fn nvfp4_scale(source: &WeightSource, sources: &[(String, View)]) -> Result<Option<f32>> {
    let name = sources.first().map_or("", |(name, _)| name);
    Ok(common_scale(&rows(source, name, sources)?))
}

/// One of the matrices' own scales of the whole with which all block scales keep their meaning.
pub(super) fn common_scale(matrices: &[PackedTensor]) -> Option<f32> {
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

/// The rows of tensors in the order of the file; a tensor that is not a matrix counts as one row, or as
/// two if its halves are swapped. Errors name `tensor`.
pub(super) fn rows(
    source: &WeightSource,
    tensor: &str,
    sources: &[(String, View)],
) -> Result<Vec<PackedTensor>> {
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

/// The e4m3 scale that means with `to` exactly what `scale` means with `from`.
pub(super) fn rescaled(scale: u8, from: f32, to: f32) -> Option<u8> {
    if from.to_bits() == to.to_bits() {
        return Some(scale);
    }
    let value = from_e4m3(scale) * from;
    let found = to_e4m3(value / to);
    (from_e4m3(found) * to == value).then_some(found)
}

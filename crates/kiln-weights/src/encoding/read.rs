//! Reads a tensor with its scales.

use kiln_tensor::HostTensor;
use kiln_tensor::packed::{BlockScales, PackedTensor, TileScales};

use super::nvfp4::Order;
use super::{Encoding, ScaleLayout, TensorEntry, TensorRef};
use crate::file::WeightFile;
use crate::{Error, Result};

/// The tensor at `entry` of `files[file]` as a packed matrix, with its last dimension as columns.
pub(crate) fn read_packed(
    files: &[WeightFile],
    file: usize,
    name: &str,
    entry: &TensorEntry,
) -> Result<PackedTensor> {
    let source = &files[file];
    let unusable =
        |error| Error::Tensor { file: source.path.clone(), tensor: name.to_owned(), source: error };
    let Some(format) = entry.encoding.format(entry.dtype) else {
        return PackedTensor::from_dense(&source.tensor(name, entry)?).map_err(unusable);
    };
    // Convolutions have a row per output channel.
    let shape = match entry.shape.dims() {
        [rows, rest @ ..] if rest.len() > 1 => [*rows, rest.iter().product()],
        _ => [entry.shape.rows(), entry.shape.last()],
    };
    let matrix = PackedTensor::new(format, shape, source.data(entry)).map_err(unusable)?;
    match &entry.encoding {
        Encoding::Dense | Encoding::Blocks(_) => Ok(matrix),
        Encoding::ScaledFp8(fp8) => {
            let scales = read_scales(files, &fp8.scales)?;
            let scaled = match (fp8.layout, &scales[..]) {
                (ScaleLayout::Tensor, [one]) => Ok(matrix.with_scale(*one)),
                (ScaleLayout::Tile(tile), _) => {
                    matrix.with_tile_scales(TileScales { scales: scales.into(), tile })
                }
                _ => matrix.with_row_scales(&scales),
            };
            scaled.map_err(unusable)
        }
        Encoding::NvFp4(nvfp4) => {
            let scales = files[nvfp4.blocks.file].data(&nvfp4.blocks.entry);
            let global = read_scales(files, &nvfp4.global)?.first().copied().unwrap_or(1.0);
            let Order { swizzled, high_first } = nvfp4.order;
            matrix.with_block_scales(BlockScales { scales, swizzled, high_first, global }).map_err(unusable)
        }
    }
}

/// Reads scales, which may have any float dtype.
pub(super) fn read_scales(files: &[WeightFile], scale: &TensorRef) -> Result<Vec<f32>> {
    let file = &files[scale.file];
    let tensor: HostTensor = file.tensor(&scale.name, &scale.entry)?;
    let values = tensor.to_f32().map(|values| values.into_owned());
    values.map_err(|source| Error::Tensor { file: file.path.clone(), tensor: scale.name.clone(), source })
}

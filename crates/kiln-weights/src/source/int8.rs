//! Reading int8 tensors with row scales, and quantizing others.

use kiln_tensor::packed::{Format, PackedTensor};
use kiln_tensor::{DType, HostTensor, Rotation, Shape};

use super::{WeightSource, unusable};
use crate::int8::{self, Int8Matrix};
use crate::source_tensor::SourceTensor;
use crate::{Error, Result};

impl WeightSource {
    /// The scales of an int8 tensor, `[rows]`; `None` for other tensors.
    pub(super) fn row_scales(&self, name: &str, tensor: &SourceTensor) -> Result<Option<HostTensor>> {
        let name = int8::scale_name(name);
        if tensor.entry.dtype != DType::I8 || !self.contains(&name) {
            return Ok(None);
        }
        let found = self.find(&name)?;
        let (file, scale) = (self.file_of(found), found.tensor(&self.files, &name)?);
        let rows = int8::row_scales(&tensor.shape, &scale).map_err(unusable(file, &name))?;
        rows.map(Some).ok_or_else(|| Error::Shape {
            file: file.path.clone(),
            tensor: name,
            found: scale.shape().clone(),
            expected: tensor.shape.dims().get(..1).unwrap_or(&[]).into(),
        })
    }

    /// An int8 tensor as a matrix of rows with their scales; `None` for other tensors.
    pub(super) fn int8_rows(&self, name: &str, tensor: &SourceTensor) -> Result<Option<PackedTensor>> {
        let Some(scales) = self.row_scales(name, tensor)? else { return Ok(None) };
        let (stored, rows) = (tensor.tensor(&self.files, name)?, scales.numel());
        let matrix =
            PackedTensor::new(Format::I8, [rows, stored.numel() / rows.max(1)], stored.bytes().clone());
        let scaled = matrix.and_then(|matrix| matrix.with_row_scales(&scales.to_f32()?));
        scaled.map(Some).map_err(unusable(self.file_of(tensor), name))
    }

    /// Whether `name` is stored as int8 rows with scales.
    pub fn is_int8(&self, name: &str) -> bool {
        let stored = self.entry(name).is_some_and(|(dtype, _)| dtype == DType::I8);
        stored && self.contains(&int8::scale_name(name))
    }

    /// Whether `name` holds the scales of int8 rows.
    pub(crate) fn is_row_scale(&self, name: &str) -> bool {
        name.strip_suffix(int8::SCALE).is_some_and(|weight| self.is_int8(weight))
    }

    /// Whether the weight of the layer `module` is an fp8 (e4m3) matrix that can be multiplied in fp8: with at most a scale
    /// per row.
    pub(crate) fn stores_fp8(&self, module: &str) -> bool {
        let name = format!("{module}.weight");
        let entry = self.entry(&name);
        let is_matrix = entry.is_some_and(|(dtype, shape)| dtype == DType::F8E4M3 && shape.rank() == 2);
        is_matrix && !self.has_tile_scales(&name)
    }

    /// Whether the weight of the layer `module` is an nvfp4 matrix, and the file does not ask for products in floats.
    pub(crate) fn stores_nvfp4(&self, module: &str) -> bool {
        let tensor = self.tensors.get(&format!("{module}.weight"));
        tensor.is_some_and(|tensor| tensor.entry.encoding.has_nvfp4_product())
    }

    /// Whether tiles of rows and columns of the matrix `name` have their own scales.
    pub(crate) fn has_tile_scales(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|tensor| tensor.entry.encoding.has_tiles())
    }

    /// The matrix `name` as int8 rows and their scales: as stored, else rotated and quantized now. The pages read for that are released,
    /// so that a large model is never in memory in both precisions.
    pub(crate) fn int8(
        &self,
        name: &str,
        shape: Shape,
        rotation: Rotation,
        threads: usize,
    ) -> Result<Int8Matrix> {
        if let Some(synthetic) = &self.synthetic {
            let quantized =
                synthetic.tensor(name, &shape).and_then(|weight| int8::quantize(&weight, rotation, threads));
            return quantized.map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            });
        }
        let tensor = self.find_with_shape(name, shape)?;
        let weight = tensor.tensor(&self.files, name)?;
        if let Some(scale) = self.row_scales(name, tensor)? {
            return Ok(Int8Matrix { weight, scale, squares: [0.0; 2] });
        }
        let file = self.file_of(tensor);
        let quantized = int8::quantize(&weight, rotation, threads).map_err(unusable(file, name))?;
        file.release(&tensor.entry);
        Ok(quantized)
    }

    /// Whether `name` is a float matrix of a layer that is used in int8.
    pub(crate) fn is_quantizable(&self, name: &str) -> bool {
        let Some((dtype, shape)) = self.entry(name) else { return false };
        let float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64);
        let values = float || dtype.is_fp8() || self.packed_format(name).is_some();
        values && shape.rank() == 2 && name.strip_suffix(".weight").is_some_and(int8::is_block_layer)
    }

    /// Rotates and quantizes a matrix that is not in the file as such.
    pub(crate) fn quantize_matrix(
        &self,
        name: &str,
        weight: &HostTensor,
        rotation: Rotation,
        threads: usize,
    ) -> Result<Int8Matrix> {
        let unusable = |source| Error::Tensor { file: self.path.clone(), tensor: name.to_owned(), source };
        int8::quantize(weight, rotation, threads).map_err(unusable)
    }
}

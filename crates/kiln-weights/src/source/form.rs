//! Tensors of 8 bits: integers with scales, floats.

use kiln_tensor::{DType, HostTensor, Shape};

use super::{WeightSource, unusable};
use crate::int8::{self, Rounded};
use crate::placed::Placed;
use crate::{Error, Result};

impl WeightSource {
    /// The scales of an 8-bit tensor, `[rows]`; `None` for other tensors.
    pub(super) fn scales(&self, name: &str, placed: &Placed) -> Result<Option<HostTensor>> {
        let name = int8::scale_name(name);
        if placed.entry.dtype != DType::I8 || !self.contains(&name) {
            return Ok(None);
        }
        let found = self.find(&name)?;
        let (file, scale) = (self.file_of(found), found.tensor(&self.files, &name)?);
        let rows = int8::row_scales(&placed.shape, &scale).map_err(unusable(file, &name))?;
        rows.map(Some).ok_or_else(|| Error::Shape {
            file: file.path.clone(),
            tensor: name,
            found: scale.shape().clone(),
            expected: placed.shape.dims().get(..1).unwrap_or(&[]).into(),
        })
    }

    /// Whether `name` is stored as 8-bit rows with scales.
    pub fn is_int8(&self, name: &str) -> bool {
        let stored = self.entry(name).is_some_and(|(dtype, _)| dtype == DType::I8);
        stored && self.contains(&int8::scale_name(name))
    }

    /// Whether `name` holds the scales of 8-bit rows.
    pub(crate) fn is_row_scale(&self, name: &str) -> bool {
        name.strip_suffix(int8::SCALE).is_some_and(|weight| self.is_int8(weight))
    }

    /// Whether the weight of the layer `module` is a matrix of 8-bit floats (e4m3).
    pub(crate) fn stores_fp8(&self, module: &str) -> bool {
        let entry = self.entry(&format!("{module}.weight"));
        entry.is_some_and(|(dtype, shape)| dtype == DType::F8E4M3 && shape.rank() == 2)
    }

    /// The matrix `name` as 8-bit rows and their scales: as it is stored, else rounded now. What was read for that is let
    /// go of, so that a large model is never in memory in both forms.
    pub(crate) fn int8(&self, name: &str, shape: Shape, threads: usize) -> Result<Rounded> {
        if let Some(synthetic) = &self.synthetic {
            let rounded = synthetic.tensor(name, &shape).and_then(|weight| int8::round(&weight, threads));
            return rounded.map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            });
        }
        let placed = self.find_of(name, shape)?;
        let weight = placed.tensor(&self.files, name)?;
        if let Some(scale) = self.scales(name, placed)? {
            return Ok(Rounded { weight, scale, squares: [0.0; 2] });
        }
        let file = self.file_of(placed);
        let rounded = int8::round(&weight, threads).map_err(unusable(file, name))?;
        file.release(&placed.entry);
        Ok(rounded)
    }

    /// A matrix that is not in the file as 8-bit rows.
    pub(crate) fn round(&self, name: &str, weight: &HostTensor, threads: usize) -> Result<Rounded> {
        let unusable = |source| Error::Tensor { file: self.path.clone(), tensor: name.to_owned(), source };
        int8::round(weight, threads).map_err(unusable)
    }
}

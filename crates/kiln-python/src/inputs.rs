//! What a request refers to: images and arrays from Python, and files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{FileRef, InputImage, InputResolver, InputTensors, LocalFiles};
use kiln_image::RgbImage;
use kiln_tensor::{DType, HostTensor};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;

/// Images and tensors by name; other names are paths.
#[derive(Default)]
pub(crate) struct Inputs {
    images: HashMap<PathBuf, InputImage>,
    tensors: HashMap<PathBuf, InputTensors>,
}

impl Inputs {
    /// Reads `{name: bytes of a file | (width, height, pixels)}` and `{name: {tensor: (shape, dtype, bytes)}}`.
    pub fn new(images: &Bound<'_, PyDict>, tensors: &Bound<'_, PyDict>) -> PyResult<Inputs> {
        let py = images.py();
        let mut inputs = Inputs::default();
        for (name, image) in images {
            let name: String = name.extract()?;
            let image = if let Ok(file) = image.cast::<PyBytes>() {
                kiln_image::from_bytes(&name, file.as_bytes())
            } else {
                let (width, height, pixels): (u32, u32, Bound<'_, PyBytes>) = image.extract()?;
                RgbImage::new(width, height, pixels.as_bytes().to_vec())
            };
            let image = image.map_err(|error| errors::request(py, error.to_string()))?;
            let file = FileRef::from(name.as_str());
            inputs.images.insert(name.into(), InputImage { image: Arc::new(image), file });
        }
        for (name, arrays) in tensors {
            let name: String = name.extract()?;
            let mut tensors = BTreeMap::new();
            for (tensor, array) in arrays.cast::<PyDict>()? {
                tensors.insert(tensor.extract::<String>()?, tensor_from(&array)?);
            }
            inputs.tensors.insert(name.clone().into(), InputTensors::in_memory(name, tensors));
        }
        Ok(inputs)
    }
}

/// Reads an array: `(shape, dtype, bytes)`.
pub(crate) fn tensor_from(array: &Bound<'_, PyAny>) -> PyResult<HostTensor> {
    let (shape, dtype, bytes): (Vec<usize>, String, Bound<'_, PyBytes>) = array.extract()?;
    let invalid = |what: String| errors::request(array.py(), what);
    let dtype = match dtype.as_str() {
        "float32" => DType::F32,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        other => return Err(invalid(format!("arrays of {other} are not supported"))),
    };
    HostTensor::new(dtype, shape, bytes.as_bytes().to_vec().into())
        .map_err(|error| invalid(error.to_string()))
}

impl InputResolver for Inputs {
    fn image(&self, name: &Path) -> kiln_engine::Result<InputImage> {
        self.images.get(name).map_or_else(|| LocalFiles.image(name), |image| Ok(image.clone()))
    }

    fn lora(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, name: &Path) -> kiln_engine::Result<InputTensors> {
        self.tensors.get(name).map_or_else(|| LocalFiles.tensors(name), |tensors| Ok(tensors.clone()))
    }
}

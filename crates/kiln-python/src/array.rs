//! Arrays: read-only memory that numpy and others use in place, through `__array_interface__`.

use kiln_tensor::{DType, HostTensor};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

/// A read-only array. `numpy.asarray` uses its memory without a copy.
#[pyclass(frozen, module = "kiln._kiln")]
pub(crate) struct Array {
    shape: Vec<usize>,
    /// The element type as numpy writes it.
    dtype: &'static str,
    data: Data,
}

enum Data {
    Bytes(Vec<u8>),
    Tensor(HostTensor),
}

impl Array {
    /// The pixels of an image, `[height, width, 3]`.
    pub fn of_pixels(image: kiln_image::RgbImage) -> Array {
        let shape = vec![image.height() as usize, image.width() as usize, 3];
        Array { shape, dtype: "|u1", data: Data::Bytes(image.into_pixels()) }
    }

    /// A tensor as f32.
    pub fn of_tensor(tensor: &HostTensor) -> kiln_engine::Result<Array> {
        let tensor = tensor.to_dtype(DType::F32)?;
        Ok(Array { shape: tensor.shape().dims().to_vec(), dtype: "<f4", data: Data::Tensor(tensor) })
    }

    /// Height and width of pixels.
    pub fn sides(&self) -> [u32; 2] {
        [self.shape[0] as u32, self.shape[1] as u32]
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Bytes(bytes) => bytes,
            Data::Tensor(tensor) => tensor.bytes(),
        }
    }
}

#[pymethods]
impl Array {
    /// The array protocol of numpy, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", self.dtype)?;
        interface.set_item("data", (self.bytes().as_ptr() as usize, true))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// The dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// A copy of the memory.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.bytes())
    }

    fn __repr__(&self) -> String {
        format!("Array(shape={:?}, dtype={:?})", self.shape, self.dtype)
    }
}
